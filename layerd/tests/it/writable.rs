//! Roots with a writable layer.

use crate::support::{Place, list, text};
use rustix::fs::{CWD, Gid, Mode, Uid, chmod, chown};
use rustix::mount::MountFlags;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

fn image(place: &Place) {
    let bottom = place.layer(|tree| {
        tree.file("d/a", "a");
        tree.file("d/b", "b");
    });
    let top = place.layer(|tree| {
        tree.file("c", "c");
        tree.xattr("", "user.note", b"of the root");
        chown(&tree.root, Some(Uid::from_raw(12)), Some(Gid::from_raw(34))).unwrap();
        chmod(&tree.root, Mode::from_raw_mode(0o1751)).unwrap();
    });
    place.image("base:1", &[bottom, top]);
}

fn mount_rw(place: &Place, dir: &Path, more: &[&str]) -> crate::support::Run {
    let mut args = vec!["base:1".as_ref(), "--rw".as_ref(), dir.as_os_str()];
    args.extend(more.iter().map(|arg| std::ffi::OsStr::new(*arg)));
    place.mount(&args)
}

#[test]
fn privileged_write_unmount_and_go_on() {
    let place = Place::new();
    image(&place);
    let (root, dir) = (place.root(), place.path("boxes/1"));
    assert_eq!(mount_rw(&place, &dir, &[]).ok()["writable"], dir.to_str().unwrap());
    let meta = fs::metadata(&root).unwrap();
    assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), (12, 34, 0o1751));
    let mut value = [0; 32];
    let length = rustix::fs::getxattr(&root, "user.note", &mut value).unwrap();
    assert_eq!(&value[..length], b"of the root");
    assert_eq!(meta.mtime(), 0, "mkfs.erofs -T0");
    fs::write(root.join("d/a"), "changed").unwrap();
    fs::remove_file(root.join("d/b")).unwrap();
    fs::write(root.join("new"), "new").unwrap();
    chmod(&root, Mode::from_raw_mode(0o700)).unwrap();

    // The same directory cannot serve two roots.
    fs::create_dir(place.path("second")).unwrap();
    let second = std::process::Command::new(env!("CARGO_BIN_EXE_layerd"))
        .args(["mount", "base:1", "--store"])
        .args([place.store.root(), "--rw".as_ref(), &dir, &place.path("second")])
        .output()
        .unwrap();
    let error = String::from_utf8(second.stderr).unwrap();
    assert!(error.contains("it is in use as the writable layer of"), "{error}");

    assert_eq!(place.umount().ok()["upper"], dir.join("upper").to_str().unwrap());
    place.assert_nothing_left();
    mount_rw(&place, &dir, &["--handover", "parked"]).ok();
    assert_eq!(text(root.join("d/a")) + &text(root.join("new")), "changednew");
    assert_eq!(list(root.join("d")), ["a"]);
    assert_eq!(fs::metadata(&root).unwrap().mode() & 0o7777, 0o700, "what was changed stays so");
    place.umount().ok();
    place.assert_nothing_left();
}

#[test]
fn privileged_one_layer_writable() {
    let place = Place::new();
    place.image("base:1", &[place.layer(|tree| tree.file("a", "a"))]);
    assert_eq!(mount_rw(&place, &place.path("rw"), &[]).ok()["kind"], "overlay");
    fs::write(place.root().join("a"), "b").unwrap();
    assert_eq!(text(place.path("rw/upper/a")), "b");
    place.umount().ok();
}

/// Case O08: what a `volatile` mount leaves is noticed before the kernel's bare refusal.
#[test]
fn privileged_o08_volatile_leftover() {
    let place = Place::new();
    image(&place);
    let dir = place.path("rw");
    fs::create_dir_all(dir.join("upper")).unwrap();
    fs::create_dir_all(dir.join("work")).unwrap();
    fs::create_dir(place.path("lower")).unwrap();
    let options = format!(
        "lowerdir={},upperdir={},workdir={},volatile",
        place.path("lower").display(),
        dir.join("upper").display(),
        dir.join("work").display()
    );
    let options = std::ffi::CString::new(options).unwrap();
    rustix::mount::mount("o", place.root(), "overlay", MountFlags::empty(), Some(options.as_c_str())).unwrap();
    fs::write(place.root().join("x"), "x").unwrap();
    rustix::mount::unmount(place.root(), rustix::mount::UnmountFlags::empty()).unwrap();

    let error = mount_rw(&place, &dir, &[]).fails(1);
    assert!(error.contains("`volatile`") && error.contains("rw/work/work/incompat/volatile"), "{error}");
    place.assert_nothing_left();
    fs::remove_dir_all(dir.join("work/work/incompat/volatile")).unwrap();
    mount_rw(&place, &dir, &[]).ok();
    assert_eq!(text(place.root().join("x")), "x");
    place.umount().ok();
}

#[test]
fn privileged_file_systems_that_cannot_be_an_upper() {
    let place = Place::new();
    image(&place);
    mount_rw(&place, &place.path("rw"), &[]).ok();
    fs::rename(place.root(), place.path("moved")).unwrap_err();
    // An overlay mount, as in a container.
    let inner = place.path("inner");
    fs::create_dir(&inner).unwrap();
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_layerd"))
        .args(["mount", "base:1", "--store"])
        .args([place.store.root(), "--rw".as_ref(), &place.root().join("nested"), &inner])
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(error.contains("it is on overlayfs (is this inside a container?)"), "{error}");
    assert!(!place.root().join("nested").exists(), "what was made for it is gone");
    place.umount().ok();
    place.assert_nothing_left();
}

/// A step that fails in the kernel, after loop devices and directories were made: nothing of it is left.
#[test]
fn privileged_a_failing_step_leaves_nothing() {
    let place = Place::new();
    image(&place);
    let dir = place.path("rw");
    // `upper` and `work` on different file systems is what only overlayfs itself refuses.
    fs::create_dir_all(dir.join("work")).unwrap();
    rustix::mount::mount("tmpfs", dir.join("work"), "tmpfs", MountFlags::empty(), None).unwrap();
    let before = place.mounts();
    for handover in ["auto", "parked"] {
        let run = mount_rw(&place, &dir, &["--attach", "loop", "--handover", handover]);
        let error = run.fails(1);
        assert!(error.contains("cannot mount overlayfs over 2 layers: Invalid argument"), "{error}");
        assert!(error.contains("hint: the kernel's own log"), "{error}");
        place.assert_nothing_left();
        assert_eq!(place.mounts(), before);
        assert_eq!(list(&dir), ["work"], "the upper directory that was made is gone");
        run.parked_nothing();
    }

    let file = place.path("file");
    fs::write(&file, "").unwrap();
    let error = mount_rw(&place, &file, &[]).fails(1);
    assert!(error.contains("cannot create"), "{error}");
    rustix::fs::mkdirat(CWD, place.path("half"), Mode::from_raw_mode(0o755)).unwrap();
    fs::write(place.path("half/work"), "").unwrap();
    mount_rw(&place, &place.path("half"), &[]).fails(1);
    assert_eq!(list(place.path("half")), ["work"]);
    place.assert_nothing_left();
}

/// Of several mounts of one writable layer at once, one succeeds.
#[test]
fn privileged_one_writable_layer_serves_one_root() {
    let place = Place::new();
    image(&place);
    let roots: Vec<_> = (0..6).map(|n| place.path(format!("root{n}"))).collect();
    let children: Vec<_> = roots
        .iter()
        .map(|root| {
            fs::create_dir(root).unwrap();
            std::process::Command::new(env!("CARGO_BIN_EXE_layerd"))
                .args(["mount", "base:1", "--attach", "loop", "--store"])
                .args([place.store.root(), "--rw".as_ref(), &place.path("rw"), root])
                .stderr(std::process::Stdio::piped())
                .stdout(std::process::Stdio::null())
                .spawn()
                .unwrap()
        })
        .collect();
    let mut mounted = 0;
    for child in children {
        let output = child.wait_with_output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        mounted += usize::from(output.status.success());
        assert!(output.status.success() || error.contains("it is in use as the writable layer of"), "{error}");
    }
    assert_eq!(mounted, 1);
    assert_eq!(place.mounts().len(), 1);
    for root in roots {
        let _ = rustix::mount::unmount(root, rustix::mount::UnmountFlags::empty());
    }
    place.assert_nothing_left();
}
