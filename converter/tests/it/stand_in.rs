//! Images on a mount that looks like one of 3FS: the stand-in's.

use crate::program::{convert, layers, run, said};
use crate::support::Place;
use fixtures::require;
use hf3fs_stand_in::mount::process::{Daemon, serve_if_asked};
use std::path::Path;
use std::process::{Command, Output};

/// Not a test: the daemon that another starts.
#[test]
#[ignore = "the daemon that another test starts"]
fn stand_in_daemon() {
    serve_if_asked();
}

/// Converted onto the mount, an image is the same as in a plain directory, and is read back whole: through rings, and by
/// the mount alone. With its daemon gone there is one clear sentence, and with the next one all is as it was.
#[test]
fn privileged_an_image_on_a_mount_of_3fs_is_the_same() {
    if !require::root() {
        return;
    }
    let place = Place::new();
    let source = place.layout(&layers(47, 60));
    let expected = run(&mut convert(&source, place.store.local_dir().unwrap().root(), "a:b"));
    let words = "meta-us=50 read-us=100 write-us=100 threads=4";
    let mut mount = Daemon::start(&["--exact", "stand_in::stand_in_daemon", "--ignored"], words).unwrap();
    let library = hf3fs_stand_in::plain::library();
    let caches = tempfile::tempdir().unwrap();
    let on = |name: &str, mut command: Command| {
        command.env("DSEC_STORE_CACHE", caches.path().join(name)).env("FS3_USRBIO_LIB", &library);
        command
    };
    let ask = |name: &str, words: &[&str]| -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dsec-convert"));
        on(name, {
            command.args(words);
            command
        })
        .output()
        .unwrap()
    };
    let named = format!("3fs:{}", mount.point().join("named").display());
    let found = run(&mut on("one", convert(&source, Path::new(&named), "a:b")));
    assert_eq!(found["manifest"], expected["manifest"]);
    let verified = ask("two", &["verify", &named, "a:b", "--deep"]);
    assert!(verified.status.success(), "{}", said(&verified));
    // A path on such a mount has the same rules without being told.
    let path = mount.point().join("plain");
    let found = run(&mut on("three", convert(&source, &path, "a:b")));
    assert_eq!(found["manifest"], expected["manifest"]);
    assert_eq!(crate::support::list(&path.join("tmp")), [""; 0]);
    let mut by_mount = Command::new(env!("CARGO_BIN_EXE_dsec-convert"));
    by_mount.args(["verify", &named, "a:b", "--deep"]).env("DSEC_STORE_CACHE", caches.path().join("four"));
    let verified = by_mount.output().unwrap();
    assert!(verified.status.success(), "{}", said(&verified));

    mount.kill().unwrap();
    let failed = ask("five", &["verify", &named, "a:b", "--deep"]);
    assert_eq!(failed.status.code(), Some(1), "{}", said(&failed));
    assert!(said(&failed).contains("not connected"), "{}", said(&failed));
    mount.restart().unwrap();
    let verified = ask("five", &["verify", &named, "a:b", "--deep"]);
    assert!(verified.status.success(), "{}", said(&verified));
}
