//! Layers committed and merged, against copying and compressing the same bytes in memory: processor time of all threads.

use super::{Numbers, ratio};
use crate::measure::Spread;
use crate::place::Place;
use crate::report::{Better, Metric};
use crate::sys::own_cpu;
use anyhow::Result;
use std::fs;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;
use ublk_overlaybd::format::lsmt::{Entry, Flags, Header};
use ublk_overlaybd::format::zfile::{Algorithm, Encoder};
use ublk_overlaybd::image::Image;
use ublk_overlaybd::layer::Layer;
use ublk_overlaybd::write::Silent;
use ublk_overlaybd::write::commit::{Compression, Wrapping, commit, merge};
use ublk_overlaybd::write::plan::Names;

/// Sectors of a write.
const WRITE: usize = 64;

/// A writable layer of a disk of `size` bytes, which begins with `data`, written in random order.
pub(super) fn pair(data: &[u8], size: u64, place: &Place, name: &str, seed: u64) -> Result<Layer> {
    let mut order: Vec<usize> = (0..data.len() / (WRITE * 512)).collect();
    let mut numbers = Numbers(seed);
    for i in (1..order.len()).rev() {
        order.swap(i, numbers.below(i + 1));
    }
    let mut file = Header::new(Flags::WRITABLE_DATA, size).encode()?.to_vec();
    let mut index = Header::new(Flags::WRITABLE_INDEX, size).encode()?.to_vec();
    for at in order {
        let moffset = (file.len() / 512) as u64;
        let entry =
            Entry { offset: (at * WRITE) as u64, length: u32::try_from(WRITE)?, moffset, zeroed: false, tag: 0 };
        index.extend(entry.encode()?);
        file.extend(&data[at * WRITE * 512..][..WRITE * 512]);
    }
    let path = |kind: &str| place.path().join(format!("{name}.{kind}"));
    fs::write(path("data"), file)?;
    fs::write(path("index"), index)?;
    Ok(Layer::open_pair(&path("data"), Some(&path("index")))?)
}

#[expect(clippy::cast_precision_loss, reason = "a rate for people")]
pub(super) fn measure(data: &[u8], place: &Place, rounds: usize) -> Result<Vec<Metric>> {
    let size = data.len() as u64;
    let layer = pair(data, size, place, "one", 3)?;
    // Of the same disk, so that as much is merged as is committed.
    let half = pair(&data[..data.len() / 2 / 32768 * 32768], size, place, "two", 9)?;
    let out = place.path().join("out");
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut metrics = Vec::new();
    let image = Image::new(vec![Arc::new(layer), Arc::new(half)])?;
    let layer = &image.layers()[0];
    for (algorithm, committed, merged, rate) in [
        (None, "commit_raw", "merge_raw", "commit_raw_rate"),
        (Some(Algorithm::Lz4), "commit_lz4", "merge_lz4", "commit_lz4_rate"),
        (Some(Algorithm::Zstd), "commit_zstd", "merge_zstd", "commit_zstd_rate"),
    ] {
        let compression = algorithm.map(|algorithm| Compression::new(algorithm, 4096)).transpose()?;
        let wrapping = Wrapping { compression, tar: false, threads, replace: true };
        let (mut ours, mut merging, mut limit, mut rates) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            let (before, began) = (own_cpu(), Instant::now());
            commit(layer, &Names::default(), &out, wrapping, &Silent)?;
            ours.push((own_cpu() - before).as_secs_f64());
            rates.push(data.len() as f64 / began.elapsed().as_secs_f64() / 1e6);
            let before = own_cpu();
            merge(&image, false, &Names::default(), &out, wrapping, &Silent)?;
            merging.push((own_cpu() - before).as_secs_f64());
            let before = own_cpu();
            alone(data, algorithm, &place.path().join("limit"))?;
            limit.push((own_cpu() - before).as_secs_f64());
        }
        let peer = "read, compress and write alone";
        metrics.push(ratio(committed, peer, &ours, &limit));
        metrics.push(ratio(merged, peer, &merging, &limit));
        metrics.push(Metric::spread(rate, Spread::of(rates), "MB/s", Better::Higher));
    }
    Ok(metrics)
}

/// What cannot be avoided: the bytes are copied out of a file's pages, compressed, and copied into another's.
fn alone(data: &[u8], algorithm: Option<Algorithm>, path: &std::path::Path) -> Result<()> {
    use std::io::Write as _;
    let mut encoder = algorithm.map(Encoder::new).transpose()?;
    let mut file = fs::File::create(path)?;
    let mut copy = vec![0; 1 << 20];
    let mut stored = Vec::new();
    for unit in data.chunks(1 << 20) {
        let copy = &mut copy[..unit.len()];
        copy.copy_from_slice(unit);
        match &mut encoder {
            None => file.write_all(black_box(copy))?,
            Some(encoder) => {
                stored.clear();
                for block in copy.chunks(4096) {
                    encoder.encode(block, &mut stored)?;
                }
                file.write_all(black_box(&stored))?;
            }
        }
    }
    Ok(file.sync_all()?)
}
