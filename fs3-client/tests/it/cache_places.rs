//! The chunk cache on file systems of several kinds, and on one that is full.

use super::cache::{blobs, config};
use fixtures::{mounts, require};
use fs3_client::{CacheConfig, ChunkCache, TryRead};
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Reads, evictions, an end, a start: what was kept is there again, and all of it is right.
fn it_works_in(dir: &Path) {
    let blobs = blobs();
    let mut evicted = 0;
    for round in 0..3 {
        let cache = ChunkCache::open(config(dir), blobs.store.clone()).unwrap();
        let open = blobs.open(&cache);
        let there: u64 = open.iter().map(fs3_client::CachedBlob::cached_bytes).sum();
        assert_eq!(there > 1 << 20, round > 0, "{there} bytes are there in round {round}");
        std::thread::scope(|scope| {
            for reader in 0..3 {
                let (blobs, open) = (&blobs, &open);
                let mut left = 150;
                let go_on = move || {
                    left -= 1;
                    left > 0
                };
                scope.spawn(move || blobs.read(open, round * 10 + reader, go_on));
            }
        });
        assert!(cache.sync());
        let metrics = cache.metrics();
        evicted += metrics.value("dsec_cache_evicted_groups_total").unwrap();
        for name in
            ["dsec_cache_write_errors_total", "dsec_cache_local_corruptions_total", "dsec_cache_index_errors_total"]
        {
            assert_eq!(metrics.value(name), Some(0), "{}", metrics.render());
        }
    }
    assert!(evicted > 0, "there was room for all");
}

#[test]
fn privileged_z07_it_works_on_overlayfs() {
    if !require::root() {
        return;
    }
    let place = mounts::tmpfs(256 << 20).unwrap();
    let [lower, upper, work] = ["lower", "upper", "work"].map(|name| place.path().join(name));
    for path in [&lower, &upper, &work] {
        std::fs::create_dir(path).unwrap();
    }
    let mounted = mounts::overlay(&[&lower], Some((&upper, &work))).unwrap();
    it_works_in(&mounted.path().join("cache"));
}

/// A file system in a file, mounted.
struct InAFile(tempfile::TempDir);

impl InAFile {
    fn xfs() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        File::create(&image).unwrap().set_len(400 << 20).unwrap();
        let mkfs = require::tool("mkfs.xfs", "xfsprogs");
        run(Command::new(mkfs).args(["-q", "-m", "reflink=1"]).arg(&image));
        let at = dir.path().join("at");
        std::fs::create_dir(&at).unwrap();
        run(Command::new(require::tool("mount", "mount")).args(["-o", "loop"]).arg(&image).arg(at));
        Self(dir)
    }
}

impl Drop for InAFile {
    fn drop(&mut self) {
        run(Command::new("umount").arg(self.0.path().join("at")));
    }
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn privileged_z07_it_works_on_xfs() {
    if !require::root() {
        return;
    }
    let mounted = InAFile::xfs();
    it_works_in(&mounted.0.path().join("at/cache"));
}

/// Takes all that is left on a file system.
fn fill(path: &Path) {
    let mut file = File::create(path).unwrap();
    let mut piece = vec![0xee; 1 << 20];
    while !piece.is_empty() {
        if file.write_all(&piece).is_err() {
            piece.truncate(piece.len() / 2);
        }
    }
}

#[test]
fn privileged_a_full_file_system_passes_through_and_is_used_again_when_there_is_room() {
    if !require::root() {
        return;
    }
    let mounted = mounts::tmpfs(48 << 20).unwrap();
    let (blobs, dir) = (blobs(), mounted.path().join("cache"));
    let config = CacheConfig { flush_every: Duration::from_millis(20), ..config(&dir) };
    let cache = ChunkCache::open(config.clone(), blobs.store.clone()).unwrap();
    let open = blobs.open(&cache);
    let some = |seed: u64, mut left: u32| {
        blobs.read(&open, seed, || {
            left -= 1;
            left > 0
        });
    };
    some(1, 30);
    let filler = mounted.path().join("filler");
    for round in 0..3 {
        fill(&filler);
        // Full, for the data and for the index: each of these reads is right.
        some(10 + round, 200);
        let passed = cache.metrics().value("dsec_cache_passed_through_chunks_total").unwrap();
        assert!(passed > 0, "{}", cache.metrics().render());
        std::fs::remove_file(&filler).unwrap();
        // And there is room: what is read is kept again.
        let began = Instant::now();
        loop {
            some(20 + round, 20);
            let mut byte = [0];
            open[0].read_at_blocking(5, &mut byte).unwrap();
            if cache.sync() && open[0].try_read_at(5, &mut byte).unwrap() == TryRead::Done {
                break;
            }
            assert!(began.elapsed() < Duration::from_secs(30), "{}", cache.metrics().render());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    drop((open, cache));
    // It is whole: a start, and reads.
    let cache = ChunkCache::open(config, blobs.store.clone()).unwrap();
    blobs.read(&blobs.open(&cache), 99, {
        let mut left = 100;
        move || {
            left -= 1;
            left > 0
        }
    });
}
