//! `dsec-convert gc`.

use super::output::{self, print};
use super::{STORE_HELP, duration, open_store, store_parser};
use converter::gc::{Report, collect};
use fs3_client::StoreLocation;
use fs3_client::gc::Options;
use indicatif::ProgressBar;
use std::io::{self, Write};
use std::time::Duration;

/// Arguments of `gc`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The store
    #[arg(help = STORE_HELP, value_parser = store_parser())]
    store: StoreLocation,
    /// Only say what would be removed; nothing is written
    #[arg(long)]
    dry_run: bool,
    /// Keep blobs that were put or used again less than this ago, by the store's clock (90s, 10m, 2h, 7d). Writers of
    /// this program need no grace: they have leases. It is how long finished layers stay for other images to share that
    /// no image names as they are (merged ones, most of all), and for copies that other tools make
    #[arg(long, value_name = "DURATION", default_value = "2d", value_parser = duration::parse)]
    grace: Duration,
    /// How long to wait for writers that were at work before; then the next run goes on
    #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = duration::parse)]
    wait: Duration,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let store = open_store(&args.store)?;
    let options = Options { grace: args.grace, wait: args.wait, ..Options::default() };
    let bar = ProgressBar::new_spinner();
    bar.enable_steady_tick(Duration::from_millis(200));
    let (mut blobs, mut bytes) = (0u64, 0);
    bar.set_message("looking for what is needed");
    let report = collect(&store, &options, args.dry_run, &mut |removed| {
        blobs += 1;
        bytes += removed.size;
        bar.set_message(format!("{blobs} blobs of {} removed", output::size(bytes)));
    });
    bar.finish_and_clear();
    let report = report?;
    print(|out| if args.json { output::json(out, &report) } else { tell(out, &report) })
}

fn tell(out: &mut impl Write, report: &Report) -> io::Result<()> {
    let collected = &report.collected;
    if report.dry_run {
        for blob in &collected.removed {
            writeln!(out, "{} {}", blob.digest, output::size(blob.size))?;
        }
    }
    writeln!(
        out,
        "{} blobs of {}: {} are needed, {} are too young to go, {} of {} {}",
        collected.blobs,
        output::size(collected.bytes),
        collected.reachable,
        collected.young,
        collected.removed.len(),
        output::size(report.removed_bytes),
        if report.dry_run { "would be removed" } else { "were removed" },
    )?;
    if report.records_removed + report.leftovers_removed > 0 {
        let (records, leftovers) = (report.records_removed, report.leftovers_removed);
        writeln!(out, "also {records} records of finished layers, and {leftovers} files that dead writers had left")?;
    }
    for lease in &collected.waits_for {
        let (purpose, pid, host) = (&lease.purpose, lease.pid, &lease.host);
        writeln!(out, "at work since before: {purpose}, process {pid} on {host}")?;
    }
    if !report.dry_run && !collected.waits_for.is_empty() {
        writeln!(out, "nothing is removed before these end; the next gc goes on from here")?;
    }
    Ok(())
}
