//! Bench `backends`: what reads cost by each way to a blob.
//!
//! On the stand-in of 3FS: by rings (its library over a directory in memory), by the mount (around the page cache, as
//! the client reads, and buffered), both by one model of latency and bandwidth; against the least time that the model
//! allows. Nothing of this is a figure of 3FS. On a disk: threads and io_uring against a bare `pread` ([`disk`]). Each
//! workload is read by all of them in each round.

mod disk;
mod reads;

use crate::measure::Spread;
use crate::report::{Better, Metric, Missing, Report, progress};
use anyhow::{Context as _, Result, ensure};
use fs3_client::blob_store::local::LocalBlobs;
use fs3_client::blob_store::usrbio::{ReadPath, UsrbioBlobs, UsrbioOptions};
use fs3_client::{Rules, StoreDir};
use hf3fs_stand_in::mount::process::{Daemon, serve_if_asked};
use hf3fs_stand_in::plain;
use reads::{Reads, SIZE};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

/// What a request costs besides its bytes, and bytes a second: the model's, of both parts.
const LATENCY: Duration = Duration::from_millis(1);
const BANDWIDTH: u32 = 1_000_000_000;
const MODEL: &str = "read-us=1000 bandwidth=1000000000 meta-us=100 write-us=100 threads=8";
/// What of the model's own rate rings should reach in large reads.
const GOAL: f64 = 0.8;

/// The workloads on the stand-in.
const WORKLOADS: [Reads; 5] = [
    Reads { name: "8 MiB, in order, 2 at a time", len: 8 << 20, count: 8, depth: 2, random: false },
    Reads { name: "1 MiB, at random, 8 at a time", len: 1 << 20, count: 48, depth: 8, random: true },
    Reads { name: "64 KiB, at random, 1 at a time", len: 64 << 10, count: 60, depth: 1, random: true },
    Reads { name: "4 KiB, at random, 1 at a time", len: 4096, count: 60, depth: 1, random: true },
    Reads { name: "4 KiB, at random, 32 at a time", len: 4096, count: 800, depth: 32, random: true },
];

/// What serves the mount, in a process of its own.
pub(crate) fn serve() {
    serve_if_asked();
}

/// Runs it; `dir` is on a disk.
pub(crate) fn run(dir: &Path, rounds: usize) -> Result<Report> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let mut report = Report {
        bench: "backends",
        setting: vec![
            format!("{rounds} rounds; a blob of {} MiB", SIZE >> 20),
            format!("the stand-in's model: {MODEL} (in memory; a stand-in, not 3FS)"),
            format!("a disk: {}", dir.display()),
        ],
        metrics: Vec::new(),
        missing: Vec::new(),
    };
    if fixtures::require::root() {
        stand_in(&runtime, rounds, &mut report.metrics)?;
    } else {
        report.missing.push(Missing { name: "the stand-in".to_owned(), how: "mounting needs root".to_owned() });
    }
    disk::run(&runtime, dir, rounds, &mut report.metrics)?;
    Ok(report)
}

/// Seconds of each way, a round each.
#[derive(Default)]
struct Times {
    rings: Vec<f64>,
    mount: Vec<f64>,
    buffered: Vec<f64>,
}

fn stand_in(runtime: &tokio::runtime::Runtime, rounds: usize, metrics: &mut Vec<Metric>) -> Result<()> {
    let contents = reads::contents();
    let memory = tempfile::tempdir_in("/dev/shm").context("/dev/shm")?;
    plain::prepare(memory.path())?;
    plain::behave(memory.path(), MODEL)?;
    let by_rings = StoreDir::create(&memory.path().join("store"))?.with_rules(Rules::Fs3);
    let digest = by_rings.publish_bytes(&contents)?.digest;
    let options = UsrbioOptions { library: Some(plain::library()), ..UsrbioOptions::default() };
    let rings = UsrbioBlobs::new(by_rings, &options);
    ensure!(matches!(rings.path(), ReadPath::Usrbio { .. }), "no rings: {:?}", rings.path());
    let daemon = Daemon::start_in(Path::new("/dev/shm"), &["__child", "stand-in"], MODEL)?;
    let on_mount = StoreDir::create(&daemon.point().join("store"))?;
    ensure!(on_mount.rules() == Rules::Fs3, "the mount is not known as one of 3FS");
    ensure!(on_mount.publish_bytes(&contents)?.digest == digest);
    let mount = LocalBlobs::new(on_mount.clone());
    for reads in &WORKLOADS {
        progress(reads.name);
        let places = reads.places();
        let check = places.first().copied().unwrap_or(0);
        for blobs in [&rings as &dyn fs3_client::BlobStore, &mount] {
            let read = runtime.block_on(blobs.read_range(&digest, check..check + reads.len))?;
            let from = usize::try_from(check)?;
            ensure!(read == contents[from..from + read.len()], "{}: wrong bytes", reads.name);
        }
        let mut times = Times::default();
        for _ in 0..rounds {
            times.rings.push(runtime.block_on(reads.through(&rings, &digest, &places))?);
            times.mount.push(runtime.block_on(reads.through(&mount, &digest, &places))?);
            times.buffered.push(buffered(&on_mount, &digest, reads, &places)?);
        }
        metrics.extend(times.metrics(reads));
    }
    let counts = rings.counts().context("counts")?;
    ensure!(counts.by_mount == 0 && counts.left_rings == 0, "not all by rings: {counts:?}");
    Ok(())
}

/// Buffered reads of an open file, by as many threads as there are reads at a time.
fn buffered(store: &StoreDir, digest: &fs3_client::Digest, reads: &Reads, places: &[u64]) -> Result<f64> {
    // Opening it drops its pages.
    let file = store.open_blob(digest, SIZE)?;
    let began = Instant::now();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..reads.depth)
            .map(|first| {
                let mine = places.iter().skip(first).step_by(reads.depth);
                let file = &file;
                scope.spawn(move || -> std::io::Result<()> {
                    let mut buffer = vec![0; usize::try_from(reads.len).unwrap_or(0)];
                    mine.copied().try_for_each(|at| file.read_exact_at(&mut buffer, at))
                })
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?.map_err(Into::into))
    })
    .map(|()| began.elapsed().as_secs_f64())
}

impl Times {
    fn metrics(&self, reads: &Reads) -> [Metric; 3] {
        let ratio = |over: &[f64], peer: &str| {
            let ratios = Spread::of(over.iter().zip(&self.rings).map(|(over, rings)| over / rings));
            Metric::spread(reads.name, ratios, "x", Better::Higher).peer(peer)
        };
        let least = reads.least(LATENCY, BANDWIDTH);
        let of_model = ratio(&vec![least; self.rings.len()], "rings over what the model allows");
        let of_model = if reads.len >= 1 << 20 { of_model.goal(GOAL) } else { of_model };
        [of_model, ratio(&self.mount, "rings over the mount"), ratio(&self.buffered, "rings over the mount, buffered")]
    }
}
