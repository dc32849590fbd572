//! What content-defined chunking would save, reckoned from the files of the distinct layers.
//!
//! Everything is counted alike for all ways of cutting: the bytes of distinct chunks, 40 bytes in a chunk table for each
//! of them, and 8 for each index in the metadata image. Fixed sizes are reckoned too, so that the numbers can be
//! compared with one another; caps and gaps are not part of it.

use crate::data::related::Related;
use crate::report::{Better, Metric};
use crate::sys;
use anyhow::Result;
use converter::entry::{Entry, EntryKind, EntrySink};
use converter::tar::{Limits, Parser, drive};
use converter::unpack::{Limits as UnpackLimits, Unpacker};
use fastcdc::v2020::FastCDC;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::convert::Infallible;
use std::fs::File;
use std::time::Duration;

const BLOCK: usize = 4096;
/// Files up to this size are in the metadata image whatever the chunks.
const INLINE: usize = 4032;

/// How files are cut.
#[derive(Debug, Clone, Copy)]
enum Cut {
    Fixed(usize),
    /// At any byte; the average size.
    Free(usize),
    /// At the multiples of 4 KiB next to those.
    Blocks(usize),
}

const CUTS: [(&str, Cut); 10] = [
    ("fixed 4 KiB", Cut::Fixed(4 << 10)),
    ("fixed 16 KiB", Cut::Fixed(16 << 10)),
    ("fixed 64 KiB", Cut::Fixed(64 << 10)),
    ("fixed 256 KiB", Cut::Fixed(256 << 10)),
    ("FastCDC 4 KiB, any byte", Cut::Free(4 << 10)),
    ("FastCDC 16 KiB, any byte", Cut::Free(16 << 10)),
    ("FastCDC 64 KiB, any byte", Cut::Free(64 << 10)),
    ("FastCDC 8 KiB, at blocks", Cut::Blocks(8 << 10)),
    ("FastCDC 16 KiB, at blocks", Cut::Blocks(16 << 10)),
    ("FastCDC 64 KiB, at blocks", Cut::Blocks(64 << 10)),
];

impl Cut {
    /// Where chunks end.
    fn ends(self, bytes: &[u8]) -> Vec<usize> {
        let cdc = |average: usize| {
            let chunks = FastCDC::new(bytes, average / 4, average, average * 4);
            chunks.map(|chunk| chunk.offset + chunk.length)
        };
        match self {
            Self::Fixed(size) => (1..=bytes.len().div_ceil(size)).map(|n| (n * size).min(bytes.len())).collect(),
            Self::Free(average) => cdc(average).collect(),
            Self::Blocks(average) => {
                let near = |end: usize| if end == bytes.len() { end } else { (end + BLOCK / 2) / BLOCK * BLOCK };
                let mut ends: Vec<usize> = cdc(average).map(near).filter(|end| *end > 0).collect();
                ends.dedup();
                // The last boundary may have been rounded past the end.
                ends.retain(|end| *end < bytes.len());
                ends.push(bytes.len());
                ends
            }
        }
    }

    /// Bytes that a chunk takes in a blob, and indexes that it needs.
    fn cost(self, len: usize) -> (u64, u64) {
        match self {
            Self::Free(_) => (len as u64, 1),
            Self::Fixed(_) => (len.next_multiple_of(BLOCK) as u64, 1),
            // EROFS has one chunk size a file: chunks of any number of blocks are chunks of one block each.
            Self::Blocks(_) => (len.next_multiple_of(BLOCK) as u64, len.div_ceil(BLOCK) as u64),
        }
    }
}

#[derive(Debug, Default)]
struct Sum {
    seen: HashSet<[u8; 16]>,
    /// Distinct chunks of the layer at hand: what it would store alone.
    in_layer: HashSet<[u8; 16]>,
    data: u64,
    alone: u64,
    indexes: u64,
    cutting: Duration,
}

impl Sum {
    fn add(&mut self, cut: Cut, bytes: &[u8]) {
        let began = sys::thread_cpu();
        let ends = cut.ends(bytes);
        self.cutting += sys::thread_cpu() - began;
        let mut start = 0;
        for end in ends {
            let chunk = &bytes[start..end];
            start = end;
            if chunk.iter().all(|byte| *byte == 0) {
                continue;
            }
            let (cost, indexes) = cut.cost(chunk.len());
            self.indexes += indexes;
            let digest = *blake3::hash(chunk).as_bytes().first_chunk().expect("32 bytes");
            if self.in_layer.insert(digest) {
                self.alone += cost;
            }
            if self.seen.insert(digest) {
                self.data += cost;
            }
        }
    }

    fn total(&self) -> u64 {
        self.data + 40 * self.seen.len() as u64 + 8 * self.indexes
    }
}

/// Feeds files to all ways of cutting.
struct Feed {
    sums: Vec<Sum>,
    file: Option<Vec<u8>>,
}

impl EntrySink for Feed {
    type Error = Infallible;

    fn entry(&mut self, entry: Entry) -> Result<(), Infallible> {
        self.file = match entry.kind {
            EntryKind::Regular { size, .. } => Some(vec![0; usize::try_from(size).expect("a file of a layer")]),
            _ => None,
        };
        Ok(())
    }

    fn data(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Infallible> {
        if let Some(file) = &mut self.file {
            let at = usize::try_from(offset).expect("inside the file");
            file[at..at + bytes.len()].copy_from_slice(bytes);
        }
        Ok(())
    }

    fn end_entry(&mut self) -> Result<(), Infallible> {
        if let Some(file) = self.file.take().filter(|file| file.len() > INLINE) {
            for ((_, cut), sum) in CUTS.iter().zip(&mut self.sums) {
                sum.add(*cut, &file);
            }
        }
        Ok(())
    }
}

/// Reads every distinct layer once.
#[expect(clippy::cast_precision_loss, reason = "sizes for people")]
pub(super) fn measure(images: &[Related]) -> Result<Vec<Metric>> {
    let layers: BTreeMap<&str, &crate::data::Layer> =
        images.iter().flat_map(|image| &image.layers).map(|layer| (layer.name.as_str(), layer)).collect();
    let mut feed = Feed { sums: CUTS.iter().map(|_| Sum::default()).collect(), file: None };
    for layer in layers.values() {
        crate::report::progress(&format!("cutting the files of {}", layer.name));
        let mut unpacker = Unpacker::new(File::open(&layer.blob)?, UnpackLimits::default())?;
        let mut parser = Parser::new(Limits::default());
        let mut buffer = vec![0; 1 << 20];
        loop {
            let n = unpacker.read(&mut buffer)?;
            if n == 0 {
                break;
            }
            let mut input = &buffer[..n];
            drive(&mut parser, &mut input, &mut feed).map_err(|e| anyhow::anyhow!("{}: {e:?}", layer.name))?;
        }
        feed.sums.iter_mut().for_each(|sum| sum.in_layer.clear());
    }
    let named: HashMap<&str, &Sum> = CUTS.iter().map(|(name, _)| *name).zip(&feed.sums).collect();
    let today = named["fixed 16 KiB"].total() as f64;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let metrics = CUTS.iter().zip(&feed.sums).flat_map(|((name, _), sum)| {
        let metrics = [
            Metric::new("reckoned_state", sum.total() as f64 / today, "x", Better::Lower),
            Metric::new("reckoned_state", mib(sum.total()), "MiB", Better::Lower),
            Metric::new("reckoned_saved", mib(sum.alone - sum.data), "MiB", Better::Higher),
            Metric::new("reckoned_indexes", mib(8 * sum.indexes), "MiB", Better::Lower),
            Metric::new("cutting_cpu", sum.cutting.as_secs_f64(), "s", Better::Lower),
        ];
        metrics.map(|metric| metric.peer(name))
    });
    Ok(metrics.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever cuts, the pieces are the whole, and those at blocks begin at blocks.
    #[test]
    fn pieces_are_the_whole() {
        let bytes: Vec<u8> =
            (0..300_001u32).map(|n| u8::try_from(n.wrapping_mul(2_654_435_761) >> 24).unwrap()).collect();
        for len in [INLINE + 1, BLOCK, BLOCK + 1, 100_000, 131_072, bytes.len()] {
            for (name, cut) in CUTS {
                let ends = cut.ends(&bytes[..len]);
                assert_eq!(ends.last(), Some(&len), "{name}");
                assert!(ends.windows(2).all(|w| w[0] < w[1]), "{name}: {ends:?}");
                if !matches!(cut, Cut::Free(_)) {
                    assert!(ends[..ends.len() - 1].iter().all(|end| end % BLOCK == 0), "{name}: {ends:?}");
                }
            }
        }
    }

    #[test]
    fn equal_chunks_are_counted_once() {
        let mut sum = Sum::default();
        let file = vec![7; 40_000];
        sum.add(Cut::Fixed(16 << 10), &file);
        sum.in_layer.clear();
        sum.add(Cut::Fixed(16 << 10), &file);
        // One whole chunk and the last one of 7,232 bytes.
        assert_eq!((sum.data, sum.alone, sum.seen.len(), sum.indexes), (16_384 + 8192, 2 * (16_384 + 8192), 2, 6));
    }
}
