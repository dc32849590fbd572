//! Real `/dev/ublkbN`, on the kernel of a guest: what reads and writes them is that kernel and its file systems.

use fixtures::require;
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use ublk_overlaybd::ublk::device::{self, Device, Service, Shape, Start};
use ublk_overlaybd::ublk::disk::{Disk, Operation};
use ublk_overlaybd::ublk::support::Support;

/// Reads of this part hang until the end of the world.
const HANGS: u64 = 32 << 20;
/// Reads of this part fail.
const BROKEN: u64 = 33 << 20;
/// Each of these parts has this size.
const PART: u64 = 1 << 20;
const SIZE: u64 = 64 << 20;

/// A file as a disk, with bad parts.
#[derive(Debug)]
struct FileDisk {
    file: File,
    bad: bool,
    flushes: AtomicU64,
}

impl FileDisk {
    fn open(path: &Path, bad: bool) -> Arc<Self> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap();
        file.set_len(SIZE).unwrap();
        Arc::new(Self { file, bad, flushes: AtomicU64::new(0) })
    }

    fn zero(&self, at: u64, len: u64) -> Result<(), Errno> {
        use rustix::fs::FallocateFlags;
        rustix::fs::fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, len)
    }
}

fn errno(error: &std::io::Error) -> Errno {
    Errno::from_raw_os_error(error.raw_os_error().unwrap_or(libc_eio()))
}

fn libc_eio() -> i32 {
    Errno::IO.raw_os_error()
}

impl Disk for FileDisk {
    fn size(&self) -> u64 {
        SIZE
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn attempt(&self, operation: &mut Operation<'_>) -> Option<Result<(), Errno>> {
        match operation {
            Operation::Read { at, .. } if self.bad && (HANGS..BROKEN + PART).contains(at) => None,
            Operation::Read { at, into } => Some(self.file.read_exact_at(into, *at).map_err(|e| errno(&e))),
            Operation::Write { at, from, durable: false } => {
                Some(self.file.write_all_at(from, *at).map_err(|e| errno(&e)))
            }
            _ => None,
        }
    }

    fn perform(&self, operation: &mut Operation<'_>) -> Result<(), Errno> {
        match operation {
            Operation::Read { at, .. } if self.bad && (HANGS..HANGS + PART).contains(at) => loop {
                thread::park();
            },
            Operation::Read { at, .. } if self.bad && (BROKEN..BROKEN + PART).contains(at) => Err(Errno::IO),
            Operation::Read { at, into } => self.file.read_exact_at(into, *at).map_err(|e| errno(&e)),
            Operation::Write { at, from, durable } => {
                self.file.write_all_at(from, *at).map_err(|e| errno(&e))?;
                if *durable { self.file.sync_data().map_err(|e| errno(&e)) } else { Ok(()) }
            }
            Operation::Flush => {
                self.flushes.fetch_add(1, Ordering::SeqCst);
                self.file.sync_data().map_err(|e| errno(&e))
            }
            Operation::Discard { at, len } => self.zero(*at, *len),
            Operation::WriteZeroes { at, len, .. } => self.zero(*at, *len),
        }
    }
}

fn service(request: Duration) -> Service {
    Service::new(Support::probe().unwrap(), 32, request, Duration::from_secs(60))
}

fn start(service: &Service, disk: &Arc<FileDisk>) -> Device {
    let disk: Arc<dyn Disk> = disk.clone();
    service.start(Start::Add { mark: 7 }, Shape::default(), disk).unwrap()
}

/// The node appears a little after the device; without udev, devtmpfs makes it.
fn node(device: &Path) -> PathBuf {
    let until = Instant::now() + Duration::from_secs(30);
    while !device.exists() {
        assert!(Instant::now() < until, "{} did not appear", device.display());
        thread::sleep(Duration::from_millis(10));
    }
    device.to_owned()
}

#[track_caller]
fn ok(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {said}");
    said
}

fn scratch() -> TempDir {
    tempfile::tempdir_in("/var/tmp").unwrap()
}

/// Mounted until it is dropped.
struct Mounted(PathBuf);

impl Mounted {
    fn new(device: &Path, on: &Path) -> Self {
        fs::create_dir_all(on).unwrap();
        ok(Command::new("mount").arg(device).arg(on));
        Self(on.to_owned())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

fn direct(path: &Path) -> File {
    let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).unwrap();
    OpenOptions::new().read(true).write(true).custom_flags(direct).open(path).unwrap()
}

/// Memory that direct I/O takes.
struct Aligned(Vec<u8>, usize);

impl Aligned {
    fn new(len: usize) -> Self {
        let memory = vec![0u8; len + 4096];
        let start = memory.as_ptr().align_offset(4096);
        Self(memory, start)
    }

    fn bytes(&mut self, len: usize) -> &mut [u8] {
        &mut self.0[self.1..][..len]
    }
}

#[test]
fn vm_ublk_a_file_system_lives_on_a_device() {
    require::vm();
    let dir = scratch();
    let disk = FileDisk::open(&dir.path().join("disk"), false);
    let service = service(Duration::from_secs(30));
    let device = start(&service, &disk);
    let path = node(&device.path());
    ok(Command::new("mkfs.ext4").args(["-q", "-E", "lazy_itable_init=0"]).arg(&path));
    let content: Vec<u8> = (0..3_000_000u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    {
        let mounted = Mounted::new(&path, &dir.path().join("mnt"));
        let mut file = File::create(mounted.0.join("file")).unwrap();
        file.write_all(&content).unwrap();
        let before = disk.flushes.load(Ordering::SeqCst);
        file.sync_all().unwrap();
        assert!(disk.flushes.load(Ordering::SeqCst) > before, "fsync reached the disk");
        ok(Command::new("fstrim").arg(&mounted.0));
    }
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
    {
        let mounted = Mounted::new(&path, &dir.path().join("mnt"));
        assert!(fs::read(mounted.0.join("file")).unwrap() == content, "what was written is read");
    }
    ok(Command::new("e2fsck").arg("-fn").arg(&path));
    let id = device.id();
    device.stop().unwrap();
    assert!(!device::present().unwrap().contains(&id));
    // What the disk has is what the device had.
    ok(Command::new("e2fsck").arg("-fn").arg(dir.path().join("disk")));
}

#[test]
fn vm_ublk_errors_and_hangs_are_errors_of_their_requests_alone() {
    require::vm();
    let dir = scratch();
    let disk = FileDisk::open(&dir.path().join("disk"), true);
    let service = service(Duration::from_secs(4));
    let device = start(&service, &disk);
    let path = node(&device.path());
    let file = direct(&path);
    let mut buffer = Aligned::new(4096);
    let broken = file.read_at(buffer.bytes(4096), BROKEN).unwrap_err();
    assert_eq!(broken.raw_os_error(), Some(libc_eio()));
    let hanging = {
        let path = path.clone();
        thread::spawn(move || {
            let began = Instant::now();
            let failed = direct(&path).read_at(Aligned::new(4096).bytes(4096), HANGS).unwrap_err();
            (failed.raw_os_error(), began.elapsed())
        })
    };
    thread::sleep(Duration::from_millis(500));
    // Beside what hangs, all else goes on.
    let mut served = 0;
    while !hanging.is_finished() {
        file.write_all_at(buffer.bytes(4096), served % 100 * 4096).unwrap();
        file.read_at(buffer.bytes(4096), served % 100 * 4096).unwrap();
        served += 1;
    }
    let (error, took) = hanging.join().unwrap();
    assert_eq!(error, Some(libc_eio()));
    assert!(took >= Duration::from_secs(3), "{took:?}");
    assert!(served > 20, "{served} requests beside one that hung for {took:?}");
    assert!(device.counters().timeouts.load(Ordering::SeqCst) >= 1);
    // And afterwards, with new buffers.
    file.read_at(buffer.bytes(4096), 0).unwrap();
    drop(file);
    device.stop().unwrap();
}

/// Serves the disk of `DSEC_TEST_UBLK` (directory, and the number to recover) until it is killed; a process of its own.
#[test]
#[ignore = "the body of a child process"]
fn ublk_child() {
    let told = std::env::var("DSEC_TEST_UBLK").expect("started by a test");
    let (dir, number) = told.split_once(':').unwrap();
    let dir = Path::new(dir);
    let disk: Arc<dyn Disk> = FileDisk::open(&dir.join("disk"), dir.join("bad").exists());
    let start = number.parse().map_or(Start::Add { mark: 7 }, |number| Start::Recover { number, mark: 7 });
    let device = service(Duration::from_secs(30)).start(start, Shape::default(), disk).unwrap();
    fs::write(dir.join("ready.tmp"), device.id().to_string()).unwrap();
    fs::rename(dir.join("ready.tmp"), dir.join("ready")).unwrap();
    loop {
        thread::park();
    }
}

/// A daemon that can be killed.
struct Daemon {
    child: Child,
    id: u32,
}

impl Daemon {
    fn begin(dir: &Path, recover: Option<u32>) -> Child {
        let _ = fs::remove_file(dir.join("ready"));
        let told = format!("{}:{}", dir.display(), recover.map_or(String::new(), |id| id.to_string()));
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "ublk_devices::ublk_child", "--ignored", "--nocapture"])
            .env("DSEC_TEST_UBLK", told)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    }

    fn start(dir: &Path, recover: Option<u32>) -> Self {
        let mut child = Self::begin(dir, recover);
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            if let Ok(id) = fs::read_to_string(dir.join("ready")) {
                return Self { child, id: id.parse().unwrap() };
            }
            assert!(child.try_wait().unwrap().is_none(), "the child ended");
            assert!(Instant::now() < until, "the child is not ready");
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn kill(mut self) -> u32 {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.id
    }
}

/// Killed again and again under load, a device keeps its place, and nobody who uses it sees an error or a wrong byte.
#[test]
fn vm_ublk_killed_and_recovered_under_load() {
    // Before, a request that is handed over while the server dies may crash the kernel: see `daemon::load`.
    let is_safe = require::vm().version() >= (6, 15);
    let dir = scratch();
    let daemon = Daemon::start(dir.path(), None);
    let path = node(Path::new(&format!("/dev/ublkb{}", daemon.id)));
    let (stop, pause) = (AtomicBool::new(false), AtomicBool::new(false));
    let writes = AtomicU64::new(0);
    let daemon = thread::scope(|scope| {
        let mut daemon = daemon;
        let workers: Vec<_> = (0..8u64)
            .map(|worker| {
                let (path, stop, pause, writes) = (&path, &stop, &pause, &writes);
                scope.spawn(move || {
                    let file = direct(path);
                    let (mut out, mut back) = (Aligned::new(16384), Aligned::new(16384));
                    let mut round = 0u64;
                    while !stop.load(Ordering::SeqCst) {
                        if pause.load(Ordering::SeqCst) {
                            thread::sleep(Duration::from_millis(1));
                            continue;
                        }
                        // Its own part of the disk, written over and over, and read back.
                        let at = worker * (4 << 20) + round % 200 * 16384;
                        for (n, word) in out.bytes(16384).chunks_exact_mut(8).enumerate() {
                            let value = (worker << 56) ^ (round << 16) ^ n as u64;
                            word.copy_from_slice(&value.to_le_bytes());
                        }
                        file.write_all_at(out.bytes(16384), at).unwrap();
                        file.read_exact_at(back.bytes(16384), at).unwrap();
                        assert!(out.bytes(16384) == back.bytes(16384), "worker {worker}, round {round}");
                        round += 1;
                        writes.fetch_add(1, Ordering::SeqCst);
                    }
                })
            })
            .collect();
        for kill in 0..6u64 {
            let before = writes.load(Ordering::SeqCst);
            thread::sleep(Duration::from_millis(200 + 137 * kill));
            pause.store(!is_safe, Ordering::SeqCst);
            let inflight = format!("/sys/block/ublkb{}/inflight", daemon.id);
            while !is_safe && fs::read_to_string(&inflight).unwrap().split_whitespace().any(|count| count != "0") {
                thread::sleep(Duration::from_millis(1));
            }
            // Between the look and the kill nobody begins: all have seen the pause, or were under way.
            thread::sleep(Duration::from_millis(if is_safe { 0 } else { 50 }));
            let id = daemon.kill();
            daemon = Daemon::start(dir.path(), Some(id));
            assert_eq!(daemon.id, id);
            pause.store(false, Ordering::SeqCst);
            let until = Instant::now() + Duration::from_secs(60);
            while writes.load(Ordering::SeqCst) < before + 20 {
                assert!(Instant::now() < until, "nothing is written after kill {kill}");
                assert!(workers.iter().all(|worker| !worker.is_finished()), "a worker failed");
                thread::sleep(Duration::from_millis(10));
            }
        }
        stop.store(true, Ordering::SeqCst);
        daemon
    });
    let id = daemon.kill();
    device::remove(id, Duration::from_secs(60)).unwrap();
    assert!(!device::present().unwrap().contains(&id));
}

/// It dies with all requests that its queue can have, so that the kernel has none of its commands to cancel.
#[test]
fn vm_ublk_killed_with_all_its_requests_in_hand() {
    require::vm();
    let dir = scratch();
    fs::write(dir.path().join("bad"), "").unwrap();
    let daemon = Daemon::start(dir.path(), None);
    let path = node(Path::new(&format!("/dev/ublkb{}", daemon.id)));
    let depth = u64::from(Shape::default().depth);
    thread::scope(|scope| {
        let readers: Vec<_> = (0..depth + 8)
            .map(|n| {
                let path = &path;
                scope.spawn(move || direct(path).read_at(Aligned::new(4096).bytes(4096), HANGS + n * 4096).unwrap())
            })
            .collect();
        let inflight = format!("/sys/block/ublkb{}/inflight", daemon.id);
        let reads =
            || fs::read_to_string(&inflight).unwrap().split_whitespace().next().unwrap().parse::<u64>().unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        while reads() < depth {
            assert!(Instant::now() < until, "{} are under way", reads());
            thread::sleep(Duration::from_millis(10));
        }
        fs::remove_file(dir.path().join("bad")).unwrap();
        let id = daemon.kill();
        let killed = Instant::now();
        let daemon = Daemon::start(dir.path(), Some(id));
        // By itself, the kernel would look after 30 seconds.
        assert!(killed.elapsed() < Duration::from_secs(20), "{:?}", killed.elapsed());
        for reader in readers {
            assert_eq!(reader.join().unwrap(), 4096);
        }
        device::remove(daemon.kill(), Duration::from_secs(60)).unwrap();
    });
}

/// A device that is not made in time is an error with a hint, and is not there afterwards, whenever the kernel gets to it.
#[test]
fn vm_ublk_made_too_late_is_removed() {
    require::vm();
    let dir = scratch();
    let before = device::present().unwrap();
    for nanos in [1, 1_000_000, 5_000_000, 20_000_000] {
        let service = Service::new(Support::probe().unwrap(), 4, Duration::from_secs(30), Duration::from_nanos(nanos));
        let disk: Arc<dyn Disk> = FileDisk::open(&dir.path().join("disk"), false);
        match service.start(Start::Add { mark: 9 }, Shape::default(), disk) {
            // With the same deadline, it may not end in time either; but it ends.
            Ok(device) => drop(device.stop()),
            Err(error) => assert!(error.to_string().contains("see the kernel's log"), "{error}"),
        }
        let until = Instant::now() + Duration::from_secs(60);
        while device::present().unwrap() != before {
            assert!(Instant::now() < until, "{:?} stay", device::present().unwrap());
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The server dies the moment its node is there (the kernel may be reading it for partitions).
#[test]
fn vm_ublk_killed_when_the_node_appears() {
    require::vm();
    let dir = scratch();
    for round in 0..5u64 {
        let before = device::present().unwrap();
        let mut child = Daemon::begin(dir.path(), None);
        let until = Instant::now() + Duration::from_secs(60);
        let id = loop {
            let new = device::present().unwrap().into_iter().find(|id| !before.contains(id));
            if let Some(id) = new
                && Path::new(&format!("/dev/ublkb{id}")).exists()
            {
                break id;
            }
            assert!(Instant::now() < until && child.try_wait().unwrap().is_none(), "no device");
            thread::sleep(Duration::from_micros(200 * round));
        };
        child.kill().unwrap();
        child.wait().unwrap();
        // Either it can be served again, or at least it goes away.
        device::remove(id, Duration::from_secs(60)).unwrap();
        assert_eq!(device::present().unwrap(), before);
    }
}

/// Devices come and go, many at once, and leave nothing behind.
#[test]
fn vm_ublk_adds_and_removes_leak_nothing() {
    require::vm();
    let dir = scratch();
    let service = service(Duration::from_secs(30));
    let count = |of: &str| fs::read_dir(of).unwrap().count();
    let mut after_first = None;
    for _ in 0..4 {
        thread::scope(|scope| {
            for n in 0..10 {
                let (service, dir) = (&service, dir.path());
                scope.spawn(move || {
                    let disk = FileDisk::open(&dir.join(n.to_string()), false);
                    let device = start(service, &disk);
                    let file = direct(&node(&device.path()));
                    file.read_at(Aligned::new(4096).bytes(4096), 0).unwrap();
                    drop(file);
                    device.stop().unwrap();
                });
            }
        });
        assert_eq!(device::present().unwrap(), [0u32; 0]);
        // Threads that have nothing to do go after a time, so those are not counted here.
        let now = count("/proc/self/fd");
        assert!(now <= *after_first.get_or_insert(now), "descriptors: {now}, {after_first:?} before");
    }
    let nodes = fs::read_dir("/dev")
        .unwrap()
        .filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().starts_with("ublkb"));
    assert_eq!(nodes.count(), 0);
}
