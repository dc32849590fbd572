//! The backends on a mount that looks like one of 3FS (the stand-in's), and on a real one where `FS3_TEST_MOUNT` names a
//! directory of it.

use crate::support::QUICK;
use fixtures::require;
use fs3_client::blob_store::deadline::{Deadline, Limits};
use fs3_client::blob_store::local::{Engine, LocalBlobs};
use fs3_client::blob_store::retry::Retry;
use fs3_client::blob_store::usrbio::{ReadPath, UsrbioBlobs, UsrbioOptions};
use fs3_client::names::dir::DirNames;
use fs3_client::testing::conformance::{self, Abilities};
use fs3_client::{BlobError, BlobStore, Body, Digest, Rules, Store, StoreDir, StoreLocation, StoreOptions};
use hf3fs_stand_in::mount::process::{Daemon, serve_if_asked};
use std::path::Path;
use std::time::{Duration, Instant};

const ALL: Abilities = Abilities { delete: true, list: true, age: true, largest: 9 << 20 };

/// Not a test: the daemon that others start.
#[test]
#[ignore = "the daemon that other tests start"]
fn stand_in_daemon() {
    serve_if_asked();
}

fn mounted(words: &str) -> Daemon {
    let quick = format!("meta-us=20 read-us=50 write-us=50 threads=4 {words}");
    Daemon::start(&["--exact", "mount::stand_in_daemon", "--ignored"], &quick).expect("the stand-in")
}

fn store_on(dir: &Path) -> StoreDir {
    let store = StoreDir::create(dir).unwrap();
    assert_eq!(store.rules(), Rules::Fs3, "the mount is not known as one of 3FS");
    store
}

fn usrbio(dir: &StoreDir, deadline: Duration) -> UsrbioBlobs {
    let library = Some(hf3fs_stand_in::plain::library());
    UsrbioBlobs::new(dir.clone(), &UsrbioOptions { library, deadline, ..UsrbioOptions::default() })
}

/// A real cluster: `FS3_TEST_MOUNT` is an empty directory on its mount. The library is the real one.
#[tokio::test(flavor = "multi_thread")]
async fn a_real_mount_where_there_is_one() {
    let Some(dir) = std::env::var_os("FS3_TEST_MOUNT") else {
        require::not_run("3fs", "FS3_TEST_MOUNT names no directory on a real 3FS");
        return;
    };
    let base = Path::new(&dir).join(format!("fs3-client-test-{}", std::process::id()));
    let store = store_on(&base.join("by-mount"));
    conformance::blobs(&LocalBlobs::new(store.clone()), ALL).await;
    conformance::names(&DirNames::new(store), true).await;
    let blobs = UsrbioBlobs::new(store_on(&base.join("by-rings")), &UsrbioOptions::default());
    conformance::blobs(&blobs, ALL).await;
    assert!(matches!(blobs.path(), ReadPath::Usrbio { .. }), "only its mount was tested: {:?}", blobs.path());
    std::fs::remove_dir_all(base).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn privileged_both_ways_keep_the_contract() {
    if !require::root() {
        return;
    }
    let mount = mounted("");
    let store = store_on(&mount.point().join("a"));
    conformance::blobs(&LocalBlobs::new(store.clone()), ALL).await;
    conformance::names(&DirNames::new(store.clone()), true).await;
    let left: Vec<_> = std::fs::read_dir(store.root().join("tmp")).unwrap().collect();
    assert!(left.is_empty(), "leftovers in tmp: {left:?}");
    let blobs = usrbio(&store_on(&mount.point().join("b")), Duration::from_secs(60));
    assert!(matches!(blobs.path(), ReadPath::Usrbio { .. }), "{:?}", blobs.path());
    conformance::blobs(&blobs, ALL).await;
    assert_eq!(blobs.counts().unwrap().by_mount, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn privileged_a_faulty_mount_is_made_good_or_told() {
    if !require::root() {
        return;
    }
    for seed in 0..2 {
        let mount = mounted("");
        let store = store_on(&mount.point().join("store"));
        mount
            .behave(&format!("seed={seed} meta-us=20 read-us=50 write-us=50 remote=30 stalls=20 stall-ms=20"))
            .unwrap();
        let limits = Limits { request: Duration::from_secs(20), rate: 256 << 10 };
        let small = Abilities { largest: 2 << 20, ..ALL };
        let whole = Retry::new(Deadline::new(LocalBlobs::new(store), limits, "3fs".to_owned()), QUICK);
        conformance::blobs(&whole, small).await;
    }
}

/// Z01: the mount's daemon sends fewer bytes than it was asked for, while there are more: they are asked for. Or there
/// are none: that is an error, and never zeros.
#[tokio::test(flavor = "multi_thread")]
async fn privileged_z01_short_reads_of_a_mount() {
    if !require::root() {
        return;
    }
    for words in ["async-dio=1", "async-dio=0"] {
        let mount = mounted(words);
        let store = store_on(&mount.point().join("store"));
        let bytes = conformance::contents(10, 3 << 20);
        let digest = store.publish_bytes(&bytes).unwrap().digest;
        let (mut good, mut bad) = (0, 0);
        for seed in 0..12 {
            mount.behave(&format!("seed={seed} meta-us=20 read-us=50 short=300")).unwrap();
            for engine in [Engine::Threads, Engine::Ring] {
                let blobs = LocalBlobs::with_engine(store.clone(), engine);
                for range in [0..3 << 20, 100_000..1_500_000, 5000..9096u64] {
                    let want = usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap();
                    match blobs.read_range(&digest, range.clone()).await {
                        Ok(read) => {
                            assert!(read == bytes[want], "{engine:?}, {words}: other bytes for {range:?}");
                            good += 1;
                        }
                        Err(error) => {
                            assert!(error.is_corrupt(), "{error}");
                            bad += 1;
                        }
                    }
                }
            }
        }
        assert!(good > 40, "{good} good, {bad} errors");
        ends_early(&mount, &store, &digest).await;
    }
}

/// A blob that lost its end behind everybody's back.
async fn ends_early(mount: &Daemon, store: &StoreDir, digest: &Digest) {
    mount.behave("meta-us=20 read-us=50 attr-ms=0").unwrap();
    let path = mount.backing().join("store/blobs/sha256").join(digest.hex());
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
    for range in [0..3 << 20, (1 << 20) - 10..(1 << 20) + 10, 2 << 20..(2 << 20) + 1] {
        let error = LocalBlobs::new(store.clone()).read_range(digest, range).await.unwrap_err();
        assert!(error.is_corrupt(), "{error}");
    }
}

/// With the immutable flag: the suite, and nobody else changes a blob.
#[tokio::test(flavor = "multi_thread")]
async fn privileged_immutable_blobs() {
    if !require::root() {
        return;
    }
    let mount = mounted("attr-ms=0 negative-ms=0");
    let disk = fixtures::mounts::scratch();
    let on_disk = StoreDir::create(&disk.path().join("store")).unwrap();
    let on_mount = store_on(&mount.point().join("store"));
    for store in [on_mount, on_disk] {
        let place = store.to_string();
        let store = store.with_immutable(true);
        conformance::blobs(&LocalBlobs::new(store.clone()), Abilities { largest: 3 << 20, ..ALL }).await;
        let bytes = conformance::contents(11, 5000);
        let digest = store.publish_bytes(&bytes).unwrap().digest;
        let path = store.blob_path(&digest);
        let refused = |done: std::io::Result<()>| {
            assert_eq!(done.unwrap_err().raw_os_error(), Some(rustix::io::Errno::PERM.raw_os_error()), "{place}");
        };
        refused(std::fs::remove_file(&path));
        refused(std::fs::rename(&path, store.root().join("tmp/x")));
        refused(std::fs::File::options().write(true).open(&path).map(drop));
        // Its age is renewed all the same, and it stays immutable.
        set_age(&path, Duration::from_secs(3600));
        store.renew(&digest).unwrap();
        let age = std::fs::metadata(&path).unwrap().modified().unwrap().elapsed().unwrap();
        assert!(age < Duration::from_secs(60), "{place}: {age:?}");
        refused(std::fs::remove_file(&path));
        store.delete_blob(&digest).unwrap();
        assert!(!path.exists());
        // What a broken disk left under a blob's name is replaced, whatever its flags.
        store.publish_bytes(&bytes).unwrap();
        flag(&path, false);
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
        std::fs::write(&path, "broken").unwrap();
        flag(&path, true);
        assert!(!store.publish_bytes(&bytes).unwrap().existed);
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "{place}");
        for listed in std::fs::read_dir(store.root().join("blobs/sha256")).unwrap() {
            flag(&listed.unwrap().path(), false);
        }
    }
}

fn flag(path: &Path, immutable: bool) {
    use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
    let file = std::fs::File::open(path).unwrap();
    let flags = ioctl_getflags(&file).unwrap() - IFlags::IMMUTABLE;
    ioctl_setflags(&file, if immutable { flags | IFlags::IMMUTABLE } else { flags }).unwrap();
}

/// Makes a file older, its flag notwithstanding.
fn set_age(path: &Path, age: Duration) {
    flag(path, false);
    let file = std::fs::File::open(path).unwrap();
    file.set_modified(std::time::SystemTime::now() - age).unwrap();
    flag(path, true);
}

/// What was written is refused where it does not come back: errors at sync and close, a full file system.
#[tokio::test(flavor = "multi_thread")]
async fn privileged_nothing_is_published_that_was_not_kept() {
    if !require::root() {
        return;
    }
    let mount = mounted("attr-ms=0 negative-ms=0");
    let store = store_on(&mount.point().join("store"));
    let blobs = LocalBlobs::new(store.clone());
    for words in ["sync-error=1000", "space=1"] {
        mount.behave(&format!("meta-us=20 write-us=20 attr-ms=0 negative-ms=0 {words}")).unwrap();
        let bytes = conformance::contents(1, 3 << 20);
        let digest = Digest::of(&bytes);
        let error = blobs.put(&digest, Body::Bytes(bytes)).await.unwrap_err();
        assert!(!error.is_corrupt(), "{words}: {error}");
        assert!(!mount.backing().join("store/blobs/sha256").join(digest.hex()).exists(), "{words}");
    }
    mount.behave("meta-us=20 attr-ms=0 negative-ms=0").unwrap();
    assert_eq!(std::fs::read_dir(store.root().join("tmp")).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn privileged_a_dead_daemon_is_told_and_comes_back() {
    if !require::root() {
        return;
    }
    let mut mount = mounted("");
    let store = store_on(&mount.point().join("store"));
    let bytes = conformance::contents(5, 3 << 20);
    let digest = store.publish_bytes(&bytes).unwrap().digest;
    let (local, rings) = (LocalBlobs::new(store.clone()), usrbio(&store, Duration::from_secs(60)));
    for blobs in [&local as &dyn BlobStore, &rings] {
        assert!(blobs.read_range(&digest, 0..3 << 20).await.unwrap() == bytes);
    }
    mount.kill().unwrap();
    for blobs in [&local as &dyn BlobStore, &rings] {
        let began = Instant::now();
        let told = |error: BlobError| {
            assert!(error.is_transient(), "{error:?}");
            let text = error.to_string();
            assert!(text.contains("not connected") || text.contains("daemon has gone"), "{text}");
        };
        told(blobs.put(&Digest::of(b"x"), Body::Bytes("x".into())).await.unwrap_err());
        told(blobs.read_range(&Digest::of(b"never opened"), 0..10).await.unwrap_err());
        // What the kernel still has, it still tells.
        for range in [0..3 << 20, 0..10u64] {
            match blobs.read_range(&digest, range.clone()).await {
                Ok(read) => assert!(read == bytes[..usize::try_from(range.end).unwrap()]),
                Err(error) => told(error),
            }
        }
        match blobs.stat(&digest).await {
            Ok(stat) => assert_eq!(stat.size, 3 << 20),
            Err(error) => told(error),
        }
        // Long before the deadline of a minute.
        assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    }
    mount.restart().unwrap();
    let whole = Retry::new(rings, QUICK);
    for blobs in [&local as &dyn BlobStore, &whole] {
        for range in [0..3 << 20, 5..10u64] {
            let want = &bytes[usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()];
            assert!(blobs.read_range(&digest, range).await.unwrap() == want);
        }
    }
}

/// A node that has an old length in its cache reads the whole blob, by either way.
#[tokio::test(flavor = "multi_thread")]
async fn privileged_lengths_of_other_nodes_are_old_and_do_no_harm() {
    if !require::root() {
        return;
    }
    let mount = mounted("");
    let other = mount.another("meta-us=20 read-us=50 attr-ms=30000 negative-ms=0 threads=4").unwrap();
    let (here, there) = (store_on(&mount.point().join("store")), StoreDir::open(&other.point().join("store")).unwrap());
    let bytes = conformance::contents(6, 400_000);
    let digest = Digest::of(&bytes);
    // Somebody's half of the blob, which the other node has seen, is replaced: what it has of it is old.
    std::fs::write(here.blob_path(&digest), &bytes[..1000]).unwrap();
    assert_eq!(std::fs::metadata(there.blob_path(&digest)).unwrap().len(), 1000);
    std::fs::write(here.blob_path(&digest), &bytes).unwrap();
    let (local, rings) = (LocalBlobs::new(there.clone()), usrbio(&there, Duration::from_secs(60)));
    for blobs in [&local as &dyn BlobStore, &rings] {
        match blobs.read_range(&digest, 0..400_000).await {
            Ok(read) => assert!(read == bytes),
            Err(BlobError::Corrupt { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    assert!(rings.read_range(&digest, 0..400_000).await.unwrap() == bytes, "rings do not go by the kernel's length");
}

/// A large read takes few requests; buffered, 4 MiB would be 32 of them.
#[tokio::test(flavor = "multi_thread")]
async fn privileged_large_reads_are_large_requests() {
    if !require::root() {
        return;
    }
    let mount = mounted("");
    let store = store_on(&mount.point().join("store"));
    let bytes = conformance::contents(7, 4 << 20);
    let digest = store.publish_bytes(&bytes).unwrap().digest;
    for engine in [Engine::Threads, Engine::Ring] {
        let blobs = LocalBlobs::with_engine(store.clone(), engine);
        assert_eq!(blobs.engine(), Engine::Threads, "an io_uring on a FUSE mount");
        assert!(blobs.advice().unwrap().contains("KiB ahead"), "{:?}", blobs.advice());
        let before = mount.reads().unwrap();
        assert!(blobs.read_range(&digest, 0..4 << 20).await.unwrap() == bytes);
        let requests = mount.reads().unwrap() - before;
        assert!((4..=5).contains(&requests), "{engine:?}: {requests} requests");
    }
}

/// The store that programs open.
#[test]
fn privileged_a_store_on_the_mount() {
    if !require::root() {
        return;
    }
    let mount = mounted("");
    let local = tempfile::tempdir().unwrap();
    let location: StoreLocation = format!("3fs:{}", mount.point().join("store").display()).parse().unwrap();
    let usrbio = UsrbioOptions { library: Some(hf3fs_stand_in::plain::library()), ..UsrbioOptions::default() };
    let options =
        StoreOptions { local_dir: Some(local.path().join("x")), usrbio, retry: QUICK, ..StoreOptions::default() };
    let store = Store::create_at(&location, &options).unwrap();
    let bytes = conformance::contents(8, 2 << 20);
    let published = store.publish_bytes(&bytes).unwrap();
    let read = store.read_range(&published.digest, 100_000..1_900_000).unwrap();
    assert!(read[..] == bytes[100_000..1_900_000]);
    assert!(store.read_blob(&published.digest, 2 << 20).unwrap() == bytes);
    assert_eq!(store.list_blobs().unwrap().len(), 1);
}
