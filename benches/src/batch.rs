//! Bench `batch`: a family of images in one run against a shell loop of single ones, and what it costs to run it again.

use crate::cli::BatchArgs;
use crate::contenders::{self, STORE, silent};
use crate::measure::{self, Contender, Run, Spread};
use crate::place::Place;
use crate::report::{Better, Metric, Report};
use anyhow::{Result, bail};
use fixtures::content::Content;
use fixtures::oci::{Compression, Image, Layer, Layout};
use fixtures::tar::{Entry, Kind, Writer};
use fs3_client::Store;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Goals, from what the project promises.
mod goal {
    /// The loop's wall time over the batch's.
    pub(super) const SPEEDUP: f64 = 1.3;
    /// The batch's processor time over the loop's: no more work than the images need.
    pub(super) const CPU_RATIO: f64 = 1.0;
    /// Wall time of a second run, over that of the first: all layers are records.
    pub(super) const AGAIN: f64 = 0.1;
    /// Wall time of a run that skips what is there, over that of the first.
    pub(super) const SKIP: f64 = 0.05;
}

const BATCH: &str = "batch";
const LOOP: &str = "a loop of single runs";
const AGAIN: &str = "batch again";
const SKIP: &str = "batch --skip-existing";

/// Images that share a base each.
const SHARING: u64 = 10;

/// Runs the benchmark.
pub(crate) fn run(args: &BatchArgs) -> Result<Report> {
    let images = u64::try_from(args.images)?;
    // About three bytes of output and sources for each byte of the layers.
    let place = Place::new(args.dir.as_deref(), images * (60 << 20))?;
    let program = contenders::build_ours()?;
    let family = Family::write(&place.path().join("family"), images)?;
    let filled = place.path().join("filled");
    let fill = family.batch(&program, &filled, args.jobs, &[])?;
    let all = [
        family.contender(BATCH, &program, args.jobs, None, &[]),
        family.single(&program, args.jobs),
        family.contender(AGAIN, &program, args.jobs, Some(&filled), &[]),
        family.contender(SKIP, &program, args.jobs, Some(&filled), &["--skip-existing"]),
    ];
    finish(fill)?;
    let inputs: Vec<&Path> = family.layers.iter().map(PathBuf::as_path).collect();
    let runs = measure::rounds(&all, args.rounds, 1, &inputs, place.path())?;
    let [batch, single, again, skip] = &runs[..] else { bail!("there are four contenders") };
    let wall = |run: &Run| run.wall.as_secs_f64();
    let cpu = |run: &Run| run.cpu.as_secs_f64();
    let minutely = |runs: &[Run]| {
        let count = f64::from(u32::try_from(args.images).unwrap_or(u32::MAX));
        Spread::of(runs.iter().map(|run| count * 60.0 / wall(run)))
    };
    let metrics = vec![
        Metric::spread("images_per_minute", minutely(batch), "1/min", Better::Higher).peer(BATCH),
        Metric::spread("images_per_minute", minutely(single), "1/min", Better::Higher).peer(LOOP),
        Metric::spread("speedup", Spread::of_ratios(single, batch, wall), "x", Better::Higher)
            .goal(goal::SPEEDUP)
            .peer(LOOP),
        Metric::spread("cpu_ratio", Spread::of_ratios(batch, single, cpu), "x", Better::Lower)
            .goal(goal::CPU_RATIO)
            .peer(LOOP),
        Metric::spread("again_wall_ratio", Spread::of_ratios(again, batch, wall), "x", Better::Lower)
            .goal(goal::AGAIN)
            .peer(BATCH),
        Metric::spread("skip_wall_ratio", Spread::of_ratios(skip, batch, wall), "x", Better::Lower)
            .goal(goal::SKIP)
            .peer(BATCH),
        Metric::spread("wall", Spread::of(batch.iter().map(wall)), "s", Better::Lower).peer(BATCH),
        Metric::spread("wall", Spread::of(again.iter().map(wall)), "s", Better::Lower).peer(AGAIN),
        Metric::spread("wall", Spread::of(skip.iter().map(wall)), "s", Better::Lower).peer(SKIP),
    ];
    let setting = vec![
        format!(
            "{} images of three gzip layers: {} bases of {} layers share, one layer of its own each",
            args.images,
            images.div_ceil(SHARING),
            2
        ),
        format!("{} interleaved rounds, --jobs {}", args.rounds, args.jobs),
        place.description.clone(),
    ];
    Ok(Report { bench: "batch", setting, metrics, missing: Vec::new() })
}

/// Images as sources, and their list.
struct Family {
    list: PathBuf,
    sources: Vec<String>,
    layers: Vec<PathBuf>,
}

impl Family {
    fn write(dir: &Path, images: u64) -> Result<Self> {
        fs::create_dir(dir)?;
        let mut family = Self { list: dir.join("list"), sources: Vec::new(), layers: Vec::new() };
        for n in 0..images {
            let base = n / SHARING * 1000;
            let image = [layer(base, 250)?, layer(base + 1, 60)?, layer(base + 2 + n % SHARING, 40)?];
            let image = image.into_iter().fold(Image::new(), Image::layer);
            let layout = dir.join(n.to_string());
            Layout::new().image("t", image).write(&layout)?;
            family.sources.push(format!("oci:{}:t", layout.display()));
            for blob in fs::read_dir(layout.join("blobs/sha256"))? {
                family.layers.push(blob?.path());
            }
        }
        let lines = family.sources.iter().enumerate().map(|(n, source)| format!("{source} family/{n}:1\n"));
        fs::write(&family.list, lines.collect::<String>())?;
        Ok(family)
    }

    fn batch(&self, program: &Path, store: &Path, jobs: usize, args: &[&str]) -> Result<Command> {
        let mut command = silent(program);
        command.arg("batch").arg(&self.list).arg("--store").arg(store).args(["--jobs", &jobs.to_string()]).args(args);
        command.stdout(File::create(store.with_extension("jsonl"))?);
        Ok(command)
    }

    /// A batch into a new store, or into one that has it all.
    fn contender(
        &self,
        name: &str,
        program: &Path,
        jobs: usize,
        filled: Option<&Path>,
        args: &'static [&'static str],
    ) -> Contender {
        let (family, program, filled) = (self.clone_list(), program.to_owned(), filled.map(Path::to_owned));
        let count = self.sources.len();
        let store = move |out: &Path| filled.clone().unwrap_or_else(|| out.join(STORE));
        let check_store = store.clone();
        Contender {
            name: name.to_owned(),
            commands: Box::new(move |out| Ok(vec![family.batch(&program, &store(out), jobs, args)?])),
            check: Box::new(move |out| is_whole(&check_store(out), count)),
        }
    }

    /// One `convert` after the other.
    fn single(&self, program: &Path, jobs: usize) -> Contender {
        let (program, sources, count) = (program.to_owned(), self.sources.clone(), self.sources.len());
        Contender {
            name: LOOP.to_owned(),
            commands: Box::new(move |out| {
                let mut command = silent(Path::new("sh"));
                let script = "set -e; program=$1 store=$2 jobs=$3; shift 3; n=0; for source; do \
                              \"$program\" convert \"$source\" --store \"$store\" --name family/$n:1 --jobs $jobs --quiet; \
                              n=$((n + 1)); done";
                command.args(["-c", script, "sh"]).arg(&program).arg(out.join(STORE)).arg(jobs.to_string());
                command.args(&sources);
                Ok(vec![command])
            }),
            check: Box::new(move |out| is_whole(&out.join(STORE), count)),
        }
    }

    fn clone_list(&self) -> Self {
        Self { list: self.list.clone(), sources: self.sources.clone(), layers: Vec::new() }
    }
}

fn is_whole(store: &Path, images: usize) -> Result<()> {
    let found = Store::open(store)?.list_refs()?.len();
    if found == images { Ok(()) } else { bail!("{found} of {images} images are in the store") }
}

fn finish(mut command: Command) -> Result<()> {
    if command.status()?.success() { Ok(()) } else { bail!("{command:?} failed") }
}

/// A layer of `files` files, about 40 KB each, as programs and texts compress.
fn layer(seed: u64, files: u64) -> Result<Layer> {
    let mut writer = Writer::new(Vec::new());
    writer.entry(&Entry::new("./", Kind::Directory))?;
    writer.entry(&Entry::new(format!("l{seed}/"), Kind::Directory))?;
    for n in 0..files {
        let id = seed * 10_000 + n;
        let content = match n % 4 {
            0 => Content::Random { seed: id, size: 30_000 + n * 91 % 20_000 },
            1 | 2 => Content::Text { seed: id, size: 60_000 + n * 37 % 30_000 },
            _ => Content::Text { seed: id, size: n * 131 % 4000 },
        };
        writer.entry(&Entry::new(format!("l{seed}/{n:05}"), Kind::Regular(content)))?;
    }
    Ok(Layer::tar(writer.finish()?).compression(Compression::Gzip))
}
