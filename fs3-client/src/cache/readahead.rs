//! What to fetch before it is asked for. Pure: accesses in, ranges of chunks out.
//!
//! As the kernel's read-ahead does it: a reader who goes on where it stopped gets a window that doubles, and a mark in
//! it. Whoever comes to the mark has the next window fetched, so that a hit costs no more than a look at the mark's bit.

use std::ops::Range;

/// Readers of one blob that are told apart.
const STREAMS: usize = 8;
/// Chunks of the first window.
const FIRST: u32 = 2;

/// The readers of one blob.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    streams: Vec<Stream>,
}

#[derive(Debug, Clone, Copy)]
struct Stream {
    /// The chunk after the last one read.
    next: u32,
    /// The chunk after the last one asked for.
    ahead: u32,
    /// Chunks to have asked for beyond what is read.
    window: u32,
}

/// What an access leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ahead {
    /// Chunks to fetch.
    pub(crate) fetch: Range<u32>,
    /// Where to set the mark.
    pub(crate) mark: u32,
}

impl Streams {
    /// Somebody reads `chunks`, and missed one or came to a mark. Windows have at most `most` chunks, and end at `end`.
    pub(crate) fn access(&mut self, chunks: &Range<u32>, most: u32, end: u32) -> Option<Ahead> {
        if most == 0 || chunks.is_empty() {
            return None;
        }
        let goes_on = |s: &Stream| {
            let from = s.next.saturating_sub(1);
            (from..=s.ahead.max(s.next)).contains(&chunks.start)
        };
        let Some(at) = self.streams.iter().position(goes_on) else {
            self.streams.truncate(STREAMS - 1);
            // Whoever begins at the beginning is taken for one who reads on.
            let window = if chunks.start == 0 { FIRST.min(most) } else { 0 };
            self.streams.insert(0, Stream { next: chunks.end, ahead: chunks.end, window });
            return (window > 0).then(|| self.extend(end)).flatten();
        };
        let mut stream = self.streams.remove(at);
        // The same chunk again tells nothing.
        if chunks.end > stream.next {
            stream.next = chunks.end;
            stream.window = stream.window.saturating_mul(2).clamp(FIRST, most).min(most);
            stream.window = stream.window.max((chunks.end - chunks.start).min(most));
        }
        stream.ahead = stream.ahead.max(stream.next);
        self.streams.insert(0, stream);
        self.extend(end)
    }

    /// Fills up the first stream's window.
    fn extend(&mut self, end: u32) -> Option<Ahead> {
        let stream = self.streams.first_mut()?;
        let target = stream.next.saturating_add(stream.window).min(end);
        // By halves of a window, so that requests stay large.
        let missing = target.saturating_sub(stream.ahead);
        if missing == 0 || (missing < stream.window / 2 && target < end) {
            return None;
        }
        let fetch = stream.ahead..target;
        stream.ahead = target;
        // Who comes to it has half a window left.
        let mark = target.saturating_sub((stream.window / 2).max(1)).clamp(fetch.start, fetch.end - 1);
        Some(Ahead { fetch, mark })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequential_reader_is_kept_ahead_of() {
        let mut streams = Streams::default();
        let mut fetched = 0;
        let mut marks = std::collections::BTreeSet::new();
        for chunk in 0..1000 {
            // A miss, or a mark.
            if chunk >= fetched || marks.remove(&chunk) {
                if let Some(ahead) = streams.access(&(chunk..chunk + 1), 64, 1000) {
                    assert!(ahead.fetch.start <= fetched.max(chunk + 1), "{ahead:?} leaves a gap after {fetched}");
                    fetched = ahead.fetch.end;
                    marks.insert(ahead.mark);
                }
                fetched = fetched.max(chunk + 1);
            }
            if chunk > 300 && chunk < 900 {
                assert!(fetched - chunk >= 32, "at {chunk} only up to {fetched}");
            }
            assert!(fetched <= chunk + 1 + 64);
        }
        assert_eq!(fetched, 1000);
    }

    #[test]
    fn a_random_reader_gets_nothing() {
        let mut streams = Streams::default();
        let mut chunk = 7u32;
        for _ in 0..1000 {
            chunk = chunk.wrapping_mul(1_103_515_245).wrapping_add(12_345) % 100_000 * 10 + 5;
            assert_eq!(streams.access(&(chunk..chunk + 1), 64, 1_000_000), None);
        }
    }

    #[test]
    fn several_readers_are_told_apart() {
        let mut streams = Streams::default();
        for step in 0..10 {
            for reader in 1..=4 {
                let chunk = reader * 1000 + step;
                let ahead = streams.access(&(chunk..chunk + 1), 64, 100_000);
                assert_eq!(ahead.is_some(), step > 0 && ahead.is_some(), "{reader} {step}");
            }
        }
        assert!(streams.streams.iter().filter(|s| s.window == 64).count() == 4, "{streams:?}");
    }

    #[test]
    fn nothing_is_asked_for_beyond_the_end_or_when_it_is_off() {
        let mut streams = Streams::default();
        assert_eq!(streams.access(&(0..1), 0, 10), None);
        assert_eq!(streams.access(&(0..4), 64, 5).unwrap().fetch, 4..5);
        assert_eq!(streams.access(&(4..5), 64, 5), None);
    }
}
