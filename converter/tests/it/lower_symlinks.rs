//! What a layer puts behind symbolic links of lower layers, where more than one thing happens at the place: found by
//! comparing tiny random stacks with extraction.

use crate::support::Place;
use fixtures::tree::Snapshot;
use fixtures::{mounts, oci, require};

fn text(tree: &Snapshot, path: &str) -> Option<String> {
    let node = tree.find(path.as_bytes())?;
    Some(format!("{:?} {:04o} {}", node.kind, node.mode, node.size))
}

/// Converts layers of these scripts, and compares paths of the overlay over them with what they must be.
fn check(scripts: &[&str], expected: &[(&str, Option<&str>)]) {
    if !require::mounts() {
        return;
    }
    mounts::in_private_namespace(|| {
        let place = Place::new();
        let layers: Vec<_> = scripts.iter().map(|script| oci::Layer::text(script)).collect();
        let converted = place.convert(&place.layout(&layers)).unwrap();
        let (overlay, _layers) = place.mount_all(&converted);
        let found = Snapshot::of(overlay.path()).unwrap();
        for (path, want) in expected {
            assert_eq!(text(&found, path).as_deref(), *want, "{path}");
        }
    });
}

const BASE: &str = "d usr/ 0755\nd usr/lib/ 0755\nf usr/lib/old \"1\" 0644\ns lib -> usr/lib\n";

#[test]
fn privileged_a_hard_link_through_a_lower_symlink_finds_this_layer_s_file() {
    check(
        &[BASE, "f usr/lib/old \"new\" 0600\nh copy -> lib/old\n"],
        &[("copy", Some("Regular 0600 3")), ("usr/lib/old", Some("Regular 0600 3"))],
    );
    check(&[BASE, "f lib/x \"new\" 0600\nh copy -> usr/lib/x\n"], &[("copy", Some("Regular 0600 3"))]);
}

#[test]
fn privileged_a_removed_symlink_is_not_followed() {
    check(
        &[BASE, "w lib\nf lib/x \"new\" 0600\n"],
        &[("lib/x", Some("Regular 0600 3")), ("usr/lib/x", None), ("usr/lib/old", Some("Regular 0644 1"))],
    );
}

#[test]
fn privileged_a_whiteout_where_something_arrives_hides_the_lower_name_only() {
    check(
        &[BASE, "w usr/lib/old\nd usr/lib/n/ 0755\nf lib/old \"new\" 0600\n"],
        &[("usr/lib/old", Some("Regular 0600 3"))],
    );
}

#[test]
fn privileged_a_directory_with_an_entry_describes_one_without() {
    let layer = "d lib/d/ 0700\nf usr/lib/d/f \"new\" 0600\n";
    check(&[BASE, layer], &[("usr/lib/d/f", Some("Regular 0600 3"))]);
    if !require::mounts() {
        return;
    }
    mounts::in_private_namespace(|| {
        let place = Place::new();
        let converted = place.convert(&place.layout(&[oci::Layer::text(BASE), oci::Layer::text(layer)])).unwrap();
        let (overlay, _layers) = place.mount_all(&converted);
        assert_eq!(Snapshot::of(overlay.path()).unwrap().find(b"usr/lib/d").unwrap().mode, 0o700);
    });
}

#[test]
fn privileged_a_whiteout_below_a_lower_file_leaves_it() {
    check(&["f b \"1\" 0644\nd a/ 0755\n", "w b/x\nf a/n \"2\" 0644\n"], &[("b", Some("Regular 0644 1"))]);
}

#[test]
fn privileged_a_whiteout_acts_before_the_symlinks_of_its_layer() {
    check(
        &["d a/ 0755\nf a/x \"1\" 0644\nd b/ 0755\nf b/x \"2\" 0644\ns c -> a\n", "w c/x\ns a -> b\n"],
        &[("b/x", Some("Regular 0644 1"))],
    );
}

/// Such a link was followed into the directory that was to be moved, which then was nowhere.
#[test]
fn a_lower_symlink_into_itself_is_refused() {
    let place = Place::new();
    let layers = ["s a -> a/b", "f a/x \"1\" 0644"].map(oci::Layer::text);
    let error = place.convert(&place.layout(&layers)).unwrap_err().to_string();
    assert!(error.contains("`a`") && error.contains("symbolic links"), "{error}");
}

#[test]
fn two_entries_of_one_place_are_told() {
    let place = Place::new();
    let layers = [BASE, "f lib/x \"1\" 0644\nf usr/lib/x \"2\" 0644\n"].map(oci::Layer::text);
    let converted = place.convert(&place.layout(&layers)).unwrap();
    let warnings = &converted.layers[1].record.warnings;
    assert!(warnings.iter().any(|w| w.entry == "usr/lib/x" && w.message.contains("left out")), "{warnings:?}");
}

#[test]
fn privileged_a_hard_link_to_a_lower_symlink_that_this_layer_goes_through() {
    check(
        &["d b/\ns a -> b\n", "f a/x \"new\" 0600\nh c -> a\n"],
        &[("b/x", Some("Regular 0600 3")), ("c", Some("Symlink 0777 1")), ("a", Some("Symlink 0777 1"))],
    );
}
