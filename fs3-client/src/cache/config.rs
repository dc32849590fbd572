//! What a cache is told at its start.

use super::error::CacheError;
use crate::blob_store::deadline::Limits;
use crate::blob_store::retry::Policy;
use std::path::PathBuf;
use std::time::Duration;

/// When a chunk's CRC32C is compared before its bytes are given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Verify {
    /// At its first use after the cache was not closed properly. What the cache wrote itself since then is not read
    /// again for that.
    #[default]
    AfterCrash,
    /// At its first use after each start.
    AfterStart,
}

/// Settings of a cache. [`CacheConfig::new`] has the defaults.
#[derive(Debug, Clone)]
pub struct CacheConfig {
    /// Its directory, made if it is not there. No other process may use it at the same time.
    pub dir: PathBuf,
    /// Bytes of chunks that it holds at most. What comes when it is full is given to its readers and not kept.
    pub capacity: u64,
    /// Groups of chunks are evicted when more than this share of the capacity is used, in percent,
    pub high_percent: u8,
    /// until no more than this share is.
    pub low_percent: u8,
    /// Bytes that shall stay free on its disk: nothing is added beyond this, and groups are evicted before it comes to
    /// that.
    pub keep_free: u64,
    /// Length of a chunk in bytes: a power of two from 4 KiB to 4 MiB. Fixed when the directory is made.
    pub chunk: u64,
    /// The largest request to the store, in bytes: a multiple of the chunk.
    pub max_request: u64,
    /// Requests at once for those who wait.
    pub requests: usize,
    /// Requests at once for nobody yet: read-ahead, prefetch, warm-up.
    pub background_requests: usize,
    /// The longest read-ahead of one reader, in bytes; 0 for none.
    pub read_ahead: u64,
    /// Bytes that all read-ahead may have on its way at once.
    pub read_ahead_budget: u64,
    /// A read that needs the store has its bytes or an error within this time.
    pub deadline: Duration,
    /// How long one request may take.
    pub attempt: Limits,
    /// How often a request is tried again within the deadline. [`Policy::once`] where the store does that itself.
    pub retry: Policy,
    /// How often a chunk is fetched whose digest is wrong.
    pub corrupt_tries: u32,
    /// When CRCs are compared.
    pub verify: Verify,
    /// How long what was fetched may wait to be made durable, and the longest pause between two looks at the disk.
    pub flush_every: Duration,
    /// Bytes that may wait for that.
    pub flush_bytes: u64,
    /// Data files that are open at once. Each is one file descriptor.
    pub open_files: usize,
    /// Where fetches run, a runtime whose clock is enabled; without it the cache has threads of its own.
    pub runtime: Option<tokio::runtime::Handle>,
}

impl CacheConfig {
    /// The defaults, for `capacity` bytes of chunks in `dir`.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>, capacity: u64) -> Self {
        Self {
            dir: dir.into(),
            capacity,
            high_percent: 95,
            low_percent: 90,
            keep_free: 1 << 30,
            chunk: 256 << 10,
            max_request: 4 << 20,
            requests: 32,
            background_requests: 16,
            read_ahead: 16 << 20,
            read_ahead_budget: 128 << 20,
            deadline: Duration::from_secs(30),
            attempt: Limits { request: Duration::from_secs(12), rate: 1 << 20 },
            retry: Policy {
                attempts: 4,
                first_wait: Duration::from_millis(100),
                longest_wait: Duration::from_secs(4),
                total: Duration::from_secs(25),
            },
            corrupt_tries: 3,
            verify: Verify::default(),
            flush_every: Duration::from_secs(2),
            flush_bytes: 256 << 20,
            open_files: 512,
            runtime: None,
        }
    }

    /// Whether the settings make sense.
    pub(crate) fn check(&self) -> Result<(), CacheError> {
        let wrong = |what: String| Err(CacheError::Config(what));
        if !self.chunk.is_power_of_two() || !(4 << 10..=4 << 20).contains(&self.chunk) {
            return wrong(format!("a chunk has a power of two of bytes from 4 KiB to 4 MiB, not {}", self.chunk));
        }
        if self.max_request < self.chunk || !self.max_request.is_multiple_of(self.chunk) {
            return wrong(format!("the largest request ({} bytes) must be a multiple of a chunk", self.max_request));
        }
        if self.max_request > 1 << 30 {
            return wrong("the largest request has at most 1 GiB".to_owned());
        }
        if self.low_percent == 0 || self.low_percent > self.high_percent || self.high_percent > 100 {
            let (low, high) = (self.low_percent, self.high_percent);
            return wrong(format!("0 < low water ({low} %) <= high water ({high} %) <= 100 % has to hold"));
        }
        if self.requests == 0 || self.background_requests == 0 || self.open_files == 0 || self.corrupt_tries == 0 {
            return wrong("requests, background_requests, open_files and corrupt_tries must be at least 1".to_owned());
        }
        Ok(())
    }

    /// Where eviction begins.
    pub(crate) fn high_water(&self) -> u64 {
        self.share(self.high_percent)
    }

    /// Where it stops.
    pub(crate) fn low_water(&self) -> u64 {
        self.share(self.low_percent)
    }

    fn share(&self, percent: u8) -> u64 {
        // Divided first, so that no capacity overflows.
        self.capacity / 100 * u64::from(percent) + self.capacity % 100 * u64::from(percent) / 100
    }

    /// Free bytes of the disk below which eviction begins.
    pub(crate) fn room_wanted(&self) -> u64 {
        self.keep_free.saturating_add((self.capacity / 20).clamp(self.max_request, 1 << 30))
    }

    /// Chunks in the largest request.
    pub(crate) fn most_chunks(&self) -> u32 {
        u32::try_from(self.max_request / self.chunk).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_make_no_sense_are_told() {
        assert!(CacheConfig::new("x", 1 << 30).check().is_ok());
        let wrong: [fn(&mut CacheConfig); 5] = [
            |c| c.chunk = 3000,
            |c| c.chunk = 1 << 30,
            |c| c.max_request = c.chunk + 1,
            |c| c.low_percent = 0,
            |c| c.requests = 0,
        ];
        for change in wrong {
            let mut config = CacheConfig::new("x", 1 << 30);
            change(&mut config);
            assert!(matches!(config.check(), Err(CacheError::Config(_))), "{config:?}");
        }
    }

    #[test]
    fn low_water_is_a_share() {
        assert_eq!(CacheConfig::new("x", 1000).low_water(), 900);
        assert!(CacheConfig::new("x", u64::MAX).low_water() < u64::MAX);
    }
}
