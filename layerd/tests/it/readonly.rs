//! Read-only roots.

use crate::support::{Place, list, text};
use std::fs;
use std::slice;

/// Case O02: overlayfs refuses a single lower directory, so one layer is its own root.
#[test]
fn privileged_o02_one_layer() {
    let place = Place::new();
    let big: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    let layer = place.layer(|tree| {
        tree.file("etc/os", "debian\n");
        tree.file("usr/lib/big", &big);
    });
    place.image("base:1", slice::from_ref(&layer));
    let mounted = place.mount(&["base:1", "--attach", "file"]).ok();
    assert_eq!(mounted["kind"], "erofs");
    assert_eq!(mounted["layers"][0]["attached"], "file");
    assert_eq!(mounted["layers"][0]["metadata"]["digest"], layer.metadata.digest().to_string());
    assert_eq!(text(place.root().join("etc/os")), "debian\n");
    assert_eq!(fs::read(place.root().join("usr/lib/big")).unwrap(), big);
    assert_eq!(place.mounts(), [(place.root(), "erofs".to_owned())]);
    assert!(fs::write(place.root().join("x"), "").is_err());

    let again = place.mount(&["base:1"]).fails(1);
    assert!(again.contains("a root is mounted there already"), "{again}");
    assert_eq!(place.umount().ok()["kind"], "erofs");
    place.assert_nothing_left();
    assert_eq!(list(place.root()), [""; 0]);
}

#[test]
fn privileged_one_layer_with_whiteouts_shows_none() {
    let place = Place::new();
    let layer = place.layer(|tree| {
        tree.file("a", "a");
        tree.whiteout("gone");
        // As the converter marks directories that hold whiteouts: only merged ones are looked through.
        tree.xattr("d", "trusted.overlay.origin", b"");
        tree.whiteout("d/gone");
        tree.file("d/b", "b");
    });
    place.image("diff:1", &[layer]);
    assert_eq!(place.mount(&["diff:1"]).ok()["kind"], "overlay");
    assert_eq!(list(place.root()), ["a", "d"]);
    assert_eq!(list(place.root().join("d")), ["b"]);
    assert!(!place.root().join("d/gone").exists());
    place.umount().ok();
    place.assert_nothing_left();
}

fn three_layers(place: &Place) {
    let bottom = place.layer(|tree| {
        tree.file("keep", "bottom");
        tree.file("replaced", "bottom");
        tree.file("removed", "bottom");
        tree.file("opaque/old", "bottom");
        tree.file("tree/a/b", "bottom");
        tree.file("merged/one", "bottom");
    });
    let middle = place.layer(|tree| {
        tree.file("replaced", "middle");
        tree.whiteout("removed");
        tree.opaque("opaque");
        tree.whiteout("tree");
        tree.file("merged/two", "middle");
        tree.file("later", "middle");
    });
    let top = place.layer(|tree| {
        tree.file("opaque/new", "top");
        tree.file("tree/c", "top");
        tree.whiteout("later");
        tree.file("merged/three", "top");
    });
    place.image("base:1", &[bottom, middle]);
    place.image("tools:1", &[top]);
}

fn assert_three_layers(place: &Place) {
    let root = place.root();
    assert_eq!(list(&root), ["keep", "merged", "opaque", "replaced", "tree"]);
    assert_eq!(text(root.join("replaced")), "middle");
    assert_eq!(list(root.join("opaque")), ["new"]);
    assert_eq!(list(root.join("tree")), ["c"]);
    assert_eq!(list(root.join("merged")), ["one", "three", "two"]);
    assert_eq!(text(root.join("merged/one")) + &text(root.join("merged/three")), "bottomtop");
}

#[test]
fn privileged_three_layers_of_two_images() {
    let place = Place::new();
    three_layers(&place);
    let mounted = place.mount(&["base:1", "tools:1", "--verify"]).ok();
    let images: Vec<_> = mounted["layers"].as_array().unwrap().iter().map(|layer| &layer["image"]).collect();
    assert_eq!(images, ["base:1", "base:1", "tools:1"]);
    assert_three_layers(&place);
    // The layers themselves are in no mount table.
    assert_eq!(place.mounts(), [(place.root(), "overlay".to_owned())]);
    place.umount().ok();
    place.assert_nothing_left();
}

/// The way for kernels that take no detached mounts as layers gives the same, and leaves nothing behind.
#[test]
fn privileged_parked_layers() {
    let place = Place::new();
    three_layers(&place);
    let run = place.mount(&["base:1", "tools:1", "--handover", "parked"]);
    run.ok();
    assert_three_layers(&place);
    run.parked_nothing();
    assert_eq!(place.mounts(), [(place.root(), "overlay".to_owned())]);
    place.umount().ok();
    place.assert_nothing_left();
}

/// Two images that share a layer: it is mounted once, where it is topmost, and the root is the same.
#[test]
fn privileged_a_layer_of_two_images() {
    let place = Place::new();
    let base = place.layer(|tree| tree.file("f", "base"));
    let diff = place.layer(|tree| {
        tree.file("f", "diff");
        tree.file("g", "diff");
    });
    place.image("a:1", &[base.clone(), diff]);
    place.image("b:1", &[base]);
    assert_eq!(place.mount(&["a:1", "b:1"]).ok()["layers"].as_array().unwrap().len(), 2);
    assert_eq!(text(place.root().join("f")) + &text(place.root().join("g")), "basediff");
    place.umount().ok();
    assert_eq!(place.mount(&["b:1", "b:1"]).ok()["kind"], "erofs");
    place.umount().ok();
    place.assert_nothing_left();
}

/// Case O10: `user.overlay.*` marks work under `userxattr`, and are not mixed with `trusted.overlay.*` ones.
#[test]
fn privileged_o10_user_xattrs() {
    let place = Place::new();
    let bottom = |tree: &crate::support::Tree| tree.file("d/old", "x");
    let user_bottom = place.layer(|tree| {
        bottom(tree);
        tree.user_opaque("other");
    });
    let user = place.layer(|tree| {
        tree.user_opaque("d");
        tree.file("d/new", "x");
    });
    let trusted = place.layer(|tree| tree.opaque("d"));
    place.image("user:1", &[user_bottom, user]);
    place.image("trusted:1", &[trusted]);
    place.mount(&["user:1"]).ok();
    assert_eq!(list(place.root().join("d")), ["new"]);
    place.umount().ok();
    let error = place.mount(&["user:1", "trusted:1"]).fails(1);
    assert!(error.contains("trusted:1 has its whiteouts in trusted.overlay.*, user:1 in user.overlay.*"), "{error}");
    place.assert_nothing_left();
}

/// Layers whose files are all in the metadata image have no devices at all.
#[test]
fn privileged_layers_without_data() {
    let place = Place::new();
    let one = place.layer_without_data(|tree| tree.file("one", "1"));
    let two = place.layer(|tree| tree.file("two", vec![b'2'; 9000]));
    place.image("one:1", slice::from_ref(&one));
    place.image("both:1", &[one, two]);
    for attach in ["file", "loop"] {
        place.mount(&["one:1", "--attach", attach]).ok();
        assert_eq!(text(place.root().join("one")), "1");
        place.umount().ok();
        place.mount(&["both:1", "--attach", attach]).ok();
        assert_eq!(text(place.root().join("one")).len() + text(place.root().join("two")).len(), 9001);
        place.umount().ok();
    }
    place.assert_nothing_left();
}
