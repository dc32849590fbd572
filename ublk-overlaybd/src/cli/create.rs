//! `ublk-overlaybd create` and `resize`.

use super::Usage;
use super::layers::index;
use super::output::{self, parse_size};
use super::wrapping::NameArgs;
use serde_json::json;
use std::io::Write as _;
use std::path::PathBuf;
use ublk_overlaybd::layer::Layer;
use ublk_overlaybd::write::create::{Kind, create};
use ublk_overlaybd::write::resize::resize as change_size;
use uuid::Uuid;

/// Arguments of `create`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The data file to make
    data: PathBuf,
    /// The index file to make
    index: PathBuf,
    /// Size of the disk, such as 64GiB; 0 is that of the layer below
    #[arg(long, value_parser = parse_size)]
    size: u64,
    /// Keep data in its place in a sparse file. Others then forget discards, and sectors beside those written
    #[arg(long)]
    sparse: bool,
    #[command(flatten)]
    names: NameArgs,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let mut names = args.names.names(Uuid::nil());
    // A writable layer has a name of its own.
    names.uuid = args.names.uuid().unwrap_or_else(Uuid::new_v4);
    let kind = if args.sparse { Kind::Sparse } else { Kind::Append };
    create(&args.data, &args.index, args.size, kind, &names)?;
    output::print(|out| {
        let uuid = names.uuid.to_string().to_uppercase();
        if args.json {
            let (data, index) = (args.data.display().to_string(), args.index.display().to_string());
            let document = json!({ "data": data, "index": index, "virtual_size": args.size, "uuid": uuid });
            return output::json(out, &document);
        }
        let (data, index, size) = (args.data.display(), args.index.display(), output::size(args.size));
        writeln!(out, "{data}, {index}: a writable layer for a disk of {size}, {uuid}")
    })
}

/// Arguments of `resize`.
#[derive(Debug, clap::Args)]
pub(super) struct ResizeArgs {
    /// The data file of the writable layer, which nobody has open
    data: PathBuf,
    /// Its index file, or `-`
    #[arg(value_name = "INDEX|-")]
    index: PathBuf,
    /// The new size, such as 64GiB
    #[arg(long, value_parser = parse_size)]
    size: u64,
    /// Allow the disk to become smaller: what lies beyond is lost. The file system must have been made smaller before
    #[arg(long)]
    shrink: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(super) fn resize(args: &ResizeArgs) -> anyhow::Result<()> {
    let index = index(&args.index);
    let layer = Layer::open_pair(&args.data, index)?;
    let before = layer.virtual_size();
    if args.size < before && !args.shrink {
        let what = format!("the disk has {}, and would become smaller: --shrink allows that", output::size(before));
        return Err(Usage(what).into());
    }
    drop(layer);
    change_size(&args.data, index, args.size)?;
    output::print(|out| {
        if args.json {
            return output::json(out, &json!({ "before": before, "virtual_size": args.size }));
        }
        writeln!(out, "{}: {} became {}", args.data.display(), output::size(before), output::size(args.size))
    })
}
