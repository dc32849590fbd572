//! The collector on real stores: a directory, and S3 where that differs.

use super::*;
use crate::lease::LeaseKind;
use crate::{Digest, Lease, LeaseInfo, RefName, Store, StoreLocation, StoreOptions};
use oci_spec::image::{Descriptor, MediaType};
use std::collections::HashSet;
use std::error::Error;
use std::str::FromStr as _;
use std::time::Duration;

/// Keeps what the refs name, and what leases hold; here those are blobs and no manifests.
struct Named<'s>(&'s Store);

impl Marks for Named<'_> {
    fn reachable(&mut self, leases: &[LeaseInfo]) -> Result<HashSet<Digest>, Box<dyn Error + Send + Sync>> {
        let refs = self.0.list_refs()?.into_iter().map(|(_, descriptor)| descriptor);
        let held = leases.iter().flat_map(|lease| lease.holds.clone());
        Ok(refs.chain(held).map(|d| d.digest().to_string().parse()).collect::<Result<_, _>>()?)
    }
}

const NOW: Options = Options { grace: Duration::ZERO, wait: Duration::ZERO, most: 1000 };

fn gc(store: &Store, options: &Options) -> Result<Collected, GcError> {
    collect(store, options, &mut Named(store), &mut |_| ())
}

fn descriptor(digest: &Digest) -> Descriptor {
    Descriptor::new(MediaType::ImageManifest, 4, oci_spec::image::Digest::from_str(&digest.to_string()).unwrap())
}

fn name(store: &Store, name: &str, digest: &Digest) {
    store.write_ref(&name.parse::<RefName>().unwrap(), &descriptor(digest)).unwrap();
}

fn blobs(store: &Store) -> HashSet<Digest> {
    store.list_blobs().unwrap().into_iter().map(|listed| listed.digest).collect()
}

fn own_objects(store: &Store) -> usize {
    store.list_objects("gc").unwrap().len() + store.list_objects("leases").unwrap().len()
}

/// Four blobs, of which the ref `a:1` names the first.
fn filled(store: &Store) -> [Digest; 4] {
    let all = [b"one.", b"two.", b"tri.", b"four"].map(|bytes| store.publish_bytes(bytes).unwrap().digest);
    name(store, "a:1", &all[0]);
    all
}

fn directory() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(&dir.path().join("store")).unwrap();
    (dir, store)
}

fn what_is_needed_stays(store: &Store) {
    let all = filled(store);
    let young = gc(store, &Options { grace: Duration::from_secs(60), ..NOW }).unwrap();
    assert_eq!((young.blobs, young.reachable, young.young, young.removed.len()), (4, 1, 3, 0));
    let seen = survey(store, &NOW, &mut Named(store)).unwrap();
    assert_eq!((seen.removed.len(), blobs(store).len(), own_objects(store)), (3, 4, 0));
    let reading = store.reading("test", vec![descriptor(&all[1])], &all[1..2]).unwrap();
    let few = gc(store, &Options { most: 1, ..NOW }).unwrap();
    assert_eq!(few.removed.len(), 2, "in two rounds");
    assert_eq!(blobs(store), all[..2].iter().copied().collect());
    drop(reading);
    assert_eq!(gc(store, &NOW).unwrap().removed_bytes(), 4);
    assert_eq!((blobs(store), own_objects(store)), (all[..1].iter().copied().collect(), 0));
    assert!(store.reading("test", vec![descriptor(&all[1])], &all[1..2]).is_err(), "it is gone");
}

fn writers_are_waited_for(store: &Store) {
    let all = filled(store);
    let before = store.writing("before").unwrap();
    let first = gc(store, &NOW).unwrap();
    assert_eq!((first.removed.len(), first.waits_for.len()), (0, 1));
    // One that comes later knows the list. It takes a blob off it by looking, and by publishing it again.
    let after = store.writing("after").unwrap();
    assert_eq!(after.blob_size(&all[1]).unwrap(), Some(4));
    assert!(after.publish_bytes(b"tri.").unwrap().existed);
    // The old one names what was condemned.
    name(&before, "b:1", &all[3]);
    drop(before);
    let second = gc(store, &NOW).unwrap();
    assert_eq!((second.removed.len(), second.kept), (0, 3), "the newer writer need not end: {second:?}");
    name(&after, "c:1", &all[2]);
    drop(after);
    let third = gc(store, &NOW).unwrap();
    assert_eq!(third.removed.len(), 1);
    assert_eq!(blobs(store), [all[0], all[2], all[3]].into());
    assert_eq!(own_objects(store), 0);
}

#[test]
fn what_is_needed_stays_in_a_directory() {
    let (_dir, store) = directory();
    what_is_needed_stays(&store);
}

#[test]
fn writers_are_waited_for_in_a_directory() {
    let (_dir, store) = directory();
    writers_are_waited_for(&store);
}

#[test]
fn on_s3() {
    let server = fixtures::s3::S3Server::start(&["images"]);
    let dir = tempfile::tempdir().unwrap();
    for (n, test) in [what_is_needed_stays, writers_are_waited_for].iter().enumerate() {
        let location: StoreLocation = format!("s3://images/{n}").parse().unwrap();
        let s3 = [
            ("AWS_ENDPOINT_URL", server.url()),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ACCESS_KEY_ID", fixtures::s3::ACCESS_KEY.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", fixtures::s3::SECRET_KEY.to_owned()),
        ];
        let s3 = Some(s3.map(|(name, value)| (name.to_owned(), value)).to_vec());
        let local_dir = Some(dir.path().join(n.to_string()));
        let options = StoreOptions { local_dir, s3, ..StoreOptions::default() };
        test(&Store::create_at(&location, &options).unwrap());
        // One that was renewed is older than its list says, and goes all the same.
        let store = Store::create_at(&location, &options).unwrap();
        let renewed = store.publish_bytes(b"five").unwrap().digest;
        std::thread::sleep(Duration::from_millis(1100));
        let name = format!("renewed/{}", renewed.hex());
        store.put_object(&name, b"", &crate::names::Condition::Always).unwrap();
        assert_eq!(gc(&store, &NOW).unwrap().removed.len(), 1);
        assert!(store.object(&name).unwrap().is_none());
    }
}

#[test]
fn only_one_at_a_time() {
    let (_dir, store) = directory();
    filled(&store);
    let other = Lease::of_kind(&store, LeaseKind::Collector, "gc", Vec::new()).unwrap();
    match gc(&store, &NOW) {
        Err(GcError::Busy(Some(lease))) => assert_eq!(lease.id, other.id()),
        done => panic!("{done:?}"),
    }
    drop(other);
    assert_eq!(gc(&store, &NOW).unwrap().removed.len(), 3);
}

#[test]
fn what_cannot_be_known_stops_it() {
    let (dir, store) = directory();
    filled(&store);
    std::fs::write(dir.path().join("store/refs/a/2"), "{").unwrap();
    let error = gc(&store, &NOW).unwrap_err();
    assert!(matches!(error, GcError::Marks(_)) && error.to_string().contains("refs/a/2"), "{error}");
    assert_eq!((blobs(&store).len(), own_objects(&store)), (4, 0));
}

#[test]
fn a_writer_ends_the_sweep_of_the_dead() {
    let (_dir, store) = directory();
    let all = filled(&store);
    // As a collector leaves it that is killed while it deletes.
    let before = store.writing("before").unwrap();
    gc(&store, &NOW).unwrap();
    drop(before);
    let state = store.object("gc/state").unwrap().unwrap();
    let sweeping = String::from_utf8(state.bytes.to_vec()).unwrap().replace("condemned", "sweep");
    store.put_object("gc/state", sweeping.as_bytes(), &crate::names::Condition::Always).unwrap();
    store.delete_blob(&all[1]).unwrap();
    let writer = store.writing("after").unwrap();
    assert_eq!(writer.blob_size(&all[1]).unwrap(), None);
    assert!(store.object("gc/state").unwrap().is_none());
    assert!(!writer.publish_bytes(b"two.").unwrap().existed);
    name(&writer, "b:1", &all[1]);
    drop(writer);
    assert_eq!(gc(&store, &NOW).unwrap().removed.len(), 2);
    assert_eq!((blobs(&store), own_objects(&store)), (all[..2].iter().copied().collect(), 0));
}

#[test]
fn damage_to_what_it_left_is_put_right() {
    let (dir, store) = directory();
    filled(&store);
    let before = store.writing("before").unwrap();
    gc(&store, &NOW).unwrap();
    drop(before);
    let list = store.list_objects("gc").unwrap().into_iter().find(|o| o.name.contains("condemned-")).unwrap();
    std::fs::write(dir.path().join("store").join(&list.name), "dsec-condemned 1 7\n").unwrap();
    assert!(store.writing("x").unwrap_err().to_string().contains(&list.name));
    assert_eq!(gc(&store, &NOW).unwrap().removed.len(), 3);
    assert_eq!(own_objects(&store), 0);
}

#[test]
fn who_is_given_up_writes_no_more() {
    let (_dir, store) = directory();
    let writer = store.writing("hangs").unwrap();
    let staged = writer.stage("data").unwrap();
    assert!(staged.path().exists());
    writer.give_up();
    assert!(!staged.path().exists());
    assert!(store.leases().unwrap().is_empty());
    assert!(staged.publish(&Digest::of(b""), 0).is_err());
    assert!(writer.stage("data").is_err() && writer.publish_bytes(b"x").is_err());
    assert!(writer.write_ref(&"a:1".parse().unwrap(), &descriptor(&Digest::of(b"x"))).is_err());
    assert!(blobs(&store).is_empty() && store.list_refs().unwrap().is_empty());
}

#[test]
fn a_lease_that_is_left_lasts_until_it_is_ended() {
    let (_dir, store) = directory();
    let all = filled(&store);
    let reading = store.reading("mount", vec![descriptor(&all[1])], &all[1..2]).unwrap();
    let id = reading.id().to_owned();
    reading.leave();
    assert_eq!(gc(&store, &NOW).unwrap().removed.len(), 2);
    assert!(blobs(&store).contains(&all[1]));
    store.end_lease(&id).unwrap();
    assert_eq!(gc(&store, &NOW).unwrap().removed.len(), 1);
}
