//! Cases O03 and O09: paths with characters that option strings give a meaning to, and long ones.

use crate::support::{Place, list, text};
use std::fs;
use std::slice;

const ODD: &str = "c,o:l\\n b#\u{fc}=x";

fn check(place: &Place, rw: &str, more: &[&str]) {
    let layer = |name: &str| place.layer(|tree| tree.file(name, vec![b'x'; 70_000]));
    let (one, two) = (layer("one"), layer("two"));
    place.image("single:1", slice::from_ref(&one));
    place.image("double:1", &[one, two]);
    let dir = place.path(rw);
    for attach in ["file", "loop"] {
        place.mount(&[&["single:1", "--attach", attach], more].concat()).ok();
        assert_eq!(text(place.root().join("one")).len(), 70_000);
        place.umount().ok();
        let rw = dir.to_str().unwrap();
        place.mount(&[&["double:1", "--attach", attach, "--rw", rw], more].concat()).ok();
        assert_eq!(text(place.root().join("two")).len(), 70_000);
        fs::write(place.root().join(attach), "x").unwrap();
        // The mount table's escapes are undone: in use is in use, whatever the name.
        let upper = place.umount().ok()["upper"].as_str().unwrap().to_owned();
        assert_eq!(upper, dir.join("upper").to_str().unwrap());
        place.assert_nothing_left();
    }
    assert_eq!(list(dir.join("upper")), ["file", "loop"]);
}

#[test]
fn privileged_o03_o09_odd_characters() {
    let place = Place::with_store(format!("{ODD}/store"));
    check(&place, &format!("rw {ODD}"), &[]);
}

#[test]
fn privileged_o03_o09_odd_characters_parked() {
    let place = Place::with_store(format!("{ODD}/store"));
    check(&place, &format!("rw {ODD}"), &["--handover", "parked"]);
}

/// `fsconfig(2)` takes strings of 255 bytes; a store may well be deeper.
#[test]
fn privileged_long_paths() {
    let long = ["d".repeat(100), "e".repeat(100), "f".repeat(100)].join("/");
    let place = Place::with_store(&long);
    check(&place, &format!("rw/{long}"), &[]);
}
