//! The tar member around a layer: what lets a registry take a layer for an ordinary one.
//!
//! `overlaybd-commit -t` writes a pax header with the size, a header without it, and the payload at byte 1536; other
//! tools write one header with the size, and the payload at byte 512. The payload is the first member; what follows it
//! is nobody's business.

/// Bytes of a tar block.
pub const BLOCK: usize = 512;
/// As many bytes from the beginning of a file as [`Member::find`] may want to see.
pub const PROBE: usize = 16 * BLOCK;

/// Where the payload lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    /// Its first byte.
    pub offset: u64,
    /// Its length in bytes.
    pub size: u64,
}

/// Why a tar is no wrapper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TarError {
    /// It ends too early, or its extended headers are longer than any writer makes them.
    #[error("tar: no member within the first {PROBE} bytes")]
    NoMember,
    /// A header that is none.
    #[error("tar: the {0} of the header is wrong")]
    Header(&'static str),
    /// A size that is no number.
    #[error("tar: the size of the member is no number")]
    Size,
    /// What is inside is no file.
    #[error("tar: the first member has type {:?}, it is no regular file", char::from(*.0))]
    Type(u8),
    /// The writer did not finish.
    #[error("tar: the member is not complete: its magic says that it was still being written")]
    Unfinished,
}

fn is_ustar(block: &[u8]) -> bool {
    block.len() >= BLOCK && &block[257..262] == b"ustar" && &block[263..265] == b"00"
}

fn checksum_is_right(block: &[u8]) -> bool {
    let sum: u32 =
        block[..BLOCK].iter().enumerate().map(|(i, &b)| if (148..156).contains(&i) { 32 } else { b.into() }).sum();
    number(&block[148..156]) == Some(sum.into())
}

/// An octal number with blanks or NULs around it, or a base-256 one.
fn number(field: &[u8]) -> Option<u64> {
    if let Some((&first, rest)) = field.split_first()
        && first & 0x80 != 0
    {
        let start = u64::from(first & 0x7F);
        return rest.iter().try_fold(start, |sum, &b| sum.checked_mul(256)?.checked_add(b.into()));
    }
    let text = std::str::from_utf8(field).ok()?.trim_matches(['\0', ' ']);
    match text {
        "" => Some(0),
        // No sign, which the parser would take.
        _ if text.starts_with('+') => None,
        _ => u64::from_str_radix(text, 8).ok(),
    }
}

/// The `size` of pax records, `Err` where there is one that is no number.
fn pax_size(mut records: &[u8]) -> Result<Option<u64>, TarError> {
    let mut found = None;
    while let Some(space) = records.iter().position(|&b| b == b' ') {
        let Some(len) = std::str::from_utf8(&records[..space]).ok().and_then(|text| text.parse::<usize>().ok()) else {
            break;
        };
        if len <= space + 1 || len > records.len() {
            break;
        }
        let record = &records[space + 1..len];
        if let Some(value) = record.strip_prefix(b"size=") {
            let value = value.strip_suffix(b"\n").unwrap_or(value);
            found = Some(std::str::from_utf8(value).ok().and_then(|text| text.parse().ok()).ok_or(TarError::Size)?);
        }
        records = &records[len..];
    }
    Ok(found)
}

impl Member {
    /// Looks for a wrapper at the beginning of a file, of which `start` has the first [`PROBE`] bytes or all; `None` if
    /// the file is no tar.
    ///
    /// # Errors
    /// It is a tar, and not one around a layer.
    pub fn find(start: &[u8]) -> Result<Option<Self>, TarError> {
        if start.len() >= BLOCK && &start[257..262] == b"xxtar" {
            return Err(TarError::Unfinished);
        }
        if !is_ustar(start) || !checksum_is_right(start) {
            return Ok(None);
        }
        let (mut at, mut size) = (0, None);
        loop {
            let block = start.get(at..at + BLOCK).ok_or(TarError::NoMember)?;
            // Writers of the inner header are careless with its checksum, not with its magic.
            if &block[257..262] == b"xxtar" {
                return Err(TarError::Unfinished);
            }
            if &block[257..262] != b"ustar" {
                return Err(TarError::Header("magic"));
            }
            let own = number(&block[124..136]);
            match block[156] {
                kind @ (b'x' | b'g' | b'L' | b'K') => {
                    let len = own.and_then(|len| usize::try_from(len).ok()).ok_or(TarError::Size)?;
                    let from = at + BLOCK;
                    let to = from.checked_add(len).ok_or(TarError::Size)?;
                    let records = start.get(from..to).ok_or(TarError::NoMember)?;
                    if kind == b'x' {
                        size = pax_size(records)?.or(size);
                    }
                    // Even an empty one has a block, for readers that take every pax header for one block long.
                    at = from + len.max(1).next_multiple_of(BLOCK);
                }
                b'0' | 0 => {
                    let size = size.or(own).ok_or(TarError::Size)?;
                    return Ok(Some(Self { offset: (at + BLOCK) as u64, size }));
                }
                other => return Err(TarError::Type(other)),
            }
        }
    }
}

/// A payload's size that no pax record can name.
const MAX_PAYLOAD: u64 = 1 << 62;

/// The three blocks before a payload of `size` bytes, as `overlaybd-commit -t` writes them.
///
/// # Errors
/// It is larger than any file.
pub fn wrapper(size: u64) -> Result<[u8; 3 * BLOCK], TarError> {
    if size > MAX_PAYLOAD {
        return Err(TarError::Size);
    }
    // "LEN size=N\n", where LEN counts itself.
    let value = format!(" size={size}\n");
    let mut len = value.len() + 1;
    while len != value.len() + len.to_string().len() {
        len += 1;
    }
    let record = format!("{len}{value}");
    let mut blocks = [0; 3 * BLOCK];
    let (pax, rest) = blocks.split_at_mut(BLOCK);
    let (records, member) = rest.split_at_mut(BLOCK);
    pax[..13].copy_from_slice(b"overlaybd.pax");
    pax[124..136].copy_from_slice(format!("{:>11o} ", record.len()).as_bytes());
    pax[156] = b'x';
    pax[257..265].copy_from_slice(b"ustar\x0000");
    finish(pax);
    records[..record.len()].copy_from_slice(record.as_bytes());

    member[..16].copy_from_slice(b"overlaybd.commit");
    member[100..108].copy_from_slice(b"100644 \0");
    member[108..116].copy_from_slice(b"     0 \0");
    member[116..124].copy_from_slice(b"     0 \0");
    member[124..136].copy_from_slice(b"          0 ");
    member[136..148].copy_from_slice(b"          0 ");
    member[156] = b'0';
    member[257..265].copy_from_slice(b"ustar\x0000");
    member[265..269].copy_from_slice(b"root");
    member[297..301].copy_from_slice(b"root");
    finish(member);
    Ok(blocks)
}

/// Puts the checksum in.
fn finish(block: &mut [u8]) {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|&b| u32::from(b)).sum();
    block[148..156].copy_from_slice(format!("{sum:>6o} \0").as_bytes());
}

/// Zeros after a payload of `size` bytes: up to the block, and two blocks more.
#[must_use]
pub fn padding_after(size: u64) -> usize {
    let block = BLOCK as u64;
    let ragged = usize::try_from(size % block).unwrap_or(0);
    (BLOCK - ragged) % BLOCK + 2 * BLOCK
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_written_is_found() {
        for size in [0, 1, 9, 84_902, 99_999_999_999, MAX_PAYLOAD] {
            let wrapper = wrapper(size).unwrap();
            assert_eq!(Member::find(&wrapper), Ok(Some(Member { offset: 1536, size })));
        }
        assert!(wrapper(MAX_PAYLOAD + 1).is_err());
    }

    #[test]
    fn another_tar_writer_is_understood() {
        let mut header = tar::Header::new_ustar();
        header.set_path("overlaybd.commit").unwrap();
        header.set_size(5000);
        header.set_mode(0o644);
        header.set_cksum();
        let mut bytes = Vec::new();
        let mut builder = tar::Builder::new(&mut bytes);
        builder.append(&header, &[7; 5000][..]).unwrap();
        builder.finish().unwrap();
        drop(builder);
        assert_eq!(Member::find(&bytes), Ok(Some(Member { offset: 512, size: 5000 })));
        let mut reader = tar::Archive::new(&bytes[..]);
        assert_eq!(reader.entries().unwrap().count(), 1);
    }

    #[test]
    fn another_tar_reader_understands_ours() {
        let payload = [9; 777];
        let mut bytes = wrapper(777).unwrap().to_vec();
        bytes.extend(payload);
        bytes.extend(vec![0; padding_after(777)]);
        assert_eq!(bytes.len() % BLOCK, 0);
        let mut reader = tar::Archive::new(&bytes[..]);
        let mut entries = reader.entries().unwrap();
        let mut entry = entries.next().unwrap().unwrap();
        assert_eq!(entry.path().unwrap().to_str(), Some("overlaybd.commit"));
        let mut read = Vec::new();
        std::io::Read::read_to_end(&mut entry, &mut read).unwrap();
        assert_eq!(read, payload);
        assert!(entries.next().is_none());
    }

    #[test]
    fn the_unfinished_is_said_to_be() {
        let mut bytes = wrapper(5).unwrap();
        bytes[1024 + 257..1024 + 265].copy_from_slice(b"xxtar\0xx");
        assert_eq!(Member::find(&bytes), Err(TarError::Unfinished));
        bytes[257..265].copy_from_slice(b"xxtar\0xx");
        assert_eq!(Member::find(&bytes), Err(TarError::Unfinished));
        assert_eq!(Member::find(&[0; 5000]), Ok(None));
        assert_eq!(Member::find(b"short"), Ok(None));
    }

    proptest! {
        #[test]
        fn it_never_panics(flips in proptest::collection::vec((0..1536usize, any::<u8>()), 0..20), cut in 0..=1536usize) {
            let mut bytes = wrapper(12345).unwrap();
            for (at, byte) in flips {
                bytes[at] = byte;
            }
            // The first header's checksum as it should be, so that the rest is looked at.
            finish(&mut bytes[..512]);
            let _ = Member::find(&bytes[..cut]);
        }
    }
}
