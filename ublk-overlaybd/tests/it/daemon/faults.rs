//! What may happen to a daemon and its files.

use super::{Daemon, Mounted, bytes, ext4, is_clean, ok, until};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;
use ublk_overlaybd::ublk::device;

fn present() -> usize {
    device::present().unwrap().len()
}

/// A sealed layer with these bytes at its beginning.
fn layer(daemon: &Daemon, name: &str, content: &[u8]) -> PathBuf {
    let raw = daemon.path(&format!("{name}.raw"));
    fs::write(&raw, content).unwrap();
    let layer = daemon.path(name);
    let mut import = Command::new(super::PROGRAM);
    super::run(import.arg("import").arg(&raw).arg(&layer).arg("--force")).ok();
    layer
}

/// Of five devices, those that can be are taken over, and the others are removed with a reason each.
#[test]
fn vm_daemon_what_cannot_be_taken_over_is_removed_loudly() {
    let mut daemon = Daemon::start();
    let before = present();
    let (old, new) = (bytes(1, 1 << 20), bytes(2, 1 << 20));
    let base = layer(&daemon, "base", &old);
    let add = |name: &str| daemon.call(&["add", name, base.to_str().unwrap()]).ok().trim().to_owned();
    let (kept, damaged, forgotten) = (add("kept"), add("damaged"), add("forgotten"));
    let own = layer(&daemon, "own", &old);
    let changed = daemon.call(&["add", "changed", own.to_str().unwrap()]).ok();
    let changed = Path::new(changed.trim());
    assert_eq!(present(), before + 4);
    // In the page cache of all.
    for node in [Path::new(&kept), changed] {
        assert!(fs::read(node).unwrap() == old);
    }
    daemon.kill();
    fs::write(daemon.path("state/devices/damaged.json"), "{").unwrap();
    fs::remove_file(daemon.path("state/devices/forgotten.json")).unwrap();
    layer(&daemon, "own", &new);
    daemon.restart();
    assert_eq!(daemon.names(), ["kept"]);
    assert_eq!(present(), before + 1);
    for node in [Path::new(&damaged), Path::new(&forgotten), changed] {
        assert!(!node.exists(), "{}", node.display());
    }
    assert!(fs::read(&kept).unwrap() == old);
    let log = daemon.log();
    for part in ["damaged.json", "has no record", "own is another file now"] {
        assert!(log.contains(part), "{part} is not in\n{log}");
    }
    assert_eq!(daemon.call(&["status", "--json"]).json()["lost"], 3);
    // Its number may be had again, but never with the old bytes.
    let node = daemon.call(&["add", "changed", own.to_str().unwrap()]).ok();
    assert!(fs::read(node.trim()).unwrap() == new);
}

/// Killed at the worst moments of adding and removing: what was answered is there, and nothing else.
#[test]
fn vm_daemon_killed_while_it_adds_and_removes() {
    let mut daemon = Daemon::start();
    let before = present();
    let base = layer(&daemon, "base", &bytes(1, 1 << 20));
    for round in 0..12u64 {
        let base = base.to_str().unwrap();
        let (mut added, mut removed) = (Vec::new(), false);
        thread::scope(|scope| {
            let daemon = &daemon;
            let adding: Vec<_> = (0..4)
                .map(|n| {
                    scope.spawn(move || {
                        let name = format!("r{round}-{n}");
                        (daemon.call(&["add", &name, base]).code == Some(0)).then_some(name)
                    })
                })
                .collect();
            let removing = scope.spawn(move || daemon.call(&["rm", &format!("r{}-0", round.wrapping_sub(1))]).code);
            thread::sleep(Duration::from_millis(60 * round));
            ok("kill", &["-9", &daemon.child.as_ref().unwrap().id().to_string()]);
            added.extend(adding.into_iter().filter_map(|thread| thread.join().unwrap()));
            removed = removing.join().unwrap() == Some(0);
        });
        daemon.kill();
        daemon.restart();
        let names = daemon.names();
        for name in &added {
            assert!(names.contains(name), "round {round}: {name} was promised, and there are {names:?}");
        }
        assert!(!removed || !names.contains(&format!("r{}-0", round.wrapping_sub(1))));
        assert_eq!(present(), before + names.len(), "round {round}: {names:?}");
        for device in daemon.call(&["list", "--json"]).json().as_array().unwrap() {
            File::open(device["path"].as_str().unwrap()).unwrap().read_exact_at(&mut [0; 4096], 8192).unwrap();
        }
    }
    daemon.call(&["rm", "--all"]).ok();
    assert_eq!(present(), before);
}

/// An upgrade: the same process, another program, and the devices stay.
#[test]
fn vm_daemon_becomes_another_program() {
    let mut daemon = Daemon::start();
    daemon.kill();
    // A program of its own, to be replaced.
    let program = daemon.path("program");
    fs::copy(super::PROGRAM, &program).unwrap();
    let config = daemon.path("daemon.toml");
    let child = Command::new(&program).args(["serve", "--config"]).arg(&config).env("RUST_LOG", "info").spawn();
    daemon.child = Some(child.unwrap());
    daemon.ready();
    let node = daemon.chain("a", "64MiB", &[]);
    let file = File::options().read(true).write(true).open(&node).unwrap();
    let content = bytes(9, 1 << 20);
    file.write_all_at(&content, 0).unwrap();
    let pid = daemon.pid();
    let new = daemon.path("program.new");
    fs::copy(super::PROGRAM, &new).unwrap();
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(&new, &program).unwrap();
    let inode = |path: &Path| std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).unwrap());
    daemon.call(&["upgrade"]).ok();
    let exe = format!("/proc/{pid}/exe");
    until("it is the new program", || inode(Path::new(&exe)) == inode(&program));
    daemon.ready();
    assert_eq!(daemon.pid(), pid);
    assert_eq!(daemon.call(&["status", "--json"]).json()["recovered"], 1);
    file.sync_all().unwrap();
    ok("blockdev", &["--flushbufs", node.to_str().unwrap()]);
    let mut back = vec![0; content.len()];
    File::open(&node).unwrap().read_exact_at(&mut back, 0).unwrap();
    assert!(back == content);
}

/// A mount that was there when the daemon started does not keep its device alive in the daemon's own namespace.
#[test]
fn vm_daemon_holds_no_mount_of_its_devices() {
    let mut daemon = Daemon::start();
    let node = daemon.chain("a", "64MiB", &[]);
    ext4(&node);
    let mounted = Mounted::new(&node, &daemon.path("mnt"));
    fs::write(mounted.path("file"), b"content").unwrap();
    daemon.kill();
    daemon.restart();
    let theirs = format!("/proc/{}/mountinfo", daemon.pid());
    assert!(!fs::read_to_string(theirs).unwrap().contains("/dev/ublkb"));
    assert_eq!(fs::read(mounted.path("file")).unwrap(), b"content");
    drop(mounted);
    is_clean(&node);
    daemon.call(&["rm", "a"]).ok();
    assert!(!node.exists());
}

/// The quota is ENOSPC for whoever writes, and nothing else breaks.
#[test]
fn vm_daemon_a_full_layer_is_a_full_disk() {
    let daemon = Daemon::start();
    let node = daemon.chain("a", "64MiB", &["--quota", "4MiB", "--reserve", "0"]);
    // Not by the page cache, which knows no other error than EIO.
    let direct = || {
        let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).unwrap();
        File::options().read(true).write(true).custom_flags(direct).open(&node).unwrap()
    };
    let memory = bytes(1, (1 << 20) + 4096);
    let block = &memory[memory.as_ptr().align_offset(4096)..][..1 << 20];
    let file = direct();
    file.write_all_at(block, 0).unwrap();
    file.sync_all().unwrap();
    let full =
        (1..8u64).map(|n| file.write_all_at(block, n << 20).and_then(|()| file.sync_all())).find_map(Result::err);
    assert_eq!(full.unwrap().raw_os_error(), Some(28));
    let mut back = vec![0; block.len()];
    File::open(&node).unwrap().read_exact_at(&mut back, 0).unwrap();
    assert!(back == block, "what was written before is there");
    drop(file);
    // What is discarded is space again.
    ok("blkdiscard", &["-f", node.to_str().unwrap()]);
    let file = direct();
    file.write_all_at(block, 32 << 20).unwrap();
    file.sync_all().unwrap();
    daemon.call(&["stat", "a"]).ok();
}
