//! [`crate::unpack`] on any bytes.

use crate::unpack::{HashingReader, Limits, UnpackError, Unpacker};

/// Unpacks `data`. A stream that unpacks without an error was read to its last byte, and gives the same plain bytes
/// through a small buffer as through a large one.
///
/// # Panics
/// When that does not hold.
pub fn unpack(data: &[u8]) {
    let large = all(data, 64 << 10);
    if let Ok(plain) = &large {
        assert_eq!(all(data, 61).ok().as_ref(), Some(plain), "buffer sizes change the result");
    }
}

fn all(data: &[u8], buffer: usize) -> Result<Vec<u8>, UnpackError> {
    let limits = Limits { plain_bytes: 1 << 20, ..Limits::default() };
    let mut unpacker = Unpacker::new(HashingReader::new(data), limits)?;
    let mut buf = vec![0; buffer];
    let mut plain = Vec::new();
    loop {
        let n = unpacker.read(&mut buf)?;
        plain.extend_from_slice(&buf[..n]);
        if n == 0 {
            break;
        }
    }
    assert_eq!(unpacker.into_inner().bytes(), data.len() as u64, "bytes were left unread");
    Ok(plain)
}
