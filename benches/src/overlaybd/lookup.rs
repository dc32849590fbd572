//! Lookups of random sectors in indexes of several sizes, against binary search over the same.

use super::Numbers;
use crate::measure::Spread;
use crate::report::{Better, Metric};
use crate::sys::thread_cpu;
use std::hint::black_box;
use std::sync::Arc;
use ublk_overlaybd::index::{Extent, Index, Kind, Stack};

/// Millions of lookups a second on a hundred thousand mappings.
const GOAL: f64 = 50.0;
const LOOKUPS: usize = 1_000_000;
/// What is looked up, over and over.
const PROBES: usize = 1 << 16;

/// Mappings of 8 to 64 sectors, a third of them with a hole behind.
fn index(count: usize) -> Index {
    let mut numbers = Numbers(count as u64 | 1);
    let (mut start, mut moffset) = (0, 8);
    let extents = (0..count).map(|_| {
        let number = numbers.next();
        let len = (1 + number % 8) * 8;
        let extent = Extent { start, len, kind: Kind::Data { layer: 0, moffset } };
        start += len + if number.is_multiple_of(3) { (number >> 32) % 64 * 8 } else { 0 };
        // Not one after the other, so that none are put together.
        moffset += len + 8;
        extent
    });
    Index::from_sorted(extents.collect::<Vec<_>>()).unwrap_or_default()
}

pub(super) fn measure(rounds: usize) -> Vec<Metric> {
    let mut metrics = Vec::new();
    for (count, name, binary) in [
        (1_000, "lookups_1e3", "binary_search_1e3"),
        (10_000, "lookups_1e4", "binary_search_1e4"),
        (100_000, "lookups_1e5", "binary_search_1e5"),
        (1_000_000, "lookups_1e6", "binary_search_1e6"),
    ] {
        let index = Arc::new(index(count));
        let starts: Vec<u64> = index.iter().map(|extent| extent.start).collect();
        let Ok(stack) = Stack::of([Arc::clone(&index)]) else { continue };
        let mut numbers = Numbers(77);
        let probes: Vec<u64> = (0..PROBES).map(|_| numbers.next() % index.end() / 8 * 8).collect();
        let (mut ours, mut stacked, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            ours.push(millions(&probes, |sector| place(index.lookup(sector..sector + 8).next())));
            stacked.push(millions(&probes, |sector| place(stack.lookup(sector..sector + 8).next())));
            theirs.push(millions(&probes, |sector| starts.partition_point(|&start| start <= sector) as u64));
        }
        let metric = |name, values: &[f64], peer: &str| {
            Metric::spread(name, Spread::of(values.iter().copied()), "M/s", Better::Higher).peer(peer)
        };
        let own = metric(name, &ours, "one index");
        metrics.push(if count == 100_000 { own.goal(GOAL) } else { own });
        metrics.push(metric(name, &stacked, "a stack"));
        metrics.push(metric(binary, &theirs, "std's binary search, the place alone"));
    }
    metrics
}

fn place(piece: Option<ublk_overlaybd::index::Piece>) -> u64 {
    match piece.and_then(|piece| piece.kind) {
        Some(Kind::Data { moffset, .. }) => moffset,
        _ => 0,
    }
}

#[expect(clippy::cast_precision_loss, reason = "a rate for people")]
fn millions(probes: &[u64], lookup: impl Fn(u64) -> u64) -> f64 {
    let before = thread_cpu();
    let mut sum = 0u64;
    for _ in 0..LOOKUPS.div_ceil(probes.len()) {
        for &sector in probes {
            sum = sum.wrapping_add(lookup(sector));
        }
    }
    black_box(sum);
    (LOOKUPS.div_ceil(probes.len()) * probes.len()) as f64 / (thread_cpu() - before).as_secs_f64() / 1e6
}
