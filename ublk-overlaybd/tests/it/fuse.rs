//! A disk shown as a file: the kernel's ext4 over a loop device over it, fio and stress-ng at work, layers sealed under
//! them, the server killed.

use crate::support::{run, run_ok};
use fixtures::mounts::{self, LoopDevice};
use fixtures::require;
use rustix::fs::{FallocateFlags, OFlags};
use rustix::process::{Pid, Signal};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// A disk that is being served.
pub(crate) struct Served {
    child: Child,
    file: PathBuf,
    said: Value,
}

impl Served {
    pub(crate) fn start(args: &[&str], file: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ublk-overlaybd"));
        command.arg("fuse").args(args).arg("--json").arg(file).env("RUST_LOG", "warn,ublk_overlaybd=info");
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let said = serde_json::from_str(&line).unwrap_or_else(|error| panic!("it said {line:?}: {error}"));
        Self { child, file: file.to_owned(), said }
    }

    fn signal(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Takes the file away, as its manual says.
    pub(crate) fn stop(mut self) {
        self.signal(Signal::TERM);
        let status = wait_for(Duration::from_secs(60), || self.child.try_wait().unwrap());
        assert!(status.success(), "{status}");
        assert!(!mounted(&self.file));
    }

    /// As a machine does that runs out of memory.
    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Whatever went wrong, nothing of it stays.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = rustix::mount::unmount(&self.file, rustix::mount::UnmountFlags::DETACH);
    }
}

/// Whether something is mounted on a file.
fn mounted(file: &Path) -> bool {
    let all = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    all.lines().any(|line| line.split(' ').nth(4) == file.to_str())
}

pub(crate) fn wait_for<T>(most: Duration, mut done: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + most;
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(Instant::now() < end, "nothing happened in {most:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn tool(program: &str, package: &str, args: &[&str]) -> String {
    let output = Command::new(require::tool(program, package)).args(args).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {}: {said}", output.status);
    said
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Writes, reads and compares at random, as a database does, with checksums in each block.
fn fio(file: &Path, size: u64, more: &[&str]) {
    let (name, size) = (format!("--filename={}", path(file)), format!("--size={size}"));
    let mut args = vec![
        "--name=verify",
        &name,
        &size,
        "--rw=randrw",
        "--rwmixread=30",
        "--bsrange=512-64k",
        "--bs_unaligned=0",
        "--direct=1",
        "--ioengine=libaio",
        "--iodepth=32",
        "--fsync=64",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_backlog=256",
        "--verify_state_save=0",
        "--randseed=7",
        "--group_reporting",
    ];
    args.extend(more);
    tool("fio", "fio", &args);
}

fn layers_of(chain: &Path) -> usize {
    let chain: Value = serde_json::from_slice(&std::fs::read(chain).unwrap()).unwrap();
    let done = chain.get("sealing").is_none();
    // As long as one is under way it does not count.
    chain["layers"].as_array().unwrap().len() * usize::from(done)
}

/// Everything below a directory: names and contents.
fn tree(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let (mut all, mut left) = (BTreeMap::new(), vec![dir.to_owned()]);
    while let Some(next) = left.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let entry = entry.unwrap();
            let kind = entry.file_type().unwrap();
            let name = entry.path().strip_prefix(dir).unwrap().to_owned();
            if kind.is_dir() {
                left.push(entry.path());
                all.insert(name, Vec::new());
            } else if kind.is_file() {
                all.insert(name, std::fs::read(entry.path()).unwrap());
            }
        }
    }
    all
}

#[test]
fn privileged_ext4_under_stress_survives_seals_and_a_restart() {
    if !require::root() {
        return;
    }
    mounts::in_private_namespace(|| {
        let dir = mounts::scratch();
        let (chain, disk) = (dir.path().join("chain.json"), dir.path().join("disk"));
        let args = ["--chain", path(&chain), "--size", "512MiB"];
        let served = Served::start(&args, &disk);
        assert_eq!(served.said["size"], 512 * MIB);
        let device = LoopDevice::writable(&disk).unwrap();
        // First the bare disk, then a file system.
        fio(device.path(), 48 * MIB, &[]);
        tool("mkfs.ext4", "e2fsprogs", &["-q", "-F", "-E", "discard", path(device.path())]);
        let ext4 = mounts::device("ext4", device.path(), &["discard"]).unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // As often as one ends another begins.
            let seals = scope.spawn(|| {
                let mut seals = 0;
                while !done.load(Ordering::Relaxed) {
                    let before = layers_of(&chain);
                    served.signal(Signal::USR1);
                    seals = wait_for(Duration::from_secs(60), || Some(layers_of(&chain)).filter(|&now| now > before));
                    std::thread::sleep(Duration::from_millis(300));
                }
                seals
            });
            let stress = scope.spawn(|| {
                let place = ext4.path().join("stress");
                std::fs::create_dir(&place).unwrap();
                let mut args = vec!["--temp-path", path(&place), "--timeout", "10", "--verify", "--quiet"];
                for kind in ["--hdd", "--iomix", "--rename", "--dir", "--fallocate", "--link"] {
                    args.extend([kind, "1"]);
                }
                args.extend(["--hdd-bytes", "16M", "--iomix-bytes", "16M", "--fallocate-bytes", "16M"]);
                tool("stress-ng", "stress-ng", &args);
            });
            let fio = scope.spawn(|| fio(&ext4.path().join("file"), 96 * MIB, &["--end_fsync=1"]));
            let ended = [stress.join(), fio.join()];
            done.store(true, Ordering::Relaxed);
            assert!(seals.join().unwrap() >= 3, "too few seals");
            ended.into_iter().for_each(|result| result.unwrap());
        });
        let before = tree(ext4.path());
        assert!(before.values().map(Vec::len).sum::<usize>() as u64 >= 96 * MIB);
        ext4.unmount().unwrap();
        tool("e2fsck", "e2fsprogs", &["-fn", path(device.path())]);
        drop(device);
        served.stop();
        assert!(!disk.exists(), "it made the file, and takes it away");

        // Again, from what is on the disk; and the same by a reader that knows nothing of chains.
        let served = Served::start(&args, &disk);
        let device = LoopDevice::writable(&disk).unwrap();
        tool("e2fsck", "e2fsprogs", &["-fn", path(device.path())]);
        let ext4 = mounts::device("ext4", device.path(), &[]).unwrap();
        assert!(tree(ext4.path()) == before, "files are not what they were");
        // What is removed is freed, though it is in a sealed layer, and stays so.
        std::fs::remove_file(ext4.path().join("file")).unwrap();
        // What a transaction that is not committed freed is not trimmed.
        rustix::fs::syncfs(File::open(ext4.path()).unwrap()).unwrap();
        tool("fstrim", "util-linux", &[path(ext4.path())]);
        ext4.unmount().unwrap();
        drop(device);
        served.stop();
        let mut args: Vec<String> = vec!["export".to_owned()];
        let state: Value = serde_json::from_slice(&std::fs::read(&chain).unwrap()).unwrap();
        let place = |name: &Value| dir.path().join(name.as_str().unwrap()).display().to_string();
        args.extend(state["layers"].as_array().unwrap().iter().map(place));
        args.extend(["--upper".to_owned(), place(&state["upper"]["data"]), place(&state["upper"]["index"])]);
        let raw = dir.path().join("raw");
        args.push(raw.display().to_string());
        run_ok(&args.iter().map(String::as_str).collect::<Vec<_>>());
        tool("e2fsck", "e2fsprogs", &["-fn", path(&raw)]);
        let allocated = std::os::unix::fs::MetadataExt::blocks(&raw.metadata().unwrap()) * 512;
        assert!(allocated < 80 * MIB, "{allocated} bytes are left of a file of 96 MiB that was removed");
    });
}

/// Somebody writes files and syncs each; what was synced is there, whatever happens to the server.
#[test]
fn privileged_a_killed_server_loses_nothing_that_was_synced() {
    if !require::root() {
        return;
    }
    mounts::in_private_namespace(|| {
        let dir = mounts::scratch();
        let (chain, disk) = (dir.path().join("chain.json"), dir.path().join("disk"));
        let args = ["--chain", path(&chain), "--size", "128MiB"];
        let mut synced: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        for round in 0..6u32 {
            let served = Served::start(&args, &disk);
            let device = LoopDevice::writable(&disk).unwrap();
            if round == 0 {
                tool("mkfs.ext4", "e2fsprogs", &["-q", "-F", path(device.path())]);
            }
            // The journal is replayed here.
            let ext4 = mounts::device("ext4", device.path(), &[]).unwrap();
            for (name, contents) in &synced {
                let found = std::fs::read(ext4.path().join(name));
                assert!(found.unwrap() == *contents, "round {round}: {name}");
            }
            let (done, written) = (AtomicBool::new(false), Mutex::new(Vec::new()));
            std::thread::scope(|scope| {
                for thread in 0..3u32 {
                    let (done, written, ext4) = (&done, &written, &ext4);
                    scope.spawn(move || {
                        let write = |number: u32| -> std::io::Result<()> {
                            let name = format!("{round}-{thread}-{}", number % 40);
                            let byte = u8::try_from((number * 7 + thread) % 251).unwrap();
                            let contents = vec![byte; 1000 + usize::try_from(number * 977 % 50_000).unwrap()];
                            // By a new name each time: a file that is being replaced may be either.
                            let path = ext4.path().join(&name);
                            let fresh = ext4.path().join(format!("{name}.new"));
                            let mut file = File::create(&fresh)?;
                            file.write_all(&contents)?;
                            file.sync_all()?;
                            std::fs::rename(&fresh, &path)?;
                            File::open(ext4.path())?.sync_all()?;
                            written.lock().unwrap().push((name, contents));
                            Ok(())
                        };
                        let mut number = 0;
                        while !done.load(Ordering::Relaxed) && number < 40 && write(number).is_ok() {
                            number += 1;
                        }
                    });
                }
                let enough = usize::try_from(10 + round * 9).unwrap();
                wait_for(Duration::from_secs(60), || (written.lock().unwrap().len() >= enough).then_some(()));
                if round % 2 == 1 {
                    served.signal(Signal::USR1);
                    std::thread::sleep(Duration::from_millis(u64::from(round) * 3));
                }
                served.kill();
                done.store(true, Ordering::Relaxed);
            });
            synced.extend(written.into_inner().unwrap());
            drop(ext4);
            drop(device);
        }
        // And what is there is a file system.
        let served = Served::start(&args, &disk);
        let device = LoopDevice::writable(&disk).unwrap();
        let ext4 = mounts::device("ext4", device.path(), &[]).unwrap();
        let found = tree(ext4.path());
        for (name, contents) in &synced {
            assert!(found[Path::new(name)] == *contents, "{name}");
        }
        ext4.unmount().unwrap();
        tool("e2fsck", "e2fsprogs", &["-fn", path(device.path())]);
        drop(device);
        served.stop();
        assert!(synced.len() > 60, "only {} files", synced.len());
    });
}

#[test]
fn privileged_the_file_is_a_disk() {
    if !require::root() {
        return;
    }
    mounts::in_private_namespace(|| {
        let dir = mounts::scratch();
        let (data, index) = (dir.path().join("data"), dir.path().join("index"));
        let (lower, disk) = (dir.path().join("lower"), dir.path().join("disk"));
        let raw = dir.path().join("raw");
        let pattern: Vec<u8> = (0..8 * MIB).map(|i| u8::try_from(i / 4096 % 255).unwrap() + 1).collect();
        std::fs::write(&raw, &pattern).unwrap();
        run_ok(&["import", path(&raw), path(&lower), "--zfile", "lz4"]);
        run_ok(&["create", path(&data), path(&index), "--size", "8MiB"]);
        std::fs::write(&disk, "hidden meanwhile").unwrap();
        let args = [path(&lower), "--upper", path(&data), path(&index), "--quota", "2MiB"];
        let served = Served::start(&args, &disk);

        // One disk at a time.
        let other = dir.path().join("other");
        let refused = run(&["fuse", path(&lower), path(&other), "--upper", path(&data), path(&index)]);
        assert_eq!(refused.status.code(), Some(1));
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(said.contains("has it open") && said.contains("data"), "{said}");
        assert!(!other.exists());
        // Nor does anybody read it while it changes, or change its size.
        for args in [
            vec!["commit", path(&data), path(&index), path(&other)],
            vec!["export", path(&lower), "--upper", path(&data), path(&index), path(&other)],
            vec!["resize", path(&data), path(&index), "--size", "16MiB"],
            vec!["seal", path(&data), path(&index)],
        ] {
            let refused = run(&args);
            let said = String::from_utf8_lossy(&refused.stderr);
            assert!(!refused.status.success() && said.contains("running disk"), "{args:?}: {said}");
            assert!(!other.exists());
        }

        let file = File::options().read(true).write(true).open(&disk).unwrap();
        let mut array = pattern.clone();
        let all = |file: &File| {
            let mut bytes = vec![0; pattern.len()];
            file.read_exact_at(&mut bytes, 0).unwrap();
            bytes
        };
        assert!(all(&file) == array);
        // Any bytes, not only whole sectors.
        for (offset, len, byte) in [(0, 1, 9), (511, 2, 8), (70_000, 5000, 7), (8 * MIB - 3, 3, 6), (4096, 8192, 5)] {
            file.write_all_at(&vec![byte; len], offset).unwrap();
            let start = usize::try_from(offset).unwrap();
            array[start..start + len].fill(byte);
        }
        // A hole, and zeros: neither needs whole sectors.
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, hole, 1000, 3_000_000).unwrap();
        array[1000..3_001_000].fill(0);
        rustix::fs::fallocate(&file, FallocateFlags::ZERO_RANGE, 5_000_001, 77).unwrap();
        array[5_000_001..5_000_078].fill(0);
        assert!(all(&file) == array);
        file.sync_all().unwrap();

        // It has its size.
        assert_eq!(file.metadata().unwrap().len(), 8 * MIB);
        assert_eq!(file.set_len(4 * MIB).unwrap_err().raw_os_error(), Some(libc::EPERM));
        assert_eq!(file.write_at(&[0; 10], 8 * MIB).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        assert_eq!(file.read_at(&mut [0; 10], 8 * MIB).unwrap(), 0);
        let collapse = rustix::fs::fallocate(&file, FallocateFlags::COLLAPSE_RANGE, 0, 4096);
        assert_eq!(collapse, Err(rustix::io::Errno::OPNOTSUPP));

        // The quota: an error, and all that was there still is; what is discarded can be written again.
        let full = (0..8).find_map(|i| file.write_all_at(&vec![0xEE; 1 << 19], i << 19).err()).unwrap();
        assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
        file.read_exact_at(&mut array, 0).unwrap();
        rustix::fs::fallocate(&file, hole, 0, 4 << 20).unwrap();
        array[..4 << 20].fill(0);
        for round in 0..16u8 {
            file.write_all_at(&vec![round; 1 << 19], 2 << 20).unwrap();
        }
        array[2 << 20..(2 << 20) + (1 << 19)].fill(15);
        assert!(all(&file) == array);

        // Past the page cache too.
        let flags = i32::try_from(OFlags::DIRECT.bits()).unwrap();
        let direct = File::options().read(true).custom_flags(flags).open(&disk).unwrap();
        let mut aligned = vec![0u8; 8192];
        let skip = aligned.as_ptr().align_offset(4096);
        assert_eq!(direct.read_at(&mut aligned[skip..skip + 4096], 4096).unwrap(), 4096);
        drop(direct);

        // It stays as long as somebody has it open.
        served.signal(Signal::TERM);
        std::thread::sleep(Duration::from_millis(300));
        assert!(mounted(&disk));
        assert!(all(&file) == array);
        drop(file);
        let mut served = served;
        let status = wait_for(Duration::from_secs(30), || served.child.try_wait().unwrap());
        assert!(status.success());
        assert_eq!(std::fs::read_to_string(&disk).unwrap(), "hidden meanwhile");
        drop(served);

        // All of it was kept; and a disk without a writable layer takes nothing.
        let read_only = Served::start(&[path(&lower)], &disk);
        let refused = File::options().write(true).open(&disk).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
        let mut bytes = Vec::new();
        File::open(&disk).unwrap().read_to_end(&mut bytes).unwrap();
        assert!(bytes == pattern);
        read_only.stop();
        let again = Served::start(&args, &disk);
        assert!(all(&File::open(&disk).unwrap()) == array);
        // Killed, and served again at the same place.
        again.kill();
        let again = Served::start(&args, &disk);
        assert!(all(&File::open(&disk).unwrap()) == array);
        again.stop();
        run_ok(&["check", path(&lower), "--upper", path(&data), path(&index)]);
    });
}

#[test]
fn what_cannot_be_served_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("disk");
    let config = dir.path().join("config.v1.json");
    std::fs::write(&config, r#"{"lowers": [], "upper": {"index": "i", "data": "d"}}"#).unwrap();
    let missing = dir.path().join("missing");
    for (args, code, why) in [
        (vec![path(&missing)], 1, "missing"),
        (vec![path(&config), "--upper", "a", "b"], 2, "names a writable layer"),
        (vec!["--chain", path(&config)], 1, "config.v1.json"),
        (vec!["--upper", "a", "b", "--chain", "c"], 2, "cannot be used with"),
        (vec!["--size", "1MiB"], 2, "--chain"),
    ] {
        let mut all = vec!["fuse"];
        all.extend(args);
        all.push(path(&file));
        let output = run(&all);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{all:?}: {said}");
        assert!(said.contains(why), "{all:?}: {said}");
        assert!(!file.exists());
    }
}
