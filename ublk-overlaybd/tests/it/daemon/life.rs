//! The life of a device: made, used, sealed, grown, held, removed.

use super::{Daemon, Mounted, bytes, ext4, is_clean, ok, until};
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

#[test]
fn vm_daemon_a_device_from_add_to_rm() {
    let daemon = Daemon::start();
    let node = daemon.chain("a", "256MiB", &[]);
    // Asked again, it is the same.
    assert_eq!(daemon.chain("a", "256MiB", &[]), node);
    let chain = daemon.path("a/chain");
    let chain = chain.to_str().unwrap();
    // Its name is taken, and its writable layer too.
    daemon.call(&["add", "a", "--chain", chain, "--size", "512MiB"]).fails(1, "made of something else");
    daemon.call(&["add", "b", "--chain", chain, "--size", "256MiB"]).fails(1, "has it open");
    daemon.call(&["add", "../b", "--chain", chain]).fails(2, "no name of a device");
    assert_eq!(daemon.names(), ["a"]);

    ext4(&node);
    let content = bytes(1, 3 << 20);
    let mounted = Mounted::new(&node, &daemon.path("mnt"));
    fs::write(mounted.path("file"), &content).unwrap();
    ok("sync", &["-f", mounted.0.to_str().unwrap()]);
    // Sealed under a mounted file system: a new layer takes what comes.
    let sealed = daemon.call(&["snapshot", "a", "--json"]).json();
    let first = PathBuf::from(sealed["layer"].as_str().unwrap());
    assert!(first.exists());
    fs::write(mounted.path("after"), b"after").unwrap();
    fs::remove_file(mounted.path("file")).unwrap();
    ok("sync", &["-f", mounted.0.to_str().unwrap()]);
    let stat = daemon.call(&["stat", "a", "--json"]).json();
    assert_eq!(stat["state"], "live");
    assert_eq!(stat["layers"], 1);
    assert!(stat["requests"]["answered"].as_u64().unwrap() > 10 && stat["requests"]["failed"] == 0, "{stat}");
    daemon.call(&["rm", "a"]).fails(1, "in use");
    assert_eq!(daemon.names(), ["a"], "it still is");
    drop(mounted);
    is_clean(&node);
    daemon.call(&["rm", "a"]).ok();
    assert!(!node.exists() && daemon.names().is_empty());
    daemon.call(&["rm", "a"]).fails(1, "there is no device `a`");

    // The layer that was sealed is a disk of its own: the file system of that moment, as a crash would have left it.
    let snapshot = daemon.path("snapshot");
    fs::create_dir(&snapshot).unwrap();
    let node =
        daemon.call(&["add", "then", first.to_str().unwrap(), "--chain", snapshot.join("chain").to_str().unwrap()]);
    let node = PathBuf::from(node.ok().trim());
    {
        let then = Mounted::new(&node, &daemon.path("mnt"));
        assert!(fs::read(then.path("file")).unwrap() == content);
        assert!(!then.path("after").exists());
    }
    // And the chain goes on where it was, beside it.
    let node = daemon.chain("a", "256MiB", &[]);
    let again = Mounted::new(&node, &daemon.path("mnt2"));
    assert_eq!(fs::read(again.path("after")).unwrap(), b"after");
    assert!(!again.path("file").exists());
    drop(again);
    daemon.call(&["rm", "a", "then"]).ok();
    let events = daemon.call(&["events"]).ok();
    let kinds: Vec<_> =
        events.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap()["what"].clone()).collect();
    assert_eq!(kinds, ["ready", "added", "sealed", "removed", "added", "added", "removed", "removed"]);
}

#[test]
fn vm_daemon_disks_that_are_files() {
    let daemon = Daemon::start();
    // An EROFS image as it is, and its digest.
    let tree = daemon.path("tree");
    fs::create_dir(&tree).unwrap();
    let content = bytes(5, 300_000);
    fs::write(tree.join("file"), &content).unwrap();
    let image = daemon.path("image");
    ok("mkfs.erofs", &["--quiet", image.to_str().unwrap(), tree.to_str().unwrap()]);
    let digest = ok("sha256sum", &[image.to_str().unwrap()]);
    let digest = digest.split(' ').next().unwrap();
    let good = format!("{}@sha256:{digest}", image.display());
    let node = PathBuf::from(daemon.call(&["add", "erofs", "--raw", &good]).ok().trim());
    let lower = Mounted::new(&node, &daemon.path("lower"));
    assert!(fs::read(lower.path("file")).unwrap() == content);
    // Nobody writes to it.
    let written = File::options().write(true).open(&node).and_then(|file| file.write_all_at(&[1; 512], 0));
    assert!(written.is_err());
    let bad = format!("{}@sha256:{}", image.display(), "0".repeat(64));
    daemon.call(&["add", "bad", "--raw", &bad]).fails(3, "its bytes are not those of");
    assert_eq!(daemon.names(), ["erofs"], "nothing is left of it");

    // What Docker's overlay2 needs in a microVM: an overlay with upper, work and a lower on such disks.
    let node = daemon.chain("rw", "128MiB", &[]);
    ext4(&node);
    let disk = Mounted::new(&node, &daemon.path("rw-mnt"));
    for dir in ["lower", "upper", "work"] {
        fs::create_dir(disk.path(dir)).unwrap();
    }
    fs::write(disk.path("lower/below"), b"below").unwrap();
    let (merged, on) = (daemon.path("merged"), |name: &str| disk.path(name).display().to_string());
    fs::create_dir(&merged).unwrap();
    let options =
        format!("lowerdir={}:{},upperdir={},workdir={}", on("lower"), lower.0.display(), on("upper"), on("work"));
    ok("mount", &["-t", "overlay", "overlay", "-o", &options, merged.to_str().unwrap()]);
    let merged = Mounted(merged);
    fs::rename(merged.path("below"), merged.path("moved")).unwrap();
    fs::remove_file(merged.path("file")).unwrap();
    fs::write(merged.path("new"), &content).unwrap();
    File::open(merged.path("new")).unwrap().sync_all().unwrap();
    assert_eq!(fs::read(merged.path("moved")).unwrap(), b"below");
    assert!(fs::read(disk.path("upper/new")).unwrap() == content);
    drop(merged);
    drop(disk);
    is_clean(&node);
    drop(lower);
}

#[test]
fn vm_daemon_xfs_lives_on_a_device() {
    let daemon = Daemon::start();
    let module = PathBuf::from("/run/dsec/modules/xfs.ko");
    // Its own dependencies are loaded with those of others.
    if !fs::read_to_string("/proc/filesystems").unwrap().contains("\txfs\n") {
        ok("insmod", &[module.to_str().unwrap()]);
    }
    let node = daemon.chain("x", "512MiB", &[]);
    ok("mkfs.xfs", &["-q", "-K", node.to_str().unwrap()]);
    let content = bytes(7, 2 << 20);
    {
        let mounted = Mounted::new(&node, &daemon.path("mnt"));
        for n in 0..20 {
            fs::write(mounted.path(&format!("f{n}")), &content[n * 1000..]).unwrap();
        }
        ok("fstrim", &[mounted.0.to_str().unwrap()]);
    }
    {
        let mounted = Mounted::new(&node, &daemon.path("mnt"));
        for n in 0..20 {
            assert!(fs::read(mounted.path(&format!("f{n}"))).unwrap() == content[n * 1000..], "f{n}");
        }
    }
    ok("xfs_repair", &["-n", node.to_str().unwrap()]);
}

#[test]
fn vm_daemon_a_device_grows_where_the_kernel_can() {
    let mut daemon = Daemon::start();
    let node = daemon.chain("a", "64MiB", &[]);
    let resizes = daemon.call(&["status", "--json"]).json()["resizes"].as_bool().unwrap();
    if !resizes {
        daemon.call(&["grow", "a", "128MiB"]).fails(1, "Linux 6.16");
        return;
    }
    ext4(&node);
    let mounted = Mounted::new(&node, &daemon.path("mnt"));
    daemon.call(&["grow", "a", "32MiB"]).fails(2, "not less than");
    daemon.call(&["grow", "a", "128MiB"]).ok();
    ok("resize2fs", &[node.to_str().unwrap()]);
    let content = bytes(2, 90 << 20);
    fs::write(mounted.path("file"), &content).unwrap();
    drop(mounted);
    is_clean(&node);
    // The size outlives the daemon, and the device.
    daemon.kill();
    daemon.restart();
    assert_eq!(ok("blockdev", &["--getsize64", node.to_str().unwrap()]).trim(), (128u64 << 20).to_string());
    daemon.call(&["rm", "a"]).ok();
    let stat = daemon.path("a/chain");
    let node = daemon.call(&["add", "b", "--chain", stat.to_str().unwrap()]).ok();
    let mounted = Mounted::new(node.trim().as_ref(), &daemon.path("mnt"));
    assert!(fs::read(mounted.path("file")).unwrap() == content);
}

#[test]
fn vm_daemon_a_quiesced_device_holds_requests_and_goes_on() {
    let daemon = Daemon::start();
    let node = daemon.chain("a", "64MiB", &[]);
    let file = File::options().read(true).write(true).open(&node).unwrap();
    file.write_all_at(&bytes(3, 4096), 0).unwrap();
    file.sync_all().unwrap();
    daemon.call(&["quiesce", "a", "--hold-ms", "60000"]).fails(2, "hold_ms");
    // Until it is resumed.
    daemon.call(&["quiesce", "a", "--hold-ms", "14000"]).ok();
    assert_eq!(daemon.call(&["stat", "a", "--json"]).json()["state"], "quiesced");
    let (other, began) = (node.clone(), Instant::now());
    let reader = thread::spawn(move || {
        let mut block = vec![0; 4096];
        // Not from the page cache.
        ok("blockdev", &["--flushbufs", other.to_str().unwrap()]);
        File::open(&other).unwrap().read_exact_at(&mut block, 8192).unwrap();
        began.elapsed()
    });
    thread::sleep(Duration::from_millis(1500));
    assert!(!reader.is_finished(), "it was served");
    daemon.call(&["resume", "a"]).ok();
    assert!(reader.join().unwrap() >= Duration::from_millis(1400));
    // And by itself.
    daemon.call(&["quiesce", "a", "--hold-ms", "1000"]).ok();
    let mut sync = file;
    sync.write_all(&bytes(4, 4096)).unwrap();
    sync.sync_all().unwrap();
    until("it goes on by itself", || daemon.call(&["stat", "a", "--json"]).json()["state"] == "live");
    let said = daemon.call(&["events"]).ok();
    assert!(said.contains("its time was over"), "{said}");
}

/// Whoever holds the device cannot be held up for ever by a daemon that is gone for good: it can be removed by anybody.
#[test]
fn vm_daemon_two_daemons_do_not_meet() {
    let daemon = Daemon::start();
    let other = Daemon::start();
    let node = daemon.chain("a", "64MiB", &[]);
    let second = other.chain("a", "64MiB", &[]);
    assert_ne!(node, second);
    // The same table a second time.
    let said = super::run(Command::new(super::PROGRAM).args(["serve", "--config"]).arg(daemon.path("daemon.toml")));
    said.fails(1, "another daemon has this state directory");
    // The same writable layer in another daemon.
    let chain = daemon.path("a/chain");
    other.call(&["add", "b", "--chain", chain.to_str().unwrap()]).fails(1, "has it open");
    drop(other);
    File::open(&node).unwrap().read_exact_at(&mut [0; 512], 0).unwrap();
}
