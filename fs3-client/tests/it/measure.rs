//! Not tests: what reads cost, as ratios inside one run. They print, and nothing fails.
//!
//! ```text
//! cargo test --release -p fs3-client --test it -- --ignored --nocapture measure::
//! ```

use bytes::Bytes;
use fs3_client::blob_store::local::{Engine, LocalBlobs};
use fs3_client::blob_store::usrbio::{UsrbioBlobs, UsrbioOptions};
use fs3_client::testing::conformance;
use fs3_client::{BlobStore, Digest, Rules, StoreDir};
use futures::StreamExt as _;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

const SIZE: u64 = 128 << 20;
const ROUNDS: usize = 5;

fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Places of reads, the same for all.
fn places(len: u64, count: u64, random: bool) -> Vec<u64> {
    let mut state = 1u64;
    let place = |n: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        if random { (state >> 20) % (SIZE / len) * len } else { n * len % SIZE }
    };
    (0..count).map(place).collect()
}

async fn all(blobs: &dyn BlobStore, digest: &Digest, len: u64, places: &[u64], depth: usize) -> Duration {
    let began = Instant::now();
    let reads = futures::stream::iter(places).map(|&at| blobs.read_range(digest, at..at + len));
    let mut reads = reads.buffer_unordered(depth);
    while let Some(read) = reads.next().await {
        let _: Bytes = read.unwrap();
    }
    began.elapsed()
}

fn median(mut all: Vec<Duration>) -> Duration {
    all.sort_unstable();
    all[all.len() / 2]
}

/// A directory on a disk: threads against a ring, and both against a bare `pread` of the open file.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "measures"]
async fn local_reads() {
    let dir = fixtures::mounts::scratch();
    let store = StoreDir::create(dir.path()).unwrap();
    let digest = store.publish_bytes(&conformance::contents(1, SIZE)).unwrap().digest;
    let file = store.open_blob(&digest, SIZE).unwrap();
    let threads = LocalBlobs::with_engine(store.clone(), Engine::Threads);
    let ring = LocalBlobs::with_engine(store.clone(), Engine::Ring);
    assert_eq!(ring.engine(), Engine::Ring, "no io_uring here");
    for (what, len, count, depth, random, cold) in [
        ("4 KiB random, depth 1, cached", 4096, 4000, 1, true, false),
        ("4 KiB random, depth 32, cached", 4096, 8000, 32, true, false),
        ("1 MiB sequential, depth 1, cached", 1 << 20, 128, 1, false, false),
        ("4 MiB sequential, depth 4, cached", 4 << 20, 32, 4, false, false),
        ("4 KiB random, depth 32, not cached", 4096, 4000, 32, true, true),
        ("4 MiB sequential, depth 4, not cached", 4 << 20, 32, 4, false, true),
    ] {
        let places = places(len, count, random);
        let mut times = [Vec::new(), Vec::new(), Vec::new()];
        let forget = || {
            if cold {
                file.sync_all().unwrap();
                rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
            }
        };
        for _ in 0..ROUNDS {
            forget();
            let began = Instant::now();
            let mut buffer = vec![0; usize::try_from(len).unwrap()];
            for &at in &places {
                file.read_exact_at(&mut buffer, at).unwrap();
            }
            times[0].push(began.elapsed());
            forget();
            times[1].push(all(&threads, &digest, len, &places, depth).await);
            forget();
            times[2].push(all(&ring, &digest, len, &places, depth).await);
        }
        let [bare, threads, ring] = times.map(median);
        let against = |time: Duration| bare.as_secs_f64() / time.as_secs_f64();
        let (threads, ring) = (against(threads), against(ring));
        say(&format!(
            "{what}: of a bare pread's rate: threads {threads:.2}, ring {ring:.2}; ring/threads {:.2}",
            ring / threads
        ));
    }
}

/// On the stand-in's mount (1 ms a request, 8 threads): large reads around the page cache, by threads and by a ring,
/// against buffered ones.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "measures"]
async fn mount_reads_on_the_stand_in() {
    use hf3fs_stand_in::mount::process::Daemon;
    let words = "meta-us=100 read-us=1000 write-us=100 threads=8";
    let mount = Daemon::start(&["--exact", "mount::stand_in_daemon", "--ignored"], words).unwrap();
    let store = StoreDir::create(&mount.point().join("store")).unwrap();
    let digest = store.publish_bytes(&conformance::contents(1, SIZE)).unwrap().digest;
    for (len, depth) in [(4 << 20, 1), (4 << 20, 4)] {
        let places = places(len, SIZE / len, false);
        let mut times = [Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..3 {
            let began = Instant::now();
            // Opened each time, as the others are: that drops its pages.
            for at in &places {
                let mut buffer = vec![0; usize::try_from(len).unwrap()];
                store.open_blob(&digest, SIZE).unwrap().read_exact_at(&mut buffer, *at).unwrap();
            }
            times[0].push(began.elapsed());
            for (engine, times) in [Engine::Threads, Engine::Ring].into_iter().zip(&mut times[1..]) {
                times.push(all(&LocalBlobs::with_engine(store.clone(), engine), &digest, len, &places, depth).await);
            }
        }
        let [buffered, threads, ring] = times.map(|times| median(times).as_secs_f64());
        say(&format!(
            "{} MiB sequential, depth {depth}: of a buffered pread's rate: threads {:.2}, ring {:.2}; ring/threads {:.2}",
            len >> 20,
            buffered / threads,
            buffered / ring,
            threads / ring
        ));
    }
}

/// On the stand-in of 3FS (its library; 1 ms a request, 1 GB/s): rings against what its model allows.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "measures"]
async fn usrbio_reads_on_the_stand_in() {
    let root = tempfile::tempdir_in("/dev/shm").unwrap();
    hf3fs_stand_in::plain::prepare(root.path()).unwrap();
    hf3fs_stand_in::plain::behave(root.path(), "bandwidth=1000000000").unwrap();
    let store = StoreDir::create(&root.path().join("store")).unwrap().with_rules(Rules::Fs3);
    let digest = store.publish_bytes(&conformance::contents(1, SIZE)).unwrap().digest;
    let library = Some(hf3fs_stand_in::plain::library());
    let rings = UsrbioBlobs::new(store, &UsrbioOptions { library, ..UsrbioOptions::default() });
    for (what, len, count, depth, random) in [
        ("8 MiB sequential, depth 2", 8 << 20, 16, 2, false),
        ("64 KiB random, depth 1", 64 << 10, 100, 1, true),
        ("4 KiB random, depth 1", 4096, 100, 1, true),
        ("4 KiB random, depth 32", 4096, 2000, 32, true),
    ] {
        let places = places(len, count, random);
        all(&rings, &digest, len, &places[..2], 1).await;
        let before = rings.counts().unwrap();
        let times = median(futures::future::join_all([()].map(|()| all(&rings, &digest, len, &places, depth))).await);
        let after = rings.counts().unwrap();
        let bytes = (len * count) as f64;
        // The link's time and each round's latency, were nothing else to cost time.
        let least = (bytes / 1e9).max(count as f64 / depth as f64 * (1e-3 + len as f64 / 1e9));
        say(&format!(
            "{what}: {:.2} of the least time that the model allows; {} transfers for {} reads",
            times.as_secs_f64() / least,
            after.transfers - before.transfers,
            after.reads - before.reads
        ));
    }
}
