//! What a cache's directory looks like, and the records of its index. Bytes in, values out: no I/O.
//!
//! ```text
//! dsec-cache.json                 {"format":1,"chunk":262144}: made first, and never changed
//! lock                            flock of the owner
//! index/                          RocksDB
//! blobs/<2 hex>/<64 hex>-<size>   the chunks of one blob, each where it is in the blob; the rest are holes
//! ```
//!
//! The index, keys with big-endian numbers so that a blob's groups follow one another, values little-endian:
//!
//! ```text
//! "clean"                                    there only after a proper end
//! "g" digest 32, size u64, group u32         present u64, unchecked u64, suspect u64, CRC32C u32 for each bit of present
//! ```
//!
//! `suspect` is written at a proper end, and counts only after one: what a crash before that one had left in doubt, and
//! nobody has read since.
//!
//! A blob's length is part of its name in both: a descriptor with a wrong length is another blob, whose chunks never mix
//! with those of the right one. 64 chunks share a record, so a terabyte of chunks is 65,536 records.

use super::geometry::GROUP;
use crate::Digest;

/// Of the layout above.
pub(crate) const FORMAT: u32 = 1;
pub(crate) const IDENTITY: &str = "dsec-cache.json";
pub(crate) const LOCK: &str = "lock";
pub(crate) const INDEX: &str = "index";
pub(crate) const BLOBS: &str = "blobs";
pub(crate) const CLEAN_KEY: &[u8] = b"clean";
const GROUP_PREFIX: u8 = b'g';
/// Bytes of a group's key.
pub(crate) const KEY_SIZE: usize = 1 + 32 + 8 + 4;

/// The contents of [`IDENTITY`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Identity {
    pub(crate) format: u32,
    pub(crate) chunk: u64,
}

/// Which blob: contents, and the length that its descriptor gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BlobKey {
    pub(crate) digest: Digest,
    pub(crate) size: u64,
}

/// Which group of which blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct GroupKey {
    pub(crate) blob: BlobKey,
    pub(crate) group: u32,
}

impl BlobKey {
    /// Directory and name of the data file.
    pub(crate) fn file(&self) -> (String, String) {
        let hex = self.digest.hex();
        (hex[..2].to_owned(), format!("{hex}-{}", self.size))
    }

    /// A group of it.
    pub(crate) fn group(self, group: u32) -> GroupKey {
        GroupKey { blob: self, group }
    }

    /// The blob whose data file has this directory and name; `None` for files that are not ours.
    pub(crate) fn of_file(directory: &str, name: &str) -> Option<Self> {
        let (hex, size) = name.split_once('-')?;
        let digest: Digest = format!("sha256:{hex}").parse().ok()?;
        let key = Self { digest, size: size.parse().ok()? };
        (key.file() == (directory.to_owned(), name.to_owned())).then_some(key)
    }
}

impl GroupKey {
    pub(crate) fn encode(&self) -> [u8; KEY_SIZE] {
        let mut key = [0; KEY_SIZE];
        key[0] = GROUP_PREFIX;
        key[1..33].copy_from_slice(self.blob.digest.as_bytes());
        key[33..41].copy_from_slice(&self.blob.size.to_be_bytes());
        key[41..].copy_from_slice(&self.group.to_be_bytes());
        key
    }

    pub(crate) fn decode(key: &[u8]) -> Option<Self> {
        let (prefix, rest) = key.split_first()?;
        let (digest, rest) = rest.split_first_chunk::<32>()?;
        let (size, rest) = rest.split_first_chunk::<8>()?;
        let group = u32::from_be_bytes(rest.try_into().ok()?);
        let blob = BlobKey { digest: Digest::from_bytes(*digest), size: u64::from_be_bytes(*size) };
        (*prefix == GROUP_PREFIX).then_some(Self { blob, group })
    }
}

/// What the index has of a group.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Record {
    /// Chunks that are in the file.
    pub(crate) present: u64,
    /// Of those, the ones that no table of digests has vouched for.
    pub(crate) unchecked: u64,
    /// Of those, the ones that were to be believed only after their CRC matched when the cache ended properly.
    pub(crate) suspect: u64,
    /// CRC32C of each, in their order.
    crcs: Vec<u32>,
}

impl Record {
    fn rank(&self, slot: u32) -> usize {
        (self.present & ((1 << slot) - 1)).count_ones() as usize
    }

    /// The CRC32C of the chunk in `slot`, if it is there.
    pub(crate) fn crc(&self, slot: u32) -> Option<u32> {
        (self.present & 1 << slot != 0).then(|| self.crcs[self.rank(slot)])
    }

    /// Takes in a chunk, or another CRC for it.
    pub(crate) fn insert(&mut self, slot: u32, crc: u32, checked: bool) {
        debug_assert!(slot < GROUP, "a slot is a bit of a word");
        let (bit, rank) = (1 << slot, self.rank(slot));
        if self.present & bit == 0 {
            self.present |= bit;
            self.crcs.insert(rank, crc);
        } else {
            self.crcs[rank] = crc;
        }
        self.suspect &= !bit;
        if checked { self.unchecked &= !bit } else { self.unchecked |= bit }
    }

    /// Takes out a chunk.
    pub(crate) fn remove(&mut self, slot: u32) {
        let bit = 1 << slot;
        if self.present & bit != 0 {
            self.crcs.remove(self.rank(slot));
            self.present &= !bit;
            self.unchecked &= !bit;
            self.suspect &= !bit;
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut value = Vec::with_capacity(24 + 4 * self.crcs.len());
        value.extend(self.present.to_le_bytes());
        value.extend(self.unchecked.to_le_bytes());
        value.extend(self.suspect.to_le_bytes());
        self.crcs.iter().for_each(|crc| value.extend(crc.to_le_bytes()));
        value
    }

    pub(crate) fn decode(value: &[u8]) -> Option<Self> {
        let (present, rest) = value.split_first_chunk::<8>()?;
        let (unchecked, rest) = rest.split_first_chunk::<8>()?;
        let (suspect, rest) = rest.split_first_chunk::<8>()?;
        let [present, unchecked, suspect] = [present, unchecked, suspect].map(|word| u64::from_le_bytes(*word));
        let (crcs, tail) = rest.as_chunks::<4>();
        if !tail.is_empty() || crcs.len() != present.count_ones() as usize || (unchecked | suspect) & !present != 0 {
            return None;
        }
        Some(Self { present, unchecked, suspect, crcs: crcs.iter().map(|crc| u32::from_le_bytes(*crc)).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_bytes_are_those_of_format_1() {
        let message = "what is on disks changed: raise FORMAT";
        let blob = BlobKey { digest: Digest::from_bytes([0xab; 32]), size: 0x0102 };
        let key = GroupKey { blob, group: 3 }.encode();
        let expected = format!("67{}00000000000001020000{}", "ab".repeat(32), "0003");
        assert_eq!(hex::encode(key), expected, "{message}");
        let mut record = Record::default();
        record.insert(63, 0xdead_beef, false);
        record.insert(1, 7, true);
        assert_eq!(
            hex::encode(record.encode()),
            "020000000000008000000000000000800000000000000000".to_owned() + "07000000efbeadde",
            "{message}"
        );
        let (directory, name) = blob.file();
        assert_eq!((directory.as_str(), name), ("ab", format!("{}-258", "ab".repeat(32))), "{message}");
        let identity = serde_json::to_string(&Identity { format: FORMAT, chunk: 262_144 }).unwrap();
        assert_eq!(identity, r#"{"format":1,"chunk":262144}"#, "{message}");
    }

    #[test]
    fn only_our_names_are_ours() {
        let blob = BlobKey { digest: Digest::of(b"x"), size: 5 };
        let (directory, name) = blob.file();
        assert_eq!(BlobKey::of_file(&directory, &name), Some(blob));
        for other in [
            format!("{name} "),
            format!("{name}.bak"),
            name.replace("-5", "-05"),
            name.replace("-5", ""),
            "README".into(),
        ] {
            assert_eq!(BlobKey::of_file(&directory, &other), None, "{other}");
        }
        assert_eq!(BlobKey::of_file("zz", &name), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_record_or_none(value in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Some(record) = Record::decode(&value) {
                prop_assert_eq!(record.encode(), value);
            }
        }

        #[test]
        fn any_bytes_are_a_key_or_none(key in proptest::collection::vec(any::<u8>(), 0..60)) {
            if let Some(decoded) = GroupKey::decode(&key) {
                prop_assert_eq!(decoded.encode().to_vec(), key);
            }
        }

        #[test]
        fn a_record_is_a_map(ops in proptest::collection::vec((0u32..64, any::<u32>(), any::<bool>(), any::<bool>()), 0..200)) {
            let mut record = Record::default();
            let mut model = std::collections::BTreeMap::new();
            for (slot, crc, checked, remove) in ops {
                if remove {
                    record.remove(slot);
                    model.remove(&slot);
                } else {
                    record.insert(slot, crc, checked);
                    model.insert(slot, (crc, checked));
                }
            }
            let record = Record::decode(&record.encode()).unwrap();
            for slot in 0..64 {
                prop_assert_eq!(record.crc(slot), model.get(&slot).map(|(crc, _)| *crc));
                let unchecked = record.unchecked & 1 << slot != 0;
                prop_assert_eq!(unchecked, model.get(&slot).is_some_and(|(_, checked)| !checked));
            }
        }
    }
}
