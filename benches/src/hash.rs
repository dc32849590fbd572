//! Bench `hash`: two SHA-256 streams side by side against one after the other.
//!
//! The converter hashes a layer's tar and its data blob, which are about as long. This shows what the second costs when
//! both go through one loop.

use crate::measure::Spread;
use crate::report::{Better, Metric, Report};
use crate::sys::thread_cpu;
use converter::hash::Hashers;
use sha2::{Digest as _, Sha256};
use std::hint::black_box;

/// Bytes of each stream, few enough to stay in the cache as they do in a converter, and how often they are hashed.
const BYTES: usize = 256 << 10;
const TIMES: u32 = 200;
/// At most this much of two separate hashes.
const GOAL: f64 = 0.75;

/// Runs it.
pub(crate) fn run(rounds: usize) -> Report {
    let (first, second) = (vec![0x5a; BYTES], vec![0xa5; BYTES]);
    let (mut single, mut pair) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        single.push(seconds_per_gb(|| {
            black_box((Sha256::digest(black_box(&first)), Sha256::digest(black_box(&second))));
        }));
        pair.push(seconds_per_gb(|| {
            let mut hasher = Hashers::<2>::default();
            hasher.update([&[black_box(&first)], &[black_box(&second)]]);
            black_box(hasher.finish());
        }));
    }
    let ratio = Spread::of(pair.iter().zip(&single).map(|(pair, single)| pair / single));
    let cpu = |values: &[f64], peer: &str| {
        Metric::spread("cpu_per_gb_of_both", Spread::of(values.iter().copied()), "s", Better::Lower).peer(peer)
    };
    Report {
        bench: "hash",
        setting: vec![format!("{TIMES} times {} KiB of each stream, {rounds} rounds", BYTES >> 10)],
        metrics: vec![
            Metric::spread("pair_ratio", ratio, "x", Better::Lower).goal(GOAL).peer("sha2, one after the other"),
            cpu(&pair, "Hashers"),
            cpu(&single, "sha2, one after the other"),
        ],
        missing: Vec::new(),
    }
}

/// Processor time to get through both streams, a billion bytes of each.
#[expect(clippy::cast_precision_loss, reason = "a few megabytes")]
fn seconds_per_gb(mut both: impl FnMut()) -> f64 {
    both();
    let before = thread_cpu();
    for _ in 0..TIMES {
        both();
    }
    (thread_cpu() - before).as_secs_f64() / f64::from(TIMES) / BYTES as f64 * 1e9
}

#[cfg(test)]
mod tests {
    #[test]
    fn both_ways_are_measured() {
        let report = super::run(1);
        assert_eq!(report.metrics.len(), 3);
        let [ratio, pair, single] = [0, 1, 2].map(|n| report.metrics[n].value);
        assert!((ratio - pair / single).abs() < 1e-9 && pair > 0.0);
    }
}
