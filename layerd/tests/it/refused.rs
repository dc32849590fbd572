//! What is refused before the kernel is asked, since the kernel would mount it.

use crate::support::{Place, list};
use fs3_client::Digest;
use std::fs;
use std::slice;

fn blob(descriptor: &oci_spec::image::Descriptor) -> Digest {
    descriptor.digest().to_string().parse().unwrap()
}

/// Case O04 and its kin: missing, short and wrong data blobs.
#[test]
fn privileged_o04_missing_short_and_wrong_blobs() {
    let place = Place::new();
    let layer = place.layer(|tree| tree.file("f", vec![7; 100_000]));
    place.image("a:1", slice::from_ref(&layer));
    let digest = blob(&layer.data[0]);
    let path = place.store.blob_path(&digest);
    let good = fs::read(&path).unwrap();

    fs::remove_file(&path).unwrap();
    let error = place.mount(&["a:1"]).fails(1);
    assert!(error.contains(&format!("blob {digest} is not in the store")), "{error}");
    assert!(error.contains("hint: `dsec-convert verify"), "{error}");

    fs::write(&path, &good[..good.len() - 4096]).unwrap();
    let error = place.mount(&["a:1"]).fails(3);
    assert!(error.contains(&format!("blob {digest} is corrupt: it has")), "{error}");

    let mut wrong = good.clone();
    wrong[5000] ^= 1;
    fs::write(&path, &wrong).unwrap();
    let error = place.mount(&["a:1", "--verify"]).fails(3);
    assert!(error.contains(&format!("blob {digest} is corrupt: its contents have sha256:")), "{error}");
    place.assert_nothing_left();

    fs::write(&path, &good).unwrap();
    place.mount(&["a:1", "--verify"]).ok();
    place.umount().ok();
}

#[test]
fn privileged_a_manifest_that_does_not_fit_its_images() {
    let place = Place::new();
    let layer = place.layer(|tree| tree.file("f", "x"));
    let mut fewer = layer.clone();
    fewer.data.clear();
    place.image("fewer:1", &[fewer]);
    let error = place.mount(&["fewer:1"]).fails(3);
    assert!(error.contains("it needs 1 data blobs, the manifest has 0"), "{error}");
    let mut more = layer.clone();
    more.data.push(layer.data[0].clone());
    place.image("more:1", &[more]);
    let error = place.mount(&["more:1"]).fails(3);
    assert!(error.contains("it needs 1 data blobs, the manifest has 2"), "{error}");
    let mut not_an_image = layer.clone();
    not_an_image.metadata = layer.data[0].clone();
    place.image("data:1", &[not_an_image]);
    let error = place.mount(&["data:1"]).fails(3);
    assert!(error.contains("not an EROFS image"), "{error}");
    let manifest = blob(&place.store.read_ref(&"more:1".parse().unwrap()).unwrap());
    fs::write(place.store.blob_path(&manifest), "{").unwrap();
    place.mount(&["more:1"]).fails(3);
    place.assert_nothing_left();
}

#[test]
fn names_stores_and_mountpoints_that_are_not_there() {
    let place = Place::new();
    let error = place.mount(&["a:1"]).fails(1);
    assert!(error.contains("a:1 is not in the store") && error.contains("hint: `dsec-convert list"), "{error}");
    assert!(place.mount(&["A:1"]).fails(2).contains("expected NAME:TAG"));
    fs::remove_dir(place.root()).unwrap();
    assert!(place.mount(&["a:1"]).fails(1).contains("there is no such directory to mount on"));
    fs::write(place.root(), "").unwrap();
    assert!(place.mount(&["a:1"]).fails(1).contains("it is not a directory"));
    fs::remove_file(place.root()).unwrap();
    fs::create_dir(place.root()).unwrap();
    fs::remove_dir_all(place.store.root().join("refs")).unwrap();
    let error = place.mount(&["a:1"]).fails(1);
    assert!(error.contains("is not a store: refs is missing"), "{error}");
    assert_eq!(list(place.root()), [""; 0]);
}
