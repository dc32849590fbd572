//! `ublk-overlaybd commit` and `merge`.

use super::layers::{DiskArgs, open_pair, split_out};
use super::progress::Bar;
use super::wrapping::{NameArgs, WrappingArgs};
use std::path::PathBuf;
use ublk_overlaybd::layer::Layer;
use ublk_overlaybd::write::commit;

pub(super) const HELP: &str = "\
Examples:
  ublk-overlaybd commit upper.data upper.index layer --zfile lz4 --tar
  ublk-overlaybd commit sparse.data - layer
  ublk-overlaybd commit sealed layer --zfile zstd --block-size 16KiB";

/// Arguments of `commit`.
#[derive(Debug, clap::Args)]
#[command(override_usage = "ublk-overlaybd commit [OPTIONS] <DATA> <INDEX|-> <OUT>\n       \
                            ublk-overlaybd commit [OPTIONS] <LAYER> <OUT>")]
pub(super) struct Args {
    /// The writable layer (its data file, and its index file or `-` if it is sparse) or the finished layer, and the file
    /// to make
    #[arg(value_name = "FILE", num_args = 2..=3, required = true)]
    files: Vec<PathBuf>,
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
    let (from, out) = split_out(&args.files)?;
    let layer = match from {
        [data, index] => open_pair(data, index)?,
        files => Layer::open_file(&files[0])?,
    };
    let names = args.names.names(layer.about().authority().parent);
    let bar = Bar::new("committing", None);
    let written = commit::commit(&layer, &names, out, wrapping, &bar)?;
    drop(bar);
    args.wrapping.report(out, &written, args.json)
}

pub(super) const MERGE_HELP: &str = "\
Examples:
  ublk-overlaybd merge base.lsmt tools.lsmt merged --zfile lz4
  ublk-overlaybd merge --config config.v1.json merged.tar --bottom --zfile zstd --tar";

/// Arguments of `merge`.
#[derive(Debug, clap::Args)]
#[command(override_usage = "ublk-overlaybd merge [OPTIONS] <LAYER>... <OUT>\n       \
                            ublk-overlaybd merge [OPTIONS] --config <config.v1.json> <OUT>")]
pub(super) struct MergeArgs {
    /// The layers, the bottom one first, and the file to make
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    #[command(flatten)]
    disk: DiskArgs,
    /// Nothing will ever lie below: leave out zeros
    #[arg(long)]
    bottom: bool,
    #[command(flatten)]
    wrapping: WrappingArgs,
    #[command(flatten)]
    names: NameArgs,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(super) fn merge(args: &MergeArgs) -> anyhow::Result<()> {
    let wrapping = args.wrapping.wrapping()?;
    let (from, out) = split_out(&args.files)?;
    let image = args.disk.image(from)?;
    let names = args.names.names(image.layers()[0].about().authority().parent);
    let bar = Bar::new("merging", None);
    let written = commit::merge(&image, args.bottom, &names, out, wrapping, &bar)?;
    drop(bar);
    args.wrapping.report(out, &written, args.json)
}
