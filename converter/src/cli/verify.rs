//! `dsec-convert verify`.

use super::output::{self, print};
use super::{Corrupt, STORE_HELP, find_image, kept, open_store, store_parser};
use converter::verify::{Problem, Progress, verify};
use fs3_client::{StoreError, StoreLocation};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::Write as _;

/// Arguments of `verify`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The store.
    #[arg(help = STORE_HELP, value_parser = store_parser())]
    store: StoreLocation,
    /// The image
    #[arg(value_name = "NAME:TAG")]
    name: String,
    /// Also hash every chunk against its layer's chunk table, and check that the tables cover every file
    #[arg(long)]
    deep: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    // What is to be checked is the store, not the local copies of what it once had.
    let store = open_store(&args.store)?.without_old_copies();
    let found = find_image(&store, &args.name).map_err(|error| {
        // The ref is there, and what it names is not: the image is broken.
        let is_missing = error.chain().any(|e| matches!(e.downcast_ref(), Some(StoreError::Missing { .. })));
        if is_missing { error.context(Corrupt) } else { error }
    })?;
    let store = kept(&store, &found, "verify")?;
    let bar = ProgressBar::new(0).with_style(
        ProgressStyle::with_template("{bytes:>10} of {total_bytes} {wide_bar} {bytes_per_sec}, {eta} left")
            .unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    let report = verify(&store, &found.manifest, args.deep, &mut |event| match event {
        Progress::Total(bytes) => bar.set_length(bytes),
        Progress::Read(bytes) => bar.inc(bytes),
    });
    bar.finish_and_clear();
    print(|out| {
        if args.json {
            let document = serde_json::json!({
                "image": args.name, "digest": found.digest, "sound": report.is_sound(), "report": report,
            });
            return output::json(out, &document);
        }
        for problem in &report.problems {
            writeln!(out, "{}", line(problem))?;
        }
        let chunks = if report.deep { format!(", {} chunks", report.chunks) } else { String::new() };
        writeln!(
            out,
            "{}: {} layers, {} blobs of {}, {} inodes, {} names{chunks}: {}",
            args.name,
            report.layers,
            report.blobs,
            output::size(report.bytes),
            report.inodes,
            report.names,
            match report.problems.len() {
                0 => "sound".to_owned(),
                1 => "1 problem".to_owned(),
                n => format!("{n} problems"),
            }
        )
    })?;
    if report.is_sound() { Ok(()) } else { Err(Corrupt.into()) }
}

fn line(problem: &Problem) -> String {
    let place = problem.layer.map_or("config".to_owned(), |index| format!("layer {index}"));
    let path = if problem.path.is_empty() { String::new() } else { format!("/{}: ", problem.path) };
    format!("{place}: {}: {path}{}", problem.blob, problem.what)
}
