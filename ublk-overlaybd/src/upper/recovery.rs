//! What index and sidecar say together after anything may have happened. Pure: bytes in, records out.

use super::sidecar::{RECORD, Record};
use crate::format::lsmt::{ENTRY_SIZE, Entry, HEADER_SIZE};
use uuid::Uuid;

/// What opening a writable layer met.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Slots of the index that are in force, padding counted.
    pub slots: u64,
    /// Slots that only the sidecar had whole; they are put back into the index.
    pub restored: u64,
    /// Slots that only the index had: a peer wrote them, or the power went between the two files.
    pub adopted: u64,
    /// Entries that were answered and not flushed by a process that died.
    pub unflushed: u64,
    /// The end of the index that was left out.
    pub dropped: Option<Dropped>,
}

/// The end of an index that was left out: it was never flushed, or is not whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dropped {
    /// Where in the index file.
    pub offset: u64,
    /// How many bytes from there on.
    pub bytes: u64,
    /// Why.
    pub why: String,
}

/// What may stand in a slot.
enum Slot {
    Good,
    Impossible(String),
}

fn judge(bytes: &[u8; ENTRY_SIZE], data_end: u64) -> Slot {
    match Entry::parse(bytes) {
        Ok(None) => Slot::Good,
        Ok(Some(entry)) if entry.is_within(data_end) => Slot::Good,
        Ok(Some(Entry { moffset, length, .. })) => {
            let what = "is outside the data, which ends at";
            Slot::Impossible(format!("moffset {moffset} with length {length} {what} {data_end}"))
        }
        Err(error) => Slot::Impossible(error.to_string()),
    }
}

/// Whether the bytes can stand in a slot, over data that ends at sector `data_end`.
pub(super) fn is_good(bytes: &[u8; ENTRY_SIZE], data_end: u64) -> bool {
    matches!(judge(bytes, data_end), Slot::Good)
}

/// The records in force, from the index's bytes after its header and the sidecar's after its own (none where it is
/// missing or somebody else's), over data that ends at sector `data_end`.
///
/// A slot that both have is taken. One that only one of them has is taken from it, since data was synced before either
/// was written. Where they differ and the index's can be, a peer has rewritten the index: it is believed, and the
/// sidecar no more. The first slot that neither has ends the replay.
pub(super) fn replay(index: &[u8], sidecar: &[u8], uuid: Uuid, data_end: u64) -> (Vec<Record>, Recovered) {
    let (entries, ragged) = index.as_chunks::<ENTRY_SIZE>();
    let (mut kept, _) = sidecar.as_chunks::<RECORD>();
    let (mut records, mut recovered) = (Vec::with_capacity(entries.len()), Recovered::default());
    let why = loop {
        let number = records.len();
        let record = kept.get(number).and_then(|bytes| Record::parse(bytes, number as u64, uuid));
        let record = record.filter(|record| matches!(judge(&record.entry, data_end), Slot::Good));
        let Some(entry) = entries.get(number) else {
            let Some(record) = record else { break None };
            recovered.restored += 1;
            records.push(record);
            continue;
        };
        match (record, judge(entry, data_end)) {
            (Some(record), _) if record.entry == *entry => records.push(record),
            (Some(record), Slot::Impossible(_)) => {
                recovered.restored += 1;
                records.push(record);
            }
            (found, Slot::Good) => {
                if found.is_some() {
                    kept = &[];
                }
                recovered.adopted += 1;
                records.push(Record { entry: *entry, data_crc: None });
            }
            (None, Slot::Impossible(why)) => break Some(why),
        }
    };
    recovered.slots = records.len() as u64;
    let end = records.len() * ENTRY_SIZE;
    let left = index.len().saturating_sub(end) as u64;
    let why = why.or_else(|| (!ragged.is_empty()).then(|| "the last entry is not whole".to_owned()));
    recovered.dropped =
        why.filter(|_| left > 0).map(|why| Dropped { offset: (HEADER_SIZE + end) as u64, bytes: left, why });
    (records, recovered)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::lsmt::PADDING;
    use proptest::prelude::*;

    fn entry(offset: u64, moffset: u64) -> [u8; ENTRY_SIZE] {
        Entry { offset, length: 1, moffset, zeroed: false, tag: 0 }.encode().unwrap()
    }

    fn files(entries: &[[u8; ENTRY_SIZE]]) -> (Vec<u8>, Vec<u8>) {
        let record = |(n, &entry)| Record { entry, data_crc: Some(1) }.encode(n as u64, Uuid::nil());
        (entries.concat(), entries.iter().enumerate().flat_map(record).collect())
    }

    #[test]
    fn each_file_helps_the_other() {
        let slots = [entry(1, 8), PADDING, entry(2, 9), entry(3, 10)];
        let (index, sidecar) = files(&slots);
        let (records, recovered) = replay(&index, &sidecar, Uuid::nil(), 20);
        assert_eq!(recovered, Recovered { slots: 4, ..Recovered::default() });
        assert!(records.iter().all(|record| record.data_crc == Some(1)));

        // The index is shorter, or a sector of it was lost.
        assert_eq!(
            replay(&index[..20], &sidecar, Uuid::nil(), 20).1,
            Recovered { slots: 4, restored: 3, ..Recovered::default() }
        );
        let mut holes = index.clone();
        holes[16..48].fill(0);
        assert_eq!(
            replay(&holes, &sidecar, Uuid::nil(), 20).1,
            Recovered { slots: 4, restored: 2, ..Recovered::default() }
        );
        // The sidecar is shorter, or none.
        assert_eq!(
            replay(&index, &sidecar[..40], Uuid::nil(), 20).1,
            Recovered { slots: 4, adopted: 3, ..Recovered::default() }
        );
        assert_eq!(replay(&index, &[], Uuid::nil(), 20).1, Recovered { slots: 4, adopted: 4, ..Recovered::default() });
    }

    #[test]
    fn the_first_impossible_slot_ends_it() {
        let (index, sidecar) = files(&[entry(1, 8), entry(2, 9), [0; 16], entry(3, 10)]);
        let (records, recovered) = replay(&index, &[], Uuid::nil(), 20);
        assert_eq!(records.len(), 2);
        let dropped = recovered.dropped.unwrap();
        assert_eq!((dropped.offset, dropped.bytes), (4096 + 32, 32));
        // Sums that are right do not make sense of nonsense.
        assert_eq!(replay(&index, &sidecar, Uuid::nil(), 20).0.len(), 2);
        // Past the end of the data, by both accounts.
        let (index, sidecar) = files(&[entry(1, 8), entry(2, 30)]);
        assert_eq!(replay(&index, &sidecar, Uuid::nil(), 20).0.len(), 1);
        let (records, recovered) = replay(&index[..21], &[], Uuid::nil(), 40);
        assert_eq!((records.len(), recovered.dropped.unwrap().bytes), (1, 5));
    }

    #[test]
    fn an_index_that_a_peer_rewrote_is_believed() {
        let (_, sidecar) = files(&[entry(1, 8), entry(2, 9), entry(3, 10)]);
        let (index, _) = files(&[entry(1, 8), entry(7, 9)]);
        let (records, recovered) = replay(&index, &sidecar, Uuid::nil(), 20);
        assert_eq!(records.iter().map(|record| record.entry).collect::<Vec<_>>().concat(), index);
        assert_eq!((recovered.adopted, recovered.restored), (1, 0));
    }

    proptest! {
        #[test]
        fn any_bytes_give_something(index in prop::collection::vec(any::<u8>(), 0..200),
                                    sidecar in prop::collection::vec(any::<u8>(), 0..200), end in any::<u64>()) {
            let (records, recovered) = replay(&index, &sidecar, Uuid::nil(), end);
            prop_assert_eq!(records.len() as u64, recovered.slots);
            prop_assert!(records.len() <= index.len() / 16 + sidecar.len() / 32);
        }
    }
}
