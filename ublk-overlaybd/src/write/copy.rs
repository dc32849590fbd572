//! A source into a file, by several threads.

use super::{Progress, WriteError};
use crate::backend::Source;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Bytes that are copied at a time.
pub(super) const UNIT: u64 = 1 << 20;

/// Calls `work` with every number below `units` from `threads` threads, and gives the first error.
pub(super) fn in_parallel<S>(
    units: usize,
    threads: usize,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) -> Result<(), WriteError> + Sync,
) -> Result<(), WriteError> {
    let (next, failed, error) = (AtomicUsize::new(0), AtomicBool::new(false), Mutex::new(None));
    let run = || {
        let mut state = state();
        while !failed.load(Ordering::Relaxed) {
            let unit = next.fetch_add(1, Ordering::Relaxed);
            if unit >= units {
                break;
            }
            if let Err(e) = work(&mut state, unit) {
                failed.store(true, Ordering::Relaxed);
                error.lock().unwrap_or_else(std::sync::PoisonError::into_inner).get_or_insert(e);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(units) {
            scope.spawn(run);
        }
        run();
    });
    error.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner).map_or(Ok(()), Err)
}

/// Writes all of `source` to `file`, which messages call `path`, from byte `to` on.
pub(super) fn copy(
    source: &dyn Source,
    file: &File,
    path: &Path,
    to: u64,
    threads: usize,
    progress: &dyn Progress,
) -> Result<(), WriteError> {
    let size = source.size();
    let units = usize::try_from(size.div_ceil(UNIT)).unwrap_or(usize::MAX);
    in_parallel(units, threads, Vec::new, |buf, unit| {
        let Range { start, end } = unit_range(unit, size);
        buf.resize(usize::try_from(end - start).unwrap_or(0), 0);
        source.read_exact_at(buf, start)?;
        file.write_all_at(buf, to + start).map_err(WriteError::io(path, "write"))?;
        progress.done(end - start);
        Ok(())
    })
}

pub(super) fn unit_range(unit: usize, size: u64) -> Range<u64> {
    let start = unit as u64 * UNIT;
    start..(start + UNIT).min(size)
}
