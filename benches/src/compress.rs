//! Bench `compress`: our compressed layers against those of mkfs.erofs with the same algorithm, level and cluster.
//!
//! Both read the same gzip layers. mkfs.erofs makes one image a layer; ours a metadata image and a data blob each, and
//! verifies and names all of it. Clusters are not the same thing: mkfs.erofs fills stored clusters of that size with as
//! much input as fits, ours are of that much input.

use crate::cli::CompressArgs;
use crate::contenders::{self, Mkfs, OURS};
use crate::convert::{self, describe};
use crate::data::{self, Image};
use crate::measure::{self, CheckOutput, Contender, Run, Spread};
use crate::place::Place;
use crate::report::{Better, Metric, Missing, Report};
use anyhow::Result;
use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Goals, from what the project promises.
mod goal {
    /// Processor time of mkfs.erofs over ours.
    pub(super) const CPU_RATIO: f64 = 4.0;
    /// Our metadata and data bytes over those of mkfs.erofs.
    pub(super) const SIZE_RATIO: f64 = 1.05;
}

/// Room that one contender needs, over the plain bytes.
const ROOM_FACTOR: u64 = 1;

/// What is compared: codec, level and cluster, in both programs' words.
#[derive(Debug, Clone)]
struct Setting {
    codec: String,
    cluster: u32,
}

impl Setting {
    /// `zstd:3` as mkfs.erofs has it: `zstd,level=3`.
    fn for_mkfs(&self) -> String {
        self.codec.replacen(':', ",level=", 1)
    }

    fn name(&self) -> String {
        format!("{} {}KiB", self.codec, self.cluster >> 10)
    }
}

/// Runs the benchmark.
pub(crate) fn run(args: &CompressArgs) -> Result<Report> {
    let image = data::image(&args.setting.layers)?;
    let plain: u64 = image.layers.iter().map(|layer| layer.plain_size).sum();
    let place = Place::new(args.setting.dir.as_deref(), plain * ROOM_FACTOR)?;
    let program = args.convert_bin.clone().map_or_else(contenders::build_ours, Ok)?;
    let settings: Vec<Setting> = args
        .codecs
        .iter()
        .flat_map(|codec| args.clusters.iter().map(|cluster| Setting { codec: codec.clone(), cluster: cluster << 10 }))
        .collect();
    let mut missing = Vec::new();
    let mkfs = contenders::mkfs();
    if let Err(error) = &mkfs {
        missing.push(Missing { name: "mkfs.erofs".to_owned(), how: format!("{error:#}") });
    }
    let mkfs = mkfs.ok();
    let inputs: Vec<&Path> = image.layers.iter().map(|layer| layer.blob.as_path()).collect();
    let mut metrics = Vec::new();
    for setting in &settings {
        let (ours_size, theirs_size) = (Rc::default(), Rc::default());
        let mut all = vec![ours(&program, &image, args.jobs, setting, &ours_size)];
        all.extend(mkfs.as_ref().map(|mkfs| theirs(mkfs, &image, setting, &theirs_size)));
        let runs = measure::rounds(&all, args.setting.rounds, args.jobs, &inputs, place.path())?;
        metrics.extend(compare(setting, &runs, *ours_size.borrow(), *theirs_size.borrow()));
    }
    let mut told = describe(&image, &place);
    told.push(format!("{} interleaved rounds, {} layers at a time", args.setting.rounds, args.jobs));
    Ok(Report { bench: "compress", setting: told, metrics, missing })
}

type Bytes = Rc<RefCell<u64>>;

fn ours(program: &Path, image: &Image, jobs: usize, setting: &Setting, size: &Bytes) -> Contender {
    let plain = contenders::converter(OURS, program.to_owned(), image, jobs);
    let (codec, cluster) = (setting.codec.clone(), format!("{}KiB", setting.cluster >> 10));
    let commands = move |out: &Path| {
        let mut commands = (plain.commands)(out)?;
        for command in &mut commands {
            command.args(["--compress", &codec, "--cluster", &cluster]);
        }
        Ok(commands)
    };
    let (check, size) = (plain.check, Rc::clone(size));
    let check: CheckOutput = Box::new(move |out| {
        check(out)?;
        size.replace(convert::total_bytes(out)?);
        Ok(())
    });
    Contender { name: format!("{OURS} {}", setting.name()), commands: Box::new(commands), check }
}

fn theirs(mkfs: &Mkfs, image: &Image, setting: &Setting, size: &Bytes) -> Contender {
    let plain = mkfs.compressed(image, &setting.for_mkfs(), setting.cluster);
    let (check, size) = (plain.check, Rc::clone(size));
    let names: Vec<PathBuf> = image.layers.iter().map(|layer| PathBuf::from(&layer.name)).collect();
    let check: CheckOutput = Box::new(move |out| {
        check(out)?;
        let sizes: std::io::Result<u64> = names.iter().map(|name| Ok(fs::metadata(out.join(name))?.len())).sum();
        size.replace(sizes?);
        Ok(())
    });
    Contender { check, name: format!("{} {}", plain.name, setting.name()), ..plain }
}

#[expect(clippy::cast_precision_loss, reason = "images are far below 2^53 bytes")]
fn compare(setting: &Setting, runs: &[Vec<Run>], ours_size: u64, theirs_size: u64) -> Vec<Metric> {
    let cpu = |run: &Run| run.cpu.as_secs_f64();
    let wall = |run: &Run| run.wall.as_secs_f64();
    let name = setting.name();
    let mut metrics = Vec::new();
    if let [ours, theirs] = runs {
        let ratio = |value: fn(&Run) -> f64| Spread::of_ratios(theirs, ours, value);
        metrics.push(Metric::spread("cpu_ratio", ratio(cpu), "x", Better::Higher).goal(goal::CPU_RATIO).peer(&name));
        metrics.push(Metric::spread("speedup", ratio(wall), "x", Better::Higher).peer(&name));
        let size = ours_size as f64 / theirs_size as f64;
        metrics.push(Metric::new("size_ratio", size, "x", Better::Lower).goal(goal::SIZE_RATIO).peer(&name));
    }
    for (who, (runs, size)) in [OURS, "mkfs.erofs"].iter().zip(runs.iter().zip([ours_size, theirs_size])) {
        let peer = format!("{who} {name}");
        let spread = Spread::of(runs.iter().map(cpu));
        metrics.push(Metric::spread("cpu", spread, "s", Better::Lower).peer(&peer));
        metrics.push(Metric::new("bytes", size as f64, "B", Better::Lower).peer(&peer));
    }
    metrics
}

/// Codecs that both programs have; a mistake is told before anything is built.
pub(crate) fn parse_codec(text: &str) -> Result<String, String> {
    let codec: converter::compress::Codec = text.parse().map_err(|e| format!("{e}"))?;
    Ok(codec.to_string())
}

/// 64 or 128.
pub(crate) fn parse_cluster(text: &str) -> Result<u32, String> {
    match text {
        "64" => Ok(64),
        "128" => Ok(128),
        _ => Err("64 or 128".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn words_of_both_programs() {
        let setting = |codec: &str| Setting { codec: parse_codec(codec).unwrap(), cluster: 64 << 10 };
        assert_eq!(setting("zstd").for_mkfs(), "zstd,level=3");
        assert_eq!(setting("lz4").for_mkfs(), "lz4");
        assert_eq!(setting("lz4hc:5").name(), "lz4hc:5 64KiB");
        assert!(parse_codec("gzip").is_err() && parse_cluster("4").is_err());
    }

    #[test]
    fn ratios_and_goals() {
        let run = |ms| Run { wall: Duration::from_millis(ms), cpu: Duration::from_millis(ms), peak_rss: 0 };
        let setting = Setting { codec: "lz4".to_owned(), cluster: 64 << 10 };
        let metrics = compare(&setting, &[vec![run(10), run(10)], vec![run(50), run(50)]], 104, 100);
        let of = |name: &str| metrics.iter().find(|metric| metric.name == name).unwrap();
        assert_eq!((of("cpu_ratio").value, of("cpu_ratio").reached()), (5.0, Some(true)));
        assert_eq!((of("size_ratio").value, of("size_ratio").reached()), (1.04, Some(true)));
        assert_eq!(metrics.len(), 7);
        // Alone, there is nothing to compare.
        assert_eq!(compare(&setting, &[vec![run(10)]], 104, 0).len(), 2);
    }
}
