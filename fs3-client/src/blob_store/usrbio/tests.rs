//! Rings against the stand-in's library: each of the traps that were found in 3FS, and what must come of it.

mod foreign;

use super::*;
use crate::testing::conformance::contents;
use hf3fs_stand_in::plain;
use std::path::Path;
use std::time::Instant;

/// A store on a directory that the stand-in takes for a mount.
struct Place {
    root: tempfile::TempDir,
    dir: StoreDir,
}

const QUICK: &str = "read-us=200";

impl Place {
    fn new(words: &str) -> Self {
        let root = tempfile::tempdir().unwrap();
        plain::prepare(root.path()).unwrap();
        let place = Self { dir: StoreDir::create(&root.path().join("store")).unwrap().with_rules(Rules::Fs3), root };
        place.behave(words);
        place
    }

    fn behave(&self, words: &str) {
        plain::behave(self.root.path(), &format!("{QUICK} {words}")).unwrap();
    }

    fn blobs(&self, change: impl FnOnce(&mut UsrbioOptions)) -> UsrbioBlobs {
        let mut options = UsrbioOptions {
            library: Some(plain::library()),
            bulk_buffer: 8 << 20,
            small_buffer: 1 << 20,
            ..UsrbioOptions::default()
        };
        change(&mut options);
        UsrbioBlobs::new(self.dir.clone(), &options)
    }

    fn blob(&self, seed: u64, len: u64) -> (Digest, Bytes) {
        let bytes = contents(seed, len);
        (self.dir.publish_bytes(&bytes).unwrap().digest, bytes)
    }

    fn links(&self) -> usize {
        std::fs::read_dir(self.root.path().join("3fs-virt/iovs")).unwrap().count()
    }
}

fn slice(bytes: &Bytes, range: &Range<u64>) -> Bytes {
    bytes.slice(usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn large_and_small_reads_are_right_and_nothing_stays() {
    let place = Place::new("");
    let (digest, bytes) = place.blob(1, 20 << 20);
    let blobs = place.blobs(|_| ());
    assert_eq!(blobs.path(), ReadPath::Usrbio { library: plain::library().into() });
    for range in [0..20 << 20, 1..(20 << 20) - 1, 4095..4097, 0..1, 5_000_000..9_000_001, 100..200_000] {
        assert!(blobs.read_range(&digest, range.clone()).await.unwrap() == slice(&bytes, &range), "{range:?}");
    }
    let counts = blobs.counts().unwrap();
    assert_eq!((counts.files, counts.by_mount, counts.rings, counts.left_rings), (1, 0, 3, 0));
    assert_eq!(place.links(), 1 + 2 * 3, "of the semaphore, and of each ring and its buffer");
    let named = |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with("hf3fs-iov-");
    let id = format!("{:08x}", std::process::id());
    let shared = std::fs::read_dir("/dev/shm").unwrap().map(Result::unwrap).filter(|entry| {
        // The stand-in has the process in the name.
        entry.file_name().to_string_lossy().get(26..34) == Some(&id)
    });
    assert_eq!(shared.filter(|_| true).filter_map(|entry| named(entry).then_some(())).count(), 0, "unlinked at once");
    drop(blobs);
    let began = Instant::now();
    while place.links() > 1 {
        assert!(began.elapsed() < Duration::from_secs(10), "rings stay when their store is dropped");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn small_neighbours_go_together() {
    let place = Place::new("read-us=20000");
    let (digest, bytes) = place.blob(2, 1 << 20);
    let blobs = place.blobs(|_| ());
    blobs.read_range(&digest, 0..1).await.unwrap();
    let before = blobs.counts().unwrap();
    let reads = (0..64u64).map(|n| {
        let range = n * 8000..n * 8000 + 5000;
        let (blobs, bytes) = (&blobs, &bytes);
        async move { assert!(blobs.read_range(&digest, range.clone()).await.unwrap() == slice(bytes, &range)) }
    });
    futures::future::join_all(reads).await;
    let after = blobs.counts().unwrap();
    let (reads, transfers) = (after.reads - before.reads, after.transfers - before.transfers);
    assert!(reads == 64 && transfers < 32, "{reads} reads became {transfers} transfers");
}

/// A part of a batch, a ring that is not full, one that is more than full: nothing waits for more to come.
#[tokio::test(flavor = "multi_thread")]
async fn batches_need_not_be_full() {
    let place = Place::new("early=0");
    let (digest, bytes) = place.blob(3, 6 << 20);
    // Fewer entries, and smaller buffers, than what is asked for at once; less than nothing is taken for a little.
    let blobs = place.blobs(|options| {
        options.entries = 2;
        options.bulk_buffer = 0;
        options.small_buffer = 4096;
        options.bulk_rings = 1;
    });
    for count in [1, 3, 40] {
        let reads = (0..count).map(|n: u64| blobs.read_range(&digest, n * 1000..(n + 300) * 10_000));
        for (n, read) in (0..).zip(futures::future::join_all(reads).await) {
            assert!(read.unwrap() == slice(&bytes, &(n * 1000..(n + 300) * 10_000)));
        }
        let reads = (0..count).map(|n: u64| blobs.read_range(&digest, n * 9000..n * 9000 + 131_072));
        for (n, read) in (0..).zip(futures::future::join_all(reads).await) {
            assert!(read.unwrap() == slice(&bytes, &(n * 9000..n * 9000 + 131_072)));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_that_ends_early_is_an_error() {
    let place = Place::new("short=1000");
    let (digest, _) = place.blob(4, 3 << 20);
    let blobs = place.blobs(|_| ());
    for range in [0..3 << 20, 0..131_072, 8192..12_288] {
        let error = blobs.read_range(&digest, range).await.unwrap_err();
        assert!(matches!(error, BlobError::Corrupt { .. }), "{error}");
    }
    place.behave("");
    // The caller's length counts, and becomes no allocation.
    for range in [0..(3 << 20) + 1, 3 << 20..u64::MAX, 0..u64::MAX, u64::MAX - 1..u64::MAX] {
        let error = blobs.read_range(&digest, range).await.unwrap_err();
        assert!(matches!(error, BlobError::Corrupt { .. }), "{error}");
        assert!(error.to_string().contains("it has 3145728 bytes"), "{error}");
    }
}

/// Z01: a short answer is asked for again; the bytes come, or an error does, and nothing is filled up.
#[tokio::test(flavor = "multi_thread")]
async fn z01_a_short_read_is_asked_for_again() {
    let mut outcomes = [0, 0];
    for seed in 0..40 {
        let place = Place::new(&format!("short=500 seed={seed}"));
        let (digest, bytes) = place.blob(70 + seed, 100_000);
        let blobs = place.blobs(|_| ());
        match blobs.read_range(&digest, 4096..8192).await {
            Ok(read) => {
                assert!(read == bytes[4096..8192]);
                outcomes[0] += 1;
            }
            Err(error) => {
                assert!(error.is_corrupt(), "{error}");
                outcomes[1] += 1;
            }
        }
        place.behave("");
        assert!(blobs.read_range(&digest, 4096..8192).await.unwrap() == bytes[4096..8192]);
    }
    assert!(outcomes[0] > 25 && outcomes[1] > 1, "{outcomes:?} of 40 came and did not");
}

/// Z08: neighbours in one blob, and the same places of another that looks the same up to a byte: each read gets its own.
#[tokio::test(flavor = "multi_thread")]
async fn z08_merged_reads_of_two_blobs_are_not_mixed() {
    let place = Place::new("read-us=5000");
    let (first, bytes) = place.blob(80, 1 << 20);
    let mut other = bytes.to_vec();
    other[500_000] ^= 1;
    let second = place.dir.publish_bytes(&other).unwrap().digest;
    let both = [(first, bytes), (second, Bytes::from(other))];
    let blobs = place.blobs(|_| ());
    for round in 0..4u64 {
        let reads = (0..60u64).map(|n| {
            let (digest, bytes) = &both[usize::try_from(n % 2).unwrap()];
            let start = 400_000 + (n / 2) * 4000 + round * 13;
            let (range, blobs) = (start..start + 4000, &blobs);
            async move {
                assert!(blobs.read_range(digest, range.clone()).await.unwrap() == slice(bytes, &range), "{range:?}")
            }
        });
        futures::future::join_all(reads).await;
    }
    let counts = blobs.counts().unwrap();
    assert!(counts.reads >= 240 && counts.transfers < 200, "nothing was merged: {counts:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_that_fail_are_tried_again_by_who_wants() {
    let place = Place::new("remote=1000");
    let (digest, _) = place.blob(5, 3 << 20);
    let blobs = place.blobs(|_| ());
    let error = blobs.read_range(&digest, 0..3 << 20).await.unwrap_err();
    assert!(error.is_transient() && error.to_string().contains("Remote I/O error"), "{error}");
    assert!(blobs.counts().unwrap().errors > 0);
}

/// Nothing is cancelled, and bytes may come after all: they find no memory that is used for something else.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_overdue_is_left_behind_with_its_ring() {
    let place = Place::new("hang=1000 late-ms=400");
    let (digest, bytes) = place.blob(6, 2 << 20);
    let blobs = place.blobs(|options| {
        options.deadline = Duration::from_millis(150);
        options.bulk_rings = 1;
        options.most_left_behind = 3;
    });
    let began = Instant::now();
    let error = blobs.read_range(&digest, 0..2 << 20).await.unwrap_err();
    assert!(matches!(error, BlobError::TimedOut { .. }), "{error}");
    assert!(began.elapsed() < Duration::from_millis(1000));
    place.behave("");
    // While the late bytes arrive, and after.
    while began.elapsed() < Duration::from_millis(900) {
        assert!(blobs.read_range(&digest, 0..2 << 20).await.unwrap() == bytes);
    }
    let counts = blobs.counts().unwrap();
    assert_eq!((counts.left_rings, counts.left_bytes, counts.by_mount), (1, 8 << 20, 0));
    // No more than so many; then the mount reads, right as ever.
    place.behave("hang=1000 late-ms=10");
    for _ in 0..2 {
        blobs.read_range(&digest, 0..200_000).await.unwrap_err();
    }
    assert!(blobs.read_range(&digest, 0..2 << 20).await.unwrap() == bytes);
    assert!(blobs.read_range(&digest, 7..9).await.unwrap() == bytes[7..9]);
    assert_eq!(blobs.path(), ReadPath::Mount { why: "too many rings were left behind".to_owned() });
    let counts = blobs.counts().unwrap();
    assert_eq!((counts.left_rings, counts.by_mount), (3, 2));
}

/// One slow transfer holds up those that were taken with it, but not the small ones, which have a ring of their own.
#[tokio::test(flavor = "multi_thread")]
async fn small_reads_do_not_wait_for_large_ones() {
    let place = Place::new("bandwidth=20000000");
    let (digest, bytes) = place.blob(7, 8 << 20);
    let (other, small) = place.blob(8, 10_000);
    let blobs = place.blobs(|_| ());
    let large = async {
        assert!(blobs.read_range(&digest, 0..8 << 20).await.unwrap() == bytes);
        Instant::now()
    };
    let little = async {
        tokio::time::sleep(Duration::from_millis(5)).await;
        place.behave("");
        assert!(blobs.read_range(&other, 0..10_000).await.unwrap() == small);
        Instant::now()
    };
    let (large, little) = futures::future::join(large, little).await;
    assert!(little < large, "the small read came {:?} after the large one", little - large);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_comes_back_gets_new_rings_and_files() {
    let place = Place::new("generation=1");
    let (digest, bytes) = place.blob(9, 3 << 20);
    let blobs = place.blobs(|options| options.deadline = Duration::from_secs(20));
    assert!(blobs.read_range(&digest, 0..3 << 20).await.unwrap() == bytes);
    place.behave("generation=1 daemon=down");
    let began = Instant::now();
    let error = blobs.read_range(&digest, 0..3 << 20).await;
    // The dead ring is noticed long before the deadline; the mount of the stand-in is a plain directory, and still reads.
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    match error {
        Ok(read) => assert!(read == bytes),
        Err(error) => assert!(error.is_transient(), "{error}"),
    }
    place.behave("generation=2");
    // Where a ring could not be made there is a pause; then all is as before.
    let began = Instant::now();
    loop {
        let by_mount = blobs.counts().unwrap().by_mount;
        if let Ok(read) = blobs.read_range(&digest, 0..3 << 20).await {
            assert!(read == bytes);
            if blobs.counts().unwrap().by_mount == by_mount {
                break;
            }
        }
        assert!(began.elapsed() < Duration::from_secs(15), "no ring any more");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(matches!(blobs.path(), ReadPath::Usrbio { .. }));
}

/// Nobody read while the daemon was another: neither the rings nor what was open is of any use, and it costs no deadline.
#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_was_replaced_unseen_costs_no_deadline() {
    let place = Place::new("generation=1");
    let (first, second) = (place.blob(50, 3 << 20), place.blob(51, 3 << 20));
    let blobs = place.blobs(|_| ());
    for _ in 0..4 {
        assert!(blobs.read_range(&first.0, 0..3 << 20).await.unwrap() == first.1);
        assert!(blobs.read_range(&first.0, 0..9).await.unwrap() == first.1[..9]);
    }
    place.behave("generation=2");
    tokio::time::sleep(Duration::from_millis(150)).await;
    let began = Instant::now();
    // Of a file that is opened only now, and of one that was open before.
    for (digest, bytes) in [&second, &first] {
        for range in [0..3 << 20, 7..2000u64] {
            let read = loop {
                match blobs.read_range(digest, range.clone()).await {
                    Ok(read) => break read,
                    Err(error) => assert!(error.is_transient(), "{error}"),
                }
            };
            assert!(read == slice(bytes, &range));
        }
    }
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_kept_up_to_a_number_and_given_back() {
    let place = Place::new("");
    let all: Vec<(Digest, Bytes)> = (0..9).map(|n| place.blob(20 + n, 5000)).collect();
    let blobs = place.blobs(|options| options.files = 3);
    for _ in 0..3 {
        for (digest, bytes) in &all {
            assert!(blobs.read_range(digest, 0..5000).await.unwrap() == *bytes);
        }
    }
    assert_eq!(blobs.counts().unwrap().files, 3);
    // A descriptor that is closed before it is given back could never be registered again: its number is in the table.
    assert_eq!(blobs.counts().unwrap().by_mount, 0);
    let (digest, _) = &all[8];
    blobs.delete(digest).await.unwrap();
    assert_eq!(blobs.counts().unwrap().files, 2);
    let error = blobs.read_range(digest, 0..10).await.unwrap_err();
    assert!(matches!(error, BlobError::NotFound { .. }), "{error}");
    // The library has a duplicate of each, which keeps a file open for its daemon until it is given back.
    let open = || {
        let links = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| std::fs::read_link(entry.unwrap().path()));
        links.filter(|link| link.as_ref().is_ok_and(|to| to.starts_with(place.root.path()))).count()
    };
    assert!(open() >= 4, "{}", open());
    drop(blobs);
    let began = Instant::now();
    while open() > 0 {
        assert!(began.elapsed() < Duration::from_secs(10), "{} descriptors stay", open());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Its table of descriptors is large, and its constructors start threads: it is loaded once, for good.
#[tokio::test]
async fn the_library_is_loaded_once() {
    let place = Place::new("");
    let first = library::load(plain::library().as_os_str()).unwrap();
    drop(place.blobs(|_| ()));
    let second = library::load(plain::library().as_os_str()).unwrap();
    assert!(std::ptr::eq(first, second));
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps.contains("libhf3fs_stand_in.so"));
}

/// A blob that another node deleted is no longer read once its chunks may be gone: they would be zeros.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_blob_is_missing_before_it_is_zeros() {
    let place = Place::new("gc-ms=600 gc-holes=1 chunk=4096");
    let (digest, bytes) = place.blob(30, 1 << 20);
    let blobs = place.blobs(|options| options.check_after = Duration::from_millis(100));
    assert!(blobs.read_range(&digest, 0..1 << 20).await.unwrap() == bytes);
    place.dir.delete_blob(&digest).unwrap();
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(1000) {
        match blobs.read_range(&digest, 0..1 << 20).await {
            Ok(read) => assert!(read == bytes, "zeros after {:?}", began.elapsed()),
            Err(BlobError::NotFound { .. }) => return,
            Err(error) => panic!("{error}"),
        }
    }
    panic!("it is still read");
}

#[tokio::test]
async fn without_a_library_or_a_daemon_the_mount_reads() {
    let place = Place::new("");
    let (digest, bytes) = place.blob(40, 300_000);
    let why = |blobs: &UsrbioBlobs| match blobs.path() {
        ReadPath::Mount { why } => why,
        path @ ReadPath::Usrbio { .. } => panic!("{path:?}"),
    };
    let missing = place.blobs(|options| options.library = Some("/nonexistent/libhf3fs.so".into()));
    assert!(why(&missing).contains("cannot open shared object file"), "{}", why(&missing));
    // A library, but another one.
    let other = place.blobs(|options| options.library = Some("libc.so.6".into()));
    assert!(why(&other).contains("hf3fs_is_hf3fs"), "{}", why(&other));
    let elsewhere = tempfile::tempdir().unwrap();
    let dir = StoreDir::create(elsewhere.path()).unwrap();
    let digest_there = dir.publish_bytes(b"there").unwrap().digest;
    let options = UsrbioOptions { library: Some(plain::library()), ..UsrbioOptions::default() };
    let off_mount = UsrbioBlobs::new(dir, &options);
    assert!(why(&off_mount).contains("finds no mount"), "{}", why(&off_mount));
    assert_eq!(off_mount.read_range(&digest_there, 0..5).await.unwrap(), "there");
    for blobs in [&missing, &other] {
        assert!(blobs.read_range(&digest, 0..300_000).await.unwrap() == bytes);
        assert!(blobs.counts().is_none());
    }
    // The library finds a mount, whose daemon is not there; or shared memory is full.
    for words in ["daemon=down", "shm-limit=4096"] {
        let place = Place::new("");
        let (digest, bytes) = place.blob(41, 300_000);
        let blobs = place.blobs(|_| ());
        place.behave(words);
        assert!(blobs.read_range(&digest, 0..300_000).await.unwrap() == bytes, "{words}");
        assert_eq!(blobs.counts().unwrap().by_mount, 1, "{words}");
    }
    let path: &Path = place.root.path();
    std::fs::remove_dir_all(path.join("3fs-virt")).unwrap();
}

/// Anything may go wrong at any time: a byte is right or there is an error, in bounded time, and where it passes the
/// bytes come in the end.
#[tokio::test(flavor = "multi_thread")]
async fn right_bytes_or_an_error() {
    for seed in 0..6 {
        let words = format!("seed={seed} short=20 remote=60 hang=6 late-ms=150 stalls=20 stall-ms=40 early=300");
        let place = Place::new(&words);
        let (digest, bytes) = place.blob(seed, 5 << 20);
        let blobs = place.blobs(|options| {
            options.deadline = Duration::from_millis(120);
            options.most_left_behind = 1000;
        });
        let began = Instant::now();
        let mut good = 0;
        for round in 0..12u64 {
            let reads = (0..12u64).map(|n| {
                let start = (round * 7_919_333 + n * 377_771) % (4 << 20);
                let len = [10, 5000, 100_000, 900_000][usize::try_from((n + round) % 4).unwrap()];
                let (blobs, digest) = (&blobs, &digest);
                async move { (start..start + len, blobs.read_range(digest, start..start + len).await) }
            });
            for (range, read) in futures::future::join_all(reads).await {
                match read {
                    Ok(read) => {
                        assert!(read == slice(&bytes, &range), "seed {seed}: {range:?} is other bytes");
                        good += 1;
                    }
                    Err(error) => assert!(error.is_transient() || error.is_corrupt(), "{error}"),
                }
            }
        }
        assert!(good > 60, "seed {seed}: {good} of 144 reads were good");
        assert!(began.elapsed() < Duration::from_secs(30), "seed {seed}: {:?}", began.elapsed());
    }
}
