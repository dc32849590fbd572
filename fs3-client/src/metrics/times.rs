//! Times in buckets.

use std::fmt::Write as _;
use std::time::Duration;

/// Upper ends of the buckets, in microseconds: from 1 us to 30 s, three a decade.
const ENDS: [u64; 23] = [
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000,
    1_000_000, 2_000_000, 5_000_000, 10_000_000, 30_000_000,
];

/// The last is for what is longer than all ends.
pub(crate) const BUCKETS: usize = ENDS.len() + 1;

/// The bucket of a time.
pub(crate) fn bucket(time: Duration) -> usize {
    let micros = time.as_nanos().div_ceil(1000);
    ENDS.iter().position(|end| micros <= u128::from(*end)).unwrap_or(ENDS.len())
}

/// How many times there were of which length.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Times {
    pub(crate) buckets: [u64; BUCKETS],
    /// All of them together.
    pub(crate) sum: Duration,
}

impl Times {
    pub(crate) fn note(&mut self, time: Duration) {
        self.buckets[bucket(time)] += 1;
        self.sum += time;
    }

    /// How many there were.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// All of them together.
    #[must_use]
    pub fn sum(&self) -> Duration {
        self.sum
    }

    /// As Prometheus' text format has a histogram; `labels` are as they stand between the braces, or nothing.
    pub(crate) fn render(&self, name: &str, labels: &str, text: &mut String) {
        let comma = if labels.is_empty() { "" } else { "," };
        let mut so_far = 0;
        for (at, count) in self.buckets.iter().enumerate() {
            so_far += count;
            let end = ENDS
                .get(at)
                .map_or_else(|| "+Inf".to_owned(), |micros| Duration::from_micros(*micros).as_secs_f64().to_string());
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{name}_bucket{{{labels}{comma}le=\"{end}\"}} {so_far}");
        }
        let braces = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        let _ = writeln!(text, "{name}_sum{braces} {}", self.sum.as_secs_f64());
        let _ = writeln!(text, "{name}_count{braces} {so_far}");
    }
}
