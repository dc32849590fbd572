//! `ublk-overlaybd import`.

use super::Usage;
use super::progress::Bar;
use super::wrapping::{NameArgs, WrappingArgs};
use anyhow::{Context as _, bail};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use ublk_overlaybd::write::import;
use uuid::Uuid;

/// Arguments of `import`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The disk image
    disk: PathBuf,
    /// The layer to make
    out: PathBuf,
    /// What the disk image is: raw, or a format of qemu-img [default: qcow2 where it begins like one, else raw]
    #[arg(long)]
    format: Option<String>,
    #[command(flatten)]
    wrapping: WrappingArgs,
    #[command(flatten)]
    names: NameArgs,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let wrapping = args.wrapping.wrapping()?;
    let names = args.names.names(Uuid::nil());
    let format = match &args.format {
        Some(format) => format.clone(),
        None => guess(&args.disk)?.to_owned(),
    };
    if !format.bytes().all(|b| b.is_ascii_alphanumeric()) {
        return Err(Usage(format!("`{format}` is no format of qemu-img")).into());
    }
    let converted = if format == "raw" { None } else { Some(convert(&args.disk, &format, &args.out)?) };
    let disk = converted.as_ref().map_or(&*args.disk, |file| file.path());
    let bar = Bar::new("importing", None);
    let written = import::import(disk, &names, &args.out, wrapping, &bar)?;
    drop(bar);
    args.wrapping.report(&args.out, &written, args.json)
}

fn guess(disk: &Path) -> anyhow::Result<&'static str> {
    let mut magic = Vec::new();
    let file = std::fs::File::open(disk).with_context(|| format!("cannot open {}", disk.display()))?;
    file.take(4).read_to_end(&mut magic).with_context(|| format!("cannot read {}", disk.display()))?;
    Ok(if magic == *b"QFI\xfb" { "qcow2" } else { "raw" })
}

/// The disk as a sparse raw file beside `out`, gone when dropped.
fn convert(disk: &Path, format: &str, out: &Path) -> anyhow::Result<tempfile::NamedTempFile> {
    let dir = out.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let raw = tempfile::Builder::new().prefix(".import-").suffix(".raw").tempfile_in(dir)?;
    // Backing files are not followed: an image from elsewhere must not name files of this machine.
    let info = qemu_img(&["info", "--output=json", "-f", format, "--"], &[disk])?;
    let info: serde_json::Value = serde_json::from_slice(&info).context("qemu-img info gave no JSON")?;
    for key in ["backing-filename", "full-backing-filename"] {
        if let Some(name) = info.get(key).and_then(serde_json::Value::as_str) {
            bail!("{}: it has the backing file {name}: flatten it first (qemu-img convert)", disk.display());
        }
    }
    if info["format-specific"]["data"].get("data-file").is_some() {
        bail!("{}: its data is in another file: flatten it first (qemu-img convert)", disk.display());
    }
    qemu_img(&["convert", "-f", format, "-O", "raw", "-S", "4k", "--"], &[disk, raw.path()])?;
    Ok(raw)
}

fn qemu_img(args: &[&str], files: &[&Path]) -> anyhow::Result<Vec<u8>> {
    // A name with a colon would be taken for a protocol.
    let files =
        files.iter().map(|file| if file.is_absolute() { file.to_path_buf() } else { Path::new("./").join(file) });
    let output = Command::new("qemu-img").args(args).args(files).output();
    let output = output.context("cannot run qemu-img (Debian: qemu-utils)")?;
    if !output.status.success() {
        bail!("qemu-img {}: {}", args[0], String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout)
}
