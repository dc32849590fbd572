//! Reading, dropping, finding again.

use super::backend::{Backend, Mode};
use super::support::{Bench, CHUNK, config, contents, read, table, until};
use crate::cache::{CacheConfig, CacheError, ChunkCache, TryRead};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const LEN: usize = 100 * 4096 + 77;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_read_is_there_and_read_again_without_the_store() {
    let dir = tempfile::tempdir().unwrap();
    let (backend, bytes) = (Backend::new(), contents(LEN, 1));
    let digest = backend.add(bytes.clone());
    let cache = ChunkCache::open(config(dir.path()), backend.clone()).unwrap();
    let blob = cache.blob(digest, LEN as u64, table(&bytes)).unwrap();
    let mut small = [0; 10];
    assert_eq!(blob.try_read_at(5000, &mut small).unwrap(), TryRead::WouldWait);
    read(&blob, &bytes, 5000..5010).await;
    assert_eq!(backend.asked(), std::slice::from_ref(&(CHUNK..2 * CHUNK)));
    assert_eq!(blob.try_read_at(5000, &mut small).unwrap(), TryRead::Done);
    assert_eq!(small, bytes[5000..5010]);
    // All of it: requests of 16 chunks, at multiples of that, around what is there.
    read(&blob, &bytes, 0..LEN).await;
    let mut asked = backend.asked();
    asked.sort_by_key(|range| range.start);
    assert_eq!(asked.len(), 8, "{asked:?}");
    assert_eq!((asked[0].clone(), asked[1].clone()), (0..CHUNK, 2 * CHUNK..16 * CHUNK));
    assert_eq!(blob.cached_bytes(), LEN as u64);
    // Not beyond the end, and nothing is nothing.
    assert!(matches!(blob.try_read_at(LEN as u64, &mut [0]), Err(CacheError::OutOfRange { .. })));
    assert!(matches!(blob.read_at(u64::MAX, &mut [0]).await, Err(CacheError::OutOfRange { .. })));
    blob.read_at(LEN as u64, &mut []).await.unwrap();
    drop((blob, cache));

    // After a proper end it is there again, with the store down, and no CRC is compared.
    backend.set(Mode::Refuse);
    let cache = ChunkCache::open(config(dir.path()), backend.clone()).unwrap();
    let blob = cache.blob(digest, LEN as u64, table(&bytes)).unwrap();
    read(&blob, &bytes, 0..LEN).await;
    assert_eq!(backend.asked(), []);
    let located = blob.locate(4096..10_000).unwrap().unwrap();
    let mut there = vec![0; 10_000 - 4096];
    rustix::io::pread(located.descriptor().unwrap(), &mut there, located.offset()).unwrap();
    assert_eq!(there, bytes[4096..10_000]);
    drop(located);
    // What a reader finds wrong is fetched again.
    assert_eq!(blob.drop_range(4096..4097), 1);
    assert!(blob.locate(4096..4097).unwrap().is_none());
    backend.set(Mode::Well);
    read(&blob, &bytes, 0..LEN).await;
    assert_eq!(backend.asked(), std::slice::from_ref(&(CHUNK..2 * CHUNK)));
    cache.close();
    assert!(matches!(blob.try_read_at(0, &mut [0]), Err(CacheError::Closed { .. })));
    assert!(matches!(cache.blob(digest, 1, None), Err(CacheError::Closed { .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_on_disk_only_is_waited_for_by_the_ring() {
    // Not a tmpfs, whose files are nowhere but in memory.
    let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let (backend, bytes) = (Backend::new(), contents(LEN, 8));
    let digest = backend.add(bytes.clone());
    let cache = ChunkCache::open(config(dir.path()), backend.clone()).unwrap();
    let blob = cache.blob(digest, LEN as u64, table(&bytes)).unwrap();
    read(&blob, &bytes, 0..LEN).await;
    assert!(cache.sync());
    backend.asked();
    for round in 0..3 {
        let located = blob.locate(0..1).unwrap().unwrap();
        rustix::fs::fadvise(located.descriptor().unwrap(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
        drop(located);
        let mut readers = tokio::task::JoinSet::new();
        for n in 0..64 {
            let (blob, bytes) = (blob.clone(), bytes.clone());
            let start = (n * 6007 + round) % LEN;
            readers.spawn(async move { read(&blob, &bytes, start..LEN.min(start + 9000)).await });
        }
        readers.join_all().await;
        read(&blob, &bytes, 0..LEN).await;
    }
    assert_eq!(backend.asked(), []);
    assert_eq!(cache.metrics().value("dsec_cache_local_corruptions_total"), Some(0));
}

#[test]
fn threads_of_no_runtime_read_too() {
    let dir = tempfile::tempdir().unwrap();
    let (backend, bytes) = (Backend::new(), contents(LEN, 2));
    let digest = backend.add(bytes.clone());
    backend.set(Mode::Slow(Duration::from_millis(5)));
    let cache = ChunkCache::open(config(dir.path()), backend.clone()).unwrap();
    let blob = cache.blob(digest, LEN as u64, None).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut buffer = vec![0; LEN];
                blob.read_at_blocking(0, &mut buffer).unwrap();
                assert!(buffer == bytes);
            });
        }
    });
    // Eight readers, and each chunk once.
    let asked: u64 = backend.asked().iter().map(|range| range.end - range.start).sum();
    assert_eq!(asked, LEN as u64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_length_is_another_blob_and_mixes_with_nothing() {
    let (backend, bytes) = (Backend::new(), contents(LEN, 3));
    let digest = backend.add(bytes.clone());
    let bench = Bench::new(config(Path::new("x")), &backend);
    let right = bench.blob(digest, LEN as u64, None);
    let short = bench.blob(digest, 5000, None);
    let long = bench.blob(digest, LEN as u64 + 5000, None);
    let mut buffer = vec![0; 5000];
    short.read_at(0, &mut buffer).await.unwrap();
    assert_eq!(buffer, bytes[..5000]);
    assert!(long.read_at(LEN as u64, &mut buffer).await.unwrap_err().is_corrupt());
    read(&right, &bytes, 0..LEN).await;
    let huge = crate::cache::format::BlobKey { digest, size: u64::MAX };
    assert!(matches!(bench.shared.hold(huge), Err(CacheError::TooLarge { .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_that_comes_later_is_heard() {
    let (backend, bytes) = (Backend::new(), contents(LEN, 4));
    let digest = backend.add(bytes.clone());
    let bench = Bench::new(config(Path::new("x")), &backend);
    backend.set(Mode::Corrupt);
    let unchecked = bench.blob(digest, LEN as u64, None);
    let mut buffer = vec![0; LEN];
    unchecked.read_at(0, &mut buffer).await.unwrap();
    assert!(buffer != bytes, "nobody could tell");
    assert!(bench.shared.flush());
    backend.set(Mode::Well);
    let checked = bench.blob(digest, LEN as u64, table(&bytes));
    read(&checked, &bytes, 0..LEN).await;
    assert!(bench.shared.end());
    backend.asked();
    // The index knows what was checked.
    let again = Bench::on(config(Path::new("x")), &backend, &bench.disk.disk.after_cut(0), bench.index.after_crash(0));
    let blob = again.blob(digest, LEN as u64, table(&bytes));
    read(&blob, &bytes, 0..LEN).await;
    assert_eq!(backend.asked(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequential_reader_is_read_ahead_for_within_the_budget() {
    let (backend, bytes) = (Backend::new(), contents(400 * 4096, 5));
    let digest = backend.add(bytes.clone());
    let config = CacheConfig { read_ahead: 64 * CHUNK, read_ahead_budget: 64 * CHUNK, ..config(Path::new("x")) };
    let bench = Bench::new(config, &backend);
    let blob = bench.blob(digest, bytes.len() as u64, table(&bytes));
    let mut waited = 0;
    for at in (0..bytes.len()).step_by(1024) {
        let mut buffer = [0; 1024];
        if blob.try_read_at(at as u64, &mut buffer).unwrap() == TryRead::WouldWait {
            waited += 1;
            read(&blob, &bytes, at..at + 1024).await;
        }
        let ahead = || bench.shared.ahead.load(std::sync::atomic::Ordering::Relaxed);
        assert!(ahead() <= 64 * CHUNK);
        until("fetching ahead", || ahead() == 0).await;
    }
    assert!(waited <= 3, "{waited} of 1600 reads had to wait");
    let asked: u64 = backend.asked().iter().map(|range| range.end - range.start).sum();
    assert_eq!(asked, bytes.len() as u64, "nothing twice");
    assert_eq!(bench.shared.ahead.load(std::sync::atomic::Ordering::Relaxed), 0);
    assert!(bench.count("dsec_cache_readahead_bytes_total") > bytes.len() as u64 * 9 / 10);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefetch_and_warm_up_fetch_what_is_missing_and_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let (backend, bytes) = (Backend::new(), contents(LEN, 6));
    let digest = backend.add(bytes.clone());
    let cache = ChunkCache::open(config(dir.path()), backend.clone()).unwrap();
    let blob = cache.blob(digest, LEN as u64, table(&bytes)).unwrap();
    assert_eq!(blob.prefetch(&[0..1, 8192..8193]).await.unwrap(), 2 * CHUNK);
    assert_eq!(blob.prefetch(std::slice::from_ref(&(0..4 * CHUNK))).await.unwrap(), 2 * CHUNK);
    let list = crate::cache::warm::parse(&format!("{digest} {LEN}\nsha256:{} 10", "0".repeat(64))).unwrap();
    let report = cache.warm(&list, |_| table(&bytes)).await;
    assert_eq!((report.blobs, report.bytes), (1, LEN as u64 - 4 * CHUNK));
    assert_eq!(report.failed.len(), 1);
    backend.asked();
    read(&blob, &bytes, 0..LEN).await;
    assert_eq!(backend.asked(), []);
    assert!(Arc::strong_count(&backend) > 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_pinned_stays_and_goes_when_it_is_let_go() {
    let (backend, bytes) = (Backend::new(), contents(256 * 4096, 9));
    let digest = backend.add(bytes.clone());
    let small = CacheConfig { capacity: 256 * CHUNK, high_percent: 50, low_percent: 1, ..config(Path::new("x")) };
    let bench = Bench::new(small, &backend);
    let blob = bench.blob(digest, bytes.len() as u64, table(&bytes));
    // The second of four groups, by a part of it, and twice.
    blob.pin(70 * CHUNK..71 * CHUNK).unwrap();
    blob.pin(64 * CHUNK..65 * CHUNK).unwrap();
    for pins in [2, 1, 0] {
        read(&blob, &bytes, 0..bytes.len()).await;
        assert!(bench.shared.flush());
        // Several rounds, since what was read again has more than one turn.
        for _ in 0..5 {
            bench.shared.relieve();
        }
        let left = if pins > 0 { 64 * CHUNK } else { 0 };
        assert_eq!(blob.cached_bytes(), left, "with {pins} pins");
        blob.unpin(70 * CHUNK..71 * CHUNK).unwrap();
    }
    assert!(bench.count("dsec_cache_evictions_put_off_total") > 0);
    assert!(matches!(blob.pin(0..u64::MAX), Err(CacheError::OutOfRange { .. })));
}

#[test]
fn a_row_of_small_reads_is_one_touch() {
    let group = crate::cache::group::Group::default();
    group.cold(7);
    (0..100).for_each(|_| group.touch(7));
    assert_eq!(group.heat(), 0);
    (8..20).for_each(|epoch| group.touch(epoch));
    assert_eq!(group.heat(), 3);
    group.cool();
    assert_eq!(group.heat(), 2);
}
