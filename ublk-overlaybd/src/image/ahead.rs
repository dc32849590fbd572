//! What is read before anybody asks for it: what a trace says will be needed, and whole layers in the background.

use super::spec::Download;
use crate::backend::{ReadError, Source};
use crate::format::trace::{Op, Record};
use crate::layer::Layer;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The most that one read asks for.
const UNIT: u64 = 1 << 20;

/// Reads what a trace of an earlier start names, in its order, so that it is in the cache when it is asked for. Returns how
/// many bytes that were. Records about layers or ranges that there are not are passed over, as are those that fail; `stop`
/// ends it early.
pub fn replay(records: &[Record], layers: &[Arc<Layer>], stop: &AtomicBool) -> u64 {
    let (mut read, mut buf) = (0, Vec::new());
    for record in records.iter().filter(|record| record.op == Op::Read) {
        let Some(layer) = usize::try_from(record.layer).ok().and_then(|number| layers.get(number)) else { continue };
        let data = layer.data();
        let end = record.offset.saturating_add(record.count).min(data.size());
        let mut at = record.offset;
        while at < end {
            if stop.load(Ordering::Relaxed) {
                return read;
            }
            let len = (end - at).min(UNIT);
            if let Err(error) = touch(&**data, at, len, &mut buf) {
                tracing::debug!(%error, "cannot read ahead what a trace names");
                break;
            }
            (at, read) = (at + len, read + len);
        }
    }
    read
}

/// Fetches all of `layers` that is in no local file, as fast as `how` allows, beginning now: the bottom layer first. Returns
/// how many bytes that were. What fails is tried as often as it says; `stop` ends it early.
///
/// # Errors
/// What the last try of a layer met; the rest of that layer, and the layers over it, are left to be read on demand.
pub fn download(layers: &[Arc<Layer>], how: &Download, stop: &AtomicBool) -> Result<u64, ReadError> {
    let (began, mut done, mut buf) = (Instant::now(), 0u64, Vec::new());
    for layer in layers {
        let stored = layer.stored();
        if stored.locate(0..stored.size()).is_some() {
            continue;
        }
        let (mut at, mut tries) = (0, 0);
        while at < stored.size() {
            let len = (stored.size() - at).min(how.block_size.clamp(1, 64 * UNIT));
            match touch(&**stored, at, len, &mut buf) {
                Ok(()) => (at, done) = (at + len, done + len),
                Err(error) if tries + 1 >= how.tries => return Err(error),
                Err(_) => tries += 1,
            }
            // Megabytes are millions here, as in the configuration.
            let due = Duration::from_micros(done.checked_div(how.max_mbps).unwrap_or(0));
            while !stop.load(Ordering::Relaxed) && began.elapsed() < due {
                std::thread::sleep((due.saturating_sub(began.elapsed())).min(Duration::from_millis(50)));
            }
            if stop.load(Ordering::Relaxed) {
                return Ok(done);
            }
        }
    }
    Ok(done)
}

fn touch(source: &dyn Source, at: u64, len: u64, buf: &mut Vec<u8>) -> Result<(), ReadError> {
    // At most 64 MiB.
    buf.resize(usize::try_from(len).unwrap_or(0), 0);
    source.read_exact_at(buf, at)
}
