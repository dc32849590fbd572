//! Warm-up: what a node shall have before it is asked for.
//!
//! A list is text, a line for each blob: digest, length, and the ranges to fetch, or none for all of it.
//!
//! ```text
//! # base image, first megabyte and the part with the libraries
//! sha256:<64 hex> 734003200 0-1048576 52428800-104857600
//! sha256:<64 hex> 8192
//! ```

use super::error::CacheError;
use super::{ChunkCache, ChunkDigests};
use crate::Digest;
use std::ops::Range;
use std::sync::Arc;

/// A line of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WarmEntry {
    /// The blob.
    pub digest: Digest,
    /// Its length in bytes.
    pub size: u64,
    /// What to fetch.
    pub ranges: Vec<Range<u64>>,
}

/// What a warm-up did.
#[derive(Debug, Clone, Default)]
pub struct WarmReport {
    /// Blobs of which all that was wanted is there.
    pub blobs: usize,
    /// Bytes that were asked of the store.
    pub bytes: u64,
    /// Blobs that failed, and why. They are fetched when they are read.
    pub failed: Vec<(Digest, CacheError)>,
}

/// Reads a list.
///
/// # Errors
/// [`CacheError::WarmList`] with the line.
pub fn parse(list: &str) -> Result<Vec<WarmEntry>, CacheError> {
    let mut entries = Vec::new();
    for (number, line) in list.lines().enumerate() {
        let fail = |what: String| CacheError::WarmList { line: number + 1, what };
        let line = line.split('#').next().unwrap_or_default();
        let mut words = line.split_whitespace();
        let Some(digest) = words.next() else { continue };
        let digest: Digest = digest.parse().map_err(|error| fail(format!("{error}")))?;
        let size = words.next().ok_or_else(|| fail("there is no length after the digest".to_owned()))?;
        let size: u64 = size.parse().map_err(|_| fail(format!("`{size}` is not a length in bytes")))?;
        let mut ranges = Vec::new();
        for word in words {
            let range = word.split_once('-').and_then(|(a, b)| Some(a.parse().ok()?..b.parse().ok()?));
            match range {
                Some(range) if range.start < range.end && range.end <= size => ranges.push(range),
                _ => return Err(fail(format!("`{word}` is not a range START-END in {size} bytes"))),
            }
        }
        if ranges.is_empty() {
            ranges.push(0..size);
        }
        entries.push(WarmEntry { digest, size, ranges });
    }
    Ok(entries)
}

impl ChunkCache {
    /// Fetches what a list names, blob by blob. `digests` gives the table of a blob, where there is one: what is fetched
    /// without it is fetched again when a reader comes with it. A store that fails is left alone, and the rest of the
    /// list with it.
    pub async fn warm(
        &self,
        list: &[WarmEntry],
        digests: impl Fn(&Digest) -> Option<Arc<dyn ChunkDigests>>,
    ) -> WarmReport {
        let mut report = WarmReport::default();
        for entry in list {
            let outcome = match self.blob(entry.digest, entry.size, digests(&entry.digest)) {
                Ok(blob) => blob.prefetch(&entry.ranges).await,
                Err(error) => Err(error),
            };
            match outcome {
                Ok(bytes) => {
                    report.blobs += 1;
                    report.bytes += bytes;
                }
                Err(error) => report.failed.push((entry.digest, error)),
            }
        }
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_text_is_a_list_or_its_line_is_named(text in "(sha256:[0-9a-f]{60,64}|[0-9 #\n-]|\\PC){0,40}") {
            match parse(&text) {
                Ok(entries) => for entry in entries {
                    prop_assert!(entry.ranges.iter().all(|range| range.start <= range.end && range.end <= entry.size));
                },
                Err(CacheError::WarmList { line, .. }) => prop_assert!(line >= 1 && line <= text.lines().count()),
                Err(other) => prop_assert!(false, "{}", other),
            }
        }
    }

    #[test]
    fn a_list_is_read_or_its_line_named() {
        let digest = Digest::of(b"x");
        let list = format!("# all\n\n{digest} 10 # a comment\n  {digest} 100 0-5 50-100\n");
        let entries = parse(&list).unwrap();
        assert_eq!((entries[0].size, entries[0].ranges.as_slice()), (10, std::slice::from_ref(&(0..10))));
        assert_eq!(entries[1].ranges, [0..5, 50..100]);
        for wrong in [
            "x 1",
            &format!("{digest}"),
            &format!("{digest} y"),
            &format!("{digest} 9 5-5"),
            &format!("{digest} 9 5-10"),
        ] {
            let error = parse(&format!("\n{wrong}")).unwrap_err();
            assert!(matches!(error, CacheError::WarmList { line: 2, .. }), "{wrong}: {error}");
        }
    }
}
