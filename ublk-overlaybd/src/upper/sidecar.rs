//! Our own file beside a writable layer's two: a record for each slot of the index, with checksums.
//!
//! ```text
//! header, 512 bytes   magic "DSECUPPR", version u32, zero u32, uuid of the data file [16], zeros, CRC-32C of 508 bytes
//! record, 32 bytes    number u64 (bit 63: the data has no checksum), the index entry [16], CRC-32C of the data u32,
//!                     CRC-32C of the uuid and the 28 bytes before u32
//! ```
//!
//! Record `n` stands at `512 + 32 n` and belongs to the entry at `4096 + 16 n` of the index, padding included. Sixteen
//! records fill a sector, thirty-two entries another: none lies across two, so a power cut tears no record. Integers are
//! little-endian.

use crate::format::lsmt::ENTRY_SIZE;
use uuid::Uuid;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of the header.
pub(super) const HEADER: usize = 512;
/// Bytes of a record.
pub(super) const RECORD: usize = 32;
/// Changes with anything that makes a file unreadable for code that does not know it.
const VERSION: u32 = 1;
const MAGIC: [u8; 8] = *b"DSECUPPR";
const UNCHECKED: u64 = 1 << 63;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 8],
    version: U32,
    zero: U32,

    uuid: [u8; 16],

    rest: [u8; HEADER - 36],
    crc: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawRecord {
    number: U64,
    entry: [u8; ENTRY_SIZE],
    data_crc: U32,
    crc: U32,
}

const _: () = assert!(size_of::<RawHeader>() == HEADER && size_of::<RawRecord>() == RECORD);

/// The header of the file beside the data file that is called `uuid`.
pub(super) fn header(uuid: Uuid) -> [u8; HEADER] {
    let mut raw = RawHeader {
        magic: MAGIC,
        version: VERSION.into(),
        zero: 0.into(),
        uuid: *uuid.as_bytes(),
        rest: [0; HEADER - 36],
        crc: 0.into(),
    };
    raw.crc = crc32c::crc32c(&raw.as_bytes()[..HEADER - 4]).into();
    zerocopy::transmute!(raw)
}

/// Whether `bytes` begin with the header for `uuid`, whole and of a version that is known.
pub(super) fn belongs_to(bytes: &[u8], uuid: Uuid) -> bool {
    bytes.get(..HEADER) == Some(&header(uuid))
}

/// An index slot and what is known of its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Record {
    /// The slot's bytes in the index: an entry, or padding.
    pub(super) entry: [u8; ENTRY_SIZE],
    /// CRC-32C of the data; none where there is no data, or where somebody else wrote it.
    pub(super) data_crc: Option<u32>,
}

impl Record {
    /// The bytes of record `number` beside the data file that is called `uuid`.
    pub(super) fn encode(&self, number: u64, uuid: Uuid) -> [u8; RECORD] {
        let number = if self.data_crc.is_some() { number } else { number | UNCHECKED };
        let data_crc = self.data_crc.unwrap_or(0);
        let mut raw = RawRecord { number: number.into(), entry: self.entry, data_crc: data_crc.into(), crc: 0.into() };
        raw.crc = sum(uuid, &raw.as_bytes()[..RECORD - 4]).into();
        zerocopy::transmute!(raw)
    }

    /// Record `number`, if the bytes are that and whole.
    pub(super) fn parse(bytes: &[u8; RECORD], number: u64, uuid: Uuid) -> Option<Self> {
        let raw: RawRecord = zerocopy::transmute!(*bytes);
        let found = raw.number.get();
        let whole = sum(uuid, &bytes[..RECORD - 4]) == raw.crc.get();
        let data_crc = (found & UNCHECKED == 0).then(|| raw.data_crc.get());
        (whole && found & !UNCHECKED == number).then_some(Self { entry: raw.entry, data_crc })
    }
}

/// Of a record. The layer's name is in it, so that leftovers of another layer's file are no records of this one.
fn sum(uuid: Uuid, bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(uuid.as_bytes()), bytes)
}

/// Where record `number` stands.
pub(super) fn position(number: u64) -> u64 {
    HEADER as u64 + number * RECORD as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_are_these_and_a_change_needs_another_version() {
        let record = Record { entry: *b"sixteen bytes...", data_crc: Some(0x0102_0304) };
        let uuid = Uuid::from_u128(7);
        let bytes = record.encode(5, uuid);
        assert_eq!(
            hex::encode(&bytes[..28]),
            "0500000000000000".to_owned() + &hex::encode(b"sixteen bytes...") + "04030201"
        );
        assert_eq!(Record::parse(&bytes, 5, uuid), Some(record));
        assert_eq!(Record::parse(&bytes, 6, uuid), None, "a record that stands elsewhere is none");
        for bit in 0..RECORD * 8 {
            let mut wrong = bytes;
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Record::parse(&wrong, 5, uuid), None);
        }
        let unchecked = Record { data_crc: None, ..record };
        assert_eq!(Record::parse(&unchecked.encode(5, uuid), 5, uuid), Some(unchecked));
        assert_eq!(Record::parse(&bytes, 5, Uuid::nil()), None, "a record of another layer is none");
        assert!(belongs_to(&header(uuid), uuid) && !belongs_to(&header(uuid), Uuid::nil()));
        assert_eq!(&header(uuid)[..16], b"DSECUPPR\x01\0\0\0\0\0\0\0");
        assert_eq!(Record::parse(&[0; RECORD], 0, uuid), None);
    }
}
