//! The store's promises: whole files or none, whoever races and whoever dies.

use super::*;
use crate::RefName;
use oci_spec::image::{Descriptor, DescriptorBuilder, MediaType};
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Child, Command, Stdio};
use std::str::FromStr as _;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

fn store() -> (tempfile::TempDir, StoreDir) {
    let dir = tempfile::tempdir().unwrap();
    let store = StoreDir::create(&dir.path().join("store")).unwrap();
    (dir, store)
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn descriptor(n: u8) -> Descriptor {
    DescriptorBuilder::default()
        .media_type(MediaType::ImageManifest)
        .digest(oci_spec::image::Digest::from_str(&Digest::of(&[n]).to_string()).unwrap())
        .size(u64::from(n))
        .annotations(
            ["b", "a", "c"]
                .map(|k| (k.to_owned(), k.to_owned()))
                .into_iter()
                .collect::<std::collections::HashMap<_, _>>(),
        )
        .build()
        .unwrap()
}

#[test]
fn open_names_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    let text = |path: &Path| StoreDir::open(path).unwrap_err().to_string();
    assert!(text(&path).ends_with("/store is not a store: the directory itself is missing"));
    fs::create_dir(&path).unwrap();
    assert!(text(&path).ends_with("/store is not a store: blobs/sha256 is missing"));
    fs::create_dir_all(path.join("blobs/sha256")).unwrap();
    assert!(text(&path).ends_with("/store is not a store: refs is missing"));
    StoreDir::create(&path).unwrap();
    StoreDir::create(&path).unwrap();
    assert_eq!(StoreDir::open(&path).unwrap().root(), path);
    assert_eq!(names(&path), ["blobs", "converted", "refs", "tmp"]);
    fs::write(dir.path().join("file"), "").unwrap();
    assert!(matches!(StoreDir::open(&dir.path().join("file")), Err(StoreError::NotAStore { .. })));
}

#[test]
fn create_is_safe_when_many_do_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a/b/store");
    let start = Barrier::new(8);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                start.wait();
                StoreDir::create(&path).unwrap().publish_bytes(b"x").unwrap();
            });
        }
    });
    assert_eq!(names(&path.join("blobs/sha256")).len(), 1);
}

#[test]
fn publish_and_read_back() {
    let (_dir, store) = store();
    let digest = Digest::of(b"hello");
    assert_eq!(store.blob_size(&digest).unwrap(), None);
    assert!(matches!(store.open_blob(&digest, 5), Err(StoreError::Missing { .. })));
    assert_eq!(store.publish_bytes(b"hello").unwrap(), Published { digest, size: 5, existed: false });
    assert_eq!(store.publish_bytes(b"hello").unwrap(), Published { digest, size: 5, existed: true });
    assert_eq!(store.blob_size(&digest).unwrap(), Some(5));
    assert_eq!(store.read_blob(&digest, 5).unwrap(), b"hello");
    let error = store.open_blob(&digest, 6).unwrap_err();
    assert!(error.is_corrupt() && error.to_string().contains(&digest.to_string()), "{error}");
    assert!(error.to_string().contains("it has 5 bytes where 6 are expected"), "{error}");
    assert_eq!(fs::metadata(store.blob_path(&digest)).unwrap().permissions().mode() & 0o333, 0);
    assert!(names(&store.tmp()).is_empty());
}

#[test]
fn the_wrong_bytes_are_noticed() {
    let (_dir, store) = store();
    let digest = Digest::of(b"hello");
    fs::write(store.blob_path(&digest), "jello").unwrap();
    let error = store.read_blob(&digest, 5).unwrap_err();
    assert!(error.is_corrupt() && error.to_string().contains("its contents have sha256:"), "{error}");
    assert!(matches!(store.read_blob(&digest, 1 << 40), Err(StoreError::TooLarge { .. })));
    let dir = Digest::of(b"dir");
    fs::create_dir(store.blob_path(&dir)).unwrap();
    assert!(store.blob_size(&dir).unwrap_err().is_corrupt());
}

#[test]
fn a_stage_of_another_length_is_refused() {
    let (_dir, store) = store();
    let staged = store.stage("t").unwrap();
    (&*staged).write_all(b"hell").unwrap();
    let error = staged.publish(&Digest::of(b"hello"), 5).unwrap_err();
    assert!(matches!(error, StoreError::ShortStage { written: 4, expected: 5, .. }), "{error}");
    assert!(names(&store.tmp()).is_empty() && names(&store.blobs()).is_empty());
}

#[test]
fn a_corrupt_leftover_is_replaced_and_never_absent() {
    let (_dir, store) = store();
    let digest = Digest::of(b"hello");
    let path = store.blob_path(&digest);
    fs::write(&path, "hel").unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut seen = 0;
            while !done.load(Ordering::Relaxed) || seen == 0 {
                assert!(path.exists(), "there was a moment without a file");
                seen += 1;
            }
        });
        for _ in 0..50 {
            fs::rename(path.with_extension("bad"), &path).ok();
            assert!(!store.publish_bytes(b"hello").unwrap().existed);
            fs::write(path.with_extension("bad"), "hel").unwrap();
        }
        done.store(true, Ordering::Relaxed);
        watcher.join().unwrap();
    });
    assert_eq!(store.read_blob(&digest, 5).unwrap(), b"hello");
}

#[test]
fn two_publish_the_same_blob() {
    let (_dir, store) = store();
    let bytes = vec![7u8; 300_000];
    for round in 0..20u8 {
        let mut bytes = bytes.clone();
        bytes[0] = round;
        let start = Barrier::new(4);
        let results: Vec<Published> = std::thread::scope(|scope| {
            let publish = || {
                start.wait();
                store.publish_bytes(&bytes).unwrap()
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(publish)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(results.iter().any(|published| !published.existed));
        assert_eq!(store.read_blob(&Digest::of(&bytes), 300_000).unwrap(), bytes);
    }
    assert_eq!(names(&store.blobs()).len(), 20);
    assert!(names(&store.tmp()).is_empty());
}

/// Not a test: the body of the processes that the tests below start. Stages a file, says so, and waits to be killed;
/// or publishes the same 200 blobs as everybody else.
#[test]
#[ignore = "a process that other tests start"]
fn child() {
    let Some(path) = std::env::var_os("STORE_TEST_PATH") else { return };
    let store = StoreDir::open(Path::new(&path)).unwrap();
    if std::env::var_os("STORE_TEST_PUBLISH").is_some() {
        for n in 0..200u32 {
            store.publish_bytes(&n.to_le_bytes().repeat(1000)).unwrap();
        }
        return;
    }
    let staged = store.stage("child").unwrap();
    (&*staged).write_all(b"half").unwrap();
    staged.sync_all().unwrap();
    writeln!(io::stderr(), "STAGED").unwrap();
    loop {
        std::thread::park();
    }
}

fn spawn_child(store: &StoreDir) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "store_dir::tests::child", "--ignored", "--nocapture"]);
    command.env("STORE_TEST_PATH", store.root()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

fn staged_child(store: &StoreDir) -> Child {
    let mut child = spawn_child(store).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.as_mut().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "STAGED"));
    child
}

#[test]
fn processes_publish_the_same_blobs() {
    let (_dir, store) = store();
    let children: Vec<Child> =
        (0..3).map(|_| spawn_child(&store).env("STORE_TEST_PUBLISH", "1").spawn().unwrap()).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert_eq!(names(&store.blobs()).len(), 200);
    for n in 0..200u32 {
        let bytes = n.to_le_bytes().repeat(1000);
        assert_eq!(store.read_blob(&Digest::of(&bytes), 4000).unwrap(), bytes);
    }
    assert!(names(&store.tmp()).is_empty());
}

#[test]
fn a_killed_writers_file_is_swept_and_a_living_ones_is_not() {
    let (_dir, store) = store();
    let mine = store.stage("mine").unwrap();
    let (mut dead, mut alive) = (staged_child(&store), staged_child(&store));
    fs::write(store.tmp().join("ffffffffffffffff.1.0.other-machine"), "").unwrap();
    fs::write(store.tmp().join("README"), "").unwrap();
    assert_eq!(store.sweep().unwrap(), Swept { removed: 0, alive: 3, foreign: 2 });
    dead.kill().unwrap();
    dead.wait().unwrap();
    assert_eq!(store.sweep().unwrap(), Swept { removed: 1, alive: 2, foreign: 2 });
    alive.kill().unwrap();
    alive.wait().unwrap();
    assert_eq!(store.sweep().unwrap(), Swept { removed: 1, alive: 1, foreign: 2 });
    drop(mine);
    assert_eq!(store.sweep().unwrap(), Swept { removed: 0, alive: 0, foreign: 2 });
    assert!(names(&store.blobs()).is_empty());
}

/// Case O12: sweeps and removals race with writers, and no writer ever loses its file.
#[test]
fn o12_sweeps_race_with_writers() {
    let (_dir, store) = store();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sweepers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut rounds = 0;
                    while !done.load(Ordering::Relaxed) || rounds == 0 {
                        store.sweep().unwrap();
                        rounds += 1;
                    }
                })
            })
            .collect();
        let writers: Vec<_> = (0..4u32)
            .map(|thread| {
                let store = &store;
                scope.spawn(move || {
                    let name: RefName = "team/app:1".parse().unwrap();
                    for n in 0..100u32 {
                        let bytes = (thread << 16 | n).to_le_bytes();
                        assert!(!store.publish_bytes(&bytes).unwrap().existed);
                        store.write_ref(&name, &descriptor(1)).unwrap();
                        match store.remove_ref(&name) {
                            Ok(()) | Err(StoreError::NoSuchRef { .. }) => {}
                            Err(e) => panic!("{e}"),
                        }
                    }
                })
            })
            .collect();
        // The sweepers are told to stop before anything fails: else a failure would wait for them for ever.
        let written: Vec<_> = writers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        done.store(true, Ordering::Relaxed);
        for writer in written {
            writer.unwrap();
        }
        for sweeper in sweepers {
            sweeper.join().unwrap();
        }
    });
    assert_eq!(names(&store.blobs()).len(), 400);
    assert!(names(&store.tmp()).is_empty());
}

#[test]
fn refs_are_written_listed_and_removed() {
    let (_dir, store) = store();
    let name = |text: &str| text.parse::<RefName>().unwrap();
    assert!(matches!(store.read_ref(&name("a:b")), Err(StoreError::NoSuchRef { .. })));
    for (n, text) in ["b:z", "a:b", "a/b:c", "a:a"].iter().enumerate() {
        store.write_ref(&name(text), &descriptor(u8::try_from(n).unwrap())).unwrap();
    }
    store.write_ref(&name("a:b"), &descriptor(9)).unwrap();
    assert_eq!(store.read_ref(&name("a:b")).unwrap(), descriptor(9));
    let first = fs::read(store.refs().join("a/b")).unwrap();
    store.write_ref(&name("a:b"), &descriptor(9)).unwrap();
    assert_eq!(fs::read(store.refs().join("a/b")).unwrap(), first, "the same descriptor gives the same bytes");

    fs::write(store.refs().join("a/.tmp-1"), "x").unwrap();
    fs::write(store.refs().join("stray"), "x").unwrap();
    fs::create_dir(store.refs().join("a/dir")).unwrap();
    fs::create_dir(store.refs().join("Not A Name")).unwrap();
    let listed = |store: &StoreDir| -> Vec<String> {
        store.list_refs().unwrap().into_iter().map(|(name, _)| name.to_string()).collect()
    };
    assert_eq!(listed(&store), ["a:a", "a:b", "a/b:c", "b:z"]);
    store.remove_ref(&name("b:z")).unwrap();
    assert!(matches!(store.remove_ref(&name("b:z")), Err(StoreError::NoSuchRef { .. })));
    assert!(!store.refs().join("b").exists());
    assert_eq!(listed(&store), ["a:a", "a:b", "a/b:c"]);

    fs::write(store.refs().join("a/a"), "{").unwrap();
    assert!(store.read_ref(&name("a:a")).unwrap_err().is_corrupt());
    assert!(matches!(store.list_refs(), Err(StoreError::BadRef { .. })));
    fs::write(store.refs().join("a/a"), vec![b' '; 70_000]).unwrap();
    assert!(matches!(store.read_ref(&name("a:a")), Err(StoreError::TooLarge { .. })));
}

#[test]
fn records() {
    let (_dir, store) = store();
    let key = Digest::of(b"key").hex();
    assert_eq!(store.record(&key).unwrap(), None);
    store.write_record(&key, b"one").unwrap();
    store.write_record(&key, b"two").unwrap();
    assert_eq!(store.record(&key).unwrap().unwrap(), b"two");
    for bad in ["", "../../etc/passwd", &key.to_uppercase(), &key[1..]] {
        assert!(matches!(store.write_record(bad, b""), Err(StoreError::BadKey { .. })), "{bad}");
        assert!(matches!(store.record(bad), Err(StoreError::BadKey { .. })), "{bad}");
    }
}

#[test]
fn a_copy_that_lost_its_empty_directories_still_works() {
    let (_dir, store) = store();
    fs::remove_dir(store.tmp()).unwrap();
    fs::remove_dir(store.converted()).unwrap();
    let store = StoreDir::open(store.root()).unwrap();
    assert_eq!(store.sweep().unwrap(), Swept::default());
    assert_eq!(store.record(&Digest::of(b"").hex()).unwrap(), None);
    store.write_record(&Digest::of(b"").hex(), b"x").unwrap();
}

struct Unmount(PathBuf);

impl Drop for Unmount {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn privileged_a_full_disk_is_told_apart_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    rustix::mount::mount("tmpfs", dir.path(), "tmpfs", rustix::mount::MountFlags::empty(), Some(c"size=256k"))
        .expect("this test needs root, to mount a tmpfs");
    let unmount = Unmount(dir.path().to_owned());
    let store = StoreDir::create(&dir.path().join("store")).unwrap();
    let small = store.publish_bytes(b"small").unwrap();
    let error = store.publish_bytes(&vec![1u8; 1 << 20]).unwrap_err();
    assert!(matches!(error, StoreError::NoSpace { op: "write", .. }), "{error}");
    assert!(error.to_string().starts_with("no space left to write /"), "{error}");
    assert!(names(&store.tmp()).is_empty());
    assert_eq!(names(&store.blobs()), [small.digest.hex()]);
    store.publish_bytes(&vec![1u8; 100 << 10]).unwrap();
    drop(unmount);
}
