//! Writes of 4 KiB by 32 threads, each flushing now and then, against the same on a plain file; and how long requests wait
//! while the writable layer is sealed under them.

use super::Numbers;
use crate::measure::Spread;
use crate::place::Place;
use crate::report::{Better, Metric};
use anyhow::Result;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use ublk_overlaybd::engine::Device;
use ublk_overlaybd::seal::Chain;
use ublk_overlaybd::upper::{Limits, Upper};

const BLOCK: usize = 4096;
const THREADS: u64 = 32;
/// Writes of a thread between two flushes.
const FLUSH_EVERY: usize = 64;
/// The longest that 99 of 100 requests may wait while a layer is sealed, in milliseconds.
const GOAL: f64 = 10.0;

/// `megabytes` in all, at random places of a disk of that size.
pub(super) fn writes(megabytes: usize, place: &Place, rounds: usize) -> Result<Vec<Metric>> {
    let size = (megabytes << 20) as u64;
    let each = (megabytes << 20) / BLOCK / usize::try_from(THREADS)?;
    let (mut ratios, mut rates) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let plain = place.path().join("plain");
        fs::write(&plain, vec![0; megabytes << 20])?;
        let file = File::options().write(true).open(&plain)?;
        file.sync_all()?;
        let path = |kind: &str| place.path().join(format!("writes-{round}.{kind}"));
        let device = Device::new(&[], Some(Upper::create(&path("data"), &path("index"), size, Limits::default())?))?;
        let theirs = spread(each, size, |bytes, at| Ok(file.write_all_at(bytes, at)?), || Ok(file.sync_data()?))?;
        let ours = spread(each, size, |bytes, at| Ok(device.write(bytes, at, false)?), || Ok(device.flush()?))?;
        ratios.push(theirs / ours);
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        rates.push(each as f64 * THREADS as f64 / ours / 1e3);
        drop(device);
        for kind in ["data", "index", "data.dsec-log"] {
            fs::remove_file(path(kind))?;
        }
    }
    Ok(vec![
        Metric::spread("write_depth_32", Spread::of(ratios), "of plain", Better::Higher)
            .peer("pwrite and fdatasync on a file, wall time"),
        Metric::spread("write_rate", Spread::of(rates), "k/s", Better::Higher),
    ])
}

/// Seconds that it takes, all threads together.
fn spread(
    each: usize,
    size: u64,
    write: impl Fn(&[u8], u64) -> Result<()> + Sync,
    flush: impl Fn() -> Result<()> + Sync,
) -> Result<f64> {
    let began = Instant::now();
    let one = |thread: u64| -> Result<()> {
        let mut numbers = Numbers(thread + 1);
        let bytes = vec![0x5A; BLOCK];
        let part = size / THREADS;
        for number in 0..each {
            let at = thread * part + numbers.next() % (part / BLOCK as u64) * BLOCK as u64;
            write(&bytes, at)?;
            if number % FLUSH_EVERY == FLUSH_EVERY - 1 {
                flush()?;
            }
        }
        flush()
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || one(thread))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?)
    })?;
    Ok(began.elapsed().as_secs_f64())
}

/// How long requests wait while a layer of so many mappings is sealed: two threads, one that reads and one that writes.
pub(super) fn seals(most: usize, place: &Place) -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for (count, names) in [
        (1_000, ["p99_before_1e3", "seal_p99_1e3", "worst_before_1e3", "seal_worst_1e3", "seal_took_1e3"]),
        (10_000, ["p99_before_1e4", "seal_p99_1e4", "worst_before_1e4", "seal_worst_1e4", "seal_took_1e4"]),
        (100_000, ["p99_before_1e5", "seal_p99_1e5", "worst_before_1e5", "seal_worst_1e5", "seal_took_1e5"]),
        (400_000, ["p99_before_4e5", "seal_p99_4e5", "worst_before_4e5", "seal_worst_4e5", "seal_took_4e5"]),
    ] {
        if count > most {
            break;
        }
        let path = place.path().join(format!("chain-{count}.json"));
        let dir = place.path().join(format!("chain-{count}"));
        fs::create_dir(&dir)?;
        let path = dir.join(path.file_name().unwrap_or_default());
        let size = count as u64 * 1024 * 2;
        let (mut chain, upper) = Chain::create(&path, size, Limits::default())?;
        let device = Device::new(&[], Some(upper))?;
        for sector in 0..count as u64 {
            device.write(&[1; 512], sector * 1024, false)?;
        }
        device.flush()?;
        let (mut before, mut during, mut took) = (Vec::new(), Vec::new(), Vec::new());
        before.extend(waits(&device, || {
            std::thread::sleep(std::time::Duration::from_millis(500));
            Ok(())
        })?);
        during.extend(waits(&device, || {
            let began = Instant::now();
            chain.seal(&device, |_| ())?;
            took.push(began.elapsed().as_secs_f64() * 1e3);
            Ok(())
        })?);
        let [p99_before, p99_during, worst_before, worst_during, name_took] = names;
        let ms = |name, value| Metric::new(name, value, "ms", Better::Lower);
        metrics.push(ms(p99_before, p99(&mut before)).peer("nothing being sealed"));
        metrics.push(ms(p99_during, p99(&mut during)).goal(GOAL));
        metrics.push(ms(worst_before, before.last().copied().unwrap_or(0.0)).peer("nothing being sealed"));
        metrics.push(ms(worst_during, during.last().copied().unwrap_or(0.0)));
        metrics.push(ms(name_took, Spread::of(took).median));
        drop((device, chain));
        fs::remove_dir_all(&dir)?;
    }
    Ok(metrics)
}

/// What requests took, in milliseconds, while `work` was done and for a short time after.
fn waits(device: &Device, work: impl FnOnce() -> Result<()>) -> Result<Vec<f64>> {
    let (done, all) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    std::thread::scope(|scope| -> Result<()> {
        let spawn = |writes: bool| {
            let (done, all) = (&done, &all);
            scope.spawn(move || -> Result<()> {
                let (mut numbers, mut mine) = (Numbers(99), Vec::new());
                let mut buf = vec![3; BLOCK];
                while !done.load(Ordering::Relaxed) {
                    let at = numbers.next() % (device.size() / BLOCK as u64) * BLOCK as u64;
                    let began = Instant::now();
                    if writes { device.write(&buf, at, false) } else { device.read(&mut buf, at) }?;
                    mine.push(began.elapsed().as_secs_f64() * 1e3);
                    // Not as fast as can be, so that there is time for the seal.
                    std::thread::sleep(std::time::Duration::from_micros(100));
                }
                if let Ok(mut all) = all.lock() {
                    all.extend(mine);
                }
                Ok(())
            })
        };
        let threads = [spawn(true), spawn(false)];
        std::thread::sleep(std::time::Duration::from_millis(20));
        let worked = work();
        std::thread::sleep(std::time::Duration::from_millis(20));
        done.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        }
        worked
    })?;
    Ok(all.into_inner().unwrap_or_default())
}

fn p99(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) * 99 / 100).copied().unwrap_or(0.0)
}
