//! `ublk-overlaybd export`.

use super::layers::{DiskArgs, split_out, threads};
use super::output;
use super::progress::Bar;
use std::io::Write as _;
use std::path::PathBuf;
use ublk_overlaybd::write::export::export;

pub(super) const HELP: &str = "\
Examples:
  ublk-overlaybd export base.lsmt tools.lsmt disk.raw
  ublk-overlaybd export base.lsmt --upper upper.data upper.index disk.raw
  ublk-overlaybd export --upper sparse.data - disk.raw
  ublk-overlaybd export --config config.v1.json disk.raw";

/// Arguments of `export`.
#[derive(Debug, clap::Args)]
#[command(override_usage = "ublk-overlaybd export [OPTIONS] <LAYER>... <OUT.raw>\n       \
                            ublk-overlaybd export [OPTIONS] --config <config.v1.json> <OUT.raw>")]
pub(super) struct Args {
    /// The layers, the bottom one first, and the file to make
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    #[command(flatten)]
    disk: DiskArgs,
    /// Threads [default: as many as there are cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: Option<u16>,
    /// Replace the file if it exists
    #[arg(long)]
    force: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let (layers, path) = split_out(&args.files)?;
    let image = args.disk.image(layers)?;
    let bar = Bar::new("exporting", None);
    let exported = export(&image, path, args.force, threads(args.threads), &bar)?;
    drop(bar);
    output::print(|out| {
        if args.json {
            return output::json(out, &exported);
        }
        let (size, written) = (output::size(exported.bytes), output::size(exported.written));
        writeln!(out, "{}: a disk of {size}, {written} of it not zero", path.display())
    })
}
