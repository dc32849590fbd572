//! Bench `dedup`: related images in one store.
//!
//! What is compared with what: a store without deduplication across images (equal layers and equal chunks of one layer
//! are shared there too), with it at several chunk sizes and with several caps on the blobs that a layer may refer to;
//! all by real conversions, and the store's bytes counted. Content-defined chunking is reckoned from the same files
//! ([`cdc`]): with boundaries at any byte, which EROFS cannot express, as the bound, and at multiples of 4 KiB.

mod cdc;

use crate::data::related::Related;
use crate::measure::Spread;
use crate::report::{Better, Metric, Missing, Report};
use crate::sys;
use anyhow::{Result, ensure};
use converter::blob::foreign::Limits;
use converter::convert::{Converted, Request, convert_as};
use converter::dictionary::tables::Tables;
use converter::dictionary::{Dedup, stored};
use converter::layer::Options;
use converter::progress::Silent;
use converter::source::{Platform, SourceRef};
use fs3_client::{Digest, Store};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

/// log2 of the largest chunk of ordinary files, and its name.
const SIZES: [(u8, &str); 4] = [(12, "4 KiB"), (14, "16 KiB"), (16, "64 KiB"), (18, "256 KiB")];
const CAPS: [u16; 7] = [0, 1, 2, 4, 8, 16, 64];
const SAVED: [(u64, &str); 5] =
    [(0, "0"), (64 << 10, "64 KiB"), (256 << 10, "256 KiB"), (1 << 20, "1 MiB"), (4 << 20, "4 MiB")];

/// What a store holds after all images.
#[derive(Debug, Default, Clone)]
struct State {
    /// Bytes of data blobs, metadata images and chunk tables, each blob once.
    data: u64,
    metadata: u64,
    tables: u64,
    /// Blobs behind each distinct layer.
    devices: Vec<usize>,
    /// Chunks that were looked up, and that were found.
    lookups: u64,
    referred: u64,
    cpu: f64,
}

impl State {
    fn total(&self) -> u64 {
        self.data + self.metadata + self.tables
    }
}

/// Runs it in `dir`.
pub(crate) fn run(images: &[Related], dir: &Path, rounds: usize) -> Result<Report> {
    std::fs::create_dir_all(dir)?;
    let stores = tempfile::tempdir_in(dir)?;
    let none = convert_all(images, stores.path(), 14, None)?;
    let default = Limits::default();
    let mut metrics = vec![
        size("state", none.total()).peer("none, 16 KiB"),
        size("data", none.data).peer("none, 16 KiB"),
        size("metadata", none.metadata).peer("none, 16 KiB"),
        size("tables", none.tables).peer("none, 16 KiB"),
    ];
    for (bits, name) in SIZES {
        let found = convert_all(images, stores.path(), bits, Some(default))?;
        let mut of = found.metrics(&none, name);
        if bits == 14 {
            of[0] = of[0].clone().goal(0.75);
            of[2] = of[2].clone().goal(1.02);
        }
        metrics.append(&mut of);
    }
    for devices in CAPS {
        let found = convert_all(images, stores.path(), 14, Some(Limits { devices, ..default }))?;
        metrics.extend(found.limited(&none, &format!("--max-devices {devices}")));
    }
    for (saved, name) in SAVED {
        let found = convert_all(images, stores.path(), 14, Some(Limits { saved, ..default }))?;
        metrics.extend(found.limited(&none, &format!("--min-saved {name}")));
    }
    metrics.push(cpu(images, stores.path(), rounds)?.goal(1.1));
    metrics.append(&mut cdc::measure(images)?);
    let layers: HashMap<&str, u64> =
        images.iter().flat_map(|i| &i.layers).map(|layer| (layer.digest.as_str(), layer.plain_size)).collect();
    let names: Vec<&str> = images.iter().map(|image| image.name).collect();
    let setting = vec![
        format!(
            "{} images ({}), {} distinct layers, {} MB of tar",
            images.len(),
            names.join(", "),
            layers.len(),
            layers.values().sum::<u64>() / 1_000_000
        ),
        "x: in proportion to the store without deduplication across images".to_owned(),
    ];
    let missing = vec![
        Missing {
            name: "mkfs.erofs".to_owned(),
            how: "it knows no other images; its -Ededupe works inside one compressed image".to_owned(),
        },
        Missing {
            name: "nydus-image chunk dict".to_owned(),
            how: "it is in no Debian package; `nydus-image create --chunk-dict` is what would be compared".to_owned(),
        },
    ];
    Ok(Report { bench: "dedup", setting, metrics, missing })
}

#[expect(clippy::cast_precision_loss, reason = "sizes for people")]
fn size(name: &'static str, bytes: u64) -> Metric {
    Metric::new(name, bytes as f64 / (1 << 20) as f64, "MiB", Better::Lower)
}

#[expect(clippy::cast_precision_loss, reason = "sizes for people")]
fn ratio(name: &'static str, value: u64, of: u64) -> Metric {
    Metric::new(name, value as f64 / of as f64, "x", Better::Lower)
}

impl State {
    fn metrics(&self, none: &Self, peer: &str) -> Vec<Metric> {
        let metrics = vec![
            ratio("state", self.total(), none.total()),
            ratio("data", self.data, none.data),
            ratio("metadata", self.metadata, none.metadata),
            size("state", self.total()),
            size("metadata", self.metadata),
            size("tables", self.tables),
        ];
        let metrics: Vec<Metric> = metrics.into_iter().chain(self.device_metrics()).collect();
        metrics.into_iter().map(|metric| metric.peer(peer)).collect()
    }

    fn limited(&self, none: &Self, peer: &str) -> Vec<Metric> {
        let metrics = std::iter::once(ratio("state", self.total(), none.total())).chain(self.device_metrics());
        metrics.map(|metric| metric.peer(peer)).collect()
    }

    #[expect(clippy::cast_precision_loss, reason = "counts for people")]
    fn device_metrics(&self) -> [Metric; 2] {
        let mean = self.devices.iter().sum::<usize>() as f64 / self.devices.len() as f64;
        let most = self.devices.iter().max().copied().unwrap_or(0) as f64;
        [Metric::new("devices_a_layer", mean, "", Better::Lower), Metric::new("most_devices", most, "", Better::Lower)]
    }
}

/// Converts all images into a fresh store, with one dictionary that grows.
fn convert_all(images: &[Related], dir: &Path, bits: u8, limits: Option<Limits>) -> Result<State> {
    crate::report::progress(&format!("converting with chunks of up to 2^{bits} bytes, {limits:?}"));
    let place = tempfile::tempdir_in(dir)?;
    let store = Store::create(&place.path().join("store"))?;
    let began = sys::own_cpu();
    let dictionary = match limits {
        Some(limits) => {
            let (tables, _, _) = Tables::new(&store, &stored(&store, &[])?, 512 << 20)?;
            Some(Dedup { dictionary: Arc::new(tables), limits, verify: false, against: Vec::new() })
        }
        None => None,
    };
    let mut converted = Vec::new();
    for image in images {
        let mut options = Options::default();
        options.chunks.max_bits = bits;
        let source = SourceRef::Oci { dir: image.layout.clone(), tag: Some("latest".to_owned()) };
        let request = Request {
            source,
            platform: Platform::host(),
            options,
            jobs: 2,
            registry: Default::default(),
            dedup: dictionary.clone(),
        };
        converted.push(convert_as(&format!("{}:1", image.name).parse()?, &request, &store, &Silent)?);
    }
    let cpu = (sys::own_cpu() - began).as_secs_f64();
    let state = State { cpu, ..count(&converted) };
    let all: u64 = store.list_blobs()?.iter().map(|listed| listed.stat.size).sum();
    // Configs and manifests are what is left.
    ensure!(all >= state.total() && all < state.total() + (1 << 20), "{all} bytes in the store, counted {state:?}");
    Ok(state)
}

fn count(converted: &[Converted]) -> State {
    let (mut data, mut metadata, mut tables) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let mut state = State::default();
    for record in converted.iter().flat_map(|image| &image.layers).map(|layer| &layer.record) {
        if metadata.insert(key(&record.metadata.digest), record.metadata.size).is_none() {
            state.devices.push(record.data.len());
            state.lookups += record.counts.lookups;
            state.referred += record.counts.referred_chunks;
        }
        data.extend(record.data.iter().map(|blob| (key(&blob.digest), blob.size)));
        tables.extend(record.chunk_tables.iter().map(|table| (key(&table.blob.digest), table.blob.size)));
    }
    let sum = |blobs: &BTreeMap<[u8; 32], u64>| blobs.values().sum();
    State { data: sum(&data), metadata: sum(&metadata), tables: sum(&tables), ..state }
}

fn key(digest: &Digest) -> [u8; 32] {
    *digest.as_bytes()
}

/// Processor time with a dictionary over that without, in interleaved rounds.
fn cpu(images: &[Related], dir: &Path, rounds: usize) -> Result<Metric> {
    let mut ratios = Vec::new();
    for _ in 0..rounds {
        let none = convert_all(images, dir, 14, None)?.cpu;
        let found = convert_all(images, dir, 14, Some(Limits::default()))?.cpu;
        ratios.push(found / none);
    }
    Ok(Metric::spread("cpu", Spread::of(ratios), "x", Better::Lower).peer("16 KiB"))
}
