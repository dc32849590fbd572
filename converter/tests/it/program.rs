//! The program itself: what it is run on, and what it says.

use fixtures::content::Content;
use fixtures::oci::{Compression, Layer};
use fixtures::tar::{Entry, Kind, Time, Writer};
use std::ffi::OsStr;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

/// `dsec-convert convert SOURCE --store STORE --name NAME --json`.
pub(crate) fn convert(source: &str, store: &Path, name: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dsec-convert"));
    command.arg("convert").arg(source).arg("--store").arg(store).args(["--name", name, "--json"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// What a run that ended well reported.
#[track_caller]
pub(crate) fn report(output: &Output) -> serde_json::Value {
    assert!(output.status.success(), "{}: {}", output.status, said(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Runs to the end, which must be a good one.
#[track_caller]
pub(crate) fn run(command: &mut Command) -> serde_json::Value {
    report(&command.output().unwrap())
}

/// What was said on standard error.
pub(crate) fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Sends `signal` (`KILL`, `TERM`, …) to a child.
pub(crate) fn signal(child: &Child, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, signal).unwrap();
}

/// Runs a command with other settings of its process: `settings` are lines of a shell.
pub(crate) fn in_shell(settings: &str, command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("{settings}\nexec \"$@\"")).arg("sh").arg(command.get_program());
    shell.args(command.get_args().collect::<Vec<&OsStr>>());
    shell.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    shell
}

/// A layer of `files` files: small ones, larger ones, a few that the layers share, links and directories.
pub(crate) fn layer(seed: u64, files: u64, compression: Compression) -> Layer {
    let mut writer = Writer::new(Vec::new());
    let mut put = |path: String, kind: Kind| {
        let mut entry = Entry::new(path, kind);
        entry.mtime = Time { secs: i64::try_from(seed).unwrap(), nanos: 5 };
        writer.entry(&entry).unwrap();
    };
    put("./".to_owned(), Kind::Directory);
    // Not in tree order, so that the data blob is rewritten too.
    for directory in ["z", "a"] {
        put(format!("{directory}{seed}/"), Kind::Directory);
        for n in 0..files / 2 {
            let content = match n % 5 {
                0 => Content::Random { seed: seed * 1000 + n, size: 40_000 + n * 17 },
                1 => Content::Text { seed: seed * 1000 + n, size: 150_000 + n },
                2 => Content::Text { seed: n, size: 70_000 },
                _ => Content::Text { seed: seed * 1000 + n, size: n * 13 % 4000 },
            };
            put(format!("{directory}{seed}/{n}"), Kind::Regular(content));
        }
        put(format!("{directory}{seed}/link"), Kind::HardLink(format!("{directory}{seed}/1").into()));
    }
    Layer::tar(writer.finish().unwrap()).compression(compression)
}

/// An image's layers of together about `3 * files * 55 KB`.
pub(crate) fn layers(seed: u64, files: u64) -> Vec<Layer> {
    let compressions = [Compression::Gzip, Compression::Zstd, Compression::None];
    (0..3).map(|n| layer(seed + n, files, compressions[usize::try_from(n).unwrap()])).collect()
}
