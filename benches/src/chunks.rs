//! Bench `chunks`: how large a file's chunks should be.
//!
//! Small chunks find more duplicates and waste less room before the 1 MiB boundaries that none may cross; large ones
//! need fewer indexes in the metadata image, and perhaps fewer steps to read. The data set is converted with each
//! limit, and read back through the kernel from fresh mounts whose backing files are in memory, so that what differs is
//! what chunks cost. Needs root.

use crate::data::Image;
use crate::measure::Spread;
use crate::report::{Better, Metric, Report};
use anyhow::{Context as _, Result, ensure};
use converter::convert::{Converted, Request, convert};
use converter::layer::Options;
use converter::progress::Silent;
use converter::source::{Platform, SourceRef};
use fixtures::mounts;
use fs3_client::Store;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// log2 of the largest chunk of ordinary files, and its name.
const SIZES: [(u8, &str); 5] = [(12, "4 KiB"), (14, "16 KiB"), (16, "64 KiB"), (18, "256 KiB"), (20, "1 MiB")];
/// Random reads of 4 KiB from each mount.
const READS: u64 = 50_000;
/// Files from this size are read at random.
const LARGE: u64 = 256 << 10;

/// What one limit gives.
struct Found {
    name: &'static str,
    metadata: u64,
    data: u64,
    deduplicated: u64,
    sequential: Vec<f64>,
    random: Vec<f64>,
}

/// Runs it in `dir`, which must be on a disk: the kernel mounts no image that is on a tmpfs.
pub(crate) fn run(image: &Image, dir: &Path, rounds: usize) -> Result<Report> {
    ensure!(fixtures::require::root(), "mounting needs root");
    let mut all = Vec::new();
    let stores = tempfile::tempdir_in(dir)?;
    for (bits, name) in SIZES {
        let store = Store::create(&stores.path().join(bits.to_string()))?;
        let converted = convert_with(image, bits, &store)?;
        let found = Found {
            name,
            metadata: converted.layers.iter().map(|l| l.record.metadata.size).sum(),
            data: converted.layers.iter().flat_map(|l| &l.record.data).map(|b| b.size).sum(),
            deduplicated: converted.layers.iter().map(|l| l.record.counts.deduplicated_bytes).sum(),
            sequential: Vec::new(),
            random: Vec::new(),
        };
        // Once unmeasured, to have the backing files in memory.
        read(&converted, &store)?;
        all.push((store, converted, found));
    }
    for _ in 0..rounds {
        for (store, converted, found) in &mut all {
            let (sequential, random) = read(converted, store)?;
            found.sequential.push(sequential);
            found.random.push(random);
        }
    }
    let metrics = all.iter().flat_map(|(.., found)| found.metrics()).collect();
    let setting = vec![format!("{} layers, {rounds} rounds, {READS} random reads a layer", image.layers.len())];
    Ok(Report { bench: "chunks", setting, metrics, missing: Vec::new() })
}

impl Found {
    #[expect(clippy::cast_precision_loss, reason = "sizes for people")]
    fn metrics(&self) -> Vec<Metric> {
        let bytes = |name, value: u64, better| Metric::new(name, value as f64 / (1 << 20) as f64, "MiB", better);
        let rate =
            |name, values: &[f64], unit| Metric::spread(name, Spread::of(values.iter().copied()), unit, Better::Higher);
        let metrics = [
            bytes("metadata", self.metadata, Better::Lower),
            bytes("data", self.data, Better::Lower),
            bytes("deduplicated", self.deduplicated, Better::Higher),
            rate("sequential_read", &self.sequential, "MB/s"),
            rate("random_reads", &self.random, "k/s"),
        ];
        metrics.map(|metric| metric.peer(&format!("chunks to {}", self.name))).to_vec()
    }
}

fn convert_with(image: &Image, bits: u8, store: &Store) -> Result<Converted> {
    let mut options = Options::default();
    options.chunks.max_bits = bits;
    let source = SourceRef::Oci { dir: image.layout.clone(), tag: Some("latest".to_owned()) };
    let registry = Default::default();
    let request = Request { source, platform: Platform::host(), options, jobs: 2, registry, dedup: None };
    Ok(convert(&request, store, &Silent)?)
}

/// (MB/s of reading every file once, thousands of random reads a second), each layer from a fresh mount.
#[expect(clippy::cast_precision_loss, reason = "rates")]
fn read(converted: &Converted, store: &Store) -> Result<(f64, f64)> {
    mounts::in_private_namespace(|| {
        let (mut bytes, mut reads) = (0u64, 0u64);
        let (mut sequential, mut random) = (0.0, 0.0);
        for layer in &converted.layers {
            let image = store.local_dir().unwrap().blob_path(&layer.record.metadata.digest);
            let data: Vec<PathBuf> =
                layer.record.data.iter().map(|b| store.local_dir().unwrap().blob_path(&b.digest)).collect();
            let devices: Vec<&Path> = data.iter().map(PathBuf::as_path).collect();
            let mounted = mounts::erofs(&image, &devices)?;
            let files = files_below(mounted.path())?;
            let began = Instant::now();
            bytes += read_all(&files)?;
            sequential += began.elapsed().as_secs_f64();
            drop(mounted);
            let mounted = mounts::erofs(&image, &devices)?;
            let files = files_below(mounted.path())?;
            let began = Instant::now();
            reads += read_at_random(&files)?;
            random += began.elapsed().as_secs_f64();
        }
        Ok((bytes as f64 / 1e6 / sequential, reads as f64 / 1e3 / random))
    })
}

fn files_below(root: &Path) -> Result<Vec<(PathBuf, u64)>> {
    let mut files = Vec::new();
    let mut todo = vec![root.to_owned()];
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(&dir).with_context(|| dir.display().to_string())? {
            let entry = entry?;
            let kind = entry.metadata()?;
            if kind.is_dir() {
                todo.push(entry.path());
            } else if kind.is_file() {
                files.push((entry.path(), kind.len()));
            }
        }
    }
    files.sort();
    Ok(files)
}

fn read_all(files: &[(PathBuf, u64)]) -> Result<u64> {
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    for (path, _) in files {
        let file = File::open(path)?;
        let mut at = 0;
        loop {
            let n = file.read_at(&mut buffer, at)?;
            if n == 0 {
                break;
            }
            at += n as u64;
        }
        bytes += at;
    }
    Ok(bytes)
}

fn read_at_random(files: &[(PathBuf, u64)]) -> Result<u64> {
    let large: Vec<(File, u64)> = files
        .iter()
        .filter(|(_, len)| *len >= LARGE)
        .map(|(path, len)| Ok((File::open(path)?, len / 4096)))
        .collect::<Result<_>>()?;
    let blocks: u64 = large.iter().map(|(_, blocks)| blocks).sum();
    let mut buffer = [0; 4096];
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let count = if blocks == 0 { 0 } else { READS };
    for (file, _) in &large {
        // No read-ahead: one read is one request.
        rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random)?;
    }
    for _ in 0..count {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut block = (state >> 16) % blocks;
        for (file, len) in &large {
            if block < *len {
                file.read_exact_at(&mut buffer, block * 4096)?;
                break;
            }
            block -= len;
        }
    }
    Ok(count)
}
