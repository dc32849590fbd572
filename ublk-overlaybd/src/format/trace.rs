//! Traces: which ranges of which layers were read when an image was started, to read them ahead the next time.
//!
//! A file without the magic is a list of files instead: one absolute path a line, where `/` or `*` at the end means all
//! that is below.

use super::checksum::raw_crc32c;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// How a trace begins.
pub const MAGIC: u32 = 3_270_449_184;
/// Longest list of files.
pub const MAX_LIST: usize = 64 << 10;

const HEADER_SIZE: usize = 24;
const RECORD_SIZE: usize = 24;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHeader {
    magic: U32,
    padding0: [u8; 4],
    data_size: U64,
    checksum: U32,
    padding1: [u8; 4],
}

/// The padding is whatever was in the writer's memory, and part of the checksum.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawRecord {
    op: u8,
    padding: [u8; 3],
    layer_index: U32,
    count: U64,
    offset: U64,
}

/// What was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Read.
    Read,
    /// Written.
    Write,
}

/// One access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// What was done.
    pub op: Op,
    /// Number of the layer, 0 at the bottom.
    pub layer: u32,
    /// Bytes.
    pub count: u64,
    /// First byte, in the layer's LSMT file without its wrappers.
    pub offset: u64,
}

/// What to read ahead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trace {
    /// Accesses in the order of time.
    Records(Vec<Record>),
    /// Files.
    Files(Vec<String>),
}

/// Why a file is no trace.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// It has no bytes.
    #[error("trace: the file is empty")]
    Empty,
    /// Its size and its header do not agree.
    #[error("trace: data_size is {data_size}, {found} bytes follow the header")]
    Size {
        /// What the header says.
        data_size: u64,
        /// What is there.
        found: usize,
    },
    /// The records are damaged.
    #[error("trace: the checksum of the records is {found:#010x}, {expected:#010x} was written")]
    Checksum {
        /// What the bytes give.
        found: u32,
        /// What the header says.
        expected: u32,
    },
    /// A record that cannot be.
    #[error("trace: record {number}: {field} cannot be {value}")]
    Record {
        /// Which.
        number: usize,
        /// What in it.
        field: &'static str,
        /// What it is.
        value: u64,
    },
    /// A list that is too long, or no text.
    #[error("trace: neither a trace nor a list of files: {0}")]
    List(String),
}

impl Trace {
    /// Reads a trace, or a list of files.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(bytes: &[u8]) -> Result<Self, TraceError> {
        if bytes.is_empty() {
            return Err(TraceError::Empty);
        }
        match RawHeader::ref_from_prefix(bytes) {
            Ok((header, rest)) if header.magic.get() == MAGIC => Self::records(header, rest),
            _ => Self::files(bytes),
        }
    }

    fn records(header: &RawHeader, rest: &[u8]) -> Result<Self, TraceError> {
        let data_size = header.data_size.get();
        let wrong = TraceError::Size { data_size, found: rest.len() };
        let Some(bytes) = usize::try_from(data_size).ok().and_then(|size| rest.get(..size)) else { return Err(wrong) };
        if bytes.len() % RECORD_SIZE != 0 {
            return Err(wrong);
        }
        let (found, expected) = (raw_crc32c(0, bytes), header.checksum.get());
        if found != expected {
            return Err(TraceError::Checksum { found, expected });
        }
        let records = bytes.chunks_exact(RECORD_SIZE).enumerate().map(|(number, bytes)| {
            let wrong = |field, value| TraceError::Record { number, field, value };
            let raw = RawRecord::ref_from_bytes(bytes).map_err(|_| wrong("size", bytes.len() as u64))?;
            let op = match raw.op {
                b'R' => Op::Read,
                b'W' => Op::Write,
                other => return Err(wrong("op", other.into())),
            };
            let (count, offset) = (raw.count.get(), raw.offset.get());
            if offset.checked_add(count).is_none() {
                return Err(wrong("offset", offset));
            }
            Ok(Record { op, layer: raw.layer_index.get(), count, offset })
        });
        Ok(Self::Records(records.collect::<Result<_, _>>()?))
    }

    fn files(bytes: &[u8]) -> Result<Self, TraceError> {
        if bytes.len() > MAX_LIST {
            return Err(TraceError::List(format!("{} bytes, {MAX_LIST} at most", bytes.len())));
        }
        let text = std::str::from_utf8(bytes).map_err(|error| TraceError::List(error.to_string()))?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let files = lines.map(|line| {
            if line.starts_with('/') && !line.contains('\0') {
                Ok(line.to_owned())
            } else {
                Err(TraceError::List(format!("`{}` is no absolute path", line.escape_debug())))
            }
        });
        Ok(Self::Files(files.collect::<Result<_, _>>()?))
    }

    /// The bytes of a trace, or of a list of files.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let records = match self {
            Self::Files(files) => return files.iter().flat_map(|file| format!("{file}\n").into_bytes()).collect(),
            Self::Records(records) => records,
        };
        let mut bytes = vec![0; HEADER_SIZE];
        for record in records {
            let raw = RawRecord {
                op: match record.op {
                    Op::Read => b'R',
                    Op::Write => b'W',
                },
                padding: [0; 3],
                layer_index: record.layer.into(),
                count: record.count.into(),
                offset: record.offset.into(),
            };
            bytes.extend(raw.as_bytes());
        }
        let data = &bytes[HEADER_SIZE..];
        let header = RawHeader {
            magic: MAGIC.into(),
            padding0: [0; 4],
            data_size: (data.len() as u64).into(),
            checksum: raw_crc32c(0, data).into(),
            padding1: [0; 4],
        };
        bytes[..HEADER_SIZE].copy_from_slice(header.as_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record() -> impl Strategy<Value = Record> {
        (any::<bool>(), any::<u32>(), 0..u64::MAX / 2, 0..u64::MAX / 2).prop_map(|(write, layer, count, offset)| {
            Record { op: if write { Op::Write } else { Op::Read }, layer, count, offset }
        })
    }

    #[test]
    fn padding_is_opaque_but_counted() {
        let record = Record { op: Op::Read, layer: 1, count: 4096, offset: 8192 };
        let mut bytes = Trace::Records(vec![record]).encode();
        bytes[25..28].copy_from_slice(&[0x10, 0, 7]);
        assert!(matches!(Trace::parse(&bytes), Err(TraceError::Checksum { .. })));
        let checksum = raw_crc32c(0, &bytes[24..]);
        bytes[16..20].copy_from_slice(&checksum.to_le_bytes());
        assert_eq!(Trace::parse(&bytes), Ok(Trace::Records(vec![record])));
        assert_eq!(bytes[..4], [0x20, 0x18, 0xEF, 0xC2]);
    }

    #[test]
    fn lists_of_files() {
        let list = Trace::Files(vec!["/usr/bin/python3".to_owned(), "/lib/*".to_owned()]);
        assert_eq!(Trace::parse(&list.encode()), Ok(list));
        assert!(Trace::parse(b"relative\n").unwrap_err().to_string().contains("relative"));
        assert_eq!(Trace::parse(b""), Err(TraceError::Empty));
        assert!(Trace::parse(&vec![b'/'; MAX_LIST + 1]).is_err());
    }

    proptest! {
        #[test]
        fn traces_survive(records in proptest::collection::vec(record(), 0..20), cut in 0..400usize, flip in 0..400usize) {
            let trace = Trace::Records(records);
            let mut bytes = trace.encode();
            prop_assert_eq!(Trace::parse(&bytes), Ok(trace));
            let _ = Trace::parse(&bytes[..cut.min(bytes.len())]);
            if let Some(byte) = bytes.get_mut(flip) {
                *byte ^= 0x55;
            }
            let _ = Trace::parse(&bytes);
        }
    }
}
