//! `ublk-overlaybd check`.

use super::layers::DiskArgs;
use super::output;
use super::progress::Bar;
use super::{Corrupt, Usage};
use serde::Serialize;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use ublk_overlaybd::backend::{FileSource, ReadError, Source};
use ublk_overlaybd::format::lsmt::{MAX_ENTRIES_SEALED, SECTOR};
use ublk_overlaybd::index::Kind;
use ublk_overlaybd::layer::{Form, Layer, unwrap};
use ublk_overlaybd::write::Progress as _;
use ublk_overlaybd::write::repair::repair_index;

/// Arguments of `check`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The layers
    #[arg(value_name = "LAYER")]
    layers: Vec<PathBuf>,
    #[command(flatten)]
    disk: DiskArgs,
    /// Write a copy of the writable layer's index to OUT, without the end that cannot be right; its data file is good as
    /// it is
    #[arg(long, value_name = "OUT", requires = "upper")]
    repair: Option<PathBuf>,
    /// Look at structure and checksums of headers and indexes alone, not at data
    #[arg(long)]
    quick: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// What was found out about one layer.
#[derive(Debug, Default, Serialize)]
struct Finding {
    file: String,
    ok: bool,
    errors: Vec<String>,
    notes: Vec<String>,
    /// Bytes of data that were read.
    read_bytes: u64,
    /// Whether that was against checksums.
    checksums: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let mut findings = Vec::new();
    // Each by itself, so that one that is wrong does not hide the next.
    for path in &args.layers {
        findings.push(match Layer::open_file(path) {
            Ok(layer) => check(&layer, args.quick)?,
            Err(error) => refused(path, error)?,
        });
    }
    let rest = match args.disk.layers(&[]) {
        Ok(layers) => layers,
        Err(error) if error.is::<Usage>() && !findings.is_empty() => Vec::new(),
        Err(error) => return Err(error),
    };
    for layer in &rest {
        findings.push(check(layer, args.quick)?);
    }
    if let (Some(out), Some(index), Some(layer)) = (&args.repair, args.disk.upper_index(), rest.last()) {
        let left_out = repair_index(layer, index, out)?;
        if let Some(finding) = findings.last_mut() {
            finding.notes.push(format!("{}: a copy of the index without its last {left_out} bytes", out.display()));
        }
    }
    let ok = findings.iter().all(|finding| finding.ok);
    output::print(|out| {
        if args.json {
            return output::json(out, &serde_json::json!({ "ok": ok, "layers": findings }));
        }
        for finding in &findings {
            let read = output::size(finding.read_bytes);
            let what = match (finding.ok, finding.checksums) {
                (false, _) => "WRONG".to_owned(),
                (true, true) => format!("right: {read} against checksums"),
                (true, false) => format!("right: {read}, which have no checksums"),
            };
            writeln!(out, "{}: {what}", finding.file)?;
            for error in &finding.errors {
                writeln!(out, "  error: {error}")?;
            }
            for note in &finding.notes {
                writeln!(out, "  note: {note}")?;
            }
        }
        Ok(())
    })?;
    if ok { Ok(()) } else { Err(Corrupt.into()) }
}

/// A layer that cannot be opened: wrong, or out of reach. A ZFile that is no layer can be right all the same.
fn refused(path: &Path, error: ReadError) -> anyhow::Result<Finding> {
    if !error.is_corrupt() {
        return Err(error.into());
    }
    let file = path.display().to_string();
    let stored: Arc<dyn Source> = Arc::new(FileSource::open(path)?);
    let mut finding = Finding { file: file.clone(), ..Finding::default() };
    match unwrap(&stored, &Arc::from(file)) {
        Ok(unwrapped) if unwrapped.zfile.is_some() && error.to_string().contains("not LSMT") => {
            if let Some(zfile) = unwrapped.zfile {
                finding.ok = true;
                finding.notes.push("a ZFile, but no layer".to_owned());
                blocks(&zfile, &mut finding)?;
            }
        }
        _ => finding.errors.push(error.to_string()),
    }
    Ok(finding)
}

fn blocks(zfile: &ublk_overlaybd::backend::ZFile, finding: &mut Finding) -> anyhow::Result<()> {
    let bar = Bar::new("checking", Some(zfile.size()));
    let (wrong, first) = zfile.check(&mut |bytes| bar.done(bytes))?;
    finding.read_bytes = zfile.size();
    finding.checksums = zfile.geometry().verify;
    if let Some(first) = first {
        finding.ok = false;
        finding.errors.push(first.to_string());
        if wrong > 1 {
            finding.errors.push(format!("and {} more blocks", wrong - 1));
        }
    }
    Ok(())
}

fn check(layer: &Layer, quick: bool) -> anyhow::Result<Finding> {
    let mut finding = Finding { file: layer.name().to_owned(), ok: true, ..Finding::default() };
    let about = layer.about();
    if about.form != Form::Writable && about.entries + about.padding > MAX_ENTRIES_SEALED {
        finding.notes.push(format!("its index has more than {MAX_ENTRIES_SEALED} entries, which overlaybd refuses"));
    }
    if let Some(zfile) = about.zfile {
        if !zfile.digest {
            finding.notes.push("an old ZFile: its headers and jump table have no checksum".to_owned());
        }
        if zfile.block_size > 32 << 10 {
            finding.notes.push("blocks of 64 KiB, which overlaybd cannot read where they do not compress".to_owned());
        }
    }
    if layer.virtual_size() > 0 && layer.index().end() > layer.virtual_size().div_ceil(SECTOR) {
        finding.notes.push("maps sectors beyond the end of its disk".to_owned());
    }
    if let Some(dropped) = about.replayed.as_ref().and_then(|replayed| replayed.dropped.as_ref()) {
        finding.ok = false;
        let (offset, bytes, why) = (dropped.offset, dropped.bytes, &dropped.why);
        finding.errors.push(format!("its index is torn at byte {offset}, {bytes} bytes before its end: {why}"));
    }
    if quick {
        return Ok(finding);
    }
    match layer.zfile() {
        Some(zfile) => blocks(zfile, &mut finding)?,
        None => {
            // Without checksums it can only be seen that all is there.
            let mut buf = vec![0; 1 << 20];
            for extent in layer.index().iter() {
                let Kind::Data { moffset, .. } = extent.kind else { continue };
                let (mut at, end) = (moffset * SECTOR, ((moffset + extent.len) * SECTOR).min(layer.data().size()));
                while at < end {
                    let len = usize::try_from(end - at).unwrap_or(usize::MAX).min(buf.len());
                    layer.data().read_exact_at(&mut buf[..len], at)?;
                    at += len as u64;
                    finding.read_bytes += len as u64;
                }
            }
        }
    }
    Ok(finding)
}
