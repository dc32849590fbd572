//! `ublk-overlaybd map`.

use super::Usage;
use super::layers::DiskArgs;
use super::output::{self, Out, parse_size};
use serde_json::json;
use std::io::{self, Write as _};
use std::path::PathBuf;
use ublk_overlaybd::format::lsmt::SECTOR;
use ublk_overlaybd::image::Image;
use ublk_overlaybd::index::{Kind, Piece};

/// Arguments of `map`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The layers, the bottom one first
    #[arg(value_name = "LAYER")]
    layers: Vec<PathBuf>,
    #[command(flatten)]
    disk: DiskArgs,
    /// Only these bytes of the disk: START..END, each a size such as 4KiB; either may be left out
    #[arg(long, value_name = "START..END")]
    range: Option<String>,
    /// Leave out what no layer maps
    #[arg(long)]
    no_holes: bool,
    /// Print JSON, a line for each range
    #[arg(long)]
    json: bool,
}

fn range(text: &str, size: u64) -> anyhow::Result<std::ops::Range<u64>> {
    let wrong = |why: &str| Usage(format!("--range {text}: {why}"));
    let (start, end) = text.split_once("..").ok_or_else(|| wrong("not START..END"))?;
    let number = |part: &str, other| if part.is_empty() { Ok(other) } else { parse_size(part).map_err(|e| wrong(&e)) };
    let (start, end) = (number(start, 0)?, number(end, size)?);
    if start > end || end > size {
        return Err(wrong(&format!("not within the disk's {size} bytes")).into());
    }
    Ok(start / SECTOR..end.div_ceil(SECTOR))
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let image = args.disk.image(&args.layers)?;
    let range = range(args.range.as_deref().unwrap_or(".."), image.size())?;
    output::print(|out| {
        let mut last: Option<Piece> = None;
        for piece in image.stack().lookup(range) {
            match &mut last {
                // Pieces of several indexes may continue one another.
                Some(before) if before.kind.map(|kind| kind.advanced(before.len)) == piece.kind => {
                    before.len += piece.len
                }
                _ => {
                    if let Some(before) = last.replace(piece) {
                        line(out, args, &image, &before)?;
                    }
                }
            }
        }
        last.map_or(Ok(()), |piece| line(out, args, &image, &piece))
    })
}

fn line(out: &mut Out, args: &Args, image: &Image, piece: &Piece) -> io::Result<()> {
    let (start, bytes) = (piece.start * SECTOR, piece.len * SECTOR);
    let (kind, layer, place) = match piece.kind {
        None if args.no_holes => return Ok(()),
        None => ("hole", None, None),
        Some(Kind::Zero) => ("zero", None, None),
        Some(Kind::Data { layer, moffset }) => ("data", Some(layer), Some(moffset * SECTOR)),
    };
    if args.json {
        let file = layer.map(|layer| image.layers()[usize::from(layer)].name());
        let document =
            json!({ "start": start, "bytes": bytes, "kind": kind, "layer": layer, "file": file, "at": place });
        return output::json_line(out, &document);
    }
    write!(out, "{start:>#14x} {bytes:>12} {kind}")?;
    if let (Some(layer), Some(place)) = (layer, place) {
        write!(out, "  layer {layer} at {place:#x}  {}", image.layers()[usize::from(layer)].name())?;
    }
    writeln!(out)
}
