//! The chunk table of a data blob: a digest for each chunk, so that a part of the blob can be checked without the rest.
//!
//! ```text
//!  0  magic "DSECCHK1"
//!  8  version            u32, 1 or 2
//! 12  block size         u32, 4096
//! 16  number of records  u64
//! 24  blocks of the blob u64
//! 32  SHA-256 of the blob, 32 bytes
//! 64  records, 40 bytes each in version 1, 80 in version 2, by start block:
//!       0  BLAKE3 of the chunk's blocks as they are in the blob, padding included, 32 bytes
//!      32  start block   u32
//!      36  block count   u32, not 0
//!     and in version 2
//!      40  BLAKE3 of the bytes that were stored there, plain and without padding, 32 bytes
//!      72  their number  u32, not 0
//!      76  encoding      u8: 0 plain, else 1 + EROFS' number of the algorithm
//!      77  zero, 3 bytes
//! ```
//! Version 1 is for blobs that hold plain chunks only; version 2 for those of layers that were compressed, where the
//! stored bytes are what a cache checks and the plain bytes what deduplication looks for.
//!
//! All numbers are little-endian. Records do not overlap; there is nothing behind the last one. The blob's digest comes
//! first, so that a table is bound to one blob whatever it is called.

use crate::compress::Algorithm;
use crate::erofs::format::BLOCK_SIZE;
use crate::read_at::ReadAt;
use fs3_client::Digest;
use std::io;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The first bytes of a chunk table.
pub const MAGIC: [u8; 8] = *b"DSECCHK1";
/// The version of tables of plain chunks.
pub const VERSION_PLAIN: u32 = 1;
/// The version of tables that also say what was stored.
pub const VERSION_INPUT: u32 = 2;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    version: U32,
    block_size: U32,

    count: U64,
    blob_blocks: U64,

    blob_digest: [u8; 32],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawRecord {
    digest: [u8; 32],
    start: U32,
    count: U32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawInput {
    digest: [u8; 32],
    len: U32,
    encoding: u8,
    reserved: [u8; 3],
}

const HEADER_SIZE: u64 = size_of::<Header>() as u64;
const RECORD_SIZE: usize = size_of::<RawRecord>();
const INPUT_SIZE: usize = size_of::<RawInput>();
/// Records read at once.
const BATCH: u64 = 1024;

/// One chunk of a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// BLAKE3 of its blocks.
    pub digest: [u8; 32],
    /// First block in the blob.
    pub start: u32,
    /// Number of blocks, at least 1.
    pub blocks: u32,
    /// What is stored there, where the table says it (version 2).
    pub input: Option<Input>,
}

/// What was stored as a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Input {
    /// BLAKE3 of the plain bytes, without padding.
    pub digest: [u8; 32],
    /// Their number, at least 1.
    pub len: u32,
    /// How they are stored; `None` for plain.
    pub algorithm: Option<Algorithm>,
}

impl Input {
    /// Why no chunk of `blocks` blocks can hold this.
    fn fault(&self, blocks: u32) -> Option<&'static str> {
        let plain = u64::from(self.len).div_ceil(u64::from(BLOCK_SIZE));
        match self.algorithm {
            _ if self.len == 0 => Some("it stands for no bytes"),
            None if plain != u64::from(blocks) => Some("its plain bytes do not fill its blocks"),
            Some(_) if plain <= u64::from(blocks) => Some("it is compressed, and no smaller"),
            _ => None,
        }
    }
}

/// Why bytes are not a chunk table, or not a sound one.
#[derive(Debug, thiserror::Error)]
pub enum ChunkTableError {
    /// The medium failed.
    #[error("cannot read the chunk table: {0}")]
    Io(#[from] io::Error),
    /// Something else.
    #[error("not a chunk table: it does not start with DSECCHK1")]
    NotATable,
    /// Made by another version.
    #[error("a chunk table of version {found}; this program reads {VERSION_PLAIN} and {VERSION_INPUT}")]
    Version {
        /// Its version.
        found: u32,
    },
    /// A chunk table, broken.
    #[error("chunk table: {0}")]
    Header(String),
    /// One record is broken.
    #[error("chunk table: record {index} (blocks {start}..+{blocks}): {what}")]
    Record {
        /// Its position.
        index: u64,
        /// Its first block.
        start: u32,
        /// Its number of blocks.
        blocks: u32,
        /// What is wrong.
        what: &'static str,
    },
}

/// Checks records one after the other: ascending, not empty, inside the blob.
#[derive(Debug)]
struct Order {
    index: u64,
    end: u64,
    blob_blocks: u64,
    /// Whether records have inputs.
    inputs: bool,
}

impl Order {
    fn check(&mut self, record: &Record) -> Result<(), ChunkTableError> {
        let Record { start, blocks, .. } = *record;
        let end = u64::from(start) + u64::from(blocks);
        let what = if blocks == 0 {
            "it is empty"
        } else if u64::from(start) < self.end {
            "it does not start behind the record before it"
        } else if end > self.blob_blocks {
            "it is not inside the blob"
        } else if record.input.is_some() != self.inputs {
            "records of both versions"
        } else if let Some(fault) = record.input.and_then(|input| input.fault(blocks)) {
            fault
        } else {
            self.end = end;
            self.index += 1;
            return Ok(());
        };
        Err(ChunkTableError::Record { index: self.index, start, blocks, what })
    }
}

/// A chunk table that can be read record by record, from a file or from bytes.
#[derive(Debug)]
pub struct ChunkTable<R> {
    source: R,
    count: u64,
    blob_blocks: u64,
    blob_digest: Digest,
    /// Whether records have inputs.
    inputs: bool,
}

/// Writes a chunk table of `records` (in the order of their start blocks) of the blob with `digest` and `blocks`: of
/// version 2 if they have inputs.
///
/// # Errors
/// When the records are not in order, overlap, are empty, or lie outside the blob, or only some have inputs.
pub fn to_bytes(digest: &Digest, blocks: u32, records: &[Record]) -> Result<Vec<u8>, ChunkTableError> {
    let inputs = records.first().is_some_and(|record| record.input.is_some());
    let mut out = Vec::with_capacity(size_of::<Header>() + records.len() * record_size(inputs));
    let header = Header {
        magic: MAGIC,
        version: if inputs { VERSION_INPUT } else { VERSION_PLAIN }.into(),
        block_size: BLOCK_SIZE.into(),
        count: (records.len() as u64).into(),
        blob_blocks: u64::from(blocks).into(),
        blob_digest: *digest.as_bytes(),
    };
    out.extend_from_slice(header.as_bytes());
    let mut order = Order { index: 0, end: 0, blob_blocks: u64::from(blocks), inputs };
    for record in records {
        order.check(record)?;
        let raw = RawRecord { digest: record.digest, start: record.start.into(), count: record.blocks.into() };
        out.extend_from_slice(raw.as_bytes());
        if let Some(Input { digest, len, algorithm }) = record.input {
            let encoding = algorithm.map_or(0, |algorithm| algorithm as u8 + 1);
            out.extend_from_slice(RawInput { digest, len: len.into(), encoding, reserved: [0; 3] }.as_bytes());
        }
    }
    Ok(out)
}

/// Bytes of a record.
const fn record_size(inputs: bool) -> usize {
    RECORD_SIZE + if inputs { INPUT_SIZE } else { 0 }
}

impl<R: ReadAt> ChunkTable<R> {
    /// Reads and checks the header; the records are checked as they are read.
    ///
    /// # Errors
    /// When the bytes are no chunk table, of another version, or their number does not fit the count.
    pub fn open(source: R) -> Result<Self, ChunkTableError> {
        let size = source.size()?;
        let mut bytes = [0u8; size_of::<Header>()];
        if size < HEADER_SIZE {
            return Err(ChunkTableError::NotATable);
        }
        source.read_exact_at(&mut bytes, 0)?;
        let Ok(header) = Header::read_from_bytes(&bytes) else { return Err(ChunkTableError::NotATable) };
        if header.magic != MAGIC {
            return Err(ChunkTableError::NotATable);
        }
        let inputs = match header.version.get() {
            VERSION_PLAIN => false,
            VERSION_INPUT => true,
            found => return Err(ChunkTableError::Version { found }),
        };
        if header.block_size.get() != BLOCK_SIZE {
            return Err(ChunkTableError::Header(format!("a block size of {}", header.block_size.get())));
        }
        let count = header.count.get();
        if count.checked_mul(record_size(inputs) as u64) != Some(size - HEADER_SIZE) {
            let what = format!("{count} records do not fit {} bytes", size - HEADER_SIZE);
            return Err(ChunkTableError::Header(what));
        }
        let blob_digest = Digest::from_bytes(header.blob_digest);
        Ok(Self { source, count, blob_blocks: header.blob_blocks.get(), blob_digest, inputs })
    }

    /// Whether the records say what was stored (version 2).
    #[must_use]
    pub const fn has_inputs(&self) -> bool {
        self.inputs
    }

    /// SHA-256 of the blob that the table is about.
    #[must_use]
    pub const fn blob_digest(&self) -> &Digest {
        &self.blob_digest
    }

    /// Length of that blob in blocks.
    #[must_use]
    pub const fn blob_blocks(&self) -> u64 {
        self.blob_blocks
    }

    /// Number of records.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.count
    }

    /// Whether there is no record.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// All records in order; ends after the first error.
    pub fn records(&self) -> Records<'_, R> {
        let order = Order { index: 0, end: 0, blob_blocks: self.blob_blocks, inputs: self.inputs };
        Records { table: self, next: 0, batch: Vec::new(), order, failed: false }
    }

    /// The record that holds block `block`, found by halving.
    ///
    /// # Errors
    /// When the medium fails. Order is not checked here.
    pub fn find(&self, block: u32) -> Result<Option<Record>, ChunkTableError> {
        let (mut low, mut high) = (0, self.count);
        while low < high {
            let middle = low + (high - low) / 2;
            let record = self.record(middle)?;
            if block < record.start {
                high = middle;
            } else if u64::from(block) >= u64::from(record.start) + u64::from(record.blocks) {
                low = middle + 1;
            } else {
                return Ok(Some(record));
            }
        }
        Ok(None)
    }

    /// The record at `index`, if there is one and it lies inside the blob.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn get(&self, index: u64) -> Result<Option<Record>, ChunkTableError> {
        if index >= self.count {
            return Ok(None);
        }
        let record = self.record(index)?;
        let inside = u64::from(record.start) + u64::from(record.blocks) <= self.blob_blocks;
        Ok(Some(record).filter(|r| inside && r.blocks > 0 && r.input.is_none_or(|i| i.fault(r.blocks).is_none())))
    }

    fn record(&self, index: u64) -> Result<Record, ChunkTableError> {
        let mut bytes = [0u8; record_size(true)];
        let size = record_size(self.inputs);
        self.source.read_exact_at(&mut bytes[..size], HEADER_SIZE + index * size as u64)?;
        decode(&bytes[..size]).ok_or(ChunkTableError::NotATable)?.map_err(|(record, what)| ChunkTableError::Record {
            index,
            start: record.start,
            blocks: record.blocks,
            what,
        })
    }
}

/// A record of either version; with what is wrong in a field that has few values, if anything is.
fn decode(bytes: &[u8]) -> Option<Result<Record, (Record, &'static str)>> {
    let (raw, rest) = RawRecord::read_from_prefix(bytes).ok()?;
    let mut record = Record { digest: raw.digest, start: raw.start.get(), blocks: raw.count.get(), input: None };
    if rest.is_empty() {
        return Some(Ok(record));
    }
    let raw = RawInput::read_from_bytes(rest).ok()?;
    let algorithm = match raw.encoding.checked_sub(1) {
        None => None,
        Some(number) => match Algorithm::from_number(number) {
            None => return Some(Err((record, "it has an unknown encoding"))),
            known => known,
        },
    };
    if raw.reserved != [0; 3] {
        return Some(Err((record, "its last bytes are not zero")));
    }
    record.input = Some(Input { digest: raw.digest, len: raw.len.get(), algorithm });
    Some(Ok(record))
}

/// Iterates over a table's records, checking their order.
#[derive(Debug)]
pub struct Records<'a, R> {
    table: &'a ChunkTable<R>,
    /// Record after the batch.
    next: u64,
    /// Records read ahead, last one first.
    batch: Vec<Result<Record, (Record, &'static str)>>,
    order: Order,
    failed: bool,
}

impl<R: ReadAt> Records<'_, R> {
    fn fill(&mut self) -> Result<(), ChunkTableError> {
        let count = (self.table.count - self.next).min(BATCH);
        let size = record_size(self.table.inputs);
        let mut bytes = vec![0; usize::try_from(count).unwrap_or(0) * size];
        self.table.source.read_exact_at(&mut bytes, HEADER_SIZE + self.next * size as u64)?;
        self.next += count;
        self.batch.extend(bytes.rchunks_exact(size).filter_map(decode));
        Ok(())
    }
}

impl<R: ReadAt> Iterator for Records<'_, R> {
    type Item = Result<Record, ChunkTableError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let result = if self.batch.is_empty() { self.fill() } else { Ok(()) };
        let record = match result {
            Ok(()) => self.batch.pop()?,
            Err(e) => {
                self.failed = true;
                return Some(Err(e));
            }
        };
        let checked = match record {
            Ok(record) => self.order.check(&record).map(|()| record),
            Err((Record { start, blocks, .. }, what)) => {
                Err(ChunkTableError::Record { index: self.order.index, start, blocks, what })
            }
        };
        self.failed = checked.is_err();
        Some(checked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record(n: u8, start: u32, blocks: u32) -> Record {
        Record { digest: [n; 32], start, blocks, input: None }
    }

    fn with_input(record: Record, len: u32, algorithm: Option<Algorithm>) -> Record {
        Record { input: Some(Input { digest: [9; 32], len, algorithm }), ..record }
    }

    fn all(bytes: &[u8]) -> Result<Vec<Record>, ChunkTableError> {
        ChunkTable::open(bytes)?.records().collect()
    }

    #[test]
    fn exact_bytes_or_a_new_version() {
        let bytes = to_bytes(&Digest::from_bytes([7; 32]), 300, &[record(1, 0, 2), record(2, 258, 1)]).unwrap();
        let mut expected = b"DSECCHK1".to_vec();
        expected.extend([1, 0, 0, 0, 0, 0x10, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0x2c, 1, 0, 0, 0, 0, 0, 0]);
        expected.extend([7; 32]);
        expected.extend([1; 32]);
        expected.extend([0, 0, 0, 0, 2, 0, 0, 0]);
        expected.extend([2; 32]);
        expected.extend([2, 1, 0, 0, 1, 0, 0, 0]);
        assert_eq!(bytes, expected, "the format changed: a version bump is required, and a reader for the old one");
    }

    #[test]
    fn exact_bytes_of_version_2() {
        let records =
            [with_input(record(1, 0, 2), 9000, Some(Algorithm::Zstd)), with_input(record(2, 2, 1), 4095, None)];
        let bytes = to_bytes(&Digest::from_bytes([7; 32]), 3, &records).unwrap();
        let mut expected = b"DSECCHK1".to_vec();
        expected.extend([2, 0, 0, 0, 0, 0x10, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend([7; 32]);
        expected.extend([1; 32]);
        expected.extend([0, 0, 0, 0, 2, 0, 0, 0]);
        expected.extend([9; 32]);
        expected.extend([0x28, 0x23, 0, 0, 4, 0, 0, 0]);
        expected.extend([2; 32]);
        expected.extend([2, 0, 0, 0, 1, 0, 0, 0]);
        expected.extend([9; 32]);
        expected.extend([0xff, 0x0f, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes, expected, "the format changed: a version bump is required, and a reader for the old one");
        assert_eq!(all(&bytes).unwrap(), records);
        let table = ChunkTable::open(bytes.as_slice()).unwrap();
        assert_eq!((table.has_inputs(), table.find(2).unwrap()), (true, Some(records[1])));
        let with = |at: usize, byte: u8| {
            let mut bytes = bytes.clone();
            bytes[at] = byte;
            let found = ChunkTable::open(bytes.as_slice()).unwrap().find(0).map(drop);
            (all(&bytes).unwrap_err().to_string(), found.is_err())
        };
        let what = "chunk table: record 0 (blocks 0..+2): ";
        assert_eq!(with(140, 9), (format!("{what}it has an unknown encoding"), true));
        assert_eq!(with(143, 1), (format!("{what}its last bytes are not zero"), true));
        assert_eq!(with(137, 0x10), (format!("{what}it is compressed, and no smaller"), false));
        assert_eq!(with(140, 0), (format!("{what}its plain bytes do not fill its blocks"), false));
    }

    #[test]
    fn inputs_are_all_or_none() {
        let plain = record(0, 0, 1);
        for records in [[plain, with_input(record(0, 1, 1), 1, None)], [with_input(plain, 1, None), record(0, 1, 1)]] {
            let error = to_bytes(&Digest::of(b""), 10, &records).unwrap_err().to_string();
            assert_eq!(error, "chunk table: record 1 (blocks 1..+1): records of both versions");
        }
        let error = to_bytes(&Digest::of(b""), 10, &[with_input(plain, 0, None)]).unwrap_err().to_string();
        assert_eq!(error, "chunk table: record 0 (blocks 0..+1): it stands for no bytes");
    }

    #[test]
    fn round_trip_over_several_batches() {
        let records: Vec<Record> = (0..3000).map(|n| record(7, n * 3, 1 + n % 3)).collect();
        let bytes = to_bytes(&Digest::of(b"x"), 9000, &records).unwrap();
        assert_eq!(all(&bytes).unwrap(), records);
        let table = ChunkTable::open(bytes.as_slice()).unwrap();
        assert_eq!((table.len(), table.blob_blocks(), *table.blob_digest()), (3000, 9000, Digest::of(b"x")));
        assert_eq!(table.find(8997).unwrap(), Some(records[2999]));
        assert_eq!(table.find(4).unwrap(), Some(records[1]));
        assert_eq!(table.find(1).unwrap(), None);
    }

    #[test]
    fn disorder_is_refused_by_both_sides() {
        for (records, what) in [
            (vec![record(0, 0, 0)], "it is empty"),
            (vec![record(0, 5, 2), record(0, 6, 1)], "it does not start behind the record before it"),
            (vec![record(0, 9, 2)], "it is not inside the blob"),
        ] {
            let error = to_bytes(&Digest::of(b""), 10, &records).unwrap_err();
            assert!(matches!(error, ChunkTableError::Record { what: w, .. } if w == what), "{error}");
            let mut bytes = to_bytes(&Digest::of(b""), 10, &[]).unwrap();
            bytes[16] = u8::try_from(records.len()).unwrap();
            for r in &records {
                bytes.extend(r.digest);
                bytes.extend(r.start.to_le_bytes());
                bytes.extend(r.blocks.to_le_bytes());
            }
            let error = all(&bytes).unwrap_err();
            assert!(matches!(error, ChunkTableError::Record { what: w, .. } if w == what), "{error}");
        }
    }

    #[test]
    fn headers_are_refused_by_field() {
        let good = to_bytes(&Digest::of(b""), 1, &[record(0, 0, 1)]).unwrap();
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            all(&bytes).unwrap_err().to_string()
        };
        assert_eq!(with(0, 0), "not a chunk table: it does not start with DSECCHK1");
        assert_eq!(with(8, 3), "a chunk table of version 3; this program reads 1 and 2");
        assert_eq!(with(8, 2), "chunk table: 1 records do not fit 40 bytes");
        assert_eq!(with(13, 0x20), "chunk table: a block size of 8192");
        assert_eq!(with(23, 0xff), format!("chunk table: {} records do not fit 40 bytes", (0xffu64 << 56) + 1));
        assert_eq!(all(&good[..103]).unwrap_err().to_string(), "chunk table: 1 records do not fit 39 bytes");
        assert!(matches!(all(&good[..63]), Err(ChunkTableError::NotATable)));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(mut bytes in proptest::collection::vec(any::<u8>(), 0..400), keep in 0..64usize, version_2: bool) {
            let good = to_bytes(&Digest::of(b""), 1, &[record(0, 0, 1)]).unwrap();
            for (to, from) in bytes.iter_mut().zip(&good[..keep]) {
                *to = *from;
            }
            if version_2 && bytes.len() > 8 {
                bytes[8] = 2;
            }
            if let Ok(records) = all(&bytes) {
                let size = if bytes[8] == 2 { 80 } else { 40 };
                prop_assert_eq!(records.len(), (bytes.len() - 64) / size);
            }
        }
    }
}
