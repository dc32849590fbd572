//! Counters, gauges and histograms.

use super::Kind;
use crate::metrics::{BUCKETS, Times, bucket};
use std::cell::Cell;
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

/// Which part is a thread's.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shard(usize);

/// This thread's part, of all numbers.
pub(crate) fn shard() -> Shard {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        // One more, 0 for none yet: so that nothing is left to be set up when it is looked at.
        static SHARD: Cell<usize> = const { Cell::new(0) };
    }
    SHARD.with(|shard| {
        if shard.get() == 0 {
            shard.set(NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS + 1);
        }
        Shard(shard.get() - 1)
    })
}

impl Sharded {
    pub(super) const KIND: Kind = Kind::Counter;
    pub(super) const TYPE: &'static str = "counter";

    fn line(&self, shard: Shard) -> &AtomicU64 {
        &self.0[shard.0 % SHARDS].0
    }

    pub(crate) fn add(&self, shard: Shard, n: u64) {
        self.line(shard).fetch_add(n, Ordering::Relaxed);
    }

    /// Whether the next of this thread's is one of those to be measured: one in 64.
    pub(crate) fn is_turn(&self, shard: Shard) -> bool {
        self.line(shard).load(Ordering::Relaxed).is_multiple_of(64)
    }

    pub(crate) fn value(&self) -> u64 {
        self.0.iter().map(|line| line.0.load(Ordering::Relaxed)).sum()
    }

    pub(super) fn render(&self, name: &str, text: &mut String) {
        line(name, self.value(), text);
    }
}

/// Times.
#[derive(Debug, Default)]
pub(crate) struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    nanos: AtomicU64,
}

impl Histogram {
    pub(super) const KIND: Kind = Kind::Histogram;
    pub(super) const TYPE: &'static str = "histogram";

    pub(crate) fn note(&self, time: Duration) {
        self.buckets[bucket(time)].fetch_add(1, Ordering::Relaxed);
        self.nanos.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// How many there were.
    pub(crate) fn value(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).sum()
    }

    pub(super) fn render(&self, name: &str, text: &mut String) {
        let buckets = self.buckets.each_ref().map(|bucket| bucket.load(Ordering::Relaxed));
        Times { buckets, sum: Duration::from_nanos(self.nanos.load(Ordering::Relaxed)) }.render(name, "", text);
    }
}
