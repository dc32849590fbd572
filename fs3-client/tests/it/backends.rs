//! The conformance suites on every backend and decorator of this crate.

use crate::support::{Place, QUICK};
use fs3_client::blob_store::deadline::{Deadline, Limits};
use fs3_client::blob_store::local::{Engine, LocalBlobs};
use fs3_client::blob_store::memory::MemoryBlobs;
use fs3_client::blob_store::metered::Metered;
use fs3_client::blob_store::retry::Retry;
use fs3_client::blob_store::s3::S3Blobs;
use fs3_client::blob_store::usrbio::{ReadPath, UsrbioBlobs, UsrbioOptions};
use fs3_client::names::dir::DirNames;
use fs3_client::names::memory::MemoryNames;
use fs3_client::names::s3::S3Names;
use fs3_client::testing::conformance::{self, Abilities};
use fs3_client::testing::faulty::{Faulty, Rates};
use fs3_client::{BlobStore, Rules, StoreDir};
use std::sync::Arc;
use std::time::Duration;

const ALL: Abilities = Abilities { delete: true, list: true, age: true, largest: 20 << 20 };

#[tokio::test]
async fn memory() {
    conformance::blobs(&MemoryBlobs::default(), ALL).await;
    conformance::names(&MemoryNames::default(), true).await;
}

#[tokio::test]
async fn directories_under_both_rules() {
    for (rules, engine) in
        [Rules::Posix, Rules::Fs3].into_iter().flat_map(|r| [Engine::Threads, Engine::Ring].map(|e| (r, e)))
    {
        let dir = tempfile::tempdir().unwrap();
        let store = StoreDir::create(&dir.path().join("store")).unwrap().with_rules(rules);
        let blobs = LocalBlobs::with_engine(store.clone(), engine);
        assert_eq!(blobs.engine(), engine, "this kernel has no io_uring");
        conformance::blobs(&blobs, ALL).await;
        conformance::names(&DirNames::new(store.clone()), true).await;
        let left: Vec<_> = std::fs::read_dir(store.root().join("tmp")).unwrap().collect();
        assert!(left.is_empty(), "{rules:?}: leftovers in tmp: {left:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn s3_on_the_loopback() {
    let place = Place::new();
    conformance::blobs(&S3Blobs::new(place.bucket("a/b"), QUICK), ALL).await;
    conformance::names(&S3Names::new(place.bucket("a/b"), QUICK), true).await;
    // Without a prefix, beside all that.
    conformance::names(&S3Names::new(place.bucket(""), QUICK), true).await;
}

/// As programs use it.
fn whole(backend: impl BlobStore) -> impl BlobStore {
    let limits = Limits { request: Duration::from_secs(30), rate: 256 << 10 };
    Retry::new(Deadline::new(Metered::new(backend), limits, "a backend".to_owned()), QUICK)
}

/// A directory that the stand-in of 3FS takes for a mount.
fn stand_in(words: &str) -> (tempfile::TempDir, StoreDir) {
    let root = tempfile::tempdir().unwrap();
    hf3fs_stand_in::plain::prepare(root.path()).unwrap();
    hf3fs_stand_in::plain::behave(root.path(), words).unwrap();
    let dir = StoreDir::create(&root.path().join("store")).unwrap().with_rules(Rules::Fs3);
    (root, dir)
}

fn usrbio(dir: &StoreDir) -> UsrbioBlobs {
    let library = Some(hf3fs_stand_in::plain::library());
    let blobs = UsrbioBlobs::new(dir.clone(), &UsrbioOptions { library, ..UsrbioOptions::default() });
    assert!(matches!(blobs.path(), ReadPath::Usrbio { .. }), "{:?}", blobs.path());
    blobs
}

#[tokio::test(flavor = "multi_thread")]
async fn usrbio_on_the_stand_in() {
    let (_root, dir) = stand_in("read-us=100");
    let blobs = usrbio(&dir);
    conformance::blobs(&blobs, ALL).await;
    let counts = blobs.counts().unwrap();
    assert!(counts.by_mount == 0 && counts.bytes > 20 << 20, "the mount did it: {counts:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn usrbio_on_a_faulty_stand_in() {
    for seed in 0..3 {
        let (_root, dir) = stand_in(&format!("read-us=100 seed={seed} remote=150 stalls=50 stall-ms=30 early=300"));
        let blobs = Arc::new(usrbio(&dir));
        conformance::blobs(&whole(Arc::clone(&blobs)), Abilities { largest: 3 << 20, ..ALL }).await;
        let counts = blobs.counts().unwrap();
        assert!(counts.errors > 0 && counts.by_mount == 0, "{counts:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_backend_as_programs_use_it() {
    conformance::blobs(&whole(MemoryBlobs::default()), ALL).await;
    for rules in [Rules::Posix, Rules::Fs3] {
        let dir = tempfile::tempdir().unwrap();
        let store = StoreDir::create(&dir.path().join("store")).unwrap().with_rules(rules);
        conformance::blobs(&whole(LocalBlobs::new(store)), ALL).await;
    }
    let place = Place::new();
    conformance::blobs(&whole(S3Blobs::new(place.bucket("whole"), QUICK)), ALL).await;
    let (_root, dir) = stand_in("read-us=100");
    conformance::blobs(&whole(usrbio(&dir)), ALL).await;
}

/// More reads at once than the ring has buffers, of which many are given up: the others are right.
#[tokio::test(flavor = "multi_thread")]
async fn a_ring_with_more_to_do_than_buffers() {
    let dir = tempfile::tempdir().unwrap();
    let store = StoreDir::create(&dir.path().join("store")).unwrap();
    let bytes = conformance::contents(3, 12 << 20);
    let digest = store.publish_bytes(&bytes).unwrap().digest;
    let blobs = LocalBlobs::with_engine(store, Engine::Ring);
    let reads = (0..300u64).map(|n| {
        let (blobs, bytes) = (&blobs, &bytes);
        let range =
            n * 7919 % (8 << 20)..n * 7919 % (8 << 20) + [100, 5000, 1 << 20, 3 << 20][usize::try_from(n % 4).unwrap()];
        async move {
            let read = blobs.read_range(&digest, range.clone());
            if n % 5 == 0 {
                let _ = tokio::time::timeout(Duration::from_micros(n * 10), read).await;
                return;
            }
            let want = &bytes[usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()];
            assert!(read.await.unwrap() == want, "{range:?}");
        }
    });
    futures::future::join_all(reads).await;
}

/// A registry lists nothing and keeps no times.
const REGISTRY: Abilities = Abilities { delete: true, list: false, age: false, largest: 20 << 20 };

#[tokio::test(flavor = "multi_thread")]
async fn a_registry() {
    use fs3_client::registry::{Client, ImageRef, Options, RegistryStore};
    let registry = fixtures::registry::Registry::start();
    let store = |name: &str| {
        let options = Options { plain_http: true, timeout: Duration::from_secs(20), ..Options::default() };
        let image: ImageRef = format!("{}/team/{name}", registry.address()).parse().unwrap();
        RegistryStore::new(Client::new(options).unwrap().target(image.place()).unwrap())
    };
    // With retries only: this registry answers 500 to a read of a blob that is being put for the second time.
    conformance::blobs(&whole(store("whole")), REGISTRY).await;
    let rates = Rates { transient: 120, lost_answer: 80, short: 80, ..Rates::default() };
    let small = Abilities { largest: 3 << 20, ..REGISTRY };
    conformance::blobs(&whole(Faulty::new(store("faulty"), rates, 5)), small).await;
}

/// What goes wrong in front of a backend is made good by what programs put around it; what cannot be told is an error.
#[tokio::test(flavor = "multi_thread")]
async fn every_backend_behind_faults() {
    let rates = Rates { transient: 120, lost_answer: 80, short: 80, ..Rates::default() };
    let small = Abilities { largest: 3 << 20, ..ALL };
    let dir = tempfile::tempdir().unwrap();
    let local = LocalBlobs::new(StoreDir::create(&dir.path().join("store")).unwrap());
    conformance::blobs(&whole(Faulty::new(local, rates, 1)), small).await;
    let (_root, fs3) = stand_in("read-us=100");
    conformance::blobs(&whole(Faulty::new(LocalBlobs::new(fs3.clone()), rates, 2)), small).await;
    let (_root, fs3) = stand_in("read-us=100");
    conformance::blobs(&whole(Faulty::new(usrbio(&fs3), rates, 3)), small).await;
    let place = Place::new();
    conformance::blobs(&whole(Faulty::new(S3Blobs::new(place.bucket("faulty"), QUICK), rates, 4)), small).await;
}

#[tokio::test]
async fn decorators_change_nothing_that_goes_well() {
    conformance::blobs(&Metered::new(MemoryBlobs::default()), ALL).await;
    conformance::blobs(&Retry::new(MemoryBlobs::default(), QUICK), ALL).await;
    let limits = Limits::default();
    conformance::blobs(&Deadline::new(MemoryBlobs::default(), limits, "memory".to_owned()), ALL).await;
    conformance::blobs(&Faulty::new(MemoryBlobs::default(), Rates::default(), 1), ALL).await;
    let names = Retry::new(Deadline::new(MemoryNames::default(), limits, "memory".to_owned()), QUICK);
    conformance::names(&names, true).await;
}

#[tokio::test]
async fn retries_make_a_faulty_store_whole() {
    let rates = Rates { transient: 150, lost_answer: 100, short: 100, ..Rates::default() };
    for seed in 0..20 {
        let meter = Metered::new(Faulty::new(MemoryBlobs::default(), rates, seed));
        let counts = meter.reader();
        let small = Abilities { largest: 300_000, ..ALL };
        conformance::blobs(&Retry::new(meter, QUICK), small).await;
        assert!(counts.snapshot().failures["transient"] > 0, "nothing failed with seed {seed}");
    }
}

#[tokio::test]
async fn a_stalled_request_ends_at_its_deadline() {
    use fs3_client::{BlobError, BlobStore as _, Digest};
    let rates = Rates { stalled: 1000, stall: Duration::from_secs(600), ..Rates::default() };
    let limits = Limits { request: Duration::from_millis(30), rate: 1 << 20 };
    let store = Deadline::new(Faulty::new(MemoryBlobs::default(), rates, 1), limits, "here".to_owned());
    let error = store.stat(&Digest::of(b"x")).await.unwrap_err();
    assert!(matches!(error, BlobError::TimedOut { .. }) && error.is_transient(), "{error}");
    assert!(error.to_string().contains("here did not look at sha256:"), "{error}");
}

#[tokio::test]
async fn meters_count() {
    use bytes::Bytes;
    use fs3_client::{BlobStore as _, Body, Digest};
    let store = Metered::new(MemoryBlobs::default());
    let digest = Digest::of(b"hello");
    store.put(&digest, Body::Bytes(Bytes::from_static(b"hello"))).await.unwrap();
    store.read_range(&digest, 1..3).await.unwrap();
    store.read_range(&digest, 1..30).await.unwrap_err();
    store.stat(&Digest::of(b"x")).await.unwrap_err();
    let meter = store.reader().snapshot();
    assert_eq!((meter.puts.count, meter.puts.bytes, meter.puts.failed), (1, 5, 0));
    assert_eq!((meter.reads.count, meter.reads.bytes, meter.reads.failed), (2, 2, 1));
    assert_eq!((meter.stats.count, meter.stats.failed), (1, 1));
    assert_eq!(meter.failures.into_iter().collect::<Vec<_>>(), [("corrupt", 1), ("not-found", 1)]);
}
