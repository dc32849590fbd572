//! Bench `merge`: `dsec-convert merge` of hundreds of thousands of inodes, against what it cannot avoid and its peers.
//!
//! The set ([`set`]) is converted twice: with small files beside their inodes, as is the default, and without (
//! `--inline-max 0`), so that the images hold names, attributes and chunk indexes alone, as those of the peers do. The
//! *limit* reads and hashes the input images, and writes and hashes as many bytes as the merged one has: nobody who
//! checks digests and publishes by digest does less.

mod set;

use crate::cli::MergeArgs;
use crate::contenders::{build_ours, mkfs};
use crate::data::hex;
use crate::measure::{self, Contender, Run, Spread};
use crate::place::Place;
use crate::report::{Better, Metric, Missing, Report, progress};
use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use std::fs::{self, File};
use std::io::{BufWriter, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Goals, from what the project promises.
mod goal {
    /// Wall time for 440,000 inodes, seconds.
    pub(super) const WALL: f64 = 0.5;
    /// Largest resident set, MiB.
    pub(super) const PEAK_RSS: f64 = 100.0;
}

/// Bytes of tar for each inode, at most about: for the room.
const ROOM: u64 = 12_000;

/// One way to convert the set.
struct Variant {
    name: &'static str,
    inline_max: &'static str,
}

const VARIANTS: [Variant; 2] =
    [Variant { name: "names alone", inline_max: "0" }, Variant { name: "small files inline", inline_max: "4096" }];

/// A converted set.
struct Converted {
    store: PathBuf,
    images: Vec<PathBuf>,
    bytes: u64,
    inodes: u64,
}

/// Runs the benchmark.
pub(crate) fn run(args: &MergeArgs) -> Result<Report> {
    let program = args.convert_bin.clone().map_or_else(build_ours, Ok)?;
    let place = Place::new(args.dir.as_deref(), args.inodes * ROOM)?;
    let tars = write_set(args.inodes, place.path())?;
    let (mut contenders, mut missing, mut inputs, mut metrics) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut setting = Vec::new();
    for variant in &VARIANTS {
        progress(&format!("converting the set: {}", variant.name));
        let converted = convert(&program, variant, &tars, place.path())?;
        setting.push(format!(
            "{}: {} inodes in {} images of {} MiB together",
            variant.name,
            converted.inodes,
            converted.images.len(),
            converted.bytes >> 20
        ));
        inputs.extend(converted.images.iter().cloned());
        contenders.push(limit(variant, &converted)?);
        for (number, other) in [&program].into_iter().chain(&args.against).enumerate() {
            let name = if number == 0 { ours(variant) } else { format!("{}, {}", other.display(), variant.name) };
            contenders.push(merging(name, other.clone(), &converted));
        }
    }
    match mkfs_images(&tars, place.path()) {
        Ok((program, images)) => contenders.push(rebuild(program, images)),
        Err(error) => missing.push(Missing { name: "mkfs.erofs rebuild".to_owned(), how: format!("{error:#}") }),
    }
    match nydus_images(&tars, place.path()) {
        Ok(bootstraps) => contenders.push(nydus(bootstraps)),
        Err(error) => missing.push(Missing { name: "nydus-image merge".to_owned(), how: format!("{error:#}") }),
    }
    let inputs: Vec<&Path> = inputs.iter().map(PathBuf::as_path).collect();
    let runs = measure::rounds(&contenders, args.rounds, 1, &inputs, place.path())?;
    let results: Vec<(&str, &[Run])> =
        contenders.iter().map(|c| c.name.as_str()).zip(runs.iter().map(Vec::as_slice)).collect();
    metrics.extend(compare(&results));
    metrics.extend(results.iter().flat_map(|(name, runs)| absolute(name, runs)));
    setting.push(format!("{}, {} interleaved rounds", place.description, args.rounds));
    Ok(Report { bench: "merge", setting, metrics, missing })
}

fn ours(variant: &Variant) -> String {
    format!("dsec-convert merge, {}", variant.name)
}

fn limit_name(variant: &Variant) -> String {
    format!("limit, {}", variant.name)
}

fn write_set(inodes: u64, dir: &Path) -> Result<Vec<PathBuf>> {
    let mut tars = Vec::new();
    for (number, (name, _)) in set::LAYERS.iter().enumerate() {
        progress(&format!("making layer {name}"));
        let path = dir.join(format!("{name}.tar"));
        set::write(number, inodes, BufWriter::with_capacity(1 << 20, File::create(&path)?))?;
        tars.push(path);
    }
    Ok(tars)
}

fn name_of(tar: &Path) -> String {
    tar.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

fn json_of(command: &mut Command) -> Result<Value> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn convert(program: &Path, variant: &Variant, tars: &[PathBuf], dir: &Path) -> Result<Converted> {
    let store = dir.join(format!("store-{}", variant.inline_max));
    let mut converted = Converted { store: store.clone(), images: Vec::new(), bytes: 0, inodes: 0 };
    for tar in tars {
        let mut command = Command::new(program);
        command.arg("convert").arg(format!("tar:{}", tar.display())).arg("--store").arg(&store);
        command.args(["--json", "--inline-max", variant.inline_max, "--name", &format!("{}:set", name_of(tar))]);
        let report = json_of(&mut command)?;
        let metadata = &report["layers"][0]["metadata"];
        let digest = metadata["digest"].as_str().and_then(|d| d.strip_prefix("sha256:")).context("no digest")?;
        converted.images.push(store.join("blobs/sha256").join(digest));
        converted.bytes += metadata["size"].as_u64().context("no size")?;
        converted.inodes += report["totals"]["inodes"].as_u64().context("no number of inodes")?;
    }
    Ok(converted)
}

/// A copy of a store by hard links, so that each run finds it as it was.
fn link_store(from: &Path, to: &Path) -> Result<()> {
    for directory in ["blobs/sha256", "tmp", "converted"] {
        fs::create_dir_all(to.join(directory))?;
    }
    for entry in fs::read_dir(from.join("blobs/sha256"))? {
        let entry = entry?;
        fs::hard_link(entry.path(), to.join("blobs/sha256").join(entry.file_name()))?;
    }
    for name in fs::read_dir(from.join("refs"))? {
        let name = name?;
        fs::create_dir_all(to.join("refs").join(name.file_name()))?;
        for tag in fs::read_dir(name.path())? {
            let tag = tag?;
            fs::copy(tag.path(), to.join("refs").join(name.file_name()).join(tag.file_name()))?;
        }
    }
    Ok(())
}

fn merging(name: String, program: PathBuf, converted: &Converted) -> Contender {
    let store = converted.store.clone();
    let commands = move |out: &Path| {
        let copy = out.join("store");
        link_store(&store, &copy)?;
        let mut command = Command::new(&program);
        command.arg("merge").arg(&copy).args(set::LAYERS.map(|(name, _)| format!("{name}:set")));
        command.args(["--name", "merged:set", "--merge-under", "all", "--json"]);
        command.stdout(File::create(out.join("merge.json"))?);
        Ok(vec![command])
    };
    let check = |out: &Path| {
        let report: Value = serde_json::from_slice(&fs::read(out.join("merge.json"))?)?;
        let layers = report["layers"].as_array().context("no layers")?;
        ensure!(layers.len() == 1 && layers[0]["reused"] == false, "{report}");
        Ok(())
    };
    Contender { name, commands: Box::new(commands), check: Box::new(check) }
}

fn limit(variant: &Variant, converted: &Converted) -> Result<Contender> {
    let (program, images) = (std::env::current_exe()?, converted.images.clone());
    let commands = move |out: &Path| {
        let mut command = Command::new(&program);
        command.args(["__child", "merge-limit", "--out"]).arg(out.join("copy")).args(&images);
        Ok(vec![command])
    };
    let check = |out: &Path| {
        ensure!(fs::metadata(out.join("copy"))?.len() > 0, "nothing was copied");
        Ok(())
    };
    Ok(Contender { name: limit_name(variant), commands: Box::new(commands), check: Box::new(check) })
}

/// What is done with each piece that was read.
type Each<'e> = Box<dyn FnMut(&[u8]) -> Result<()> + 'e>;

/// The limit: hashes what it reads, writes it, and hashes what it wrote.
pub(crate) fn limit_child(images: &[PathBuf], out: &Path) -> Result<()> {
    let mut copy = File::create(out)?;
    let mut buffer = vec![0; 1 << 20];
    let mut hash = |file: &mut File, mut each: Each<'_>| -> Result<String> {
        let mut hasher = Sha256::new();
        loop {
            let n = file.read(&mut buffer)?;
            if n == 0 {
                return Ok(hex(&hasher.finalize()));
            }
            hasher.update(&buffer[..n]);
            each(&buffer[..n])?;
        }
    };
    for image in images {
        let digest = hash(&mut File::open(image)?, Box::new(|bytes| Ok(copy.write_all(bytes)?)))?;
        let name = image.file_name().unwrap_or_default().to_string_lossy().into_owned();
        ensure!(digest == name, "{name} has {digest}");
    }
    copy.sync_all()?;
    let digest = hash(&mut File::open(out)?, Box::new(|_| Ok(())))?;
    ensure!(digest.len() == 64, "{digest}");
    Ok(())
}

/// One image a tar that refers to the tar, as mkfs.erofs can merge them.
fn mkfs_images(tars: &[PathBuf], dir: &Path) -> Result<(PathBuf, Vec<PathBuf>)> {
    let program = mkfs()?.program().to_owned();
    let mut images = Vec::new();
    for tar in tars {
        progress(&format!("mkfs.erofs --tar=i of {}", name_of(tar)));
        let image = dir.join(format!("{}.erofs", name_of(tar)));
        let mut command = Command::new(&program);
        command.args(["--quiet", "--tar=i", "--aufs"]).arg(&image).arg(tar);
        let output = command.output()?;
        ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
        images.push(image);
    }
    Ok((program, images))
}

fn rebuild(program: PathBuf, images: Vec<PathBuf>) -> Contender {
    let commands = move |out: &Path| {
        let mut command = Command::new(&program);
        command.stdout(Stdio::null());
        command.args(["--quiet", "--aufs", "--ovlfs-strip=0"]).arg(out.join("merged.erofs")).args(&images);
        Ok(vec![command])
    };
    let check = |out: &Path| {
        ensure!(fs::metadata(out.join("merged.erofs"))?.len() > 1 << 20, "it is too small");
        Ok(())
    };
    Contender { name: MKFS.to_owned(), commands: Box::new(commands), check: Box::new(check) }
}

const MKFS: &str = "mkfs.erofs rebuild";
const NYDUS: &str = "nydus-image merge";

fn nydus_images(tars: &[PathBuf], dir: &Path) -> Result<Vec<PathBuf>> {
    let mut bootstraps = Vec::new();
    for tar in tars {
        let bootstrap = dir.join(format!("{}.bootstrap", name_of(tar)));
        let mut command = Command::new("nydus-image");
        command.args(["create", "--type", "tar-rafs", "--fs-version", "6", "--compressor", "none"]);
        command.args(["--log-level", "error", "--bootstrap"]).arg(&bootstrap);
        command.arg("--blob").arg(dir.join(format!("{}.blob", name_of(tar)))).arg(tar);
        let output = command.output().context("see the Nydus project's releases, or `cargo install nydus-rs`")?;
        if !output.status.success() {
            bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        bootstraps.push(bootstrap);
    }
    Ok(bootstraps)
}

fn nydus(bootstraps: Vec<PathBuf>) -> Contender {
    let commands = move |out: &Path| {
        let mut command = Command::new("nydus-image");
        command.args(["merge", "--log-level", "error", "--bootstrap"]).arg(out.join("merged")).args(&bootstraps);
        command.stdout(Stdio::null());
        Ok(vec![command])
    };
    let check = |out: &Path| {
        ensure!(fs::metadata(out.join("merged"))?.len() > 1 << 20, "it is too small");
        Ok(())
    };
    Contender { name: NYDUS.to_owned(), commands: Box::new(commands), check: Box::new(check) }
}

fn compare(results: &[(&str, &[Run])]) -> Vec<Metric> {
    let find = |wanted: &str| results.iter().find(|(name, _)| *name == wanted).map(|(_, runs)| *runs);
    let mut metrics = Vec::new();
    for variant in &VARIANTS {
        let (Some(own), Some(limit)) = (find(&ours(variant)), find(&limit_name(variant))) else { continue };
        let wall = |run: &Run| run.wall.as_secs_f64();
        let cpu = |run: &Run| run.cpu.as_secs_f64();
        let over = |name, of: Spread, peer: &str| Metric::spread(name, of, "x", Better::Lower).peer(peer);
        metrics.push(over("wall_ratio", Spread::of_ratios(own, limit, wall), &limit_name(variant)));
        metrics.push(over("cpu_ratio", Spread::of_ratios(own, limit, cpu), &limit_name(variant)));
    }
    for peer in [MKFS, NYDUS] {
        if let (Some(own), Some(peer_runs)) = (find(&ours(&VARIANTS[0])), find(peer)) {
            let spread = Spread::of_ratios(peer_runs, own, |run| run.wall.as_secs_f64());
            metrics.push(Metric::spread("speedup", spread, "x", Better::Higher).peer(peer));
        }
    }
    metrics
}

#[expect(clippy::cast_precision_loss, reason = "sizes for people")]
fn absolute(name: &str, runs: &[Run]) -> Vec<Metric> {
    let of = |value: &dyn Fn(&Run) -> f64| Spread::of(runs.iter().map(value));
    let wall = Metric::spread("wall", of(&|run| run.wall.as_secs_f64()), "s", Better::Lower);
    let cpu = Metric::spread("cpu", of(&|run| run.cpu.as_secs_f64()), "s", Better::Lower);
    let rss = of(&|run| run.peak_rss as f64 / f64::from(1 << 20));
    let rss = Metric::spread("peak_rss", rss, "MiB", Better::Lower);
    let goals = VARIANTS.iter().any(|variant| ours(variant) == name);
    let (wall, rss) = if goals { (wall.goal(goal::WALL), rss.goal(goal::PEAK_RSS)) } else { (wall, rss) };
    [wall, cpu, rss].map(|metric| metric.peer(name)).to_vec()
}
