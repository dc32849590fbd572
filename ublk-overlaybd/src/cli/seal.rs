//! `ublk-overlaybd seal`.

use super::layers::{open_pair, threads};
use super::output;
use super::progress::Bar;
use serde_json::json;
use std::io::Write as _;
use std::path::PathBuf;
use ublk_overlaybd::write::seal::{seal_copy, seal_in_place};

/// Arguments of `seal`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The data file of the writable layer, which nobody has open
    data: PathBuf,
    /// Its index file
    index: PathBuf,
    /// Seal a copy with this name; without it the data file itself is sealed
    out: Option<PathBuf>,
    /// Replace OUT if it exists
    #[arg(long, requires = "out")]
    force: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let layer = open_pair(&args.data, &args.index)?;
    let (path, bytes) = match &args.out {
        Some(out) => {
            let bar = Bar::new("sealing", Some(layer.data().size()));
            (out, seal_copy(&layer, out, args.force, threads(None), &bar)?)
        }
        None => (&args.data, seal_in_place(&layer, &args.data)?),
    };
    output::print(|out| {
        let mappings = layer.index().len();
        if args.json {
            let document = json!({ "file": path.display().to_string(), "bytes": bytes, "mappings": mappings });
            return output::json(out, &document);
        }
        writeln!(out, "{}: sealed, {}, {mappings} mappings", path.display(), output::size(bytes))
    })
}
