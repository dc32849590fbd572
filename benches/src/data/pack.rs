//! From a tree or a running command to a compressed layer, the same bytes for the same files.

use super::Layer;
use crate::inflate::Inflate;
use crate::tool;
use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// Every file of the data set is from this second, since installers leave the time they ran.
pub(super) const EPOCH: &str = "1700000000";

/// A command that yields to whatever else the machine is doing.
pub(super) fn quiet(program: &str) -> Command {
    let mut command = Command::new("nice");
    command.args(["-n", "10", program]);
    command
}

/// Runs a step of a recipe; what it says is shown only if it fails.
pub(super) fn run(command: &mut Command) -> Result<()> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// Packs the entry `top` of `root` and compresses it.
pub(super) fn tree(root: &Path, top: &str, out: &Path) -> Result<()> {
    tool::require("tar", "tar")?;
    let mut tar = quiet("tar");
    tar.args(["--create", "--format=posix", "--pax-option=delete=atime,delete=ctime", "--sort=name"]);
    tar.args(["--numeric-owner", "--owner=0", "--group=0", "--mode=u+rw,go=rX"]);
    tar.arg(format!("--mtime=@{EPOCH}")).arg("--directory").arg(root).arg(top);
    compress(&mut tar, out)
}

/// Compresses what a command writes to its standard output.
///
/// By gzip itself at its default level and without a name or time: the bytes most registries hold.
pub(super) fn compress(source: &mut Command, out: &Path) -> Result<()> {
    tool::require("gzip", "gzip")?;
    let mut source_child = source
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .with_context(|| format!("cannot run {source:?}"))?;
    let plain = source_child.stdout.take().context("the standard output was piped")?;
    let gzip = quiet("gzip").args(["-6", "-n", "-c"]).stdin(plain).stdout(File::create(out)?).status();
    let made = source_child.wait()?;
    if !made.success() {
        bail!("{source:?}: {made}");
    }
    let gzip = gzip.context("cannot run gzip")?;
    if !gzip.success() {
        bail!("gzip: {gzip}");
    }
    Ok(())
}

/// Reads a compressed layer once and takes its digests and sizes.
pub(super) fn inspect(name: &str, blob: &Path) -> Result<Layer> {
    let mut file = File::open(blob)?;
    let (mut compressed, mut plain, mut inflate) = (Sha256::new(), Sha256::new(), Inflate::new());
    let (mut input, mut output) = (vec![0; 256 << 10], vec![0; 1 << 20]);
    let (mut size, mut plain_size, mut finished) = (0, 0, false);
    loop {
        let n = file.read(&mut input)?;
        if n == 0 {
            break;
        }
        compressed.update(&input[..n]);
        size += n as u64;
        let mut rest = &input[..n];
        loop {
            let step = inflate.step(rest, &mut output)?;
            plain.update(&output[..step.produced]);
            plain_size += step.produced as u64;
            rest = &rest[step.consumed..];
            finished = step.finished;
            if rest.is_empty() && step.produced < output.len() {
                break;
            }
        }
    }
    if !finished {
        bail!("{} ends early", blob.display());
    }
    Ok(Layer {
        name: name.to_owned(),
        digest: hex(&compressed.finalize()),
        size,
        diff_id: hex(&plain.finalize()),
        plain_size,
        blob: blob.to_owned(),
    })
}

/// Bytes as lower-case hex digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_same_files_make_the_same_layer_whenever_and_in_whatever_order_they_came() {
        let make = |names: &[&str]| {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir_all(dir.path().join("root/app")).unwrap();
            for name in names {
                fs::write(dir.path().join("root/app").join(name), name).unwrap();
            }
            let out = dir.path().join("out.tar.gz");
            tree(&dir.path().join("root"), "app", &out).unwrap();
            inspect("x", &out).unwrap()
        };
        let (one, two) = (make(&["a", "b", "c"]), make(&["c", "b", "a"]));
        assert_eq!((&one.digest, &one.diff_id), (&two.digest, &two.diff_id));
        assert_ne!(one.digest, make(&["a", "b"]).digest);
        assert_eq!(one.plain_size % 512, 0);
    }

    #[test]
    fn a_failing_step_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let error = run(Command::new("sh").args(["-c", "echo it broke >&2; exit 3"])).unwrap_err().to_string();
        assert!(error.contains("it broke") && error.contains('3'), "{error}");
        assert!(compress(&mut Command::new("false"), &dir.path().join("x")).is_err());
        fs::write(dir.path().join("cut"), b"\x1f\x8b\x08\0\0\0\0\0\0\x03").unwrap();
        assert!(inspect("x", &dir.path().join("cut")).is_err());
    }
}
