//! What a cache counts. Each name is defined once, with its unit and what it means, and rendered as Prometheus text.

mod cells;

use cells::{Counter, Gauge, Histogram, Sharded};
pub(crate) use cells::{Shard, shard};
use std::fmt::Write as _;

/// What kind of number it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It only rises.
    Counter,
    /// It rises and falls.
    Gauge,
    /// Times, in buckets.
    Histogram,
}

/// The definition of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Definition {
    /// Its name.
    pub name: &'static str,
    /// Counter, gauge or histogram.
    pub kind: Kind,
    /// What one of it is.
    pub unit: &'static str,
    /// What it counts.
    pub help: &'static str,
}

macro_rules! metrics {
    ($($field:ident: $cell:ident, $name:literal, $unit:literal, $help:literal;)*) => {
        /// The numbers of one cache. There are no others: no globals.
        #[derive(Debug, Default)]
        pub struct Metrics {
            $(pub(crate) $field: $cell,)*
        }

        /// All that there are.
        pub const DEFINITIONS: &[Definition] = &[
            $(Definition { name: $name, kind: $cell::KIND, unit: $unit, help: $help },)*
        ];

        impl Metrics {
            /// All of them as Prometheus' text format has them.
            #[must_use]
            pub fn render(&self) -> String {
                let mut text = String::with_capacity(8 << 10);
                $(
                    // Writing to a string cannot fail.
                    let _ = writeln!(text, "# HELP {} {}", $name, $help);
                    let _ = writeln!(text, "# TYPE {} {}", $name, $cell::TYPE);
                    self.$field.render($name, &mut text);
                )*
                text
            }

            /// The number behind a name; of a histogram, how many there were.
            #[must_use]
            pub fn value(&self, name: &str) -> Option<u64> {
                $(if name == $name { return Some(self.$field.value()); })*
                None
            }
        }
    };
}

metrics! {
    hits: Sharded, "dsec_cache_hits_total", "reads",
        "Reads that were answered from the cache's files alone.";
    hit_bytes: Sharded, "dsec_cache_hit_bytes_total", "bytes",
        "Bytes of those reads.";
    misses: Counter, "dsec_cache_misses_total", "reads",
        "Reads that had to wait for the store, at least for a part.";
    miss_bytes: Counter, "dsec_cache_miss_bytes_total", "bytes",
        "Bytes of those reads, those that were there included.";
    would_wait: Counter, "dsec_cache_would_wait_total", "reads",
        "Reads that were not answered, since they might not wait.";
    read_errors: Counter, "dsec_cache_read_errors_total", "reads",
        "Reads that ended with an error.";
    hit_seconds: Histogram, "dsec_cache_hit_seconds", "seconds",
        "Time of a read from the cache's files: one in 64 is measured.";
    miss_seconds: Histogram, "dsec_cache_miss_seconds", "seconds",
        "Time of a read that waited for the store.";
    joined: Counter, "dsec_cache_joined_chunks_total", "chunks",
        "Chunks that a read waited for while they were being fetched already.";
    requests: Counter, "dsec_cache_store_requests_total", "requests",
        "Requests to the store, each attempt counted.";
    retries: Counter, "dsec_cache_store_retries_total", "requests",
        "Of those, the ones that tried again.";
    failures: Counter, "dsec_cache_store_failures_total", "requests",
        "Fetches that failed for good.";
    request_seconds: Histogram, "dsec_cache_store_request_seconds", "seconds",
        "Time of a fetch, retries included.";
    fetched_chunks: Counter, "dsec_cache_fetched_chunks_total", "chunks",
        "Chunks that the store gave.";
    fetched_bytes: Counter, "dsec_cache_fetched_bytes_total", "bytes",
        "Bytes that the store gave.";
    merged: Counter, "dsec_cache_merged_chunks_total", "chunks",
        "Chunks that were fetched in the request of a neighbour.";
    in_flight: Gauge, "dsec_cache_in_flight_requests", "requests",
        "Fetches under way.";
    ahead_bytes: Counter, "dsec_cache_readahead_bytes_total", "bytes",
        "Bytes that were asked for ahead of a sequential reader.";
    prefetched_bytes: Counter, "dsec_cache_prefetch_bytes_total", "bytes",
        "Bytes that were asked for by prefetch and warm-up.";
    background_given_up: Counter, "dsec_cache_background_given_up_total", "requests",
        "Requests ahead of readers that were not made, since the store failed or the budget was used up.";
    corrupt_store: Counter, "dsec_cache_store_corruptions_total", "chunks",
        "Chunks that the store gave with other bytes than their digests have.";
    corrupt_local: Counter, "dsec_cache_local_corruptions_total", "chunks",
        "Chunks whose bytes on the local disk were wrong, short or unreadable.";
    dropped: Counter, "dsec_cache_dropped_chunks_total", "chunks",
        "Chunks that a reader found wrong and dropped.";
    evicted_groups: Counter, "dsec_cache_evicted_groups_total", "groups",
        "Groups of chunks that were evicted.";
    evicted_bytes: Counter, "dsec_cache_evicted_bytes_total", "bytes",
        "Bytes of those.";
    evictions_put_off: Counter, "dsec_cache_evictions_put_off_total", "groups",
        "Groups that were in use, or pinned, when their turn came.";
    passed_through: Counter, "dsec_cache_passed_through_chunks_total", "chunks",
        "Chunks that were given to readers and not kept: a full disk, a failing one, or no room.";
    write_errors: Counter, "dsec_cache_write_errors_total", "writes",
        "Writes and syncs of data files that failed.";
    index_errors: Counter, "dsec_cache_index_errors_total", "operations",
        "Operations of the index that failed.";
    used_bytes: Gauge, "dsec_cache_used_bytes", "bytes",
        "Bytes of chunks that are there.";
    groups: Gauge, "dsec_cache_groups", "groups",
        "Groups that have chunks and are durable.";
    blobs: Gauge, "dsec_cache_blobs", "blobs",
        "Blobs that are known.";
    open_files: Gauge, "dsec_cache_open_files", "files",
        "Data files that are open.";
    unflushed_bytes: Gauge, "dsec_cache_unflushed_bytes", "bytes",
        "Bytes of chunks that are not durable yet.";
    flush_seconds: Histogram, "dsec_cache_flush_seconds", "seconds",
        "Time to make chunks durable, a batch each.";
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_text_is_what_prometheus_reads() {
        let metrics = Metrics::default();
        metrics.hits.add(shard(), 2);
        metrics.in_flight.add(3);
        metrics.in_flight.sub(1);
        metrics.miss_seconds.note(Duration::from_micros(1500));
        let text = metrics.render();
        for line in [
            "# TYPE dsec_cache_hits_total counter",
            "dsec_cache_hits_total 2",
            "dsec_cache_in_flight_requests 2",
            "# TYPE dsec_cache_miss_seconds histogram",
            "dsec_cache_miss_seconds_bucket{le=\"0.001\"} 0",
            "dsec_cache_miss_seconds_bucket{le=\"0.002\"} 1",
            "dsec_cache_miss_seconds_bucket{le=\"+Inf\"} 1",
            "dsec_cache_miss_seconds_sum 0.0015",
            "dsec_cache_miss_seconds_count 1",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
        assert_eq!(metrics.value("dsec_cache_hits_total"), Some(2));
        assert_eq!(metrics.value("x"), None);
    }

    #[test]
    fn names_follow_the_rules_and_are_documented() {
        let documented = include_str!("../../../docs/chunk-cache.md");
        let mut names = std::collections::BTreeSet::new();
        for definition in DEFINITIONS {
            let Definition { name, kind, unit, help } = definition;
            assert!(names.insert(name), "{name} is there twice");
            assert!(name.starts_with("dsec_cache_") && help.ends_with('.') && !unit.is_empty(), "{definition:?}");
            assert_eq!(name.ends_with("_total"), *kind == Kind::Counter, "{name}");
            assert_eq!(name.ends_with("_seconds"), *kind == Kind::Histogram, "{name}");
            assert!(documented.contains(&format!("| `{name}` |")), "docs/chunk-cache.md does not have {name}");
        }
    }
}
