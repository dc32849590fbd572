//! Misses against what the store's latency and bandwidth allow.

use super::shaped::Shaped;
use crate::measure::Spread;
use crate::report::{Better, Metric, progress};
use crate::sys::own_cpu;
use anyhow::{Result, ensure};
use fs3_client::cache::DigestTable;
use fs3_client::{CacheConfig, CachedBlob, ChunkCache, ChunkDigests, Digest};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of the file.
pub(super) const SIZE: u64 = 200_000_000;
pub(super) const LATENCY: Duration = Duration::from_millis(1);
/// Of all requests together, a second.
pub(super) const BANDWIDTH: u64 = 500_000_000;
const CHUNK: u64 = 256 << 10;
/// At most this much of the inevitable time.
const GOAL: f64 = 1.15;
/// What a reader asks for at a time: as the kernel does through FUSE, and as a copying program does.
const STEPS: [(&str, u64); 2] = [("128 KiB reads", 128 << 10), ("1 MiB reads", 1 << 20)];
const READERS: usize = 16;

struct Cold {
    _dir: tempfile::TempDir,
    store: Arc<Shaped>,
    cache: ChunkCache,
    blob: CachedBlob,
}

impl Cold {
    fn new(dir: &Path, table: Option<Arc<dyn ChunkDigests>>) -> Result<Self> {
        let dir = tempfile::tempdir_in(dir)?;
        let store = Arc::new(Shaped::new(LATENCY, BANDWIDTH));
        let config = CacheConfig { keep_free: 0, ..CacheConfig::new(dir.path(), 4 << 30) };
        let cache = ChunkCache::open(config, store.clone())?;
        let blob = cache.blob(Digest::of(b"misses"), SIZE, table)?;
        Ok(Self { _dir: dir, store, cache, blob })
    }

    /// The whole file, from the first byte to the last.
    fn read(&self, step: u64) -> Result<()> {
        let mut buffer = vec![0; usize::try_from(step)?];
        let mut at = 0;
        while at < SIZE {
            let end = SIZE.min(at + step);
            let part = &mut buffer[..usize::try_from(end - at)?];
            self.blob.read_at_blocking(at, part)?;
            // Not only its time counts.
            ensure!(part[..64] == self.store.contents(&(at..end))[..64], "wrong bytes at {at}");
            at = end;
        }
        Ok(())
    }

    fn count(&self, name: &str) -> u64 {
        self.cache.metrics().value(name).unwrap_or(0)
    }
}

#[expect(clippy::cast_precision_loss, reason = "a few hundred megabytes")]
pub(super) fn measure(dir: &Path, rounds: usize) -> Result<Vec<Metric>> {
    let store = Shaped::new(LATENCY, 0);
    let pieces = (0..SIZE.div_ceil(CHUNK)).map(|n| n * CHUNK..SIZE.min((n + 1) * CHUNK));
    let digests = pieces.map(|piece| Digest::of(&store.contents(&piece))).collect();
    let table: Arc<dyn ChunkDigests> = Arc::new(DigestTable::new(CHUNK, SIZE, digests).map_err(anyhow::Error::msg)?);
    let limit = LATENCY.as_secs_f64() + SIZE as f64 / BANDWIDTH as f64;
    let mut metrics = Vec::new();
    for (who, step) in STEPS {
        for (checked, name) in [(false, "cold_over_limit"), (true, "cold_over_limit_checked")] {
            let (mut over, mut cpu) = (Vec::new(), Vec::new());
            let (mut fetched, mut requests, mut merged) = (0.0, 0.0, 0.0);
            for round in 1..=rounds {
                progress(&format!("round {round} of {rounds}: cold, {who}, digests: {checked}"));
                let cold = Cold::new(dir, checked.then(|| Arc::clone(&table)))?;
                let (used, began) = (own_cpu(), Instant::now());
                cold.read(step)?;
                over.push(began.elapsed().as_secs_f64() / limit);
                cpu.push((own_cpu() - used).as_secs_f64() * 1e9 / SIZE as f64);
                let (asked, bytes) = cold.store.asked();
                (fetched, requests) = (bytes as f64 / SIZE as f64, asked as f64);
                merged = cold.count("dsec_cache_merged_chunks_total") as f64;
            }
            metrics.push(Metric::spread(name, Spread::of(over), "x", Better::Lower).goal(GOAL).peer(who));
            metrics.push(Metric::spread("cold_cpu_per_gb", Spread::of(cpu), "s", Better::Lower).peer(who));
            if !checked {
                metrics.push(Metric::new("cold_fetched_over_asked", fetched, "x", Better::Lower).goal(1.0).peer(who));
                metrics.push(Metric::new("cold_requests", requests, "", Better::Lower).peer(who));
                metrics.push(Metric::new("cold_merged_chunks", merged, "", Better::Higher).peer(who));
            }
        }
    }
    metrics.extend(at_once(dir)?);
    metrics.extend(scattered(dir)?);
    Ok(metrics)
}

/// Readers of the same file that begin together: what one asks for is fetched for all.
#[expect(clippy::cast_precision_loss, reason = "a few hundred megabytes")]
fn at_once(dir: &Path) -> Result<Vec<Metric>> {
    progress("cold, many readers at once");
    let cold = Cold::new(dir, None)?;
    let began = Instant::now();
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS).map(|_| scope.spawn(|| cold.read(1 << 20))).collect();
        readers.into_iter().try_for_each(|reader| reader.join().map_err(|_| anyhow::anyhow!("a reader panicked"))?)
    })?;
    let limit = LATENCY.as_secs_f64() + SIZE as f64 / BANDWIDTH as f64;
    let who = "16 readers at once";
    let fetched = cold.store.asked().1 as f64 / SIZE as f64;
    let joined = cold.count("dsec_cache_joined_chunks_total") as f64;
    Ok(vec![
        Metric::new("cold_over_limit", began.elapsed().as_secs_f64() / limit, "x", Better::Lower).peer(who),
        Metric::new("cold_fetched_over_asked", fetched, "x", Better::Lower).goal(1.0).peer(who),
        Metric::new("cold_joined_chunks", joined, "", Better::Higher).peer(who),
    ])
}

/// As a sandbox starts: small reads here and there, most of them near the last one.
#[expect(clippy::cast_precision_loss, reason = "a few megabytes")]
fn scattered(dir: &Path) -> Result<Vec<Metric>> {
    progress("cold, scattered reads");
    let cold = Cold::new(dir, None)?;
    let mut state = 88_172_645_463_325_252_u64;
    let mut next = |end: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % end
    };
    let (mut at, mut asked) = (0, 0u64);
    let mut touched = vec![false; usize::try_from(SIZE / 4096 + 1)?];
    let mut buffer = vec![0; 16 << 10];
    for _ in 0..2000 {
        at = if next(10) == 0 { next(SIZE) } else { at + next(256 << 10) } % (SIZE - (16 << 10));
        cold.blob.read_at_blocking(at, &mut buffer)?;
        for block in at / 4096..(at + (16 << 10)).div_ceil(4096) {
            let block = &mut touched[usize::try_from(block)?];
            asked += u64::from(!std::mem::replace(block, true)) * 4096;
        }
    }
    let (requests, bytes) = cold.store.asked();
    let who = "2000 scattered reads";
    Ok(vec![
        Metric::new("cold_fetched_over_asked", bytes as f64 / asked as f64, "x", Better::Lower).peer(who),
        Metric::new("cold_requests", requests as f64, "", Better::Lower).peer(who),
    ])
}
