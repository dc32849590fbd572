//! Bench `convert`: our converter against the limit and against its peers.

use crate::cli::ConvertArgs;
use crate::contenders::{self, JSON, LIMIT, Mkfs, OURS, REFERENCE, STORE};
use crate::data::{self, Image};
use crate::measure::{self, CheckOutput, Contender, Run, Spread};
use crate::place::Place;
use crate::report::{Better, Metric, Missing, Report};
use anyhow::{Context as _, Result, bail};
use converter::manifest;
use serde_json::Value;
use std::cell::RefCell;
use std::fs;
use std::path::Path;
use std::rc::Rc;

/// Goals, from what the project promises.
mod goal {
    /// Processor time over the limit's.
    pub(super) const CPU_RATIO: f64 = 1.2;
    /// Wall time over the limit's.
    pub(super) const WALL_RATIO: f64 = 1.25;
    /// A peer's wall time over ours.
    pub(super) const SPEEDUP: f64 = 2.0;
    /// Largest resident set, MiB.
    pub(super) const PEAK_RSS: f64 = 96.0;
    /// Metadata bytes over those of mkfs.erofs plus what is inlined.
    pub(super) const METADATA_RATIO: f64 = 1.0;
}

/// Room that one contender needs, over the plain bytes: block padding and what it keeps meanwhile.
const ROOM_FACTOR: u64 = 2;

/// What our converter made.
#[derive(Debug, Clone, Default)]
struct Made {
    metadata_bytes: u64,
    data_bytes: u64,
    /// File contents inside the metadata images, if the converter says.
    inline_bytes: Option<u64>,
}

/// Runs the benchmark.
pub(crate) fn run(args: &ConvertArgs) -> Result<Report> {
    let image = data::image(&args.setting.layers)?;
    let plain: u64 = image.layers.iter().map(|layer| layer.plain_size).sum();
    let place = Place::new(args.setting.dir.as_deref(), plain * ROOM_FACTOR)?;
    let made = Rc::new(RefCell::new(Made::default()));
    let (all, mut missing) = lineup(args, &image, &made)?;
    let names: Vec<String> = all.iter().map(|contender| contender.name.clone()).collect();
    let inputs: Vec<&Path> = image.layers.iter().map(|layer| layer.blob.as_path()).collect();
    let runs = measure::rounds(&all, args.setting.rounds, args.jobs, &inputs, place.path())?;
    let results: Vec<(&str, &[Run])> = names.iter().map(String::as_str).zip(runs.iter().map(Vec::as_slice)).collect();

    let mut metrics = compare(&results);
    if results.iter().any(|(name, _)| *name == OURS) {
        match metadata(&made.borrow(), &image, args.mkfs_chunk, place.path()) {
            Ok(found) => metrics.extend(found),
            Err(error) => missing.push(Missing { name: "metadata_ratio".to_owned(), how: format!("{error:#}") }),
        }
    }
    metrics.extend(results.iter().flat_map(|(name, runs)| absolute(name, runs)));
    let mut setting = describe(&image, &place);
    setting.push(format!("{} interleaved rounds, {} layers at a time", args.setting.rounds, args.jobs));
    Ok(Report { bench: "convert", setting, metrics, missing })
}

/// What was measured on what.
pub(crate) fn describe(image: &Image, place: &Place) -> Vec<String> {
    let mb = |bytes: u64| format!("{} MB", bytes / 1_000_000);
    let layers: Vec<String> = image
        .layers
        .iter()
        .map(|layer| format!("{} {} ({} gzip)", layer.name, mb(layer.plain_size), mb(layer.size)))
        .collect();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let model = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = model.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("unknown processor");
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    vec![
        layers.join(", "),
        format!("{cores} cores of {}, Linux {}", model.trim_start_matches([':', '\t', ' ']), kernel.trim()),
        place.description.clone(),
    ]
}

/// All who take part, in the order of a round.
fn lineup(args: &ConvertArgs, image: &Image, made: &Rc<RefCell<Made>>) -> Result<(Vec<Contender>, Vec<Missing>)> {
    let wanted = |name: &str| args.only.is_empty() || args.only.iter().any(|only| name.starts_with(only.as_str()));
    let mut all = Vec::new();
    if wanted(OURS) {
        let program = args.convert_bin.clone().map_or_else(contenders::build_ours, Ok)?;
        let ours = contenders::converter(OURS, program, image, args.jobs);
        all.push(Contender { check: noting(ours.check, made), ..ours });
    }
    for other in &args.against {
        all.push(contenders::converter(&other.display().to_string(), other.clone(), image, args.jobs));
    }
    all.push(contenders::limit(image, args.jobs, true)?);
    if args.setting.dir.is_some() {
        all.push(contenders::limit(image, args.jobs, false)?);
    }
    let (peers, mut missing) = contenders::peers(image);
    all.extend(peers);
    all.retain(|contender| {
        wanted(&contender.name) || args.against.iter().any(|a| a.display().to_string() == contender.name)
    });
    missing.retain(|missing| wanted(&missing.name));
    if all.is_empty() {
        bail!(
            "nobody is left: --only takes the beginning of names such as {OURS}, {LIMIT}, mkfs.erofs, umoci, tar, gzip"
        );
    }
    Ok((all, missing))
}

/// The same check, which also notes the sizes of what was made before it is deleted.
fn noting(check: CheckOutput, made: &Rc<RefCell<Made>>) -> CheckOutput {
    let made = Rc::clone(made);
    Box::new(move |out| {
        check(out)?;
        made.replace(sizes(out)?);
        Ok(())
    })
}

/// Sizes from the manifest of the converted image.
fn sizes(out: &Path) -> Result<Made> {
    let store = out.join(STORE);
    let json = |path: &Path| -> Result<Value> {
        serde_json::from_slice(&fs::read(path)?).with_context(|| format!("{}", path.display()))
    };
    let reference = json(&store.join("refs").join(REFERENCE.0).join(REFERENCE.1))?;
    let digest = reference["digest"].as_str().and_then(|digest| digest.strip_prefix("sha256:"));
    let digest = digest.context("the ref has no sha256 digest")?;
    let image = manifest::Image::from_json(&fs::read(store.join("blobs/sha256").join(digest))?)?;
    let report = json(&out.join(JSON))?;
    let inline = report["layers"].as_array().and_then(|layers| layers.iter().map(|l| l["inline_bytes"].as_u64()).sum());
    Ok(Made {
        metadata_bytes: image.layers.iter().map(|layer| layer.metadata.size()).sum(),
        data_bytes: image.layers.iter().flat_map(|layer| &layer.data).map(|data| data.size()).sum(),
        inline_bytes: inline,
    })
}

/// Bytes of all metadata images and data blobs of the converted image.
pub(crate) fn total_bytes(out: &Path) -> Result<u64> {
    let made = sizes(out)?;
    Ok(made.metadata_bytes + made.data_bytes)
}

/// Ours against each of the others.
fn compare(results: &[(&str, &[Run])]) -> Vec<Metric> {
    let Some(&(_, ours)) = results.iter().find(|(name, _)| *name == OURS) else { return Vec::new() };
    let (wall, cpu) = (|run: &Run| run.wall.as_secs_f64(), |run: &Run| run.cpu.as_secs_f64());
    let mut metrics = Vec::new();
    for &(name, runs) in results {
        if name == LIMIT {
            let ratio = |value: fn(&Run) -> f64| Spread::of_ratios(ours, runs, value);
            metrics.push(
                Metric::spread("cpu_ratio_to_limit", ratio(cpu), "x", Better::Lower).goal(goal::CPU_RATIO).peer(name),
            );
            metrics.push(
                Metric::spread("wall_ratio_to_limit", ratio(wall), "x", Better::Lower)
                    .goal(goal::WALL_RATIO)
                    .peer(name),
            );
        } else if name != OURS && name != contenders::LIMIT_NO_FSYNC {
            let speedup =
                Metric::spread("speedup", Spread::of_ratios(runs, ours, wall), "x", Better::Higher).peer(name);
            // Another revision of ours has no goal to be beaten by.
            metrics.push(if Path::new(name).is_absolute() { speedup } else { speedup.goal(goal::SPEEDUP) });
        }
    }
    let rss = Spread::of(ours.iter().map(mib));
    metrics.push(Metric::spread("peak_rss_mib", rss, "MiB", Better::Lower).goal(goal::PEAK_RSS).peer(OURS));
    metrics
}

/// What one contender took.
fn absolute(name: &str, runs: &[Run]) -> [Metric; 3] {
    let spread = |value: fn(&Run) -> f64| Spread::of(runs.iter().map(value));
    [
        Metric::spread("wall", spread(|run| run.wall.as_secs_f64()), "s", Better::Lower).peer(name),
        Metric::spread("cpu", spread(|run| run.cpu.as_secs_f64()), "s", Better::Lower).peer(name),
        Metric::spread("peak_rss", spread(mib), "MiB", Better::Lower).peer(name),
    ]
}

#[expect(clippy::cast_precision_loss, reason = "resident sets are far below 2^53 bytes")]
fn mib(run: &Run) -> f64 {
    run.peak_rss as f64 / f64::from(1 << 20)
}

/// The metadata images against those of mkfs.erofs with the same chunks, plus the bytes that ours has inline.
#[expect(clippy::cast_precision_loss, reason = "images are far below 2^53 bytes")]
fn metadata(made: &Made, image: &Image, chunk: u64, dir: &Path) -> Result<Vec<Metric>> {
    let bytes = |name, value: u64, peer: &str| Metric::new(name, value as f64, "B", Better::Lower).peer(peer);
    let mut metrics =
        vec![bytes("metadata_bytes", made.metadata_bytes, OURS), bytes("data_bytes", made.data_bytes, OURS)];
    let mkfs: Mkfs = contenders::mkfs()?;
    let theirs: Result<u64> = image.layers.iter().map(|layer| mkfs.chunked_metadata(&layer.blob, chunk, dir)).sum();
    let theirs = theirs?;
    metrics.push(bytes("metadata_bytes", theirs, "mkfs.erofs, chunked"));
    let inline = made.inline_bytes.context("dsec-convert --json does not tell `inline_bytes` of each layer")?;
    metrics.push(bytes("inline_bytes", inline, OURS));
    let ratio = made.metadata_bytes as f64 / (theirs + inline) as f64;
    let ratio = Metric::new("metadata_ratio", ratio, "x", Better::Lower).goal(goal::METADATA_RATIO);
    metrics.push(ratio.peer("mkfs.erofs, chunked, plus inline bytes"));
    Ok(metrics)
}
