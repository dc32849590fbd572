//! Devices whose layers come from a registry: while it fails, hangs, and comes back, and while there is no room to keep
//! anything.

use super::{Daemon, bytes, ok, run};
use crate::cached::Remote;
use fixtures::faulty_proxy::{Fault, FaultyProxy};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const SIZE: usize = 24 << 20;
const BLOCK: usize = 4096;

/// A registry with one layer of `SIZE` bytes, and what is in its way.
struct Backend {
    remote: Remote,
    fault: Arc<Mutex<Option<Fault>>>,
    _proxy: FaultyProxy,
    content: Vec<u8>,
}

impl Backend {
    fn start() -> Self {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let (raw, layer) = (dir.path().join("raw"), dir.path().join("layer"));
        let content = bytes(77, SIZE);
        fs::write(&raw, &content).unwrap();
        run(Command::new(super::PROGRAM).arg("import").arg(&raw).arg(&layer)).ok();
        let remote = Remote::new(&[layer.to_str().unwrap()]);
        let fault = Arc::new(Mutex::new(None));
        let script = Arc::clone(&fault);
        let proxy = FaultyProxy::start(remote.registry.address(), move |_| script.lock().unwrap().clone());
        let mut config = remote.read();
        config["repoBlobUrl"] = format!("{}/v2/team/disk/blobs", proxy.url()).into();
        remote.write(&config);
        Self { remote, fault, _proxy: proxy, content }
    }

    fn set(&self, fault: Option<Fault>) {
        *self.fault.lock().unwrap() = fault;
    }

    fn add(&self, daemon: &Daemon) -> PathBuf {
        let config = self.remote.path("config.v1.json");
        PathBuf::from(daemon.call(&["add", "a", "--config", &config]).ok().trim())
    }

    /// Reads a block of the device, not from the page cache; the error's number.
    fn read(&self, node: &Path, at: usize) -> Result<(), i32> {
        let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).unwrap();
        let file = File::options().read(true).custom_flags(direct).open(node).unwrap();
        let mut memory = vec![0; 2 * BLOCK];
        let start = memory.as_ptr().align_offset(BLOCK);
        let block = &mut memory[start..start + BLOCK];
        file.read_exact_at(block, at as u64).map_err(|error| error.raw_os_error().unwrap_or(0))?;
        assert!(block == &self.content[at..at + BLOCK], "wrong bytes at {at}");
        Ok(())
    }
}

const CONFIG: &str = "request_deadline_ms = 8000\n";

#[test]
fn vm_daemon_a_backend_fails_hangs_and_comes_back() {
    fixtures::require::vm();
    let backend = Backend::start();
    let daemon = Daemon::start_with(&format!("{CONFIG}cache = '{}'\n", backend.remote.path("cache")));
    let node = backend.add(&daemon);
    let (here, there, beyond) = (BLOCK, 8 << 20, 16 << 20);
    backend.read(&node, here).unwrap();

    // It refuses everything: what is here is read on, and what is not is an error, which passes with its cause.
    backend.set(Some(Fault::Status { status: 503, retry_after: None }));
    let began = Instant::now();
    assert_eq!(backend.read(&node, there), Err(5));
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    backend.read(&node, here).unwrap();
    backend.set(None);
    backend.read(&node, there).unwrap();

    // It hangs: beside what waits for it, what is here is read without waiting.
    backend.set(Some(Fault::Stall(Duration::from_secs(120))));
    thread::scope(|scope| {
        let waiting = scope.spawn(|| backend.read(&node, beyond));
        thread::sleep(Duration::from_millis(500));
        let mut reads = 0;
        while !waiting.is_finished() && reads < 200 {
            backend.read(&node, here).unwrap();
            reads += 1;
        }
        assert!(reads >= 50, "{reads} reads beside one that waits");
        assert_eq!(waiting.join().unwrap(), Err(5));
    });
    let stat = daemon.call(&["stat", "a", "--json"]).json();
    assert!(stat["requests"]["failed"].as_u64().unwrap() >= 2, "{stat}");
    backend.set(None);
    backend.read(&node, beyond).unwrap();

    for at in (0..SIZE - BLOCK).step_by(1 << 20) {
        backend.read(&node, at).unwrap();
    }
}

#[test]
fn vm_daemon_a_full_cache_passes_through() {
    fixtures::require::vm();
    let backend = Backend::start();
    let cache = PathBuf::from(backend.remote.path("cache"));
    fs::create_dir(&cache).unwrap();
    // Room for the index, and for little else.
    ok("mount", &["-t", "tmpfs", "-o", "size=16m", "cache", cache.to_str().unwrap()]);
    {
        let daemon = Daemon::start_with(&format!("{CONFIG}cache = '{}'\n", cache.display()));
        let node = backend.add(&daemon);
        for at in (0..SIZE - BLOCK).step_by(128 << 10) {
            backend.read(&node, at).unwrap();
        }
        assert_eq!(daemon.call(&["stat", "a", "--json"]).json()["requests"]["failed"], 0);
    }
    ok("umount", &["-l", cache.to_str().unwrap()]);
}
