//! Stores at all their places, as the converter sees them.

use crate::support::{Place, QUICK};
use fixtures::faulty_proxy::Fault;
use fs3_client::testing::conformance::contents;
use fs3_client::{Digest, RefName, Rules, Store, StoreDir, StoreError, StoreLocation, StoreOptions};
use oci_spec::image::{Descriptor, DescriptorBuilder, MediaType};
use std::io::{Read as _, Write as _};
use std::str::FromStr as _;

fn descriptor(n: u64) -> Descriptor {
    DescriptorBuilder::default()
        .media_type(MediaType::ImageManifest)
        .digest(oci_spec::image::Digest::from_str(&Digest::of(&n.to_le_bytes()).to_string()).unwrap())
        .size(n)
        .build()
        .unwrap()
}

fn publish(store: &Store, bytes: &[u8]) -> Digest {
    let staged = store.stage("test").unwrap();
    (&*staged).write_all(bytes).unwrap();
    let digest = Digest::of(bytes);
    staged.publish(&digest, bytes.len() as u64).unwrap();
    digest
}

fn read(store: &Store, digest: &Digest, size: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    store.open_blob(digest, size).unwrap().read_to_end(&mut bytes).unwrap();
    bytes
}

/// All that a store does, at whatever place; `other` is the same store from another machine.
fn does_what_a_store_does(store: &Store, other: &Store) {
    let large = contents(3, 20 << 20);
    let digest = publish(store, &large);
    assert_eq!(store.blob_size(&digest).unwrap(), Some(20 << 20));
    assert_eq!(other.blob_size(&digest).unwrap(), Some(20 << 20));
    assert!(read(store, &digest, 20 << 20) == large && read(other, &digest, 20 << 20) == large);
    assert_eq!(other.read_range(&digest, 12_345_678..12_345_688).unwrap(), large[12_345_678..12_345_688]);
    assert!(other.read_range(&digest, 0..(20 << 20) + 1).unwrap_err().is_corrupt());

    let published = store.publish_bytes(b"hello").unwrap();
    assert!(!published.existed);
    assert!(other.publish_bytes(b"hello").unwrap().existed);
    assert_eq!(other.read_blob(&published.digest, 5).unwrap(), b"hello");
    assert!(other.open_blob(&published.digest, 6).unwrap_err().is_corrupt());
    assert!(matches!(store.open_blob(&Digest::of(b"none"), 4), Err(StoreError::Missing { .. })));
    assert!(matches!(store.read_range(&Digest::of(b"none"), 0..1), Err(StoreError::Missing { .. })));
    assert!(matches!(store.open_blob(&Digest::of(b""), 0), Err(StoreError::Missing { .. })));
    store.publish_bytes(b"").unwrap();
    assert_eq!(read(other, &Digest::of(b""), 0), b"");
    let staged = store.stage("short").unwrap();
    assert!(matches!(staged.publish(&Digest::of(b"x"), 1), Err(StoreError::ShortStage { .. })));

    let name = |text: &str| text.parse::<RefName>().unwrap();
    assert!(matches!(store.read_ref(&name("a:b")), Err(StoreError::NoSuchRef { .. })));
    for (n, text) in [(1, "team/app:1"), (2, "b:z"), (3, "a:b"), (4, "a:b")] {
        store.write_ref(&name(text), &descriptor(n)).unwrap();
    }
    assert_eq!(other.read_ref(&name("a:b")).unwrap(), descriptor(4));
    let listed: Vec<String> = other.list_refs().unwrap().into_iter().map(|(name, _)| name.to_string()).collect();
    assert_eq!(listed, ["a:b", "b:z", "team/app:1"]);
    other.remove_ref(&name("b:z")).unwrap();
    assert!(matches!(store.remove_ref(&name("b:z")), Err(StoreError::NoSuchRef { .. })));

    let key = Digest::of(b"key").hex();
    assert_eq!(store.record(&key).unwrap(), None);
    store.write_record(&key, b"one").unwrap();
    store.write_record(&key, b"two").unwrap();
    assert_eq!(other.record(&key).unwrap().unwrap(), b"two");
    assert!(matches!(store.record("../x"), Err(StoreError::BadKey { .. })));
    let records: Vec<String> = other.list_records().unwrap().into_iter().map(|r| r.name).collect();
    assert_eq!(records, std::slice::from_ref(&key));
    other.delete_record(&key).unwrap();
    assert_eq!(store.record(&key).unwrap(), None);

    let mut all: Vec<(Digest, u64)> =
        other.list_blobs().unwrap().into_iter().map(|listed| (listed.digest, listed.stat.size)).collect();
    all.sort();
    let mut expected = [(digest, 20 << 20), (published.digest, 5), (Digest::of(b""), 0)];
    expected.sort();
    assert_eq!(all, expected);
    other.renew(&published.digest).unwrap();
    other.delete_blob(&published.digest).unwrap();
    assert_eq!(store.blob_size(&published.digest).unwrap(), None);
    let fresh = store.without_old_copies();
    assert!(matches!(fresh.open_blob(&published.digest, 5), Err(StoreError::Missing { .. })));
    store.sweep().unwrap();
}

#[test]
fn a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let location: StoreLocation = dir.path().join("store").to_str().unwrap().parse().unwrap();
    let options = StoreOptions::default();
    assert!(matches!(Store::open_at(&location, &options), Err(StoreError::NotAStore { .. })));
    let store = Store::create_at(&location, &options).unwrap();
    assert!(store.local_dir().is_some() && store.meter().is_none());
    assert_eq!(store.location(), location);
    does_what_a_store_does(&store, &Store::open_at(&location, &options).unwrap());
}

#[test]
fn a_directory_by_the_rules_of_3fs() {
    let dir = tempfile::tempdir().unwrap();
    let location: StoreLocation = format!("3fs:{}", dir.path().join("store").display()).parse().unwrap();
    let options = |name: &str| StoreOptions { local_dir: Some(dir.path().join(name)), ..StoreOptions::default() };
    assert!(matches!(Store::open_at(&location, &options("a")), Err(StoreError::NotAStore { .. })));
    let store = Store::create_at(&location, &options("a")).unwrap();
    assert_eq!(store.location(), location);
    assert_eq!(store.local_dir().unwrap().rules(), Rules::Fs3);
    does_what_a_store_does(&store, &Store::open_at(&location, &options("b")).unwrap());
    let error = store.read_ref(&"x:y".parse().unwrap()).unwrap_err().to_string();
    assert!(error.contains("is not in the store 3fs:/"), "{error}");
    // What is being written is not on the shared file system.
    let staged = store.stage("x").unwrap();
    assert!(staged.path().starts_with(dir.path().join("a")), "{}", staged.path().display());
}

#[test]
fn s3() {
    let place = Place::new();
    let error = Store::open_at(&place.location(), &place.options("a")).unwrap_err();
    assert_eq!(error.to_string(), "s3://bucket/team/store is not a store: dsec-store.json is missing");
    let store = place.store("a");
    assert_eq!(store.location(), place.location());
    assert!(store.local_dir().is_none());
    does_what_a_store_does(&store, &Store::open_at(&place.location(), &place.options("b")).unwrap());
    let error = store.read_ref(&"x:y".parse().unwrap()).unwrap_err().to_string();
    assert_eq!(error, "x:y is not in the store s3://bucket/team/store");
    let error = store.open_blob(&Digest::of(b"none"), 4).unwrap_err().to_string();
    assert!(error.contains("s3://bucket/team/store/blobs/sha256/"), "{error}");
}

#[test]
fn s3_through_a_bad_network() {
    let place = Place::new();
    let faults = [
        Fault::Reset,
        Fault::LoseAnswer,
        Fault::Status { status: 503, retry_after: Some(0) },
        Fault::ResetBody { after: 100_000 },
        Fault::Truncate { after: 5 },
        Fault::ClaimWhole,
        Fault::WrongRequestBytes { at: 2 },
    ];
    let mut state = 5u64;
    place.proxy.set_script(move |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let random = usize::try_from(state >> 40).unwrap();
        (random % 5 == 0).then(|| faults[random / 5 % faults.len()].clone())
    });
    does_what_a_store_does(&place.store("a"), &place.store("b"));
    assert!(place.proxy.log().iter().filter(|handled| handled.fault.is_some()).count() > 5);
}

/// Bytes that change on their way are told by the digest, and the blob is fetched again; when they stay wrong, that is
/// said and nothing is kept.
#[test]
fn wrong_bytes_are_never_handed_out() {
    let place = Place::new();
    let bytes = contents(4, 100_000);
    let digest = publish(&place.store("a"), &bytes);
    let other = place.store("b");
    place.proxy.set_script(|request| {
        let first = request.header("range").is_some() && request.nth_of_target == 0;
        first.then_some(Fault::WrongBytes { at: 77 })
    });
    assert_eq!(read(&other, &digest, 100_000), bytes);
    let third = place.store("c");
    place.proxy.set_script(|request| request.header("range").is_some().then_some(Fault::WrongBytes { at: 77 }));
    let error = third.open_blob(&digest, 100_000).unwrap_err();
    assert!(error.is_corrupt() && error.to_string().contains("its contents have sha256:"), "{error}");
    place.proxy.set_script(|_| None);
    assert_eq!(read(&third, &digest, 100_000), bytes, "nothing wrong was kept");
}

/// Once fetched, a blob is read locally; and a check of the store asks the store.
#[test]
fn copies_are_used_and_checks_do_not_use_them() {
    let place = Place::new();
    let store = place.store("a");
    let bytes = contents(5, 50_000);
    let digest = publish(&store, &bytes);
    let asked = || place.proxy.log().iter().filter(|h| h.request.header("range").is_some()).count();
    assert_eq!(read(&store, &digest, 50_000), bytes);
    assert_eq!(asked(), 0, "what was published is here");
    let fresh = store.without_old_copies();
    assert_eq!(read(&fresh, &digest, 50_000), bytes);
    assert_eq!(read(&fresh, &digest, 50_000), bytes);
    assert_eq!(asked(), 1, "once is enough");
    let object = place.server.bucket("bucket").join("team/store/blobs/sha256").join(digest.hex());
    std::fs::write(&object, vec![0u8; 50_000]).unwrap();
    assert_eq!(read(&store, &digest, 50_000), bytes, "the copy is right");
    assert!(store.without_old_copies().open_blob(&digest, 50_000).unwrap_err().is_corrupt());
}

#[test]
fn many_threads_fetch_a_blob_once() {
    let place = Place::new();
    let bytes = contents(6, 1 << 20);
    let digest = publish(&place.store("a"), &bytes);
    let other = place.store("b");
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| assert_eq!(read(&other, &digest, 1 << 20), bytes));
        }
    });
    let fetched = place.proxy.log().iter().filter(|h| h.request.header("range").is_some()).count();
    assert_eq!(fetched, 1);
}

/// Two machines replace one ref again and again: each ends, and the last word is one of theirs.
#[test]
fn writers_race_on_a_ref() {
    let place = Place::new();
    let name: RefName = "team/app:1".parse().unwrap();
    let stores = [place.store("a"), place.store("b"), place.store("c")];
    std::thread::scope(|scope| {
        for (n, store) in (0u64..).zip(&stores) {
            let name = &name;
            scope.spawn(move || {
                for round in 0..10 {
                    store.write_ref(name, &descriptor(n * 100 + round)).unwrap();
                }
            });
        }
    });
    let last = stores[0].read_ref(&name).unwrap();
    assert!([9, 109, 209].contains(&last.size()), "{}", last.size());
}

/// A caller's own runtime serves too, from threads that are not its own.
#[test]
fn a_runtime_can_be_given() {
    let place = Place::new();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let options = StoreOptions { runtime: Some(runtime.handle().clone()), retry: QUICK, ..place.options("a") };
    let store = Store::create_at(&place.location(), &options).unwrap();
    assert!(!store.publish_bytes(b"x").unwrap().existed);
    // A store that owns its runtime can be dropped inside another.
    let own = place.store("b");
    runtime.block_on(async move { drop(own) });
}

/// A put that does not fit on the local disk's copy is no reason to fail: what is too large is not kept.
#[test]
fn what_is_too_large_is_not_kept() {
    let place = Place::new();
    let options = StoreOptions { local_limit: 80_000, ..place.options("small") };
    let store = Store::create_at(&place.location(), &options).unwrap();
    let bytes = contents(8, 50_000);
    let digest = publish(&store, &bytes);
    assert_eq!(read(&store, &digest, 50_000), bytes);
    let local = StoreDir::open(&place.local.path().join("small")).unwrap();
    assert_eq!(local.blob_size(&digest).unwrap(), None);
    assert_eq!(place.objects("team/store/blobs"), 1);
}
