//! Case O05: stores where the kernel takes no files, so that loop devices stand between.

use crate::support::{Place, text};
use fs3_client::StoreDir;
use rustix::mount::MountFlags;
use std::fs;
use std::slice;

fn check(place: &Place) {
    let layer = |name: &str| place.layer(|tree| tree.file(name, vec![b'x'; 70_000]));
    let (one, two) = (layer("one"), layer("two"));
    place.image("single:1", slice::from_ref(&one));
    place.image("double:1", &[one, two]);

    let error = place.mount(&["double:1", "--attach", "file"]).fails(1);
    assert!(error.contains("Block device required"), "the kernel's ENOTBLK: {error}");
    assert!(error.contains("--attach loop"), "{error}");

    for (image, kind, devices) in [("single:1", "erofs", 2), ("double:1", "overlay", 4)] {
        let run = place.mount(&[image]);
        let mounted = run.ok();
        assert_eq!(mounted["kind"], kind);
        for layer in mounted["layers"].as_array().unwrap() {
            assert_eq!(layer["attached"], "loop");
        }
        assert_eq!(mounted["warnings"].as_array().unwrap().len(), 1);
        assert_eq!(run.stderr().matches("warning: ").count(), 1, "{}", run.stderr());
        assert!(run.stderr().contains("loop devices are used"), "{}", run.stderr());
        assert_eq!(text(place.root().join("one")).len(), 70_000);
        assert_eq!(place.loops(), devices);
        assert_eq!(place.umount().ok()["kind"], kind);
        place.assert_nothing_left();
    }
}

#[test]
fn privileged_o05_store_on_tmpfs() {
    check(&Place::on_tmpfs());
}

#[test]
fn privileged_o05_store_on_overlayfs() {
    let mut place = Place::new();
    for dir in ["l", "u", "w", "o"] {
        fs::create_dir(place.path(dir)).unwrap();
    }
    let [lower, upper, work] = ["l", "u", "w"].map(|dir| place.path(dir));
    let options = format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
    let options = std::ffi::CString::new(options).unwrap();
    rustix::mount::mount("o", place.path("o"), "overlay", MountFlags::empty(), Some(options.as_c_str()))
        .expect("this test needs root, to mount overlayfs");
    place.store = StoreDir::create(&place.path("o/store")).unwrap();
    check(&place);
}

/// Case O06: the same by request, where files would do.
#[test]
fn privileged_o06_loop_devices_on_request() {
    let place = Place::new();
    let layer = |name: &str| place.layer(|tree| tree.file(name, vec![b'x'; 70_000]));
    place.image("double:1", &[layer("one"), layer("two")]);
    let run = place.mount(&["double:1", "--attach", "loop"]);
    assert_eq!(run.ok()["warnings"].as_array().unwrap().len(), 0);
    assert_eq!(place.loops(), 4);
    assert_eq!(text(place.root().join("two")).len(), 70_000);
    place.umount().ok();
    place.assert_nothing_left();
}
