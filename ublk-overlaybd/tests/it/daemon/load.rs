//! Under load: nobody who uses a device sees an error or a wrong byte, whatever happens to the daemon.

use super::{Daemon, Mounted, ext4, is_clean, ok, until};
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// fio writes and verifies in a directory, for some seconds.
fn fio(dir: &Path, seconds: u64, depth: u32) -> Child {
    Command::new("fio")
        .args(["--name=v", "--rw=randrw", "--bs=4k-64k", "--size=24m", "--ioengine=libaio", "--direct=1"])
        .args(["--verify=crc32c", "--verify_fatal=1", "--verify_backlog=64", "--time_based", "--output-format=terse"])
        .arg(format!("--directory={}", dir.display()))
        .arg(format!("--iodepth={depth}"))
        .arg(format!("--runtime={seconds}"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .unwrap()
}

/// Before Linux 6.15 the ublk driver may use a command after it is freed, and crash, when its server dies at the moment in
/// which a request is handed over: seen with 6.12.117, in `ublk_queue_rq`. There, nothing is handed over while one dies.
struct Hush<'t> {
    loads: &'t [Child],
    mounts: &'t [Mounted],
    is_needed: bool,
}

impl Hush<'_> {
    fn begin(&self) {
        if !self.is_needed {
            return;
        }
        self.signal("-STOP");
        for mount in self.mounts {
            ok("fsfreeze", &["-f", mount.0.to_str().unwrap()]);
        }
        let is_idle = |device: std::io::Result<fs::DirEntry>| {
            let path = device.unwrap().path();
            let counts = fs::read_to_string(path.join("inflight")).unwrap_or_default();
            !path.display().to_string().contains("ublkb") || counts.split_whitespace().all(|count| count == "0")
        };
        until("nothing is under way", || fs::read_dir("/sys/block").unwrap().all(is_idle));
    }

    fn end(&self) {
        if !self.is_needed {
            return;
        }
        for mount in self.mounts {
            ok("fsfreeze", &["-u", mount.0.to_str().unwrap()]);
        }
        self.signal("-CONT");
    }

    fn signal(&self, signal: &str) {
        for load in self.loads {
            // Its processes.
            ok("kill", &[signal, "--", &format!("-{}", load.id())]);
        }
    }
}

#[track_caller]
fn ended_well(fio: Child) {
    let output = fio.wait_with_output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    // The fifth field of terse output is the error.
    assert_eq!(said.lines().find(|l| l.starts_with("3;")).and_then(|l| l.split(';').nth(4)), Some("0"), "{said}");
}

/// Kills in all: `DSEC_LONG=1` makes it a hundred.
fn kills() -> u32 {
    if std::env::var_os("DSEC_LONG").is_some() { 100 } else { 8 }
}

#[test]
fn vm_daemon_killed_and_upgraded_under_fio() {
    let mut daemon = Daemon::start();
    daemon.kill();
    daemon.spawn("supervise");
    daemon.ready();
    let nodes = [daemon.chain("a", "96MiB", &[]), daemon.chain("b", "96MiB", &["--queues", "2", "--depth", "16"])];
    let mounts: Vec<_> = nodes
        .iter()
        .enumerate()
        .map(|(n, node)| {
            ext4(node);
            Mounted::new(node, &daemon.path(&format!("mnt{n}")))
        })
        .collect();
    let seconds = u64::from(kills()) * 3 + 5;
    let loads: Vec<_> = mounts.iter().zip([1, 16]).map(|(mount, depth)| fio(&mount.0, seconds, depth)).collect();
    let is_needed = fixtures::require::vm().version() < (6, 15);
    let hush = Hush { loads: &loads, mounts: &mounts, is_needed };
    for kill in 0..kills() {
        let pid = daemon.pid();
        // Another moment each time.
        thread::sleep(Duration::from_millis(900 + u64::from(kill) * 137 % 600));
        hush.begin();
        if kill % 4 == 3 {
            daemon.call(&["upgrade"]).ok();
            thread::sleep(Duration::from_millis(300));
        } else {
            ok("kill", &["-9", &pid.to_string()]);
            until("it is started again", || daemon.call(&["status"]).code == Some(0) && daemon.pid() != pid);
        }
        daemon.ready();
        let status = daemon.call(&["status", "--json"]).json();
        assert_eq!((status["recovered"].as_u64(), status["lost"].as_u64()), (Some(2), Some(0)), "kill {kill}");
        hush.end();
    }
    loads.into_iter().for_each(ended_well);
    drop(mounts);
    for node in &nodes {
        is_clean(node);
    }
    let stat = daemon.call(&["stat", "a", "--json"]).json();
    assert_eq!(stat["requests"]["failed"], 0, "{stat}");
    daemon.call(&["rm", "--all"]).ok();
    let supervisor = daemon.child.as_ref().unwrap().id();
    ok("kill", &[&supervisor.to_string()]);
    until("the supervisor ends with its daemon", || daemon.child.as_mut().unwrap().try_wait().unwrap().is_some());
}

#[test]
fn vm_daemon_sealed_every_second_under_fio() {
    let daemon = Daemon::start();
    let node = daemon.chain("a", "96MiB", &[]);
    ext4(&node);
    let mounted = Mounted::new(&node, &daemon.path("mnt"));
    let mut load = fio(&mounted.0, 15, 16);
    let mut sealed = 0;
    while load.try_wait().unwrap().is_none() {
        thread::sleep(Duration::from_secs(1));
        daemon.call(&["snapshot", "a"]).ok();
        sealed += 1;
    }
    ended_well(load);
    assert!(sealed >= 5, "{sealed}");
    drop(mounted);
    is_clean(&node);
    assert_eq!(daemon.call(&["stat", "a", "--json"]).json()["layers"], sealed);
    // The chain alone is the same disk.
    daemon.call(&["rm", "a"]).ok();
    let node = daemon.chain("a", "96MiB", &[]);
    is_clean(&node);
}

/// Many devices over one base: taken over together.
#[test]
fn vm_daemon_takes_over_a_hundred_devices() {
    let mut daemon = Daemon::start();
    let raw = daemon.path("base.raw");
    fs::write(&raw, super::bytes(1, 1 << 20)).unwrap();
    let base = daemon.path("base");
    super::run(Command::new(super::PROGRAM).arg("import").arg(&raw).arg(&base)).ok();
    thread::scope(|scope| {
        for part in 0..4 {
            let (daemon, base) = (&daemon, &base);
            scope.spawn(move || {
                for n in 0..25 {
                    daemon.call(&["add", &format!("d{}", part * 25 + n), base.to_str().unwrap()]).ok();
                }
            });
        }
    });
    daemon.kill();
    let began = Instant::now();
    daemon.restart();
    let took = began.elapsed();
    let status = daemon.call(&["status", "--json"]).json();
    assert_eq!((status["recovered"].as_u64(), status["lost"].as_u64()), (Some(100), Some(0)));
    for device in daemon.call(&["list", "--json"]).json().as_array().unwrap() {
        let read = fs::read(device["path"].as_str().unwrap()).unwrap();
        assert!(read == super::bytes(1, 1 << 20), "{device}");
    }
    eprintln!("100 devices were taken over in {took:?}, in emulation");
    daemon.call(&["rm", "--all"]).ok();
}

/// Fifty at a time, again and again: nothing stays in /dev, and the daemon has no more descriptors and threads than before.
#[test]
fn vm_daemon_adds_and_removes_leave_nothing() {
    let daemon = Daemon::start();
    let rounds = if std::env::var_os("DSEC_LONG").is_some() { 20 } else { 3 };
    let raw = daemon.path("base.raw");
    fs::write(&raw, super::bytes(1, 1 << 20)).unwrap();
    let count = |of: &str| fs::read_dir(format!("/proc/{}/{of}", daemon.pid())).unwrap().count();
    let nodes = || {
        fs::read_dir("/dev")
            .unwrap()
            .filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().starts_with("ublk"))
            .count()
    };
    let before = nodes();
    let mut first = None;
    for _ in 0..rounds {
        thread::scope(|scope| {
            for n in 0..50 {
                let (daemon, raw) = (&daemon, &raw);
                scope.spawn(move || {
                    let name = format!("d{n}");
                    daemon.call(&["add", &name, "--raw", raw.to_str().unwrap()]).ok();
                    daemon.call(&["rm", &name]).ok();
                });
            }
        });
        until("nodes go", || nodes() == before);
        // Threads without work go after a while.
        until("threads go", || count("task") <= 24);
        let descriptors = count("fd");
        assert!(descriptors <= *first.get_or_insert(descriptors), "{descriptors}, {first:?} after the first round");
    }
    assert!(daemon.names().is_empty());
}
