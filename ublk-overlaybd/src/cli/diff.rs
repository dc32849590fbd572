//! `ublk-overlaybd diff`.

use super::Differ;
use super::output;
use serde_json::json;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use ublk_overlaybd::backend::{FileSource, Source};
use ublk_overlaybd::format::lsmt::Header;
use ublk_overlaybd::image::Image;
use ublk_overlaybd::layer::{Layer, unwrap};

pub(super) const HELP: &str = "\
Exits with 1 when the disks differ.

Examples:
  ublk-overlaybd diff base.lsmt merged.lsmt
  ublk-overlaybd diff config.v1.json disk.raw
  ublk-overlaybd diff base.lsmt,tools.lsmt merged.lsmt --json";

/// Bytes that are compared at a time.
const UNIT: usize = 1 << 20;
/// What is told apart.
const GRAIN: usize = 512;

/// Arguments of `diff`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// A disk: config.v1.json, layers with commas between them (the bottom one first), or a raw disk
    a: PathBuf,
    /// The other one
    b: PathBuf,
    /// Say no more than how much differs
    #[arg(long)]
    summary: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Whether a file begins as a JSON object does.
pub(super) fn is_json(path: &Path) -> bool {
    let mut start = [0; 64];
    let read = std::fs::File::open(path).and_then(|mut file| file.read(&mut start)).unwrap_or(0);
    start[..read].iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{')
}

fn open(path: &Path) -> anyhow::Result<Arc<dyn Source>> {
    if let Some(text) = path.to_str().filter(|text| text.contains(',') && !path.exists()) {
        let layers = text.split(',').map(|path| Ok(Arc::new(Layer::open_file(Path::new(path))?)));
        return Ok(Arc::new(Image::new(layers.collect::<anyhow::Result<_>>()?)?));
    }
    if is_json(path) {
        return Ok(Arc::new(Image::open_config(path, None)?));
    }
    let name: Arc<str> = path.display().to_string().into();
    let stored: Arc<dyn Source> = Arc::new(FileSource::open(path)?);
    let inner = unwrap(&stored, &name)?;
    let mut magic = [0; 24];
    let is_layer = inner.lsmt.size() >= 24 && {
        inner.lsmt.read_exact_at(&mut magic, 0)?;
        Header::has_magic(&magic)
    };
    if is_layer || inner.zfile.is_some() {
        return Ok(Arc::new(Image::new(vec![Arc::new(Layer::open(stored, name)?)])?));
    }
    Ok(stored)
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let (a, b) = (open(&args.a)?, open(&args.b)?);
    let common = a.size().min(b.size());
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    let (mut left, mut right) = (vec![0; UNIT], vec![0; UNIT]);
    let mut at = 0;
    while at < common {
        let len = usize::try_from(common - at).unwrap_or(UNIT).min(UNIT);
        a.read_exact_at(&mut left[..len], at)?;
        b.read_exact_at(&mut right[..len], at)?;
        if left[..len] != right[..len] {
            for (number, (x, y)) in left[..len].chunks(GRAIN).zip(right[..len].chunks(GRAIN)).enumerate() {
                if x == y {
                    continue;
                }
                let start = at + (number * GRAIN) as u64;
                match ranges.last_mut() {
                    Some(last) if last.1 == start => last.1 = start + x.len() as u64,
                    _ => ranges.push((start, start + x.len() as u64)),
                }
            }
        }
        at += len as u64;
    }
    let differing: u64 = ranges.iter().map(|(start, end)| end - start).sum();
    let same = ranges.is_empty() && a.size() == b.size();
    output::print(|out| {
        if args.json {
            let list: Vec<_> =
                ranges.iter().map(|(start, end)| json!({ "start": start, "bytes": end - start })).collect();
            let mut document =
                json!({ "same": same, "sizes": [a.size(), b.size()], "differing_bytes": differing, "ranges": list });
            if args.summary
                && let Some(document) = document.as_object_mut()
            {
                document.remove("ranges");
            }
            return output::json(out, &document);
        }
        if a.size() != b.size() {
            writeln!(out, "sizes differ: {} and {}", a.size(), b.size())?;
        }
        if !args.summary {
            for (start, end) in &ranges {
                writeln!(out, "{start:>#14x} {:>12}", end - start)?;
            }
        }
        if same { writeln!(out, "the same") } else { writeln!(out, "{} differ", output::size(differing)) }
    })?;
    if same { Ok(()) } else { Err(Differ.into()) }
}
