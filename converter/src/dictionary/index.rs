//! Chunk digests in memory, 16 bytes for each: a prefix of the digest, and where the whole of it stands.

/// One chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Entry {
    /// The first 8 bytes of its key, big-endian.
    pub(super) prefix: u64,
    /// The blob that has it. Lower numbers go first.
    pub(super) blob: u32,
    /// Position in the blob's chunk table.
    pub(super) record: u32,
}

impl Entry {
    pub(super) fn new(digest: &[u8; 32], blob: u32, record: u32) -> Self {
        Self { prefix: prefix(digest), blob, record }
    }
}

fn prefix(digest: &[u8; 32]) -> u64 {
    u64::from_be_bytes(*digest.first_chunk().expect("32 bytes"))
}

/// Entries in order, and where each range of prefixes begins: digests are evenly spread, so a lookup looks at a few.
#[derive(Debug, Default)]
pub(super) struct Sorted {
    entries: Vec<Entry>,
    /// `buckets[n]` is the first entry whose prefix has the top bits `n` or more.
    buckets: Vec<u32>,
    bits: u32,
}

/// Entries for each bucket, on average.
const BUCKET: usize = 8;

impl Sorted {
    /// # Panics
    /// With 2^32 entries.
    pub(super) fn new(mut entries: Vec<Entry>) -> Self {
        entries.sort_unstable();
        entries.shrink_to_fit();
        u32::try_from(entries.len()).expect("fewer than 2^32 entries");
        let bits = (entries.len() / BUCKET).max(1).ilog2();
        let mut buckets = Vec::with_capacity((1 << bits) + 1);
        let mut at = 0;
        for bucket in 0..1u64 << bits {
            let first = bucket.checked_shl(64 - bits).unwrap_or(0);
            at += entries[at..].partition_point(|e| e.prefix < first);
            buckets.push(u32::try_from(at).expect("checked above"));
        }
        buckets.push(u32::try_from(entries.len()).expect("checked above"));
        Self { entries, buckets, bits }
    }

    pub(super) fn merge(&self, other: &Self) -> Self {
        Self::new([self.entries.as_slice(), &other.entries].concat())
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// All entries that may be of `digest`, by blob.
    pub(super) fn candidates(&self, digest: &[u8; 32]) -> &[Entry] {
        if self.entries.is_empty() {
            return &[];
        }
        let prefix = prefix(digest);
        let bucket = usize::try_from(prefix.checked_shr(64 - self.bits).unwrap_or(0)).expect("few buckets");
        let range = &self.entries[self.buckets[bucket] as usize..self.buckets[bucket + 1] as usize];
        let start = range.partition_point(|e| e.prefix < prefix);
        let len = range[start..].partition_point(|e| e.prefix == prefix);
        &range[start..start + len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn digest(n: u64, spread: u32) -> [u8; 32] {
        let mut digest = *blake3::hash(&n.to_le_bytes()).as_bytes();
        // Prefixes that lie together, or are the same.
        let near = prefix(&digest) >> spread;
        digest[..8].copy_from_slice(&near.to_be_bytes());
        digest
    }

    proptest! {
        #[test]
        fn finds_what_a_scan_finds(count in 0..300u64, more in 0..300u64, spread in 0..64u32) {
            let entry = |n: u64| Entry::new(&digest(n, spread), u32::try_from(n % 7).unwrap(), u32::try_from(n).unwrap());
            let both = Sorted::new((0..count).map(entry).collect()).merge(&Sorted::new((count..count + more).map(entry).collect()));
            let all: BTreeSet<Entry> = (0..count + more).map(entry).collect();
            prop_assert_eq!(both.len(), all.len());
            for n in 0..count + more + 20 {
                let wanted = digest(n, spread);
                let expected: Vec<Entry> = all.iter().filter(|e| e.prefix == prefix(&wanted)).copied().collect();
                prop_assert_eq!(both.candidates(&wanted), &expected[..]);
            }
        }
    }

    #[test]
    fn an_empty_one_has_nothing() {
        assert!(Sorted::new(Vec::new()).candidates(&[7; 32]).is_empty());
        assert!(Sorted::default().candidates(&[7; 32]).is_empty());
    }

    #[test]
    fn entries_are_small() {
        assert_eq!(size_of::<Entry>(), 16);
    }
}
