//! File systems straight into layers: clean, the same every time, and with what they were filled with.

use crate::support::{run, run_ok};
use fixtures::require::tool;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

fn clean(raw: &Path) {
    let output = Command::new(tool("e2fsck", "e2fsprogs")).arg("-fn").arg(raw).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
}

fn debugfs(raw: &Path, command: &str) -> String {
    let output = Command::new(tool("debugfs", "e2fsprogs")).args(["-R", command]).arg(raw).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A tree made in another order each time, at another time, with the same times of modification.
fn tree(dir: &Path, backwards: bool) {
    fs::create_dir(dir).unwrap();
    let mut names: Vec<u64> = (0..40).collect();
    if backwards {
        names.reverse();
    }
    let at = |path: &Path, seconds| {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        fs::File::open(path).unwrap().set_modified(time).unwrap();
    };
    for n in names {
        let sub = dir.join(format!("dir {}", n % 5));
        let _ = fs::create_dir(&sub);
        fs::write(sub.join(format!("file {n}")), vec![u8::try_from(n).unwrap(); 3000 * usize::try_from(n).unwrap()])
            .unwrap();
        at(&sub.join(format!("file {n}")), 1_000_000_000 + n);
        std::os::unix::fs::symlink(format!("to {n}"), sub.join(format!("link {n}"))).unwrap();
    }
    fs::hard_link(dir.join("dir 1/file 1"), dir.join("hard")).unwrap();
    for n in 0..5 {
        at(&dir.join(format!("dir {n}")), 1_100_000_000 + n);
    }
    at(dir, 1_200_000_000);
    // Links keep the time that they were made at: of those nothing is said.
    let mut links = Command::new("find");
    links.arg(dir).args(["-type", "l", "-exec", "touch", "-h", "-d", "@1000000000", "{}", "+"]);
    assert!(links.status().unwrap().success());
}

#[test]
fn a_directory_becomes_a_layer_the_same_every_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let text = |name: &str| path(name).display().to_string();
    tree(&path("one"), false);
    run_ok(&["mkfs", &text("layer 1"), "--size", "256MiB", "-d", &text("one"), "--label", "root", "--journal"]);
    std::thread::sleep(Duration::from_millis(1100));
    tree(&path("two"), true);
    // Reading changes the time of access.
    fs::read(path("two/hard")).unwrap();
    run_ok(&[
        "mkfs",
        &text("layer 2"),
        "--size",
        "256MiB",
        "-d",
        &text("two"),
        "--label",
        "root",
        "--journal",
        "--threads",
        "1",
    ]);
    let (one, two) = (fs::read(path("layer 1")).unwrap(), fs::read(path("layer 2")).unwrap());
    assert!(one == two, "the layers differ");
    assert!(one.len() < 8 << 20, "{} bytes for a small tree", one.len());

    run_ok(&["export", &text("layer 1"), &text("raw")]);
    assert_eq!(path("raw").metadata().unwrap().len(), 256 << 20);
    clean(&path("raw"));
    let said = debugfs(&path("raw"), "stat \"/dir 2/file 7\"");
    assert!(said.contains("Size: 21000"), "{said}");
    for time in ["ctime", "atime", "mtime"] {
        let line = said.lines().find(|line| line.trim_start().starts_with(time)).unwrap();
        assert!(line.contains(&format!("{:#010x}", 1_000_000_007)), "{line}");
    }
    assert!(debugfs(&path("raw"), "stat /hard").contains("Links: 2"));
    assert!(debugfs(&path("raw"), "stats").contains("root"));
    let cat =
        Command::new(tool("debugfs", "e2fsprogs")).args(["-R", "cat \"/dir 4/file 39\""]).arg(path("raw")).output();
    assert_eq!(cat.unwrap().stdout, vec![39; 3000 * 39]);
    // Nothing else was left.
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 5);
}

#[test]
fn times_are_clamped_where_it_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    tree(&path("tree"), false);
    let status = Command::new(env!("CARGO_BIN_EXE_ublk-overlaybd"))
        .args(["mkfs", "layer", "--size", "64MiB", "-d", "tree", "--zfile", "lz4"])
        .env("SOURCE_DATE_EPOCH", "1000000005")
        .current_dir(&dir)
        .status();
    assert!(status.unwrap().success());
    run_ok(&["export", &path("layer").display().to_string(), &path("raw").display().to_string()]);
    clean(&path("raw"));
    for (file, time) in [("dir 1/file 1", 1_000_000_001), ("dir 2/file 7", 1_000_000_005), ("dir 3", 1_000_000_005)] {
        let said = debugfs(&path("raw"), &format!("stat \"/{file}\""));
        let line = said.lines().find(|line| line.trim_start().starts_with("mtime")).unwrap().to_owned();
        assert!(line.contains(&format!("{time:#010x}")), "{file}: {line}");
    }
}

#[test]
fn large_empty_disks_cost_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let text = |name: &str| dir.path().join(name).display().to_string();
    run_ok(&["mkfs", &text("layer"), "--size", "4TiB", "--zfile", "zstd"]);
    assert!(dir.path().join("layer").metadata().unwrap().len() < 32 << 20);
    run_ok(&["mkfs", &text("small"), "--size", "64MiB"]);
    run_ok(&["export", &text("small"), &text("raw")]);
    clean(&dir.path().join("raw"));
    for (args, code) in [
        (vec!["--size", "1000"], 2),
        (vec!["--size", "64MiB", "--label", "far too long a label"], 2),
        (vec!["--size", "64MiB", "-d", "/nowhere"], 1),
    ] {
        let out = text("never");
        let args: Vec<&str> = ["mkfs", &out].into_iter().chain(args).collect();
        assert_eq!(run(&args).status.code(), Some(code), "{args:?}");
    }
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 3);
}

#[test]
fn privileged_a_tar_becomes_a_layer_the_same_every_time() {
    if !fixtures::require::root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let text = |name: &str| dir.path().join(name).display().to_string();
    let mut builder = tar::Builder::new(Vec::new());
    for n in 0..20u64 {
        let mut header = tar::Header::new_gnu();
        header.set_size(n * 1000);
        header.set_mode(0o640);
        header.set_uid(1000 + n);
        header.set_mtime(1_000_000_000 + n);
        // Its directory is implied.
        builder
            .append_data(&mut header, format!("a/b/f{n}"), &vec![7; usize::try_from(n).unwrap() * 1000][..])
            .unwrap();
    }
    fs::write(text("tar"), builder.into_inner().unwrap()).unwrap();
    run_ok(&["mkfs", &text("1"), "--size", "64MiB", "--from-tar", &text("tar")]);
    std::thread::sleep(Duration::from_millis(1100));
    run_ok(&["mkfs", &text("2"), "--size", "64MiB", "--from-tar", &text("tar")]);
    assert!(fs::read(text("1")).unwrap() == fs::read(text("2")).unwrap());
    run_ok(&["export", &text("1"), &text("raw")]);
    clean(&dir.path().join("raw"));
    let said = debugfs(&dir.path().join("raw"), "stat /a/b/f19");
    assert!(said.contains("User:  1019") && said.contains("Size: 19000"), "{said}");
}
