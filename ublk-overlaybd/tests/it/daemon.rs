//! The daemon as its users have it: the program, its socket, and real block devices on the kernel of a guest.
#![allow(clippy::print_stderr)] // What a daemon said belongs to a test that fails.

use fixtures::require;
use serde_json::Value;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

#[cfg(feature = "cache")]
mod backend;
mod faults;
mod life;
mod load;

const PROGRAM: &str = env!("CARGO_BIN_EXE_ublk-overlaybd");
/// How long anything may take in a guest without hardware's help.
const PATIENCE: Duration = Duration::from_secs(120);

/// A daemon, with its own state and socket.
struct Daemon {
    dir: TempDir,
    child: Option<Child>,
}

/// What a command said.
struct Said {
    out: String,
    error: String,
    code: Option<i32>,
}

impl Said {
    #[track_caller]
    fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{}{}", self.out, self.error);
        self.out
    }

    #[track_caller]
    fn json(self) -> Value {
        serde_json::from_str(&self.ok()).unwrap()
    }

    /// It failed with this code, and the sentence has this in it.
    #[track_caller]
    fn fails(self, code: i32, part: &str) {
        assert_eq!(self.code, Some(code), "{}{}", self.out, self.error);
        assert!(self.error.contains(part), "`{part}` is not in: {}", self.error);
    }
}

fn run(command: &mut Command) -> Said {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Said { out: text(&output.stdout), error: text(&output.stderr), code: output.status.code() }
}

/// A program of the system's that must succeed.
#[track_caller]
fn ok(program: &str, arguments: &[&str]) -> String {
    run(Command::new(program).args(arguments)).ok()
}

#[track_caller]
fn until(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is() {
        assert!(Instant::now() < end, "{what}: not within {PATIENCE:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

impl Daemon {
    /// One with nothing.
    fn start() -> Self {
        Self::start_with("")
    }

    /// One with these lines in its file.
    fn start_with(config: &str) -> Self {
        require::vm();
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let (state, socket) = (dir.path().join("state"), dir.path().join("socket"));
        let config = format!("state = '{}'\nsocket = '{}'\n{config}", state.display(), socket.display());
        fs::write(dir.path().join("daemon.toml"), config).unwrap();
        let mut daemon = Self { dir, child: None };
        daemon.spawn("serve");
        daemon.ready();
        daemon
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn spawn(&mut self, how: &str) {
        let log = File::options().create(true).append(true).open(self.path("log")).unwrap();
        let child = Command::new(PROGRAM)
            .arg(how)
            .args(["--config".as_ref(), self.path("daemon.toml").as_os_str()])
            .env("RUST_LOG", "info")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        self.child = Some(child.unwrap());
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Waits until it has taken over what there was.
    #[track_caller]
    fn ready(&mut self) {
        let end = Instant::now() + PATIENCE;
        loop {
            let events = self.call(&["events"]);
            if events.code == Some(0) && events.out.contains("\"ready\"") {
                return;
            }
            let ended = self.child.as_mut().and_then(|child| child.try_wait().unwrap());
            assert!(ended.is_none(), "it ended: {ended:?}\n{}", self.log());
            assert!(Instant::now() < end, "it is not ready\n{}", self.log());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// One of the client's commands.
    fn call(&self, arguments: &[&str]) -> Said {
        let (command, rest) = arguments.split_first().unwrap();
        let socket = self.path("socket");
        run(Command::new(PROGRAM).arg(command).arg("--socket").arg(socket).args(rest))
    }

    fn pid(&self) -> u32 {
        u32::try_from(self.call(&["status", "--json"]).json()["pid"].as_u64().unwrap()).unwrap()
    }

    /// As the kernel does when there is no memory.
    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    fn restart(&mut self) {
        self.spawn("serve");
        self.ready();
    }

    /// Adds a device of a new chain, and gives its node.
    #[track_caller]
    fn chain(&self, name: &str, size: &str, more: &[&str]) -> PathBuf {
        let dir = self.path(name);
        fs::create_dir_all(&dir).unwrap();
        let chain = dir.join("chain");
        let mut arguments = vec!["add", name, "--chain", chain.to_str().unwrap(), "--size", size];
        arguments.extend(more);
        PathBuf::from(self.call(&arguments).ok().trim())
    }

    fn names(&self) -> Vec<String> {
        let list = self.call(&["list", "--json"]).json();
        list.as_array().unwrap().iter().map(|device| device["name"].as_str().unwrap().to_owned()).collect()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("{}", self.log());
        }
        let removed = self.call(&["rm", "--all", "--force"]);
        if removed.code != Some(0) {
            eprintln!("devices stay: {}", removed.error);
        }
        self.kill();
    }
}

/// Mounted until it is dropped.
struct Mounted(PathBuf);

impl Mounted {
    #[track_caller]
    fn new(device: &Path, on: &Path) -> Self {
        fs::create_dir_all(on).unwrap();
        ok("mount", &[device.to_str().unwrap(), on.to_str().unwrap()]);
        Self(on.to_owned())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

fn ext4(device: &Path) {
    ok("mkfs.ext4", &["-q", "-E", "lazy_itable_init=0,nodiscard", device.to_str().unwrap()]);
}

#[track_caller]
fn is_clean(device: &Path) {
    ok("e2fsck", &["-fn", device.to_str().unwrap()]);
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for (number, word) in (seed << 32..).zip(bytes.chunks_mut(8)) {
        let word_bytes = fixtures::content::splitmix64(number).to_le_bytes();
        let len = word.len();
        word.copy_from_slice(&word_bytes[..len]);
    }
    bytes
}

/// Off the guest there is no ublk, or no right to it: a sentence, and nothing is left.
#[test]
fn a_machine_that_cannot_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let (state, socket) = (dir.path().join("state"), dir.path().join("socket"));
    if Path::new("/dev/ublk-control").exists() {
        // The host has ublk: the tests named vm_ say more than this one could.
        return;
    }
    let said = run(Command::new(PROGRAM).arg("serve").arg("--state").arg(&state).arg("--socket").arg(&socket));
    said.fails(1, "ublk-overlaybd fuse");
    assert!(!state.exists() && !socket.exists());
    let said = run(Command::new(PROGRAM).args(["list", "--socket"]).arg(&socket));
    said.fails(1, "no daemon answers there");
    fs::write(dir.path().join("d.toml"), "sockets = '/x'\n").unwrap();
    let said = run(Command::new(PROGRAM).args(["serve", "--config"]).arg(dir.path().join("d.toml")));
    said.fails(2, "sockets");
}
