//! `ublk-overlaybd mkfs`.

use super::Usage;
use super::output::parse_size;
use super::progress::Bar;
use super::wrapping::{NameArgs, WrappingArgs};
use std::path::PathBuf;
use ublk_overlaybd::mkfs::{self, Content, Ext4, USUAL_TIME, USUAL_UUID};
use ublk_overlaybd::write::import;
use uuid::Uuid;

pub(super) const HELP: &str = "\
The same content gives the same bytes. SOURCE_DATE_EPOCH (seconds since 1970) is the time that everything is made at, and \
files that are younger get it. Needs mke2fs, and tar for --tar.

Examples:
  ublk-overlaybd mkfs base --size 16GiB -d rootfs --zfile lz4
  ublk-overlaybd mkfs empty --size 64GiB --label scratch";

/// Arguments of `mkfs`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The layer to make
    out: PathBuf,
    /// Size of the disk, such as 64GiB
    #[arg(long, value_parser = parse_size)]
    size: u64,
    /// Fill it with what is in this directory
    #[arg(short, long, value_name = "DIR", conflicts_with = "from_tar")]
    directory: Option<PathBuf>,
    /// Fill it with what is in this tar, which may be compressed
    #[arg(long, value_name = "TAR")]
    from_tar: Option<PathBuf>,
    /// The file system's label
    #[arg(long, default_value = "")]
    label: String,
    /// The file system's UUID
    #[arg(long, value_name = "UUID", default_value_t = USUAL_UUID)]
    fs_uuid: Uuid,
    /// Give it a journal: then a guest that is killed needs no fsck
    #[arg(long)]
    journal: bool,
    /// More features, as after `mke2fs -O`
    #[arg(long, value_name = "LIST")]
    features: Option<String>,
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
    let wrong = |text| Usage(format!("SOURCE_DATE_EPOCH is `{text}`: no number of seconds up to the year 2106"));
    let asked = std::env::var("SOURCE_DATE_EPOCH").ok();
    let asked: Option<u32> = asked.map(|text| text.parse().map_err(|_| wrong(text))).transpose()?;
    let content = match (&args.directory, &args.from_tar) {
        (Some(dir), _) => Content::Dir(dir),
        (None, Some(tar)) => Content::Tar(tar),
        (None, None) => Content::Nothing,
    };
    let ext4 = Ext4 {
        size: args.size,
        label: args.label.clone(),
        uuid: args.fs_uuid,
        journal: args.journal,
        time: asked.unwrap_or(USUAL_TIME),
        clamp: asked.is_some(),
        features: args.features.clone(),
    };
    let disk = mkfs::scratch(&args.out)?;
    mkfs::make(disk.path(), &ext4, content)?;
    let bar = Bar::new("writing the layer", None);
    let written = import::import(disk.path(), &names, &args.out, wrapping, &bar)?;
    drop(bar);
    args.wrapping.report(&args.out, &written, args.json)
}
