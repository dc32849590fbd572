//! Bench `cache`: the chunk cache against plain reads of its own file, and against what its store allows.
//!
//! Hits are compared with `pread` of the very same file, warm and cold, in interleaved rounds within one process. Misses
//! are compared with the time that latency and bandwidth of a shaped store make inevitable. Memory is that of children,
//! as the kernel accounts it.

mod hit;
mod memory;
mod miss;
mod shaped;

use crate::cli::CacheArgs;
use crate::measure::Spread;
use crate::report::{Better, Metric, Report};
use anyhow::Result;
use std::path::{Path, PathBuf};

pub(crate) use memory::child;

/// Runs it.
pub(crate) fn run(args: &CacheArgs) -> Result<Report> {
    let parent = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let place = |name: &str| -> Result<tempfile::TempDir> {
        Ok(tempfile::Builder::new().prefix(&format!("dsec-bench-{name}-")).tempdir_in(&parent)?)
    };
    let mut metrics = hit::measure(place("hit")?.path(), args.rounds)?;
    metrics.extend(miss::measure(place("miss")?.path(), args.rounds)?);
    metrics.extend(memory::measure(place("memory")?.path())?);
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let setting = vec![
        format!("cache in {}, {} rounds, {cores} cores", shown(&parent), args.rounds),
        format!("hits: a blob of {} MiB; misses: a file of {} MB", hit::SIZE >> 20, miss::SIZE / 1_000_000),
        format!("the store: {:?} a request, {} MB/s all together", miss::LATENCY, miss::BANDWIDTH / 1_000_000),
    ];
    Ok(Report { bench: "cache", setting, metrics, missing: Vec::new() })
}

fn shown(path: &Path) -> String {
    PathBuf::from(path).display().to_string()
}

/// The quotients of two contenders' values, round by round.
fn ratio(name: &'static str, over: &[f64], under: &[f64]) -> Metric {
    Metric::spread(name, Spread::of(over.iter().zip(under).map(|(over, under)| over / under)), "x", Better::Higher)
}
