//! What a ZFile holds, decompressed as it is read.

use super::{ReadError, Source, check_range};
use crate::format::zfile::{Decoder, Geometry, HEAD_SIZE, Head, JumpTable, ZFileError};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

/// How often a block is asked for again when its bytes prove wrong and there is a copy to ask.
const RETRIES: usize = 3;
/// Most stored bytes that one read of the source asks for.
const MOST_STORED: u64 = 1 << 20;

/// What a thread keeps from one read to the next.
struct Scratch {
    stored: Vec<u8>,
    plain: Vec<u8>,
    decoder: Decoder,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> =
        const { RefCell::new(Scratch { stored: Vec::new(), plain: Vec::new(), decoder: Decoder::new() }) };
}

/// A ZFile over a source, read as what was compressed.
#[derive(Debug)]
pub struct ZFile {
    stored: Arc<dyn Source>,
    name: Arc<str>,
    geometry: Geometry,
    /// log2 of the block's size.
    bits: u32,
    table: JumpTable,
}

/// A read that came to nothing.
enum Failed {
    /// It would have to wait.
    Wait,
    Read(ReadError),
}

impl ZFile {
    /// Opens `stored`, which messages call `name`.
    ///
    /// # Errors
    /// It is no ZFile, damaged, or cannot be read.
    pub fn open(stored: Arc<dyn Source>, name: impl Into<Arc<str>>) -> Result<Self, ReadError> {
        let name = name.into();
        let size = stored.size();
        let corrupt =
            |offset, error: ZFileError| ReadError::Corrupt { what: name.to_string(), offset, why: error.to_string() };
        if size < 2 * HEAD_SIZE as u64 {
            return Err(corrupt(0, ZFileError::TooShort(size)));
        }
        let mut block = [0; HEAD_SIZE];
        stored.read_exact_at(&mut block, 0)?;
        let mut head = Head::header(&block).map_err(|e| corrupt(0, e))?;
        let mut place = 0;
        if !head.is_overwritten() {
            place = size - HEAD_SIZE as u64;
            stored.read_exact_at(&mut block, place)?;
            head = Head::trailer(&block).map_err(|e| corrupt(place, e))?;
        }
        let geometry = head.geometry(size).map_err(|e| corrupt(place, e))?;
        // Not more than the file has, as was just checked.
        let mut bytes = vec![0; usize::try_from(geometry.blocks * 4).unwrap_or(usize::MAX)];
        stored.read_exact_at(&mut bytes, geometry.index_offset)?;
        let table = JumpTable::parse(&geometry, &bytes).map_err(|e| corrupt(geometry.index_offset, e))?;
        let bits = geometry.block_size.trailing_zeros();
        Ok(Self { stored, name, geometry, bits, table })
    }

    /// Its sizes and options.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Bytes of memory it takes.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.table.memory()
    }

    /// Decodes every block, and gives how many are wrong with what is wrong with the first of them.
    ///
    /// # Errors
    /// The source cannot be read.
    pub fn check(&self, progress: &mut dyn FnMut(u64)) -> Result<(u64, Option<ReadError>), ReadError> {
        let (mut wrong, mut first) = (0, None);
        let mut plain = vec![0; self.geometry.block_size as usize];
        for block in 0..self.geometry.blocks {
            let len = self.geometry.plain_len(block);
            match self.read_exact_at(&mut plain[..len], block * u64::from(self.geometry.block_size)) {
                Ok(()) => {}
                Err(error) if error.is_corrupt() => {
                    wrong += 1;
                    first.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
            progress(len as u64);
        }
        Ok((wrong, first))
    }

    fn read(&self, buf: &mut [u8], offset: u64, wait: bool) -> Result<(), Failed> {
        check_range(&self.name, self.geometry.original_size, buf.len(), offset).map_err(Failed::Read)?;
        let bits = self.bits;
        SCRATCH.with_borrow_mut(|scratch| {
            let (mut buf, mut offset) = (buf, offset);
            while !buf.is_empty() {
                // As many blocks as are needed and not too many at a time.
                let first = offset >> bits;
                let last = (offset + buf.len() as u64 - 1) >> bits;
                let Range { start, mut end } = self.table.range(first);
                let mut next = first + 1;
                while next <= last {
                    let more = self.table.range(next).end;
                    if more - start > MOST_STORED {
                        break;
                    }
                    (end, next) = (more, next + 1);
                }
                let to = (next << bits).min(offset + buf.len() as u64);
                let (now, rest) = buf.split_at_mut(usize::try_from(to - offset).unwrap_or(usize::MAX));
                self.read_blocks(scratch, now, offset, start, end, wait)?;
                (buf, offset) = (rest, to);
            }
            Ok(())
        })
    }

    /// Reads the blocks stored at `start..end` and puts what `offset..offset + buf.len()` needs of them into `buf`.
    fn read_blocks(
        &self,
        scratch: &mut Scratch,
        buf: &mut [u8],
        offset: u64,
        start: u64,
        end: u64,
        wait: bool,
    ) -> Result<(), Failed> {
        // At most `MOST_STORED`, or one block.
        let len = usize::try_from(end - start).unwrap_or(usize::MAX);
        let mut tries = 0;
        loop {
            let Scratch { stored, plain, decoder } = &mut *scratch;
            let bytes = if let Some(bytes) = self.stored.bytes(start..end) {
                bytes
            } else {
                if stored.len() < len {
                    stored.resize(len, 0);
                }
                let stored = &mut stored[..len];
                if wait {
                    self.stored.read_exact_at(stored, start).map_err(Failed::Read)?;
                } else if !self.stored.try_read_at(stored, start).map_err(Failed::Read)? {
                    return Err(Failed::Wait);
                }
                stored
            };
            let Err((at, error)) = self.decode(bytes, plain, decoder, buf, offset) else { return Ok(()) };
            // Perhaps only the copy at hand is wrong.
            tracing::warn!(file = &*self.name, offset = start + at, %error, "a compressed block is wrong");
            if tries == RETRIES || !self.stored.drop_cached(start..end) {
                let (what, why) = (self.name.to_string(), error);
                return Err(Failed::Read(ReadError::Corrupt { what, offset: start + at, why }));
            }
            if !wait {
                return Err(Failed::Wait);
            }
            tries += 1;
        }
    }

    fn decode(
        &self,
        stored: &[u8],
        plain: &mut Vec<u8>,
        decoder: &mut Decoder,
        mut buf: &mut [u8],
        mut offset: u64,
    ) -> Result<(), (u64, String)> {
        let bits = self.bits;
        let mut at = 0;
        while !buf.is_empty() {
            let block = offset >> bits;
            let Range { start, end } = self.table.range(block);
            let length = usize::try_from(end - start).unwrap_or(0);
            let plain_len = self.geometry.plain_len(block);
            let within = usize::try_from(offset - (block << bits)).unwrap_or(0);
            let (now, rest) = buf.split_at_mut(buf.len().min(plain_len - within));
            let bytes = &stored[at..at + length];
            let decoded = if now.len() == plain_len {
                decoder.decode(&self.geometry, bytes, now)
            } else {
                plain.resize(plain_len.max(plain.len()), 0);
                let decoded = decoder.decode(&self.geometry, bytes, &mut plain[..plain_len]);
                now.copy_from_slice(&plain[within..within + now.len()]);
                decoded
            };
            decoded.map_err(|error| (at as u64, format!("block {block}: {error}")))?;
            offset += now.len() as u64;
            at += length;
            buf = rest;
        }
        Ok(())
    }
}

impl Source for ZFile {
    fn size(&self) -> u64 {
        self.geometry.original_size
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), ReadError> {
        match self.read(buf, offset, true) {
            Ok(()) => Ok(()),
            Err(Failed::Read(error)) => Err(error),
            // Nobody asked not to.
            Err(Failed::Wait) => Err(ReadError::TimedOut { what: self.name.to_string() }),
        }
    }

    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> Result<bool, ReadError> {
        match self.read(buf, offset, false) {
            Ok(()) => Ok(true),
            Err(Failed::Wait) => Ok(false),
            Err(Failed::Read(error)) => Err(error),
        }
    }

    fn drop_cached(&self, range: Range<u64>) -> bool {
        let end = range.end.min(self.geometry.original_size);
        if range.start >= end {
            return false;
        }
        let (first, last) = (self.table.range(range.start >> self.bits), self.table.range((end - 1) >> self.bits));
        self.stored.drop_cached(first.start..last.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::checksum::raw_crc32c;
    use crate::format::zfile::{Algorithm, Encoder};
    use std::sync::Mutex;

    fn zfile(plain: &[u8], block_size: u32, algorithm: Algorithm) -> Vec<u8> {
        let mut bytes = vec![0; HEAD_SIZE];
        let mut encoder = Encoder::new(algorithm).unwrap();
        let mut table = Vec::new();
        for block in plain.chunks(block_size as usize) {
            table.extend(encoder.encode(block, &mut bytes).unwrap().to_le_bytes());
        }
        let geometry = Geometry {
            index_offset: bytes.len() as u64,
            blocks: (table.len() / 4) as u64,
            original_size: plain.len() as u64,
            block_size,
            algorithm,
            verify: true,
            first_block: 512,
            index_crc: Some(raw_crc32c(0, &table)),
            header_overwritten: true,
            digest: true,
        };
        let (header, trailer) = geometry.encode();
        bytes[..HEAD_SIZE].copy_from_slice(&header);
        bytes.extend(table);
        bytes.extend(trailer);
        bytes
    }

    #[test]
    fn any_range_is_read() {
        let plain: Vec<u8> = (0..100_000u32).map(|i| (i / 7 % 251) as u8).collect();
        for (block_size, algorithm) in [(4096, Algorithm::Lz4), (65536, Algorithm::Zstd)] {
            let file = ZFile::open(Arc::new(zfile(&plain, block_size, algorithm)), "z").unwrap();
            assert_eq!(file.size(), 100_000);
            for (start, end) in [(0, 100_000), (4095, 4097), (1, 2), (99_999, 100_000), (5, 5), (4096, 8192)] {
                let mut buf = vec![0; end - start];
                file.read_exact_at(&mut buf, start as u64).unwrap();
                assert_eq!(buf, plain[start..end]);
            }
            assert!(matches!(file.read_exact_at(&mut [0; 2], 99_999), Err(ReadError::OutOfRange { .. })));
        }
        let empty = ZFile::open(Arc::new(zfile(&[], 4096, Algorithm::Lz4)), "z").unwrap();
        assert_eq!(empty.size(), 0);
    }

    /// Gives wrong bytes until it was told to forget them often enough.
    #[derive(Debug)]
    struct BadCopy {
        right: Vec<u8>,
        wrong_at: u64,
        left: Mutex<u32>,
        another: bool,
    }

    impl Source for BadCopy {
        fn size(&self) -> u64 {
            self.right.size()
        }

        fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), ReadError> {
            self.right.read_exact_at(buf, offset)?;
            if *self.left.lock().unwrap() > 0
                && let Some(at) = self.wrong_at.checked_sub(offset)
                && let Some(byte) = buf.get_mut(usize::try_from(at).unwrap())
            {
                *byte ^= 1;
            }
            Ok(())
        }

        fn try_read_at(&self, buf: &mut [u8], offset: u64) -> Result<bool, ReadError> {
            self.read_exact_at(buf, offset).map(|()| true)
        }

        fn drop_cached(&self, range: std::ops::Range<u64>) -> bool {
            assert!(range.contains(&self.wrong_at));
            *self.left.lock().unwrap() -= 1;
            self.another
        }
    }

    #[test]
    fn a_bad_copy_is_dropped_and_asked_for_again_three_times() {
        let right = zfile(&[5; 20_000], 4096, Algorithm::Lz4);
        let open = |left, another| {
            let source = BadCopy { right: right.clone(), wrong_at: 520, left: Mutex::new(left), another };
            ZFile::open(Arc::new(source), "layer").unwrap()
        };
        let mut buf = [0; 100];
        open(3, true).read_exact_at(&mut buf, 50).unwrap();
        assert_eq!(buf, [5; 100]);
        let error = open(4, true).read_exact_at(&mut buf, 50).unwrap_err();
        assert!(error.is_corrupt() && error.to_string().contains("layer: at byte 512: block 0"), "{error}");
        assert!(open(1, false).read_exact_at(&mut buf, 50).is_err());
        let file = open(1, true);
        assert!(!file.try_read_at(&mut buf, 50).unwrap());
        assert!(file.try_read_at(&mut buf, 50).unwrap());
    }
}
