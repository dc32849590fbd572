//! What the tests stand on.

use super::backend::Backend;
use crate::blob_store::deadline::Limits;
use crate::blob_store::retry::Policy;
use crate::cache::disk::{Disk, Room};
use crate::cache::format::BlobKey;
use crate::cache::index::Index;
use crate::cache::index::forgetful::Forgetful;
use crate::cache::shared::{Parts, Shared};
use crate::cache::{CacheConfig, CachedBlob, ChunkDigests, DigestTable};
use crate::testing::power_cut;
use crate::{Digest, Medium};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub(super) const CHUNK: u64 = 4096;

/// Bytes that are nowhere the same, and none of them 0.
pub(super) fn contents(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        u8::try_from(state % 255).unwrap() + 1
    };
    (0..len).map(|_| next()).collect()
}

/// Small chunks, short waits, nothing ahead.
pub(super) fn config(dir: &Path) -> CacheConfig {
    CacheConfig {
        chunk: CHUNK,
        max_request: 16 * CHUNK,
        keep_free: 0,
        read_ahead: 0,
        deadline: Duration::from_secs(20),
        attempt: Limits { request: Duration::from_secs(10), rate: 1 << 20 },
        retry: Policy {
            attempts: 3,
            first_wait: Duration::from_millis(1),
            longest_wait: Duration::from_millis(2),
            total: Duration::from_secs(10),
        },
        ..CacheConfig::new(dir, 1 << 30)
    }
}

/// A splitmix64.
#[derive(Debug, Clone)]
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    pub(super) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// The power-cut disk as the cache sees it.
#[derive(Debug, Clone)]
pub(super) struct TestDisk {
    pub(super) disk: power_cut::Disk,
    /// What it says is free.
    pub(super) free: Arc<Mutex<u64>>,
}

impl TestDisk {
    pub(super) fn over(disk: power_cut::Disk) -> Self {
        Self { disk, free: Arc::new(Mutex::new(u64::MAX)) }
    }
}

impl Disk for TestDisk {
    fn open(&self, blob: &BlobKey) -> io::Result<Arc<dyn Medium>> {
        Ok(Arc::new(self.disk.open(&blob.file().1)))
    }

    fn remove(&self, blob: &BlobKey) -> io::Result<()> {
        if !self.disk.has_power() {
            return Err(io::Error::other("the power is out"));
        }
        self.disk.remove(&blob.file().1);
        Ok(())
    }

    fn list(&self) -> io::Result<Vec<(BlobKey, u64)>> {
        let names = self.disk.names();
        Ok(names.iter().filter_map(|name| Some((BlobKey::of_file(name.get(..2)?, name)?, u64::MAX))).collect())
    }

    fn room(&self) -> io::Result<Room> {
        Ok(Room { free: *self.free.lock().unwrap() })
    }
}

/// A cache without its thread, over a disk and an index that forget: the test is its keeper.
#[derive(Debug)]
pub(super) struct Bench {
    pub(super) disk: TestDisk,
    pub(super) index: Arc<Forgetful>,
    pub(super) shared: Arc<Shared>,
}

impl Bench {
    pub(super) fn new(config: CacheConfig, backend: &Arc<Backend>) -> Self {
        let disk = power_cut::Disk::new();
        Self::on(config, backend, &disk, Arc::new(Forgetful::default()))
    }

    /// On what another left.
    pub(super) fn on(
        config: CacheConfig,
        backend: &Arc<Backend>,
        disk: &power_cut::Disk,
        index: Arc<Forgetful>,
    ) -> Self {
        Self::try_on(config, backend, disk, index).unwrap()
    }

    pub(super) fn try_on(
        config: CacheConfig,
        backend: &Arc<Backend>,
        disk: &power_cut::Disk,
        index: Arc<Forgetful>,
    ) -> Result<Self, crate::CacheError> {
        config.check().unwrap();
        let index = index.on(disk);
        let disk = TestDisk::over(disk.clone());
        let parts = Parts {
            store: Arc::clone(backend) as _,
            disk: Arc::new(disk.clone()),
            index: Arc::clone(&index) as Arc<dyn Index>,
            ring: None,
            runtime: tokio::runtime::Handle::current(),
            lock: None,
        };
        Ok(Self { disk, index, shared: Shared::open(config, parts)? })
    }

    pub(super) fn blob(&self, digest: Digest, size: u64, table: Option<Arc<dyn ChunkDigests>>) -> CachedBlob {
        let blob = self.shared.hold(BlobKey { digest, size }).unwrap();
        let first = table.is_some_and(|table| blob.set_digests(table));
        let cached = CachedBlob::new(Arc::clone(&self.shared), blob);
        if first {
            cached.drop_unchecked();
        }
        cached
    }

    pub(super) fn count(&self, name: &str) -> u64 {
        self.shared.gauges();
        self.shared.metrics.value(name).unwrap_or_else(|| panic!("no metric {name}"))
    }
}

pub(super) fn table(bytes: &[u8]) -> Option<Arc<dyn ChunkDigests>> {
    Some(Arc::new(DigestTable::of(bytes, usize::try_from(CHUNK).unwrap())))
}

/// Reads a range, and compares.
pub(super) async fn read(blob: &CachedBlob, contents: &[u8], range: std::ops::Range<usize>) {
    let mut buffer = vec![0; range.len()];
    blob.read_at(range.start as u64, &mut buffer).await.unwrap();
    assert!(buffer == contents[range.clone()], "wrong bytes in {range:?}");
}

/// Lets all tasks run that have been spawned.
pub(super) async fn until(what: &str, done: impl Fn() -> bool) {
    let began = std::time::Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_secs(20), "{what} did not come about");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
