//! On a disk: threads and io_uring against a bare `pread` of the open file.

use super::reads::{Reads, SIZE, contents};
use crate::measure::Spread;
use crate::report::{Better, Metric, progress};
use anyhow::{Result, ensure};
use fs3_client::StoreDir;
use fs3_client::blob_store::local::{Engine, LocalBlobs};
use rustix::fs::{Advice, fadvise};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Instant;
use tokio::runtime::Runtime;

/// The workloads, and whether the page cache is emptied before.
const WORKLOADS: [(Reads, bool); 4] = [
    (Reads { name: "cached: 4 KiB, at random, 32 at a time", len: 4096, count: 8000, depth: 32, random: true }, false),
    (Reads { name: "cached: 4 MiB, in order, 4 at a time", len: 4 << 20, count: 16, depth: 4, random: false }, false),
    (
        Reads { name: "not cached: 4 KiB, at random, 32 at a time", len: 4096, count: 4000, depth: 32, random: true },
        true,
    ),
    (
        Reads { name: "not cached: 4 MiB, in order, 4 at a time", len: 4 << 20, count: 16, depth: 4, random: false },
        true,
    ),
];

pub(super) fn run(runtime: &Runtime, dir: &Path, rounds: usize, metrics: &mut Vec<Metric>) -> Result<()> {
    let dir = tempfile::tempdir_in(dir)?;
    let store = StoreDir::create(&dir.path().join("store"))?;
    let digest = store.publish_bytes(&contents())?.digest;
    let file = store.open_blob(&digest, SIZE)?;
    let threads = LocalBlobs::with_engine(store.clone(), Engine::Threads);
    let ring = LocalBlobs::with_engine(store, Engine::Ring);
    ensure!(ring.engine() == Engine::Ring, "the kernel gives no io_uring");
    file.sync_all()?;
    for (reads, cold) in &WORKLOADS {
        progress(reads.name);
        let places = reads.places();
        let settle = || if *cold { fadvise(&file, 0, None, Advice::DontNeed) } else { Ok(()) };
        let (mut by_threads, mut by_ring) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            settle()?;
            let began = Instant::now();
            let mut buffer = vec![0; usize::try_from(reads.len)?];
            for &at in &places {
                file.read_exact_at(&mut buffer, at)?;
            }
            let bare = began.elapsed().as_secs_f64();
            settle()?;
            by_threads.push(bare / runtime.block_on(reads.through(&threads, &digest, &places))?);
            settle()?;
            by_ring.push(bare / runtime.block_on(reads.through(&ring, &digest, &places))?);
        }
        for (ratios, peer) in [(by_threads, "threads over bare preads"), (by_ring, "io_uring over bare preads")] {
            metrics.push(Metric::spread(reads.name, Spread::of(ratios), "x", Better::Higher).peer(peer));
        }
    }
    Ok(())
}
