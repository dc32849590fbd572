//! The chunk cache as a node has it: on a real disk, with RocksDB, in processes that are killed, full and in use.
//!
//! A process of its own is this binary again, told by the environment what to do: [`child`].

use async_trait::async_trait;
use bytes::Bytes;
use fs3_client::blob_store::memory::MemoryBlobs;
use fs3_client::blob_store::{Body, Listed, Stat};
use fs3_client::cache::DigestTable;
use fs3_client::{
    BlobError, BlobStore, CacheConfig, CacheError, CachedBlob, ChunkCache, ChunkDigests, Digest, TryRead,
};
use futures::stream::BoxStream;
use std::ops::Range;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const CHUNK: u64 = 16 << 10;
const CAPACITY: u64 = 6 << 20;
const ROLE: &str = "DSEC_CACHE_TEST_ROLE";
const DIR: &str = "DSEC_CACHE_TEST_DIR";
const SEED: &str = "DSEC_CACHE_TEST_SEED";

/// Numbers that are the same for the same seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).unwrap()
    }
}

/// Blobs in memory, and a switch.
#[derive(Debug, Default)]
pub(super) struct Switched {
    blobs: MemoryBlobs,
    down: AtomicBool,
    /// Rises when it goes down and when it comes back.
    turns: AtomicU64,
}

impl Switched {
    fn set_down(&self, down: bool) {
        if self.down.swap(down, Ordering::SeqCst) != down {
            self.turns.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Whether it is up, and how often it has changed.
    fn is_up(&self) -> Option<u64> {
        let turns = self.turns.load(Ordering::SeqCst);
        (!self.down.load(Ordering::SeqCst)).then_some(turns)
    }
}

#[async_trait]
impl BlobStore for Switched {
    async fn stat(&self, digest: &Digest) -> Result<Stat, BlobError> {
        self.blobs.stat(digest).await
    }
    async fn read_range(&self, digest: &Digest, range: Range<u64>) -> Result<Bytes, BlobError> {
        if self.down.load(Ordering::SeqCst) {
            let (place, what) = ("the test".to_owned(), digest.to_string());
            return Err(BlobError::Refused { place, op: "read", what, source: "it is down".into() });
        }
        self.blobs.read_range(digest, range).await
    }
    async fn put(&self, digest: &Digest, body: Body) -> Result<(), BlobError> {
        self.blobs.put(digest, body).await
    }
    async fn delete(&self, digest: &Digest) -> Result<(), BlobError> {
        self.blobs.delete(digest).await
    }
    fn list(&self) -> BoxStream<'_, Result<Listed, BlobError>> {
        self.blobs.list()
    }
}

pub(super) struct Blobs {
    pub(super) store: Arc<Switched>,
    items: Vec<(Digest, Vec<u8>)>,
}

/// The same in every process: none of the bytes is 0.
pub(super) fn blobs() -> Blobs {
    let store = Arc::new(Switched::default());
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let item = |n: u64| {
        let mut random = Random(n * 7 + 1);
        let len = 3 * 1024 * 1024 + random.below(100_000);
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            bytes.extend((random.next() | 0x0101_0101_0101_0101).to_le_bytes());
        }
        bytes.truncate(len);
        let digest = Digest::of(&bytes);
        runtime.block_on(store.put(&digest, Body::Bytes(Bytes::from(bytes.clone())))).unwrap();
        (digest, bytes)
    };
    let items = (1..=4).map(item).collect();
    Blobs { store, items }
}

/// Room for half of the blobs, and everything often.
pub(super) fn config(dir: &Path) -> CacheConfig {
    CacheConfig {
        chunk: CHUNK,
        max_request: 8 * CHUNK,
        keep_free: 0,
        read_ahead: 8 * CHUNK,
        flush_every: Duration::from_millis(3),
        open_files: 3,
        ..CacheConfig::new(dir, CAPACITY)
    }
}

impl Blobs {
    pub(super) fn open(&self, cache: &ChunkCache) -> Vec<CachedBlob> {
        let open = |(digest, bytes): &(Digest, Vec<u8>)| {
            let table: Arc<dyn ChunkDigests> = Arc::new(DigestTable::of(bytes, usize::try_from(CHUNK).unwrap()));
            cache.blob(*digest, bytes.len() as u64, Some(table)).unwrap()
        };
        self.items.iter().map(open).collect()
    }

    /// Random reads until `go_on` says no: each is right, or an error while the store was down.
    pub(super) fn read(&self, blobs: &[CachedBlob], seed: u64, mut go_on: impl FnMut() -> bool) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let mut random = Random(seed | 1);
        let mut buffer = Vec::new();
        while go_on() {
            let item = random.below(blobs.len());
            let (blob, bytes) = (&blobs[item], &self.items[item].1);
            let start = random.below(bytes.len());
            let end = bytes.len().min(start + 1 + random.below(200_000));
            buffer.resize(end - start, 0);
            let wide = start as u64..end as u64;
            let up = self.store.is_up();
            let outcome = match random.below(20) {
                0 => {
                    blob.drop_range(wide);
                    continue;
                }
                1..4 => {
                    let Some(located) = blob.locate(wide).unwrap() else { continue };
                    // As an io_uring of the caller's would.
                    let read = rustix::io::pread(located.descriptor().unwrap(), &mut buffer, located.offset());
                    assert_eq!(read.unwrap() as u64, located.len());
                    Ok(())
                }
                4..9 => {
                    // A task, which may lose patience.
                    let patience = Duration::from_micros(random.next() % 3000);
                    let read = async { tokio::time::timeout(patience, blob.read_at(wide.start, &mut buffer)).await };
                    match runtime.block_on(read) {
                        Ok(outcome) => outcome,
                        Err(_) => continue,
                    }
                }
                9 => {
                    if blob.try_read_at(wide.start, &mut buffer).unwrap() == TryRead::WouldWait {
                        continue;
                    }
                    Ok(())
                }
                _ => blob.read_at_blocking(wide.start, &mut buffer),
            };
            match outcome {
                Ok(()) => assert!(buffer == bytes[start..end], "wrong bytes from {start} to {end} of {item}"),
                Err(_) => {
                    // Perhaps what it joined was refused before the store came back: then it is right soon.
                    let mut tries = 0;
                    while up.is_some()
                        && up == self.store.is_up()
                        && let Err(error) = blob.read_at_blocking(start as u64, &mut buffer)
                    {
                        tries += 1;
                        let stays = up == self.store.is_up();
                        assert!(tries < 200 || !stays, "the store is up, and reads go on failing: {error}");
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
            }
        }
    }
}

/// What a child process does. Without a role, nothing: then this is a test among others.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let dir = std::env::var_os(DIR).unwrap();
    let seed: u64 = std::env::var(SEED).unwrap().parse().unwrap();
    let blobs = blobs();
    match (role.as_str(), ChunkCache::open(config(Path::new(&dir)), blobs.store.clone())) {
        ("read until killed", Ok(cache)) => {
            let open = blobs.open(&cache);
            std::fs::write(Path::new(&dir).join("ready"), b"").unwrap();
            std::thread::scope(|scope| {
                (0..3).for_each(|n| {
                    let (blobs, open) = (&blobs, &open);
                    scope.spawn(move || blobs.read(open, seed * 3 + n, || true));
                });
            });
        }
        ("be refused", Err(error @ CacheError::InUse { .. })) => {
            std::fs::write(Path::new(&dir).join("refused"), error.to_string()).unwrap();
        }
        (role, opened) => panic!("{role}: {:?}", opened.map(|_| "opened")),
    }
}

fn spawn(role: &str, dir: &Path, seed: u64) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "cache::child", "--nocapture"]).env(ROLE, role).env(DIR, dir).env(SEED, seed.to_string());
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

pub(super) fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

/// `DSEC_CACHE_KILLS=500` is the long mode.
#[test]
fn kill_9_at_any_time_leaves_right_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let blobs = blobs();
    let mut random = Random(99);
    let (mut found, mut killed_late) = (0, 0);
    for round in 0..number("DSEC_CACHE_KILLS", 8) {
        let mut child = spawn("read until killed", dir.path(), round + 1);
        let ready = dir.path().join("ready");
        let began = Instant::now();
        while !ready.exists() {
            assert!(began.elapsed() < Duration::from_secs(60) && child.try_wait().unwrap().is_none(), "the child died");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::fs::remove_file(&ready).unwrap();
        std::thread::sleep(Duration::from_millis(random.next() % 120));
        assert!(child.try_wait().unwrap().is_none(), "the child met a wrong byte");
        child.kill().unwrap();
        child.wait().unwrap();
        killed_late += 1;

        // With the store down first: what is there, and nothing else.
        blobs.store.set_down(true);
        let cache = ChunkCache::open(config(dir.path()), blobs.store.clone()).unwrap();
        let open = blobs.open(&cache);
        let mut chunk = vec![0; usize::try_from(CHUNK).unwrap()];
        for (blob, (_, bytes)) in open.iter().zip(&blobs.items) {
            for (n, part) in bytes.chunks(chunk.len()).enumerate() {
                let into = &mut chunk[..part.len()];
                if blob.try_read_at(n as u64 * CHUNK, into).unwrap() == TryRead::Done {
                    assert!(*into == *part, "a wrong chunk {n} after kill -9");
                    found += 1;
                } else {
                    assert!(blob.read_at_blocking(n as u64 * CHUNK, into).is_err());
                }
            }
        }
        blobs.store.set_down(false);
        let mut left = 40;
        blobs.read(&open, round + 77, || {
            left -= 1;
            left > 0
        });
        let corrupt = cache.metrics().value("dsec_cache_local_corruptions_total").unwrap();
        assert_eq!(corrupt, 0, "a kill tears nothing: the page cache outlives the process");
        if round % 2 == 0 {
            cache.close();
        }
    }
    assert!(found > 100 * killed_late, "only {found} chunks outlived {killed_late} kills");
}

#[test]
fn two_processes_do_not_share_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let blobs = blobs();
    let cache = ChunkCache::open(config(dir.path()), blobs.store.clone()).unwrap();
    assert!(spawn("be refused", dir.path(), 1).wait().unwrap().success());
    let said = std::fs::read_to_string(dir.path().join("refused")).unwrap();
    assert!(said.contains(&format!("(pid {})", std::process::id())), "{said}");
    // And the first goes on.
    let mut left = 20;
    blobs.read(&blobs.open(&cache), 5, || {
        left -= 1;
        left > 0
    });
}

/// Readers on several threads, a cache of half the size of what they read, blobs that come and go, and a store that is
/// down now and then.
/// `DSEC_CACHE_SOAK=3600` is the long mode, in seconds.
#[test]
fn eviction_under_load() {
    let dir = tempfile::tempdir().unwrap();
    let blobs = blobs();
    let cache = ChunkCache::open(config(dir.path()), blobs.store.clone()).unwrap();
    let end = Instant::now() + Duration::from_secs(number("DSEC_CACHE_SOAK", 3));
    let errors = || cache.metrics().value("dsec_cache_read_errors_total").unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(4711);
            while Instant::now() < end {
                for down in [false, true] {
                    blobs.store.set_down(down);
                    std::thread::sleep(Duration::from_millis(20 + random.next() % if down { 30 } else { 300 }));
                }
            }
            blobs.store.set_down(false);
        });
        for thread in 0..4 {
            let (blobs, cache) = (&blobs, &cache);
            scope.spawn(move || {
                let mut round = 0;
                while Instant::now() < end {
                    round += 1;
                    let open = blobs.open(cache);
                    let used = cache.metrics().value("dsec_cache_used_bytes").unwrap();
                    assert!(used <= CAPACITY, "{used} bytes are more than there may be");
                    let mut left = 200;
                    blobs.read(&open, thread * 1000 + round, || {
                        left -= 1;
                        left > 0 && Instant::now() < end
                    });
                }
            });
        }
    });
    let metrics = cache.metrics();
    let value = |name: &str| metrics.value(name).unwrap();
    assert!(value("dsec_cache_evicted_groups_total") > 0, "{}", metrics.render());
    assert_eq!(value("dsec_cache_local_corruptions_total") + value("dsec_cache_write_errors_total"), 0);
    assert!(errors() > 0, "the store was never down when it was needed");
    // What the disk holds is what was counted, and what is being written.
    assert!(cache.sync());
    let used = on_disk(&dir.path().join("blobs"));
    assert!(used <= CAPACITY + (2 << 20), "{used} bytes on disk");
}

fn on_disk(dir: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries.map(|e| if e.path().is_dir() { on_disk(&e.path()) } else { e.metadata().unwrap().blocks() * 512 }).sum()
}
