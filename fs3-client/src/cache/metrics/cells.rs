//! Counters, gauges and histograms.

use super::Kind;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

fn line(name: &str, value: u64, text: &mut String) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{name} {value}");
}

/// A number that rises.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(super) const KIND: Kind = Kind::Counter;
    pub(super) const TYPE: &'static str = "counter";

    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn render(&self, name: &str, text: &mut String) {
        line(name, self.value(), text);
    }
}

/// A number that rises and falls.
#[derive(Debug, Default)]
pub(crate) struct Gauge(AtomicU64);

impl Gauge {
    pub(super) const KIND: Kind = Kind::Gauge;
    pub(super) const TYPE: &'static str = "gauge";

    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Never below nothing.
    pub(crate) fn sub(&self, n: u64) {
        let less = |value: u64| Some(value.saturating_sub(n));
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    pub(crate) fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }

    pub(crate) fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn render(&self, name: &str, text: &mut String) {
        line(name, self.value(), text);
    }
}

/// A cache line of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Line(AtomicU64);

const SHARDS: usize = 16;

/// A number that rises on the hot path: each thread has its part of it.
#[derive(Debug, Default)]
pub(crate) struct Sharded([Line; SHARDS]);

fn shard() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static SHARD: usize = NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS;
    }
    SHARD.with(|shard| *shard)
}

impl Sharded {
    pub(super) const KIND: Kind = Kind::Counter;
    pub(super) const TYPE: &'static str = "counter";

    pub(crate) fn add(&self, n: u64) {
        self.0[shard()].0.fetch_add(n, Ordering::Relaxed);
    }

    /// Whether the next of this thread's is one of those to be measured: one in 64.
    pub(crate) fn is_turn(&self) -> bool {
        self.0[shard()].0.load(Ordering::Relaxed).is_multiple_of(64)
    }

    pub(crate) fn value(&self) -> u64 {
        self.0.iter().map(|line| line.0.load(Ordering::Relaxed)).sum()
    }

    pub(super) fn render(&self, name: &str, text: &mut String) {
        line(name, self.value(), text);
    }
}

/// Upper ends of the buckets, in microseconds: from 1 us to 30 s, three a decade.
const ENDS: [u64; 23] = [
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000,
    1_000_000, 2_000_000, 5_000_000, 10_000_000, 30_000_000,
];

/// Times.
#[derive(Debug)]
pub(crate) struct Histogram {
    /// The last is for what is longer than all ends.
    buckets: [AtomicU64; ENDS.len() + 1],
    nanos: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: std::array::from_fn(|_| AtomicU64::new(0)), nanos: AtomicU64::new(0) }
    }
}

impl Histogram {
    pub(super) const KIND: Kind = Kind::Histogram;
    pub(super) const TYPE: &'static str = "histogram";

    pub(crate) fn note(&self, time: Duration) {
        let micros = time.as_nanos().div_ceil(1000);
        let at = ENDS.iter().position(|end| micros <= u128::from(*end)).unwrap_or(ENDS.len());
        self.buckets[at].fetch_add(1, Ordering::Relaxed);
        self.nanos.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// How many there were.
    pub(crate) fn value(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).sum()
    }

    pub(super) fn render(&self, name: &str, text: &mut String) {
        let mut so_far = 0;
        for (at, bucket) in self.buckets.iter().enumerate() {
            so_far += bucket.load(Ordering::Relaxed);
            let end = ENDS
                .get(at)
                .map_or_else(|| "+Inf".to_owned(), |micros| Duration::from_micros(*micros).as_secs_f64().to_string());
            let _ = writeln!(text, "{name}_bucket{{le=\"{end}\"}} {so_far}");
        }
        let sum = Duration::from_nanos(self.nanos.load(Ordering::Relaxed)).as_secs_f64();
        let _ = writeln!(text, "{name}_sum {sum}");
        let _ = writeln!(text, "{name}_count {so_far}");
    }
}
