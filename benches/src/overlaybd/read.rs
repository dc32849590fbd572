//! Random reads of 4 KiB through the engine, all of it local and in the page cache, against plain reads of a file with the
//! same bytes: processor time of one thread.

use super::ring::Ring;
use super::{Numbers, write};
use crate::measure::Spread;
use crate::place::Place;
use crate::report::{Better, Metric};
use crate::sys::thread_cpu;
use anyhow::{Result, ensure};
use std::fs::{self, File};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use ublk_overlaybd::engine::{self, Device, Located};
use ublk_overlaybd::upper::{Limits, Upper};

/// At least so much of what plain reads do.
const GOAL: f64 = 0.8;
const BLOCK: usize = 4096;
const DEPTH: usize = 32;
/// Reads of a measurement.
const READS: usize = 200_000;

pub(super) fn measure(data: &[u8], place: &Place, rounds: usize) -> Result<Vec<Metric>> {
    let raw = place.path().join("raw");
    fs::write(&raw, data)?;
    let raw = File::open(raw)?;
    let layer = Arc::new(write::pair(data, data.len() as u64, place, "reads", 5)?);
    let below = Device::new(&[Arc::clone(&layer)], None)?;
    // Half of the blocks once more, in the order of chance.
    let path = |kind: &str| place.path().join(format!("reads-upper.{kind}"));
    let upper = Upper::create(&path("data"), &path("index"), data.len() as u64, Limits::default())?;
    let above = Device::new(&[layer], Some(upper))?;
    let blocks = data.len() / BLOCK;
    let mut numbers = Numbers(11);
    for _ in 0..blocks / 2 {
        let at = numbers.below(blocks) * BLOCK;
        above.write(&data[at..at + BLOCK], at as u64, false)?;
    }
    above.flush()?;
    let order: Vec<u64> = (0..READS).map(|_| (numbers.below(blocks) * BLOCK) as u64).collect();
    for device in [&below, &above] {
        check(device, data, &order[..order.len().min(1000)])?;
    }
    let mut metrics = Vec::new();
    for (device, one, many) in [(&below, "read_depth_1", "read_depth_32"), (&above, "upper_depth_1", "upper_depth_32")]
    {
        let (mut single, mut ring) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let plain = seconds(|| one_by_one(&order, |buf, at| Ok(raw.read_exact_at(buf, at)?)))?;
            let ours = seconds(|| one_by_one(&order, |buf, at| Ok(device.read(buf, at)?)))?;
            single.push(plain / ours);
            let plain = seconds(|| by_ring_plain(&order, &raw))?;
            let ours = seconds(|| by_ring(&order, device))?;
            ring.push(plain / ours);
        }
        let metric = |name, values, peer: &str| {
            Metric::spread(name, Spread::of(values), "of plain", Better::Higher).peer(peer).goal(GOAL)
        };
        metrics.push(metric(one, single, "pread of a file"));
        metrics.push(metric(many, ring, "io_uring on a file"));
    }
    Ok(metrics)
}

fn seconds(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let before = thread_cpu();
    work()?;
    Ok((thread_cpu() - before).as_secs_f64())
}

fn check(device: &Device, data: &[u8], order: &[u64]) -> Result<()> {
    let mut buf = vec![0; BLOCK];
    for &at in order {
        device.read(&mut buf, at)?;
        ensure!(buf == data[usize::try_from(at)?..][..BLOCK], "wrong bytes at {at}");
    }
    Ok(())
}

fn one_by_one(order: &[u64], mut read: impl FnMut(&mut [u8], u64) -> Result<()>) -> Result<()> {
    let mut buf = vec![0; BLOCK];
    order.iter().try_for_each(|&at| read(&mut buf, at))
}

fn by_ring_plain(order: &[u64], file: &File) -> Result<()> {
    let mut ring: Ring<(&File, u64)> = Ring::new(DEPTH, BLOCK)?;
    for &at in order {
        ring.read(|(file, at)| Some((file.as_fd(), *at)), (file, at))?;
    }
    ring.finish()
}

/// As a queue of ublk does: what lies in a file is read by the ring, the rest by the engine.
fn by_ring(order: &[u64], device: &Device) -> Result<()> {
    let mut ring: Ring<Located> = Ring::new(DEPTH, BLOCK)?;
    let mut buf = vec![0; BLOCK];
    for &at in order {
        match device.locate(at, BLOCK as u64)? {
            engine::Place::File(located) => ring.read(file_of, located)?,
            engine::Place::Zero | engine::Place::Elsewhere => device.read(&mut buf, at)?,
        }
    }
    ring.finish()
}

fn file_of(located: &Located) -> Option<(BorrowedFd<'_>, u64)> {
    Some((located.descriptor()?, located.offset()))
}
