//! What was written and not flushed, for a process that dies while the machine goes on.
//!
//! A write is answered when its data is in the page cache and its mapping in memory. A power cut may take both, and that is
//! what a flush is for; but when the process alone dies, whoever wrote lives on, and counts on what was answered. So each
//! mapping also goes into this file, into the page cache, before the write is answered. Nothing here is ever synced: the
//! file counts only for the boot in which it was written.
//!
//! ```text
//! header, 4096 bytes   magic "DSECLIVE", version u32, zero u32, boot id [36], zero u32, uuid of the data file [16],
//!                      salt [16], CRC-32C of what is before u32, zero u32, number of the first slot that may not be in
//!                      the index u64
//! ring of records      as in the sidecar, with the salt for the uuid; slot `n` at `n % 2^18`
//! ```
//!
//! When the layer is opened, the records from that number on are published again, and flushed. Some of them may be in the
//! index already; since they come again in their order, that makes no difference.

use super::UpperError;
use super::sidecar::{RECORD, Record};
use fs3_client::Medium;
use std::sync::Arc;
use uuid::Uuid;

/// Slots that the ring holds. Far fewer wait for a flush at any time.
pub(super) const RING: u64 = 1 << 18;
const HEADER: u64 = 4096; // Also where `records` begins to read.
const MAGIC: &[u8; 8] = b"DSECLIVE";
const VERSION: u32 = 1;
/// Bytes of a boot id.
const BOOT: usize = 36;
/// What the checksum covers.
const FIXED: usize = 8 + 4 + 4 + BOOT + 4 + 16 + 16;
/// Where the number of the first slot is, aligned.
const FIRST: usize = FIXED + 4 + 4;

/// This boot of the machine; none where it has no name, and then nothing is kept.
pub(super) fn boot() -> Option<[u8; BOOT]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    text.trim().as_bytes().try_into().ok()
}

/// Where slots go that are not flushed yet.
#[derive(Debug)]
pub(super) struct Journal {
    file: Arc<dyn Medium>,
    salt: Uuid,
}

fn header(boot: &[u8; BOOT], uuid: Uuid, salt: Uuid, first: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(FIRST + 8);
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(boot);
    bytes.extend([0; 4]);
    bytes.extend(uuid.as_bytes());
    bytes.extend(salt.as_bytes());
    let crc = crc32c::crc32c(&bytes);
    bytes.extend(crc.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(first.to_le_bytes());
    bytes
}

/// The records of a journal that a process of this boot left for the layer called `uuid`, in their order. Pure: bytes in,
/// records out.
pub(super) fn records(bytes: &[u8], boot: &[u8; BOOT], uuid: Uuid) -> Vec<Record> {
    let Some(fixed) = bytes.get(..FIXED) else { return Vec::new() };
    let (Some(salt), Some(first)) = (fixed.last_chunk::<16>(), bytes.get(FIRST..FIRST + 8)) else { return Vec::new() };
    let (salt, first) = (Uuid::from_bytes(*salt), u64::from_le_bytes(first.try_into().unwrap_or_default()));
    if bytes.get(..FIRST) != Some(&header(boot, uuid, salt, 0)[..FIRST]) {
        return Vec::new();
    }
    let ring = bytes.get(4096..).unwrap_or_default();
    let mut found: Vec<(u64, Record)> = (0..RING)
        .zip(ring.as_chunks::<RECORD>().0)
        .filter_map(|(place, bytes)| {
            // The one number from the first on that belongs here.
            let number = first.checked_add(place.wrapping_sub(first) % RING)?;
            Some((number, Record::parse(bytes, number, salt)?))
        })
        .collect();
    found.sort_unstable_by_key(|(number, _)| *number);
    found.into_iter().map(|(_, record)| record).collect()
}

impl Journal {
    /// Begins anew in `file`: all slots before `first` are in the index. Nothing that is there counts any more.
    pub(super) fn begin(file: Arc<dyn Medium>, boot: &[u8; BOOT], uuid: Uuid, first: u64) -> std::io::Result<Self> {
        let salt = Uuid::new_v4();
        file.write_all_at(&header(boot, uuid, salt, first), 0)?;
        Ok(Self { file, salt })
    }

    /// Keeps `records`, the first of which has the number `first`. Less than the ring holds.
    pub(super) fn keep(&self, first: u64, records: &[Record]) -> std::io::Result<()> {
        let bytes: Vec<u8> = (first..).zip(records).flat_map(|(number, r)| r.encode(number, self.salt)).collect();
        let place = first % RING;
        // Up to the end of the ring, and from its beginning.
        let until_end = usize::try_from((RING - place) * RECORD as u64).unwrap_or(usize::MAX);
        let (here, there) = bytes.split_at(until_end.min(bytes.len()));
        self.file.write_all_at(here, HEADER + place * RECORD as u64)?;
        if there.is_empty() { Ok(()) } else { self.file.write_all_at(there, HEADER) }
    }

    /// All slots before `first` are in the index, durably.
    pub(super) fn flushed(&self, first: u64) -> std::io::Result<()> {
        self.file.write_all_at(&first.to_le_bytes(), FIRST as u64)
    }
}

/// An error of the journal's file.
pub(super) fn error(name: &str) -> impl FnOnce(std::io::Error) -> UpperError {
    UpperError::io(name, "keep what is not flushed")
}

#[cfg(test)]
mod tests {
    use super::*;
    use fs3_client::testing::power_cut::Disk;
    use proptest::prelude::*;

    const THIS: [u8; BOOT] = [b'a'; BOOT];

    fn record(n: u64) -> Record {
        let mut entry = [0; 16];
        entry[..8].copy_from_slice(&n.to_le_bytes());
        Record { entry, data_crc: Some(7) }
    }

    fn all(file: &dyn Medium) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(file.size().unwrap()).unwrap()];
        file.read_at(&mut bytes, 0).unwrap();
        bytes
    }

    #[test]
    fn what_was_kept_is_found_in_its_order_and_only_in_this_boot() {
        let disk = Disk::new();
        let file: Arc<dyn Medium> = Arc::new(disk.open("journal"));
        let uuid = Uuid::from_u128(1);
        let start = RING - 3;
        let journal = Journal::begin(Arc::clone(&file), &THIS, uuid, start).unwrap();
        // Over the end of the ring, and with a gap: a write that was not answered.
        journal.keep(start, &[record(0), record(1), record(2), record(3), record(4)]).unwrap();
        journal.keep(start + 6, &[record(6)]).unwrap();
        let numbers = |bytes: &[u8]| -> Vec<u8> { records(bytes, &THIS, uuid).iter().map(|r| r.entry[0]).collect() };
        assert_eq!(numbers(&all(&*file)), [0, 1, 2, 3, 4, 6]);
        assert!(records(&all(&*file), &[b'b'; BOOT], uuid).is_empty(), "another boot");
        assert!(records(&all(&*file), &THIS, Uuid::from_u128(2)).is_empty(), "another layer");
        journal.flushed(start + 4).unwrap();
        assert_eq!(numbers(&all(&*file)), [4, 6]);
        // Begun anew, nothing of it counts.
        Journal::begin(Arc::clone(&file), &THIS, uuid, start).unwrap();
        assert!(numbers(&all(&*file)).is_empty());
    }

    proptest! {
        #[test]
        fn any_bytes_give_something(mut bytes in prop::collection::vec(any::<u8>(), 0..9000), first in any::<u64>(), whole in any::<bool>()) {
            if whole && bytes.len() > FIRST + 8 {
                let header = header(&THIS, Uuid::nil(), Uuid::nil(), first);
                bytes[..header.len()].copy_from_slice(&header);
            }
            prop_assert!(records(&bytes, &THIS, Uuid::nil()).len() <= bytes.len() / RECORD);
        }
    }
}
