//! Who takes part: our converter, the limit, and whatever other programs do a comparable task.

use crate::data::Image;
use crate::measure::{CheckOutput, Contender, MakeCommands};
use crate::place;
use crate::report::Missing;
use crate::tool;
use anyhow::{Context as _, Result, bail};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Our converter's name in reports.
pub(crate) const OURS: &str = "dsec-convert";
/// The limit's name in reports.
pub(crate) const LIMIT: &str = "limit";
/// The limit's name when it leaves out the final fsync.
pub(crate) const LIMIT_NO_FSYNC: &str = "limit, no fsync";
/// Name of the image that ours puts into its store.
pub(crate) const REFERENCE: (&str, &str) = ("bench", "latest");
/// Directory of the store, and file of the JSON that ours prints, in the output directory.
pub(crate) const STORE: &str = "store";
/// See [`STORE`].
pub(crate) const JSON: &str = "convert.json";

/// Builds `dsec-convert` as it is in the working tree and says where it is.
pub(crate) fn build_ours() -> Result<PathBuf> {
    let beside = std::env::current_exe()?.with_file_name(OURS);
    // Cargo says where it is to what it runs. Without it, this is an installed copy, and so is the converter beside it.
    let Some(cargo) = std::env::var_os("CARGO") else {
        if beside.is_file() {
            return Ok(beside);
        }
        bail!("{} is not there: build it, or name one with --convert-bin", beside.display());
    };
    let mut build = Command::new(cargo);
    build.args(["build", "--release", "--quiet", "--package", "converter"]).current_dir(place::workspace());
    if !build.status().context("cannot run cargo")?.success() {
        bail!("{build:?} failed");
    }
    if !beside.is_file() {
        bail!("{build:?} did not make {}: run this benchmark with --release", beside.display());
    }
    Ok(beside)
}

/// A `dsec-convert`, ours or that of another revision.
pub(crate) fn converter(name: &str, program: PathBuf, image: &Image, jobs: usize) -> Contender {
    let source = format!("oci:{}", image.layout.display());
    let commands = move |out: &Path| {
        let mut command = silent(&program);
        command.args(["convert", &source, "--json", "--jobs", &jobs.to_string(), "--store"]).arg(out.join(STORE));
        command.args(["--name", &format!("{}:{}", REFERENCE.0, REFERENCE.1)]);
        command.stdout(File::create(out.join(JSON))?);
        Ok(vec![command])
    };
    let check = |out: &Path| exists(&out.join(STORE).join("refs").join(REFERENCE.0).join(REFERENCE.1));
    contender(name, commands, check)
}

/// The limit, as this program's own child.
pub(crate) fn limit(image: &Image, jobs: usize, fsync: bool) -> Result<Contender> {
    let (program, layout) = (std::env::current_exe()?, image.layout.clone());
    let commands = move |out: &Path| {
        let mut command = silent(&program);
        command.args(["__child", "limit", "--jobs", &jobs.to_string(), "--layout"]).arg(&layout);
        command.arg("--out").arg(out);
        if fsync {
            command.arg("--fsync");
        }
        Ok(vec![command])
    };
    let names: Vec<String> = image.layers.iter().map(|layer| layer.diff_id.clone()).collect();
    let check = move |out: &Path| names.iter().try_for_each(|name| exists(&out.join(name)));
    Ok(contender(if fsync { LIMIT } else { LIMIT_NO_FSYNC }, commands, check))
}

/// The peers that this machine has, and how to get the others.
pub(crate) fn peers(image: &Image) -> (Vec<Contender>, Vec<Missing>) {
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    let mut add = |name: &str, peer: Result<Contender>| match peer {
        Ok(peer) => found.push(peer),
        Err(error) => missing.push(Missing { name: name.to_owned(), how: format!("{error:#}") }),
    };
    add("mkfs.erofs", mkfs().map(|mkfs| erofs(&mkfs, image)));
    add(
        "nydus-image",
        installed("nydus-image", "see the Nydus project's releases, or `cargo install nydus-rs`")
            .map(|program| nydus(program, image)),
    );
    add("umoci", installed("umoci", "apt-get install umoci").map(|program| umoci(program, image)));
    add("tar", installed("tar", "apt-get install tar").map(|program| tar(program, image)));
    add("gzip", installed("gzip", "apt-get install gzip").map(|program| gzip(program, image)));
    (found, missing)
}

fn installed(name: &str, how: &str) -> Result<PathBuf> {
    tool::find(name).with_context(|| format!("not in PATH: {how}"))
}

/// An mkfs.erofs that reads compressed tars.
#[derive(Debug, Clone)]
pub(crate) struct Mkfs {
    program: PathBuf,
    version: String,
}

const MKFS_HOW: &str = "build erofs-utils 1.8 or later with zlib and name its mkfs.erofs in DSEC_BENCH_MKFS";

/// `DSEC_BENCH_MKFS`, or the one in `PATH`; version 1.8 or later.
pub(crate) fn mkfs() -> Result<Mkfs> {
    match std::env::var_os("DSEC_BENCH_MKFS") {
        Some(program) => mkfs_at(PathBuf::from(program)),
        None => mkfs_at(installed("mkfs.erofs", MKFS_HOW)?),
    }
}

fn mkfs_at(program: PathBuf) -> Result<Mkfs> {
    let output = Command::new(&program).arg("--version").output();
    let output = output.with_context(|| format!("cannot run {}", program.display()))?;
    // Releases differ in which of the two they print it to.
    let text = [output.stdout, output.stderr].concat();
    let version = version(&String::from_utf8_lossy(&text))
        .with_context(|| format!("{} does not tell its version", program.display()))?;
    if version < (1, 8) {
        bail!("{} is version {}.{}: {MKFS_HOW}", program.display(), version.0, version.1);
    }
    Ok(Mkfs { program, version: format!("{}.{}", version.0, version.1) })
}

/// The first `A.B` in a text that is a version number.
fn version(text: &str) -> Option<(u32, u32)> {
    text.split_whitespace().find_map(|word| {
        let mut parts = word.split(|c: char| !c.is_ascii_digit());
        Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
    })
}

impl Mkfs {
    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    /// Bytes of the metadata image that it makes of a layer with its data in chunks on another device.
    pub(crate) fn chunked_metadata(&self, layer: &Path, chunk: u64, dir: &Path) -> Result<u64> {
        let (image, data) = (dir.join("chunked.erofs"), dir.join("chunked.data"));
        let mut command = Command::new(&self.program);
        command.args(["--quiet", "--tar=f", "--ungzip", &format!("--chunksize={chunk}")]);
        command.arg(format!("--blobdev={}", data.display())).arg(&image).arg(layer);
        let output = command.output()?;
        if !output.status.success() {
            bail!("{command:?}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr).trim());
        }
        let bytes = fs::metadata(&image)?.len();
        fs::remove_file(&image)?;
        fs::remove_file(&data)?;
        Ok(bytes)
    }
}

impl Mkfs {
    /// One whole EROFS image a layer, compressed by `codec` (with its level) into clusters of at most `cluster` bytes,
    /// straight from the compressed layer.
    pub(crate) fn compressed(&self, image: &Image, codec: &str, cluster: u32) -> Contender {
        let (program, codec) = (self.program.clone(), codec.to_owned());
        let command = move |layer: &Path, out: &Path| {
            let mut command = silent(&program);
            command.args(["--quiet", "--tar=f", "--ungzip", &format!("-z{codec}"), &format!("-C{cluster}")]);
            command.arg(out).arg(layer);
            Ok(command)
        };
        each_layer(&format!("mkfs.erofs {}", self.version), image, command)
    }
}

/// One whole, uncompressed EROFS image a layer, straight from the compressed layer.
fn erofs(mkfs: &Mkfs, image: &Image) -> Contender {
    let program = mkfs.program.clone();
    let command = move |layer: &Path, out: &Path| {
        let mut command = silent(&program);
        command.args(["--quiet", "--tar=f", "--ungzip"]).arg(out).arg(layer);
        Ok(command)
    };
    each_layer(&format!("mkfs.erofs {}", mkfs.version), image, command)
}

/// RAFS v6 bootstrap and blob, uncompressed.
fn nydus(program: PathBuf, image: &Image) -> Contender {
    let command = move |layer: &Path, out: &Path| {
        fs::create_dir(out)?;
        let mut command = silent(&program);
        command.args(["create", "--type", "targz-rafs", "--fs-version", "6", "--compressor", "none"]);
        command.args(["--log-level", "error", "--bootstrap"]).arg(out.join("bootstrap"));
        command.arg("--blob").arg(out.join("blob")).arg(layer);
        Ok(command)
    };
    each_layer("nydus-image", image, command)
}

/// All layers on top of each other, in one directory.
fn umoci(program: PathBuf, image: &Image) -> Contender {
    let source = format!("{}:latest", image.layout.display());
    let commands = move |out: &Path| {
        let mut command = silent(&program);
        command.args(["unpack", "--image", &source]).arg(out.join("bundle"));
        Ok(vec![command])
    };
    contender("umoci unpack", commands, |out| exists(&out.join("bundle/rootfs")))
}

/// Each layer in a directory of its own.
fn tar(program: PathBuf, image: &Image) -> Contender {
    let command = move |layer: &Path, out: &Path| {
        fs::create_dir(out)?;
        let mut command = silent(&program);
        command.args(["--extract", "--gzip", "--numeric-owner", "--directory"]).arg(out).arg("--file").arg(layer);
        Ok(command)
    };
    each_layer("tar -xz", image, command)
}

/// Each layer inflated into a file, neither checked nor changed.
fn gzip(program: PathBuf, image: &Image) -> Contender {
    let command = move |layer: &Path, out: &Path| {
        let mut command = silent(&program);
        command.arg("-dc").arg(layer).stdout(File::create(out)?);
        Ok(command)
    };
    each_layer("gzip -dc", image, command)
}

/// A contender that has one command for each layer, from the compressed layer to a path of its own.
fn each_layer(name: &str, image: &Image, command: impl Fn(&Path, &Path) -> Result<Command> + 'static) -> Contender {
    let layers: Vec<(String, PathBuf)> =
        image.layers.iter().map(|layer| (layer.name.clone(), layer.blob.clone())).collect();
    let names: Vec<String> = layers.iter().map(|(name, _)| name.clone()).collect();
    contender(
        name,
        move |out| layers.iter().map(|(name, layer)| command(layer, &out.join(name))).collect(),
        move |out| names.iter().try_for_each(|name| exists(&out.join(name))),
    )
}

fn contender(
    name: &str,
    commands: impl Fn(&Path) -> Result<Vec<Command>> + 'static,
    check: impl Fn(&Path) -> Result<()> + 'static,
) -> Contender {
    let (commands, check): (MakeCommands, CheckOutput) = (Box::new(commands), Box::new(check));
    Contender { name: name.to_owned(), commands, check }
}

/// A command that prints to nowhere, unless it is told otherwise.
pub(crate) fn silent(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.stdout(Stdio::null());
    command
}

fn exists(path: &Path) -> Result<()> {
    let meta = fs::metadata(path).with_context(|| format!("{} was not made", path.display()))?;
    if meta.is_file() && meta.len() == 0 {
        bail!("{} is empty", path.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_mkfs() {
        let new = "mkfs.erofs (erofs-utils) 1.9.3\navailable compressors: lz4";
        assert_eq!(version(new), Some((1, 9)));
        assert_eq!(version("mkfs.erofs 1.5\n"), Some((1, 5)));
        assert_eq!(version("mkfs.erofs (erofs-utils) 1.10-gabcdef"), Some((1, 10)));
        assert_eq!(version("usage: nothing"), None);
    }

    #[test]
    fn an_mkfs_is_taken_or_refused_by_what_it_prints() {
        let dir = tempfile::tempdir().unwrap();
        let program = |name: &str, script: &str| {
            use std::os::unix::fs::PermissionsExt as _;
            let path = dir.path().join(name);
            fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            path
        };
        assert_eq!(mkfs_at(program("new", "echo mkfs.erofs 1.8.10")).unwrap().version, "1.8");
        assert_eq!(mkfs_at(program("stderr", "echo mkfs.erofs 1.9 >&2")).unwrap().version, "1.9");
        for (name, script, words) in [("old", "echo mkfs.erofs 1.5", "1.5"), ("mute", "true", "does not tell")] {
            let error = mkfs_at(program(name, script)).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn an_output_is_there_and_not_empty() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        assert!(exists(&file).is_err() && exists(dir.path()).is_ok());
        fs::write(&file, b"").unwrap();
        assert!(exists(&file).is_err());
        fs::write(&file, b"x").unwrap();
        assert!(exists(&file).is_ok());
    }
}
