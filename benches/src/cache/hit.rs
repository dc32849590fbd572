//! Hits against plain reads of the same file.

use super::{ratio, shaped::Shaped};
use crate::measure::Spread;
use crate::report::{Better, Metric, progress};
use crate::sys::{own_cpu, thread_cpu};
use anyhow::{Context as _, Result, ensure};
use fs3_client::{CacheConfig, CachedBlob, ChunkCache, Digest};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of the blob.
pub(super) const SIZE: u64 = 256 << 20;
const SMALL: usize = 4096;
const LARGE: usize = 1 << 20;
/// Small reads a round, all readers together, of what is in memory; and of what is on disk.
const WARM: u64 = 400_000;
const COLD: u64 = 8_000;
const READERS: u64 = 32;
/// The least share of the plain rate.
const GOAL: f64 = 0.9;

/// A place in the blob, for the `n`th read of a round: each once, in no order.
fn place(n: u64, round: u64) -> u64 {
    (n.wrapping_mul(2_654_435_761).wrapping_add(round * 7919) % (SIZE / SMALL as u64)) * SMALL as u64
}

struct Both {
    runtime: tokio::runtime::Runtime,
    blob: CachedBlob,
    file: Arc<File>,
}

pub(super) fn measure(dir: &Path, rounds: usize) -> Result<Vec<Metric>> {
    let store = Arc::new(Shaped::new(Duration::ZERO, 0));
    let cache = ChunkCache::open(CacheConfig { keep_free: 0, ..CacheConfig::new(dir, 4 << 30) }, store.clone())?;
    let blob = cache.blob(Digest::of(b"hits"), SIZE, None)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(blob.prefetch(std::slice::from_ref(&(0..SIZE))))?;
    ensure!(cache.sync() && blob.cached_bytes() == SIZE, "the cache does not keep the blob");
    let file = Arc::new(File::open(data_file(&dir.join("blobs"))?)?);
    let mut there = vec![0; SMALL];
    file.read_exact_at(&mut there, 123 << 12)?;
    ensure!(there == store.contents(&(123 << 12..124 << 12)), "the file has other bytes");
    let both = Both { runtime, blob, file };
    let mut metrics = Vec::new();
    both.one_reader(rounds, &mut metrics)?;
    both.many_readers(rounds, &mut metrics)?;
    both.sequential(rounds, &mut metrics)?;
    both.on_disk(rounds, &mut metrics)?;
    Ok(metrics)
}

/// The one data file.
fn data_file(dir: &Path) -> Result<PathBuf> {
    let first = std::fs::read_dir(dir)?.next().with_context(|| format!("nothing in {}", dir.display()))?;
    let path = first?.path();
    if path.is_dir() { data_file(&path) } else { Ok(path) }
}

/// What many reads took: a rate, and processor time of each in nanoseconds.
#[derive(Debug, Clone, Copy)]
struct Took {
    rate: f64,
    cpu: f64,
}

#[expect(clippy::cast_precision_loss, reason = "numbers of reads")]
fn took(reads: u64, wall: Duration, cpu: Duration) -> Took {
    Took { rate: reads as f64 / wall.as_secs_f64(), cpu: cpu.as_secs_f64() * 1e9 / reads as f64 }
}

/// Times reads that this thread does.
fn alone(reads: u64, mut read: impl FnMut(u64)) -> Took {
    let (cpu, wall) = (thread_cpu(), Instant::now());
    (0..reads).for_each(&mut read);
    took(reads, wall.elapsed(), thread_cpu() - cpu)
}

/// Times reads that many threads do, each its share.
fn threads(reads: u64, read: &(impl Fn(u64) + Sync)) -> Took {
    let (cpu, wall) = (own_cpu(), Instant::now());
    std::thread::scope(|scope| {
        for reader in 0..READERS {
            scope.spawn(move || (0..reads / READERS).for_each(|n| read(n * READERS + reader)));
        }
    });
    took(reads, wall.elapsed(), own_cpu() - cpu)
}

/// The rate of ours over the plain one, by processor time: what is in memory takes nothing else, and what others do on the
/// machine takes none of it.
fn over_plain(name: &'static str, ours: &[Took], plain: &[Took]) -> Metric {
    let per_cpu_second = |of: &[Took]| of.iter().map(|took| 1e9 / took.cpu).collect::<Vec<_>>();
    ratio(name, &per_cpu_second(ours), &per_cpu_second(plain)).goal(GOAL).peer(PLAIN)
}

fn rates(of: &[Took]) -> Vec<f64> {
    of.iter().map(|took| took.rate).collect()
}

fn reads_per_second(name: &'static str, of: &[Took], who: &str) -> Metric {
    Metric::spread(name, Spread::of(rates(of)), "reads/s", Better::Higher).peer(who)
}

const PLAIN: &str = "pread";

impl Both {
    fn plain(&self, buffer: &mut [u8], at: u64) {
        self.file.read_exact_at(buffer, at).expect("a file that was just written is read");
    }

    fn ours(&self, buffer: &mut [u8], at: u64) {
        self.blob.read_at_blocking(at, buffer).expect("what is cached is read");
    }

    fn one_reader(&self, rounds: usize, metrics: &mut Vec<Metric>) -> Result<()> {
        let (mut plain, mut ours, mut task) = (Vec::new(), Vec::new(), Vec::new());
        let mut buffer = vec![0; SMALL];
        for round in 0..rounds as u64 {
            progress(&format!("round {} of {rounds}: 4 KiB hits, one reader", round + 1));
            plain.push(alone(WARM, |n| self.plain(&mut buffer, place(n, round))));
            ours.push(alone(WARM, |n| self.ours(&mut buffer, place(n, round))));
            let (blob, mut buffer) = (self.blob.clone(), vec![0; SMALL]);
            task.push(self.runtime.block_on(async move {
                let (cpu, wall) = (thread_cpu(), Instant::now());
                for n in 0..WARM {
                    blob.read_at(place(n, round), &mut buffer).await?;
                }
                Ok::<_, fs3_client::CacheError>(took(WARM, wall.elapsed(), thread_cpu() - cpu))
            })?);
        }
        let spread = |of: &[Took]| Spread::of(of.iter().map(|took| took.cpu));
        let more: Vec<f64> = ours.iter().zip(&plain).map(|(ours, plain)| ours.cpu - plain.cpu).collect();
        metrics.push(over_plain("hit_4k_depth_1", &ours, &plain));
        metrics.push(over_plain("hit_4k_depth_1_task", &task, &plain));
        metrics.push(ratio("hit_4k_depth_1_by_the_clock", &rates(&ours), &rates(&plain)).peer(PLAIN));
        metrics.push(Metric::spread("cpu_per_hit", spread(&ours), "ns", Better::Lower).peer("read_at_blocking"));
        metrics.push(Metric::spread("cpu_per_hit", spread(&task), "ns", Better::Lower).peer("read_at"));
        metrics.push(Metric::spread("cpu_per_hit", spread(&plain), "ns", Better::Lower).peer(PLAIN));
        metrics.push(Metric::spread("cpu_per_hit_over_pread", Spread::of(more), "ns", Better::Lower));
        Ok(())
    }

    fn many_readers(&self, rounds: usize, metrics: &mut Vec<Metric>) -> Result<()> {
        let (mut plain, mut ours, mut tasks) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..rounds as u64 {
            progress(&format!("round {} of {rounds}: 4 KiB hits, {READERS} readers", round + 1));
            plain.push(threads(WARM, &|n| self.plain(&mut [0; SMALL], place(n, round))));
            ours.push(threads(WARM, &|n| self.ours(&mut [0; SMALL], place(n, round))));
            tasks.push(self.tasks(WARM, round)?);
        }
        metrics.push(over_plain("hit_4k_depth_32", &ours, &plain));
        metrics.push(over_plain("hit_4k_depth_32_tasks", &tasks, &plain));
        metrics.push(ratio("hit_4k_depth_32_by_the_clock", &rates(&ours), &rates(&plain)).peer(PLAIN));
        metrics.push(reads_per_second("hits_4k_depth_32", &ours, "read_at_blocking"));
        metrics.push(reads_per_second("hits_4k_depth_32", &plain, PLAIN));
        Ok(())
    }

    /// As many readers, which are tasks.
    fn tasks(&self, reads: u64, round: u64) -> Result<Took> {
        let (cpu, wall) = (own_cpu(), Instant::now());
        self.runtime.block_on(async {
            let mut readers = tokio::task::JoinSet::new();
            for reader in 0..READERS {
                let blob = self.blob.clone();
                readers.spawn(async move {
                    let mut buffer = vec![0; SMALL];
                    for n in 0..reads / READERS {
                        blob.read_at(place(n * READERS + reader, round), &mut buffer).await?;
                    }
                    Ok::<_, fs3_client::CacheError>(())
                });
            }
            readers.join_all().await.into_iter().collect::<Result<Vec<()>, _>>()
        })?;
        Ok(took(reads, wall.elapsed(), own_cpu() - cpu))
    }

    fn sequential(&self, rounds: usize, metrics: &mut Vec<Metric>) -> Result<()> {
        let (mut plain, mut ours, mut task) = (Vec::new(), Vec::new(), Vec::new());
        let mut buffer = vec![0; LARGE];
        let reads = 4 * SIZE / LARGE as u64;
        let at = |n: u64| n * LARGE as u64 % SIZE;
        for round in 1..=rounds {
            progress(&format!("round {round} of {rounds}: 1 MiB hits in a row"));
            plain.push(alone(reads, |n| self.plain(&mut buffer, at(n))));
            ours.push(alone(reads, |n| self.ours(&mut buffer, at(n))));
            let blob = self.blob.clone();
            let buffer = &mut buffer;
            task.push(self.runtime.block_on(async move {
                let (cpu, wall) = (thread_cpu(), Instant::now());
                for n in 0..reads {
                    blob.read_at(at(n), buffer).await?;
                }
                Ok::<_, fs3_client::CacheError>(took(reads, wall.elapsed(), thread_cpu() - cpu))
            })?);
        }
        metrics.push(over_plain("hit_1m_sequential", &ours, &plain));
        metrics.push(over_plain("hit_1m_sequential_task", &task, &plain));
        Ok(())
    }

    /// What is not in memory: tasks wait by the ring, the others have a thread each.
    fn on_disk(&self, rounds: usize, metrics: &mut Vec<Metric>) -> Result<()> {
        let (mut plain, mut tasks) = (Vec::new(), Vec::new());
        for round in 0..rounds as u64 {
            progress(&format!("round {} of {rounds}: 4 KiB hits from the disk, {READERS} readers", round + 1));
            // By turns who comes first.
            for first in [round % 2 == 0, round % 2 != 0] {
                rustix::fs::fadvise(&*self.file, 0, None, rustix::fs::Advice::DontNeed)?;
                if first {
                    plain.push(threads(COLD, &|n| self.plain(&mut [0; SMALL], place(n, round))));
                } else {
                    tasks.push(self.tasks(COLD, round)?);
                }
            }
        }
        metrics.push(ratio("hit_4k_depth_32_from_disk", &rates(&tasks), &rates(&plain)).goal(GOAL).peer(PLAIN));
        metrics.push(reads_per_second("hits_4k_depth_32_from_disk", &tasks, "read_at"));
        metrics.push(reads_per_second("hits_4k_depth_32_from_disk", &plain, PLAIN));
        Ok(())
    }
}
