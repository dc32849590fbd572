//! Random lives of a cache: reads, evictions, failing disks and stores, kills and power cuts, in any order.
//!
//! The model is the blobs themselves. A read is right or an error, and an error only when the store is not well: a disk
//! that is full, fails or is dead never makes a read fail. `DSEC_CACHE_SEEDS=100000` is the long mode, and
//! `DSEC_CACHE_SEED=N` runs one.

use super::backend::{Backend, Mode};
use super::support::{Bench, CHUNK, Random, config, contents, table};
use crate::Medium as _;
use crate::blob_store::retry::Policy;
use crate::cache::index::forgetful::Forgetful;
use crate::cache::{CacheConfig, CachedBlob, ChunkDigests, TryRead, Verify};
use crate::testing::power_cut::Disk;
use crate::{CacheError, Digest};
use futures::future::join_all;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

struct Item {
    bytes: Vec<u8>,
    digest: Digest,
    table: Option<Arc<dyn ChunkDigests>>,
}

/// Blobs of all kinds: several groups, one chunk, less than one, none; with and without a table.
fn items() -> &'static [Item] {
    static ITEMS: OnceLock<Vec<Item>> = OnceLock::new();
    ITEMS.get_or_init(|| {
        let chunk = usize::try_from(CHUNK).unwrap();
        let lengths = [130 * chunk + 5, 66 * chunk, 3 * chunk + 1, 100, 0, 70 * chunk - 1];
        let item = |(n, len): (usize, &usize)| {
            let bytes = contents(*len, 1000 + n as u64);
            let table = if n == 5 { None } else { table(&bytes) };
            Item { digest: Digest::of(&bytes), table, bytes }
        };
        lengths.iter().enumerate().map(item).collect()
    })
}

struct Life {
    seed: u64,
    random: Random,
    config: CacheConfig,
    backend: Arc<Backend>,
    mode: Mode,
    bench: Bench,
    blobs: Vec<CachedBlob>,
    pinned: Vec<(usize, Range<u64>)>,
    /// What happened, for who has to understand it.
    story: Vec<String>,
    outcomes: [u64; 2],
}

fn open_blobs(bench: &Bench) -> Vec<CachedBlob> {
    items().iter().map(|item| bench.blob(item.digest, item.bytes.len() as u64, item.table.clone())).collect()
}

impl Life {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let backend = Backend::new();
        for item in items() {
            backend.add(item.bytes.clone());
        }
        let capacity = [90, 140, 1000][usize::try_from(random.below(3)).unwrap()] * CHUNK;
        let config = CacheConfig {
            capacity,
            high_percent: 80,
            low_percent: 50,
            verify: if random.chance(50) { Verify::AfterCrash } else { Verify::AfterStart },
            open_files: 2,
            read_ahead: random.below(2) * 16 * CHUNK,
            retry: Policy {
                attempts: 3,
                first_wait: Duration::ZERO,
                longest_wait: Duration::ZERO,
                total: Duration::from_secs(20),
            },
            // Hanging costs this each time, so few lives have it.
            deadline: if seed.is_multiple_of(16) { Duration::from_millis(60) } else { Duration::from_secs(60) },
            ..config(Path::new("x"))
        };
        let bench = Bench::new(config.clone(), &backend);
        let blobs = open_blobs(&bench);
        let (pinned, story, outcomes) = (Vec::new(), Vec::new(), [0; 2]);
        Self { seed, random, config, backend, mode: Mode::Well, bench, blobs, pinned, story, outcomes }
    }

    fn range(&mut self, item: usize) -> Range<usize> {
        let len = items()[item].bytes.len();
        let start = usize::try_from(self.random.below(len as u64 + 1)).unwrap();
        let most = if self.random.chance(70) { 3 * CHUNK } else { 80 * CHUNK };
        start..len.min(start + usize::try_from(self.random.below(most)).unwrap())
    }

    fn item(&mut self) -> usize {
        usize::try_from(self.random.below(items().len() as u64)).unwrap()
    }

    fn fail(&self, what: &str) -> ! {
        panic!("seed {}: {what}, after\n{}", self.seed, self.story.join("\n"))
    }

    /// Whether the store's lies could not be told from the truth.
    fn is_blind(&self, item: usize) -> bool {
        items()[item].table.is_none() && matches!(self.mode, Mode::Corrupt | Mode::Shifted)
    }

    async fn read(&mut self) {
        let mut picked: Vec<(usize, Range<usize>)> = Vec::new();
        for _ in 0..=self.random.below(3) {
            let item = self.item();
            let range = self.range(item);
            if !self.is_blind(item) {
                picked.push((item, range));
            }
        }
        let reads = picked.iter().map(|(item, range)| {
            let blob = self.blobs[*item].clone();
            let range = range.clone();
            async move {
                let mut buffer = vec![0; range.len()];
                let outcome = blob.read_at(range.start as u64, &mut buffer).await;
                outcome.map(|()| buffer)
            }
        });
        let outcomes = join_all(reads).await;
        for ((item, range), outcome) in picked.into_iter().zip(outcomes) {
            self.story.push(format!("read {item} {range:?}: {:?}", outcome.as_ref().map(Vec::len)));
            self.judge(item, &range, outcome);
        }
    }

    fn judge(&mut self, item: usize, range: &Range<usize>, outcome: Result<Vec<u8>, CacheError>) {
        match outcome {
            Ok(bytes) => {
                self.outcomes[0] += 1;
                if bytes != items()[item].bytes[range.clone()] {
                    self.fail(&format!("wrong bytes of {item} in {range:?}"));
                }
            }
            Err(error) => {
                self.outcomes[1] += 1;
                let late = matches!(error, CacheError::TimedOut { .. }) && self.seed.is_multiple_of(16);
                if self.mode == Mode::Well && !late {
                    self.fail(&format!("the store is well, and a read fails: {error}"));
                }
            }
        }
    }

    fn try_read(&mut self) {
        let item = self.item();
        let range = self.range(item);
        let mut buffer = vec![0; range.len()];
        if self.blobs[item].try_read_at(range.start as u64, &mut buffer).unwrap() == TryRead::Done {
            self.judge(item, &range, Ok(buffer));
        }
    }

    /// What was located stays, whatever is evicted.
    fn hold(&mut self) {
        let item = self.item();
        let range = self.range(item);
        let wide = range.start as u64..range.end as u64;
        let Some(located) = self.blobs[item].locate(wide.clone()).unwrap() else { return };
        let errors = self.bench.count("dsec_cache_write_errors_total");
        self.bench.shared.flush();
        self.bench.shared.relieve();
        if self.bench.count("dsec_cache_write_errors_total") != errors {
            // A failed sync may take what was not synced, and nobody's lock keeps a disk from that.
            return;
        }
        let mut buffer = vec![0; range.len()];
        if let Ok(read) = located.medium().read_at(&mut buffer, located.offset()) {
            self.story.push(format!("held {item} {range:?} through an eviction"));
            if !self.bench.disk.disk.has_power() {
                return;
            }
            if read != buffer.len() {
                self.fail("what was located is not all there");
            }
            self.judge(item, &range, Ok(buffer));
        }
    }

    async fn step(&mut self) {
        let what = self.random.below(100);
        match what {
            0..40 => self.read().await,
            40..50 => self.try_read(),
            50..54 => self.hold(),
            54..58 => {
                let item = self.item();
                let range = self.range(item);
                let dropped = self.blobs[item].drop_range(range.start as u64..range.end as u64);
                self.story.push(format!("dropped {dropped} of {item} {range:?}"));
            }
            58..66 => {
                let flushed = self.bench.shared.flush();
                self.story.push(format!("flush: {flushed}"));
            }
            66..74 => {
                self.bench.shared.relieve();
                self.story.push(format!("relieved: {} left", self.bench.shared.used()));
            }
            74..77 => {
                let item = self.item();
                let range = self.range(item);
                let wide = range.start as u64..range.end as u64;
                if !self.is_blind(item) {
                    let outcome = self.blobs[item].prefetch(std::slice::from_ref(&wide)).await;
                    self.story.push(format!("prefetch {item} {wide:?}: {outcome:?}"));
                }
            }
            77..80 => {
                let item = self.item();
                let range = self.range(item);
                let wide = range.start as u64..range.end as u64;
                match self.pinned.pop() {
                    Some((item, range)) if self.random.chance(50) => self.blobs[item].unpin(range).unwrap(),
                    _ => {
                        self.blobs[item].pin(wide.clone()).unwrap();
                        self.pinned.push((item, wide));
                    }
                }
            }
            80..86 => self.change_mode().await,
            86..90 => self.trouble(),
            90..93 => {
                self.bench.disk.disk.limit(None);
                self.bench.index.broken.store(false, Ordering::Relaxed);
                *self.bench.disk.free.lock().unwrap() = u64::MAX;
                self.bench.shared.full_until.store(0, Ordering::Relaxed);
                self.story.push("the disk is well".to_owned());
            }
            93..96 => {
                let at = self.bench.disk.disk.operations() + self.random.below(6);
                self.bench.disk.disk.cut_at(at);
                self.story.push(format!("the power will go before operation {at}"));
            }
            96..98 => self.end_and_restart().await,
            _ => self.crash().await,
        }
        self.quiet().await;
    }

    /// Nothing under way, so that a life is the same each time.
    async fn quiet(&self) {
        if self.mode == Mode::Hang {
            return;
        }
        while self.blobs.iter().any(CachedBlob::is_fetching) {
            tokio::task::yield_now().await;
        }
    }

    async fn change_mode(&mut self) {
        // What was asked for before may still come, and must not be judged by the new mode.
        while self.blobs.iter().any(CachedBlob::is_fetching) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let modes = [
            Mode::Well,
            Mode::Well,
            Mode::Well,
            Mode::Well,
            Mode::Refuse,
            Mode::Corrupt,
            Mode::Short,
            Mode::EndsEarly,
            Mode::NotFound,
            Mode::Flap(2),
            Mode::Flap(5),
            Mode::Whole,
            Mode::Shifted,
            Mode::ShortFor(2),
            Mode::Slow(Duration::from_micros(300)),
            if self.seed.is_multiple_of(16) { Mode::Hang } else { Mode::Well },
        ];
        self.mode = modes[usize::try_from(self.random.below(modes.len() as u64)).unwrap()];
        self.backend.set(self.mode);
        self.story.push(format!("the store: {:?}", self.mode));
    }

    fn trouble(&mut self) {
        match self.random.below(5) {
            4 => self.bench.disk.disk.fail_reads(self.random.below(4)),
            0 => self.bench.disk.disk.limit(Some(self.random.below(200) * CHUNK)),
            1 => self.bench.index.broken.store(true, Ordering::Relaxed),
            2 => self.bench.disk.disk.fail_next_sync(self.random.next()),
            _ => *self.bench.disk.free.lock().unwrap() = self.random.below(40) * CHUNK,
        }
        self.story.push("trouble with the disk".to_owned());
    }

    /// A proper end: all that was there is there again.
    async fn end_and_restart(&mut self) {
        self.settle().await;
        self.bench.index.broken.store(false, Ordering::Relaxed);
        self.bench.shared.closed.store(true, Ordering::Release);
        let clean = self.bench.shared.end();
        let before: Vec<u64> = self.blobs.iter().map(CachedBlob::cached_bytes).collect();
        self.story.push(format!("a proper end: {clean}"));
        // Nobody believes more than is durable.
        let disk = self.bench.disk.disk.after_cut(0);
        let index = self.bench.index.after_crash(0);
        let damaged = !(clean && self.config.verify == Verify::AfterCrash) && self.damage(&disk);
        self.restart(&disk, index);
        let after: Vec<u64> = self.blobs.iter().map(CachedBlob::cached_bytes).collect();
        // More may be there: what a fetch that came too late would have written again is dropped in memory, and the next
        // start, which is no clean one then, finds it with its CRC. That it is right is seen when it is read.
        let lost = before.iter().zip(&after).any(|(before, after)| after < before);
        if clean && !damaged && lost {
            self.fail(&format!("{before:?} bytes were there before the end, and {after:?} after it"));
        }
    }

    async fn crash(&mut self) {
        self.settle().await;
        let (disk_seed, index_seed) = (self.random.below(20), self.random.next());
        let disk = self.bench.disk.disk.after_cut(disk_seed);
        let index = self.bench.index.after_crash(index_seed);
        let damaged = self.damage(&disk);
        self.story.push(format!("a crash: {disk_seed}, damaged: {damaged}"));
        self.restart(&disk, index);
    }

    async fn settle(&self) {
        while self.blobs.iter().any(CachedBlob::is_fetching) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Sometimes a disk is worse than it should be.
    fn damage(&mut self, disk: &Disk) -> bool {
        let names = disk.names();
        if names.is_empty() || self.random.chance(70) {
            return false;
        }
        let name = &names[usize::try_from(self.random.below(names.len() as u64)).unwrap()];
        let file = disk.open(name);
        let len = file.size().unwrap();
        match self.random.below(3) {
            0 => file.set_len(len / 2).unwrap(),
            1 => file.punch(0..len).unwrap(),
            _ if len > 0 => file.write_all_at(b"\0", self.random.below(len)).unwrap(),
            _ => {}
        }
        true
    }

    fn restart(&mut self, disk: &Disk, index: Arc<Forgetful>) {
        self.pinned.clear();
        self.bench = Bench::on(self.config.clone(), &self.backend, disk, index);
        self.blobs = open_blobs(&self.bench);
    }
}

async fn live(seed: u64) -> [u64; 2] {
    let mut life = Life::new(seed);
    for _ in 0..40 {
        life.step().await;
    }
    // In the end all is well, and all is right.
    life.settle().await;
    life.mode = Mode::Well;
    life.backend.set(Mode::Well);
    for item in 0..items().len() {
        let all = 0..items()[item].bytes.len();
        let mut buffer = vec![0; all.len()];
        let outcome = life.blobs[item].read_at(0, &mut buffer).await;
        life.judge(item, &all, outcome.map(|()| buffer));
    }
    life.settle().await;
    life.outcomes
}

pub(super) fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

#[test]
fn a_byte_is_right_or_an_error_in_any_life() {
    let seeds = match number("DSEC_CACHE_SEED") {
        Some(one) => one..one + 1,
        None => 0..number("DSEC_CACHE_SEEDS").unwrap_or(2000),
    };
    let threads = 4;
    let lives = |first: u64| {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().max_blocking_threads(4).build().unwrap();
        let mut outcomes = [0; 2];
        for seed in seeds.clone().skip(usize::try_from(first).unwrap()).step_by(threads) {
            let [right, errors] = runtime.block_on(live(seed));
            outcomes[0] += right;
            outcomes[1] += errors;
        }
        outcomes
    };
    let outcomes = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads as u64).map(|first| scope.spawn(move || lives(first))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let right: u64 = outcomes.iter().map(|[right, _]| right).sum();
    let errors: u64 = outcomes.iter().map(|[_, errors]| errors).sum();
    assert!(seeds.end - seeds.start < 100 || (right > errors && errors > 0), "{right} right, {errors} errors");
}

/// One script, cut at each of its operations on the disk, and reopened on what each of some outcomes left.
#[test]
fn the_power_may_go_at_any_operation() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let script = |cut: Option<u64>| {
        runtime.block_on(async {
            let mut life = Life::new(1);
            life.config.capacity = 90 * CHUNK;
            let (disk, index) = (Disk::new(), Arc::default());
            life.restart(&disk, index);
            if let Some(cut) = cut {
                disk.cut_at(cut);
            }
            for round in 0..4 {
                for (item, start) in [(0, round * 20), (1, 0), (5, 64), (2, 0), (0, 65), (1, 60), (3, 0)] {
                    let len = items()[item].bytes.len();
                    let start = len.min(start * 4096);
                    let range = start..len.min(start + 9 * 4096);
                    let mut buffer = vec![0; range.len()];
                    let outcome = life.blobs[item].read_at(range.start as u64, &mut buffer).await;
                    life.judge(item, &range, outcome.map(|()| buffer));
                }
                life.blobs[1].drop_range(0..5000);
                life.bench.shared.flush();
                let mut buffer = vec![0; 60 * 4096];
                life.blobs[0].read_at(round as u64 * CHUNK, &mut buffer).await.unwrap();
                life.bench.shared.flush();
                life.bench.shared.relieve();
            }
            life.settle().await;
            life
        })
    };
    let whole = script(None);
    let evicted = whole.bench.count("dsec_cache_evicted_groups_total");
    assert!(evicted > 2, "the script evicts {evicted} groups");
    let operations = whole.bench.disk.disk.operations();
    whole.bench.shared.end();
    assert!(operations > 40, "{operations}");
    for cut in 0..operations {
        let mut life = script(Some(cut));
        let (disk, index) = (life.bench.disk.disk.clone(), Arc::clone(&life.bench.index));
        for seed in 0..6 {
            runtime.block_on(async {
                life.restart(&disk.after_cut(seed), index.after_crash(seed));
                for item in 0..items().len() {
                    let all = 0..items()[item].bytes.len();
                    let mut buffer = vec![0; all.len()];
                    let outcome = life.blobs[item].read_at(0, &mut buffer).await;
                    life.judge(item, &all, outcome.map(|()| buffer));
                }
                life.settle().await;
            });
        }
    }
}
