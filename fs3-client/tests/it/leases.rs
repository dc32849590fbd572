//! Leases: seen by all while held, gone when dropped, and gone when their holder is.

use crate::support::Place;
use fs3_client::{Store, StoreDir, StoreError, StoreLocation, StoreOptions};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn purposes(store: &Store) -> Vec<String> {
    let mut all: Vec<String> = store.leases().unwrap().into_iter().map(|lease| lease.purpose).collect();
    all.sort();
    all
}

fn held_and_dropped(store: &Store, other: &Store) {
    assert!(other.leases().unwrap().is_empty());
    let first = store.lease("convert").unwrap();
    let second = store.lease("gc").unwrap();
    assert_eq!(purposes(other), ["convert", "gc"]);
    let lease = &other.leases().unwrap()[0];
    assert_eq!(lease.pid, std::process::id());
    assert!(lease.ends > lease.renewed && !lease.host.is_empty());
    first.check().unwrap();
    drop(first);
    assert_eq!(purposes(other), ["gc"]);
    drop(second);
    assert!(other.leases().unwrap().is_empty());
}

#[test]
fn at_every_place() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(&dir.path().join("store")).unwrap();
    held_and_dropped(&store, &store);
    let location: StoreLocation = format!("3fs:{}", dir.path().join("3fs").display()).parse().unwrap();
    let options = StoreOptions { local_dir: Some(dir.path().join("local")), ..StoreOptions::default() };
    let store = Store::create_at(&location, &options).unwrap();
    held_and_dropped(&store, &store);
    let place = Place::new();
    held_and_dropped(&place.store("a"), &place.store("b"));
}

/// Not a test: holds a lease until it is killed.
#[test]
#[ignore = "a process that another test starts"]
fn child() {
    let Some(path) = std::env::var_os("LEASE_TEST_PATH") else { return };
    let _lease = Store::open(path.as_ref()).unwrap().lease("child").unwrap();
    loop {
        std::thread::park();
    }
}

/// On a directory of a local disk, the kernel tells at once that a holder is dead.
#[test]
fn the_lease_of_a_killed_process_ends_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(&dir.path().join("store")).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "leases::child", "--ignored", "--nocapture"])
        .env("LEASE_TEST_PATH", dir.path().join("store"))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let began = Instant::now();
    while store.leases().unwrap().is_empty() {
        assert!(began.elapsed() < Duration::from_secs(60), "the child never took its lease");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(purposes(&store), ["child"]);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(store.leases().unwrap().is_empty());
    assert_eq!(std::fs::read_dir(dir.path().join("store/leases")).unwrap().count(), 0, "its file is gone too");
}

/// A lease that is renewed outlasts its time; a holder whose lease was ended by somebody hears of it.
#[test]
fn renewal() {
    let place = Place::new();
    let options = StoreOptions { lease_lasts: Duration::from_secs(1), ..place.options("a") };
    let store = Store::create_at(&place.location(), &options).unwrap();
    let lease = store.lease("long").unwrap();
    let first = store.leases().unwrap().remove(0).renewed;
    std::thread::sleep(Duration::from_millis(2500));
    lease.check().unwrap();
    let listed = store.leases().unwrap().remove(0);
    assert!(listed.renewed > first, "never renewed");
    store.delete_object(&format!("leases/{}", listed.id)).unwrap();
    let began = Instant::now();
    let error = loop {
        match lease.check() {
            Err(error) => break error,
            Ok(()) => assert!(began.elapsed() < Duration::from_secs(30), "nobody noticed"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert!(matches!(error, StoreError::LeaseLost { .. }), "{error}");
    assert!(error.to_string().contains("s3://bucket/team/store was lost (somebody ended it)"), "{error}");
}

/// While the store cannot be reached a lease is not lost, until its time is over.
#[test]
fn an_outage_is_survived_or_told() {
    use fixtures::faulty_proxy::Fault;
    let place = Place::new();
    let options = StoreOptions {
        lease_lasts: Duration::from_secs(2),
        retry: fs3_client::blob_store::retry::Policy::once(),
        ..place.options("a")
    };
    let store = Store::create_at(&place.location(), &options).unwrap();
    let lease = store.lease("x").unwrap();
    place.proxy.set_script(|_| Some(Fault::Reset));
    std::thread::sleep(Duration::from_millis(1000));
    lease.check().unwrap();
    place.proxy.set_script(|_| None);
    std::thread::sleep(Duration::from_millis(1500));
    lease.check().unwrap();
    place.proxy.set_script(|_| Some(Fault::Reset));
    std::thread::sleep(Duration::from_millis(2600));
    let error = lease.check().unwrap_err();
    assert!(error.to_string().contains("it was not renewed in time"), "{error}");
}

/// A leftover of a writer elsewhere stays while that writer's lease lives, and goes when both are gone and old.
#[test]
fn leftovers_of_others_stay_while_their_lease_lives() {
    let dir = tempfile::tempdir().unwrap();
    let store = StoreDir::create(&dir.path().join("store")).unwrap();
    let leftover = dir.path().join("store/tmp/ffffffffffffffff-abcdef012345.77.1.data");
    std::fs::write(&leftover, "half").unwrap();
    let old = std::time::SystemTime::now() - Duration::from_secs(25 * 3600);
    std::fs::File::open(&leftover).unwrap().set_modified(old).unwrap();
    let lease = dir.path().join("store/leases/ffffffffffffffff-abcdef012345.77.2.lease");
    std::fs::create_dir(dir.path().join("store/leases")).unwrap();
    let body = r#"{"version":1,"purpose":"convert","host":"h","machine":"abcdef012345","boot":"ffffffffffffffff","pid":77,"started":1,"lasts":900}"#;
    std::fs::write(&lease, body).unwrap();
    assert_eq!(store.sweep().unwrap().foreign, 1);
    assert!(leftover.exists());
    // It was not renewed for longer than it lasts, clocks that differ included.
    let ended = std::time::SystemTime::now() - Duration::from_secs(900 + 301);
    std::fs::File::open(&lease).unwrap().set_modified(ended).unwrap();
    assert_eq!(store.sweep().unwrap().removed, 1);
    assert!(!leftover.exists() && !lease.exists());
}
