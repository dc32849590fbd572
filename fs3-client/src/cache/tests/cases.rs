//! Cases Z01 to Z09 of what caches have got wrong elsewhere.

use super::backend::{Backend, Mode};
use super::support::{Bench, CHUNK, config, contents, read, table, until};
use crate::Medium as _;
use crate::blob_store::deadline::Limits;
use crate::blob_store::retry::Policy;
use crate::cache::{CacheConfig, CacheError, ChunkCache, TryRead};
use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const LEN: usize = 200 * 4096 + 1234;

fn blob(seed: u64) -> (std::sync::Arc<Backend>, Vec<u8>, crate::Digest) {
    let (backend, bytes) = (Backend::new(), contents(LEN, seed));
    let digest = backend.add(bytes.clone());
    (backend, bytes, digest)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn z01_a_short_read_is_never_filled_up() {
    let (backend, bytes, digest) = blob(1);
    for table in [None, table(&bytes)] {
        let bench = Bench::new(config(Path::new("x")), &backend);
        let blob = bench.blob(digest, LEN as u64, table);
        // Short, and the rest when it is tried again.
        backend.set(Mode::ShortFor(2));
        read(&blob, &bytes, 100..200).await;
        // Short for good, with and without the store's saying so.
        for mode in [Mode::Short, Mode::EndsEarly] {
            backend.set(mode);
            let error = blob.read_at(0, &mut vec![0; LEN]).await.unwrap_err();
            assert!(error.is_corrupt(), "{error}");
            assert_eq!(blob.cached_bytes(), CHUNK, "what came is not kept");
            // What is there is read on.
            read(&blob, &bytes, 0..4096).await;
        }
        backend.set(Mode::Well);
        read(&blob, &bytes, 0..LEN).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn z02_an_eviction_that_stops_half_way_leaves_a_miss() {
    let (backend, bytes, digest) = blob(2);
    let small = CacheConfig { capacity: 70 * CHUNK, high_percent: 90, low_percent: 1, ..config(Path::new("x")) };
    let mut cuts = 0;
    for cut in 0..40 {
        let bench = Bench::new(small.clone(), &backend);
        let blob = bench.blob(digest, LEN as u64, None);
        for start in (0..66).step_by(2) {
            read(&blob, &bytes, start * 4096..(start + 1) * 4096).await;
            read(&blob, &bytes, (start + 1) * 4096..(start + 2) * 4096).await;
        }
        assert!(bench.shared.flush());
        let before = bench.disk.disk.operations();
        bench.disk.disk.cut_at(before + cut);
        bench.shared.relieve();
        bench.shared.flush();
        cuts += u64::from(!bench.disk.disk.has_power());
        // Without a restart: right, or an error of the store, which is up.
        read(&blob, &bytes, 0..70 * 4096).await;
        // And after one, whatever became of what was not synced.
        for seed in 0..4 {
            let again =
                Bench::on(small.clone(), &backend, &bench.disk.disk.after_cut(seed), bench.index.after_crash(seed));
            read(&again.blob(digest, LEN as u64, None), &bytes, 0..LEN).await;
        }
    }
    assert!(cuts >= 2, "the power was cut in {cuts} evictions");
    // The index fails in the middle: nothing is punched.
    let bench = Bench::new(small, &backend);
    let blob = bench.blob(digest, LEN as u64, None);
    read(&blob, &bytes, 0..66 * 4096).await;
    assert!(bench.shared.flush());
    bench.index.broken.store(true, Ordering::Relaxed);
    let before = bench.disk.disk.operations();
    bench.shared.relieve();
    assert_eq!(bench.disk.disk.operations(), before, "a hole for what the index still has");
    read(&blob, &bytes, 0..LEN).await;
    let again = Bench::on(config(Path::new("x")), &backend, &bench.disk.disk.after_cut(1), bench.index.after_crash(0));
    read(&again.blob(digest, LEN as u64, None), &bytes, 0..LEN).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn z03_an_answer_to_another_question_is_not_cached() {
    // That a server's answer is for the range is the backends' to see (see the registry's and S3's tests). A store that
    // lets one through gives another number of bytes, or wrong ones.
    let (backend, bytes, digest) = blob(3);
    let bench = Bench::new(config(Path::new("x")), &backend);
    let blob = bench.blob(digest, LEN as u64, table(&bytes));
    for mode in [Mode::Whole, Mode::Shifted] {
        backend.set(mode);
        let error = blob.read_at(65_536, &mut [0; 100]).await.unwrap_err();
        assert!(error.is_corrupt(), "{error}");
        assert_eq!(blob.cached_bytes(), 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn z04_what_is_corrupt_is_tried_a_bounded_number_of_times() {
    let (backend, bytes, digest) = blob(4);
    let dir = tempfile::tempdir().unwrap();
    let cache = ChunkCache::open(config(dir.path()), backend.clone()).unwrap();
    let blob = cache.blob(digest, LEN as u64, table(&bytes)).unwrap();
    read(&blob, &bytes, 0..10 * 4096).await;
    // The cached chunk is corrupt: its reader sees it, drops it, and it heals.
    let (above, name) = crate::cache::format::BlobKey { digest, size: LEN as u64 }.file();
    let file = fs::File::options().write(true).open(dir.path().join("blobs").join(above).join(name)).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0; 100], 5000).unwrap();
    let mut buffer = vec![0; 4096];
    blob.read_at(4096, &mut buffer).await.unwrap();
    assert_ne!(buffer, bytes[4096..8192]);
    assert_eq!(blob.drop_range(4096..8192), 1);
    read(&blob, &bytes, 0..10 * 4096).await;
    // And at its origin: an error after three tries, and the chunks beside it are right.
    *backend.rotten.lock().unwrap() = Some(50 * 4096 + 7);
    backend.asked();
    let error = blob.read_at(48 * 4096, &mut vec![0; 4 * 4096]).await.unwrap_err();
    assert!(matches!(error, CacheError::Corrupt { tries: 3, start: 204_800, .. }), "{error}");
    let bad = backend.asked().into_iter().filter(|range| range.contains(&(50 * 4096 + 7))).count();
    assert!(bad <= 4, "{bad} requests for the corrupt chunk");
    for chunk in [48, 49, 51] {
        read(&blob, &bytes, chunk * 4096..(chunk + 1) * 4096).await;
    }
    assert!(cache.metrics().value("dsec_cache_store_corruptions_total").unwrap() >= 4);
    // The store is down for longer than anybody waits: a bounded number of tries, then an error.
    backend.set(Mode::Refuse);
    backend.asked();
    let error = blob.read_at(100 * 4096, &mut buffer).await.unwrap_err();
    assert!(error.is_transient(), "{error}");
    assert_eq!(backend.asked().len(), 3);
    assert_eq!(cache.metrics().value("dsec_cache_store_retries_total"), Some(2));
}

#[test]
fn z05_foreign_folders_stay_and_a_second_owner_is_refused() {
    let (backend, bytes, digest) = blob(5);
    let dir = tempfile::tempdir().unwrap();
    let theirs = ["README", "other/blobs/x", "blobs/ab/notes.txt", "blobs/zz/deep/file", "blobs/ab/0123-5"];
    let cache = ChunkCache::open(config(dir.path()), backend.clone()).unwrap();
    let second = ChunkCache::open(config(dir.path()), backend.clone()).unwrap_err();
    assert!(matches!(second, CacheError::InUse { .. }), "{second}");
    assert!(
        second.to_string().contains(&format!("in use by another process (pid {})", std::process::id())),
        "{second}"
    );
    let held = cache.blob(digest, LEN as u64, None).unwrap();
    held.read_at_blocking(0, &mut [0; 1]).unwrap();
    drop(cache);
    // Somebody still holds a blob, so nobody else may punch its file.
    assert!(matches!(ChunkCache::open(config(dir.path()), backend.clone()), Err(CacheError::InUse { .. })));
    drop(held);
    for name in theirs {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, name).unwrap();
    }
    for _ in 0..2 {
        let cache = ChunkCache::open(config(dir.path()), backend.clone()).unwrap();
        let blob = cache.blob(digest, LEN as u64, None).unwrap();
        let mut buffer = vec![0; LEN];
        blob.read_at_blocking(0, &mut buffer).unwrap();
        assert!(buffer == bytes);
    }
    for name in theirs {
        assert_eq!(fs::read_to_string(dir.path().join(name)).unwrap(), name);
    }
    // A directory that has our names and is not ours, and one of another kind.
    let foreign = tempfile::tempdir().unwrap();
    fs::create_dir(foreign.path().join("blobs")).unwrap();
    let error = ChunkCache::open(config(foreign.path()), backend.clone()).unwrap_err();
    assert!(error.to_string().contains("somebody else's"), "{error}");
    let other = CacheConfig { chunk: 8192, max_request: 8192, ..config(dir.path()) };
    let error = ChunkCache::open(other, backend.clone()).unwrap_err();
    assert!(error.to_string().contains("made for chunks of 4096 bytes"), "{error}");
    fs::write(dir.path().join("dsec-cache.json"), r#"{"format":9,"chunk":4096}"#).unwrap();
    let error = ChunkCache::open(config(dir.path()), backend).unwrap_err();
    assert!(error.to_string().contains("of format 9"), "{error}");
}

#[test]
fn z06_it_starts_while_the_store_is_down() {
    let (backend, bytes, digest) = blob(6);
    let dir = tempfile::tempdir().unwrap();
    let open = || ChunkCache::open(config(dir.path()), backend.clone()).unwrap();
    open().blob(digest, LEN as u64, None).unwrap().read_at_blocking(0, &mut vec![0; 40 * 4096]).unwrap();
    backend.set(Mode::Refuse);
    let cache = open();
    let blob = cache.blob(digest, LEN as u64, None).unwrap();
    let mut buffer = vec![0; 40 * 4096];
    blob.read_at_blocking(0, &mut buffer).unwrap();
    assert!(buffer == bytes[..40 * 4096]);
    assert!(blob.read_at_blocking(50 * 4096, &mut [0; 9]).unwrap_err().is_transient());
    let nobody_has_it = cache.blob(crate::Digest::of(b"?"), 9, None).unwrap();
    assert!(nobody_has_it.read_at_blocking(0, &mut [0; 9]).is_err());
    backend.set(Mode::Well);
    let mut buffer = vec![0; LEN];
    blob.read_at_blocking(0, &mut buffer).unwrap();
    assert!(buffer == bytes);
}

#[test]
fn z07_it_works_on_tmpfs() {
    let (backend, bytes, digest) = blob(7);
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let small = CacheConfig { capacity: 150 * CHUNK, flush_every: Duration::from_millis(5), ..config(dir.path()) };
    let mut evicted = 0;
    for round in 0..3 {
        let cache = ChunkCache::open(small.clone(), backend.clone()).unwrap();
        let blob = cache.blob(digest, LEN as u64, table(&bytes)).unwrap();
        let mut buffer = vec![0; 4096];
        for step in 0..400 {
            let at = (step * 37 + round) % 200 * 4096;
            blob.read_at_blocking(at as u64, &mut buffer).unwrap();
            assert!(buffer == bytes[at..at + 4096]);
            if step % 50 == 0 {
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        evicted += cache.metrics().value("dsec_cache_evicted_groups_total").unwrap();
    }
    assert!(evicted > 0, "there was room for all");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn z08_merged_requests_give_each_its_bytes() {
    let (backend, bytes, digest) = blob(8);
    let bench = Bench::new(CacheConfig { requests: 1, ..config(Path::new("x")) }, &backend);
    let blob = bench.blob(digest, LEN as u64, table(&bytes));
    let same = bench.blob(digest, LEN as u64, None);
    // One request is under way, and holds the only turn; the others wait, and become few.
    backend.set(Mode::Slow(Duration::from_millis(100)));
    let mut readers = tokio::task::JoinSet::new();
    for chunk in (0..201).rev() {
        let (blob, bytes) = (if chunk % 2 == 0 { blob.clone() } else { same.clone() }, bytes.clone());
        readers.spawn(async move {
            let end = LEN.min((chunk + 1) * 4096);
            read(&blob, &bytes, chunk * 4096..end).await;
        });
    }
    until("all waiting", || bench.shared.metrics.misses.value() == 201).await;
    readers.join_all().await;
    let asked = backend.asked();
    assert!(asked.len() <= 20, "{} requests for 201 chunks that are neighbours", asked.len());
    assert!(bench.count("dsec_cache_merged_chunks_total") > 150);
    // A file with another name is another blob, whatever is in it.
    let mut other = bytes.clone();
    other[0] ^= 1;
    let other_digest = backend.add(other.clone());
    read(&bench.blob(other_digest, LEN as u64, None), &other, 0..4097).await;
    read(&blob, &bytes, 0..4097).await;
    // From the first byte, the last, and across.
    for range in [0..1, LEN - 1..LEN, 4095..4097, 63 * 4096..65 * 4096, 0..LEN] {
        read(&same, &bytes, range).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn z09_prefetch_gives_up_quietly() {
    let backend = Backend::new();
    let bytes = contents(1000 * 4096, 9);
    let (digest, all) = (backend.add(bytes.clone()), 0..1000 * CHUNK);
    let bench = Bench::new(config(Path::new("x")), &backend);
    let blob = bench.blob(digest, bytes.len() as u64, table(&bytes));
    backend.set(Mode::Refuse);
    for _ in 0..10 {
        assert!(blob.prefetch(std::slice::from_ref(&all)).await.unwrap_err().is_transient());
    }
    let asked = backend.asked().len();
    // 63 requests would be 189 attempts, ten times over 1,890. As many as begin at once may fail before two have told.
    assert!(asked <= 3 * (bench.shared.config.background_requests + 2), "{asked} attempts");
    assert!(bench.count("dsec_cache_background_given_up_total") > 0);
    // Who wants the bytes is not kept from trying.
    backend.set(Mode::Well);
    read(&blob, &bytes, 0..4096).await;
    // After its pause the prefetch goes on by itself.
    while blob.prefetch(std::slice::from_ref(&all)).await.is_err() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(blob.cached_bytes(), 1000 * CHUNK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_hangs_costs_the_deadline_and_what_is_cached_goes_on() {
    let (backend, bytes, digest) = blob(10);
    let quick = CacheConfig {
        deadline: Duration::from_millis(300),
        attempt: Limits { request: Duration::from_secs(60), rate: 1 << 30 },
        retry: Policy::once(),
        requests: 2,
        ..config(Path::new("x"))
    };
    let bench = Bench::new(quick, &backend);
    let blob = bench.blob(digest, LEN as u64, None);
    read(&blob, &bytes, 0..4096).await;
    backend.set(Mode::Hang);
    let began = Instant::now();
    let mut readers = tokio::task::JoinSet::new();
    for chunk in 1..200u64 {
        let blob = blob.clone();
        readers.spawn(async move { blob.read_at(chunk * CHUNK, &mut [0; 100]).await.unwrap_err() });
    }
    let mut buffer = [0; 4096];
    for _ in 0..100 {
        assert_eq!(blob.try_read_at(0, &mut buffer).unwrap(), TryRead::Done);
        assert_eq!(buffer, bytes[..4096]);
    }
    for error in readers.join_all().await {
        assert!(matches!(error, CacheError::TimedOut { .. }), "{error}");
    }
    // Those that waited for their turn too.
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    backend.set(Mode::Well);
    read(&blob, &bytes, 0..LEN).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_goes_away_cancels_nothing() {
    let (backend, bytes, digest) = blob(11);
    let bench = Bench::new(config(Path::new("x")), &backend);
    let blob = bench.blob(digest, LEN as u64, None);
    backend.set(Mode::Slow(Duration::from_millis(50)));
    let leader = tokio::spawn({
        let blob = blob.clone();
        async move { blob.read_at(0, &mut [0; 4096]).await }
    });
    until("the leader's request", || bench.count("dsec_cache_in_flight_requests") == 1).await;
    let follower = tokio::spawn({
        let (blob, bytes) = (blob.clone(), bytes.clone());
        async move { read(&blob, &bytes, 0..4096).await }
    });
    until("the follower", || bench.count("dsec_cache_joined_chunks_total") == 1).await;
    leader.abort();
    follower.await.unwrap();
    assert_eq!(backend.asked().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_passes_through() {
    let (backend, bytes, digest) = blob(12);
    let bench = Bench::new(config(Path::new("x")), &backend);
    let blob = bench.blob(digest, LEN as u64, table(&bytes));
    bench.disk.disk.limit(Some(20 * CHUNK));
    read(&blob, &bytes, 0..LEN).await;
    assert!(bench.count("dsec_cache_write_errors_total") > 0);
    assert!(bench.count("dsec_cache_passed_through_chunks_total") >= 180);
    assert!(blob.cached_bytes() <= 20 * CHUNK);
    // Room again: kept again, after a while.
    bench.disk.disk.limit(None);
    bench.shared.full_until.store(0, Ordering::Relaxed);
    read(&blob, &bytes, 0..LEN).await;
    assert_eq!(blob.cached_bytes(), LEN as u64);
    // And less than is to stay free: nothing is added, and what is there goes.
    *bench.disk.free.lock().unwrap() = 0;
    let other = contents(LEN, 13);
    let other_digest = backend.add(other.clone());
    read(&bench.blob(other_digest, LEN as u64, None), &other, 0..LEN).await;
    assert_eq!(bench.shared.used(), LEN as u64);
    assert!(bench.shared.flush());
    bench.shared.relieve();
    assert_eq!(bench.shared.used(), 0);
    read(&blob, &bytes, 0..LEN).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_deadline_is_the_reads_and_not_each_requests() {
    let (backend, _, digest) = blob(14);
    let quick = CacheConfig { deadline: Duration::from_millis(400), requests: 1, ..config(Path::new("x")) };
    let bench = Bench::new(quick, &backend);
    let blob = bench.blob(digest, LEN as u64, None);
    // Thirteen requests, one at a time: each comes in time, and together they take nearly two seconds.
    backend.set(Mode::Slow(Duration::from_millis(150)));
    let began = Instant::now();
    let error = blob.read_at(0, &mut vec![0; LEN]).await.unwrap_err();
    assert!(matches!(error, CacheError::TimedOut { .. }), "{error}");
    assert!(began.elapsed() < Duration::from_millis(1500), "{:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_fails_or_loses_bytes_costs_a_fetch_and_no_read() {
    let (backend, bytes, digest) = blob(15);
    let bench = Bench::new(config(Path::new("x")), &backend);
    let blob = bench.blob(digest, LEN as u64, table(&bytes));
    read(&blob, &bytes, 0..LEN).await;
    assert!(bench.shared.flush());
    backend.asked();
    bench.disk.disk.fail_reads(1);
    read(&blob, &bytes, 100..200).await;
    assert_eq!(backend.asked(), std::slice::from_ref(&(0..CHUNK)), "what could not be read is fetched again");
    // Somebody cut the file.
    let name = bench.disk.disk.names().remove(0);
    bench.disk.disk.open(&name).set_len(LEN as u64 / 2).unwrap();
    read(&blob, &bytes, 0..LEN).await;
    assert!(bench.count("dsec_cache_local_corruptions_total") > 100);
    assert!(bench.shared.flush());
    backend.asked();
    read(&blob, &bytes, 0..LEN).await;
    assert_eq!(backend.asked(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_capacity_holds_however_many_write_at_once() {
    let (backend, bytes, digest) = blob(16);
    let small = CacheConfig { capacity: 50 * CHUNK, max_request: CHUNK, ..config(Path::new("x")) };
    let bench = Bench::new(small, &backend);
    let blob = bench.blob(digest, LEN as u64, None);
    backend.set(Mode::Slow(Duration::from_millis(2)));
    let mut readers = tokio::task::JoinSet::new();
    for chunk in 0..200 {
        let (blob, bytes) = (blob.clone(), bytes.clone());
        readers.spawn(async move { read(&blob, &bytes, chunk * 4096..(chunk + 1) * 4096).await });
    }
    readers.join_all().await;
    assert_eq!(blob.cached_bytes(), 50 * CHUNK, "as much as there may be, and no more");
    assert_eq!(bench.shared.used(), 50 * CHUNK);
    assert_eq!(bench.count("dsec_cache_passed_through_chunks_total"), 150);
}
