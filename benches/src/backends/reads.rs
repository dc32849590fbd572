//! A workload: reads of one length, in order or not.

use anyhow::Result;
use fs3_client::{BlobStore, Digest};
use futures::{StreamExt as _, TryStreamExt as _};
use std::time::{Duration, Instant};

/// Bytes of the blob.
pub(super) const SIZE: u64 = 64 << 20;

/// Reads of one length.
pub(super) struct Reads {
    pub(super) name: &'static str,
    pub(super) len: u64,
    pub(super) count: u64,
    /// At a time.
    pub(super) depth: usize,
    pub(super) random: bool,
}

/// Bytes that no two places have in common.
pub(super) fn contents() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let word = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..SIZE / 8).flat_map(word).collect()
}

impl Reads {
    /// Where they begin, the same each time.
    pub(super) fn places(&self) -> Vec<u64> {
        let mut state = 1u64;
        let place = |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            if self.random { (state >> 20) % (SIZE / self.len) * self.len } else { n * self.len % SIZE }
        };
        (0..self.count).map(place).collect()
    }

    /// Seconds that it takes by `blobs`.
    pub(super) async fn through(&self, blobs: &dyn BlobStore, digest: &Digest, places: &[u64]) -> Result<f64> {
        let began = Instant::now();
        let reads = futures::stream::iter(places).map(|&at| blobs.read_range(digest, at..at + self.len));
        let read: u64 = reads
            .buffer_unordered(self.depth)
            .map_ok(|bytes| bytes.len() as u64)
            .try_fold(0, |sum, len| async move { Ok(sum + len) })
            .await?;
        anyhow::ensure!(read == self.len * self.count, "{read} bytes");
        Ok(began.elapsed().as_secs_f64())
    }

    /// Seconds that it takes at least where each request costs `latency`, and `bandwidth` bytes go through in a second.
    #[expect(clippy::cast_precision_loss, reason = "a few megabytes")]
    pub(super) fn least(&self, latency: Duration, bandwidth: u32) -> f64 {
        let bytes = self.len as f64 / f64::from(bandwidth);
        let turns = self.count as f64 / self.depth as f64;
        (bytes * self.count as f64).max(turns * (latency.as_secs_f64() + bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_inside_and_the_least_time_is_the_larger_bound() {
        let reads = Reads { name: "x", len: 1 << 20, count: 100, depth: 4, random: true };
        let places = reads.places();
        assert!(places.len() == 100 && places.iter().all(|at| at % (1 << 20) == 0 && at + (1 << 20) <= SIZE));
        assert_eq!(places, reads.places());
        let least = |depth| Reads { depth, ..reads }.least(Duration::from_millis(1), 1 << 30);
        // 100 MiB over 1 GiB/s; or 100 turns of a millisecond and of a 1/1024 second.
        assert!((least(4) - 100.0 / 1024.0).abs() < 1e-9);
        assert!((least(1) - 100.0 * (1e-3 + 1.0 / 1024.0)).abs() < 1e-9);
        assert_eq!(contents().len() as u64, SIZE);
    }
}
