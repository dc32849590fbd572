//! `ublk-overlaybd ls`.

use super::info::{describe, layer_document};
use super::output;
use serde_json::Value;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use ublk_overlaybd::format::lsmt::Header;
use ublk_overlaybd::format::{tar, zfile};
use ublk_overlaybd::image::Image;

/// Arguments of `ls`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Layers, directories that have some, or config.v1.json
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<PathBuf>,
    /// Print JSON, a line for each layer
    #[arg(long)]
    json: bool,
}

/// Whether a file begins as one of ours does.
fn is_ours(path: &Path) -> bool {
    use std::io::Read as _;
    let mut start = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(tar::PROBE as u64).read_to_end(&mut start));
    if read.is_err() {
        return false;
    }
    let inner = match tar::Member::find(&start) {
        Ok(Some(member)) => usize::try_from(member.offset).ok().and_then(|at| start.get(at..)).unwrap_or_default(),
        Ok(None) => &start,
        Err(_) => return false,
    };
    Header::has_magic(inner) || zfile::Head::has_magic(inner)
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let mut found = Vec::new();
    for path in &args.paths {
        if path.is_dir() {
            let mut files: Vec<PathBuf> =
                std::fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
            files.sort();
            found.extend(files.iter().filter(|path| path.is_file() && is_ours(path)).map(|path| describe(path)));
        } else if super::diff::is_json(path) {
            found.extend(Image::open_config(path, None)?.layers().iter().map(|layer| Ok(layer_document(layer))));
        } else {
            found.push(describe(path));
        }
    }
    let mut failed = None;
    let mut rows = Vec::new();
    for layer in found {
        match layer {
            Ok(layer) => rows.push(layer),
            // The others are listed all the same.
            Err(error) => {
                eprintln!("error: {}", super::sentence(&error));
                failed = Some(error);
            }
        }
    }
    output::print(|out| {
        if args.json {
            return rows.iter().try_for_each(|row| output::json_line(out, row));
        }
        let rows: Vec<Vec<String>> = rows.iter().map(row).collect();
        output::table(out, &["FILE", "KIND", ">SIZE", ">DISK", ">DATA", ">MAPPINGS", "PACKING", "UUID"], &rows)?;
        out.flush()
    })?;
    failed.map_or(Ok(()), Err)
}

fn row(layer: &Value) -> Vec<String> {
    let text = |key: &str| layer[key].as_str().unwrap_or("-").to_owned();
    let size = |key: &str| layer[key].as_u64().map_or("-".to_owned(), output::size);
    let mut packing = Vec::new();
    if layer["tar"].is_object() {
        packing.push("tar".to_owned());
    }
    if let Some(algorithm) = layer["zfile"]["algorithm"].as_str() {
        packing.push(algorithm.to_owned());
    }
    let packing = if packing.is_empty() { "raw".to_owned() } else { packing.join("+") };
    let mappings = layer["mappings"].as_u64().map_or("-".to_owned(), |count| count.to_string());
    let file = layer["file"].as_str().unwrap_or_default().escape_debug().to_string();
    vec![file, text("kind"), size("bytes"), size("virtual_size"), size("data_bytes"), mappings, packing, text("uuid")]
}
