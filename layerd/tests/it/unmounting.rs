//! What `umount` takes away, and what it leaves alone.

use crate::support::{Place, umount};
use rustix::mount::MountFlags;
use std::fs;
use std::process::{Command, Stdio};

fn image(place: &Place) {
    place.image("base:1", &[place.layer(|tree| tree.file("f", "x"))]);
}

#[test]
fn privileged_only_what_is_ours() {
    let place = Place::new();
    image(&place);
    assert!(place.umount().fails(1).contains("nothing is mounted there"));
    assert!(umount(&[place.path("nowhere")]).fails(1).contains("cannot find"));
    rustix::mount::mount("mine", place.root(), "tmpfs", MountFlags::empty(), None).unwrap();
    let error = place.umount().fails(1);
    assert!(error.contains("(tmpfs of mine) is not a root that layerd mounted"), "{error}");
    // A root over it is ours, and taking it away brings the other one back.
    place.mount(&["base:1"]).ok();
    assert_eq!(place.mounts().len(), 2);
    place.umount().ok();
    assert_eq!(place.mounts(), [(place.root(), "tmpfs".to_owned())]);
    place.umount().fails(1);
}

#[test]
fn privileged_a_busy_root_names_its_users() {
    let place = Place::new();
    image(&place);
    place.mount(&["base:1"]).ok();
    let mut sleeper = Command::new("sleep").arg("1000").current_dir(place.root()).stdin(Stdio::null()).spawn().unwrap();
    let error = place.umount().fails(1);
    assert!(error.contains("is busy: ") && error.contains(&format!("process {} (", sleeper.id())), "{error}");
    assert!(error.contains("works in it") && error.contains("hint: ") && error.contains("--lazy"), "{error}");
    let open = fs::File::open(place.root().join("f")).unwrap();
    let unmounted = umount(&["--lazy".as_ref(), place.root().as_os_str()]).ok();
    assert_eq!(unmounted["lazy"], true);
    assert!(place.mounts().is_empty());
    drop(open);
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
    place.assert_nothing_left();
}

/// A process that ends a moment later is waited for.
#[test]
fn privileged_a_user_that_is_just_ending() {
    let place = Place::new();
    image(&place);
    place.mount(&["base:1"]).ok();
    let mut sleeper = Command::new("sleep").arg("0.2").current_dir(place.root()).spawn().unwrap();
    place.umount().ok();
    sleeper.wait().unwrap();
    place.assert_nothing_left();
}

#[test]
fn privileged_a_mount_below_keeps_it_busy() {
    let place = Place::new();
    place.image("base:1", &[place.layer(|tree| tree.dir("mnt"))]);
    place.mount(&["base:1"]).ok();
    rustix::mount::mount("t", place.root().join("mnt"), "tmpfs", MountFlags::empty(), None).unwrap();
    let error = place.umount().fails(1);
    assert!(error.contains("root/mnt is mounted below it"), "{error}");
    rustix::mount::unmount(place.root().join("mnt"), rustix::mount::UnmountFlags::empty()).unwrap();
    place.umount().ok();
}
