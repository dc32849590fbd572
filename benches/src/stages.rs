//! Bench `limit`: what each thing costs that a converter cannot avoid, one at a time on one thread.
//!
//! Processor time, since that is what stays the same when the stages overlap. The sum over two cores is the shortest
//! wall time that any converter can have.

use crate::inflate::Inflate;
use crate::limit::{BUFFER, READ, Source};
use crate::measure::Spread;
use crate::place::Place;
use crate::report::{Better, Metric};
use crate::sys::thread_cpu;
use anyhow::Result;
use sha2::{Digest as _, Sha256};
use std::fs::File;
use std::hint::black_box;
use std::io::{Read as _, Write as _};

/// The stages, as metrics `cpu_s` of each and `cpu_s` of their sum.
///
/// The bytes that a stage works on have just been read or inflated, so they are where they would be in a converter:
/// in the cache.
pub(crate) fn measure(layers: &[Source], place: &Place, rounds: usize) -> Result<Vec<Metric>> {
    let mut runs = Vec::new();
    for _ in 0..rounds {
        let mut sum = Stages::default();
        for layer in layers {
            one(layer, place, &mut sum)?;
        }
        runs.push(sum);
    }
    let stage = |name: &str, value: &dyn Fn(&Stages) -> f64| {
        Metric::spread("cpu", Spread::of(runs.iter().map(value)), "s", Better::Lower).peer(name)
    };
    let total = |s: &Stages| s.read + s.hash_compressed + s.inflate + s.hash_plain + s.write;
    Ok(vec![
        stage("read", &|s| s.read),
        stage("sha256 compressed", &|s| s.hash_compressed),
        stage("inflate (ISA-L)", &|s| s.inflate),
        stage("sha256 plain", &|s| s.hash_plain),
        stage("write", &|s| s.write),
        stage("all", &total),
        Metric::spread("wall", Spread::of(runs.iter().map(|s| s.fsync)), "s", Better::Lower).peer("fsync"),
    ])
}

/// Seconds.
#[derive(Debug, Default)]
struct Stages {
    read: f64,
    hash_compressed: f64,
    inflate: f64,
    hash_plain: f64,
    write: f64,
    fsync: f64,
}

fn one(layer: &Source, place: &Place, sum: &mut Stages) -> Result<()> {
    let (mut input, mut output) = (vec![0; READ], vec![0; BUFFER]);
    let (mut compressed, mut plain, mut inflate) = (Sha256::new(), Sha256::new(), Inflate::new());
    let mut source = File::open(&layer.blob)?;
    let mut out = tempfile::tempfile_in(place.path())?;
    loop {
        let n = timed(&mut sum.read, || source.read(&mut input))?;
        if n == 0 {
            break;
        }
        timed(&mut sum.hash_compressed, || compressed.update(&input[..n]));
        let mut rest = &input[..n];
        loop {
            let step = timed(&mut sum.inflate, || inflate.step(rest, &mut output))?;
            rest = &rest[step.consumed..];
            timed(&mut sum.hash_plain, || plain.update(&output[..step.produced]));
            timed(&mut sum.write, || out.write_all(&output[..step.produced]))?;
            if rest.is_empty() && step.produced < output.len() {
                break;
            }
        }
    }
    black_box((compressed.finalize(), plain.finalize()));
    let start = std::time::Instant::now();
    out.sync_all()?;
    sum.fsync += start.elapsed().as_secs_f64();
    Ok(())
}

fn timed<T>(seconds: &mut f64, work: impl FnOnce() -> T) -> T {
    let before = thread_cpu();
    let result = work();
    *seconds += (thread_cpu() - before).as_secs_f64();
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{data, limit};

    #[test]
    fn every_stage_is_counted_and_they_add_up() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root/app");
        std::fs::create_dir_all(&root).unwrap();
        let large: Vec<u8> = (0..2_000_000_u32).flat_map(|n| (n.wrapping_mul(n) / 3).to_le_bytes()).collect();
        std::fs::write(root.join("file"), large).unwrap();
        let layout = data::layout_of_tree(&dir.path().join("root"), "app", dir.path()).unwrap();
        let place = Place::new(Some(dir.path()), 0).unwrap();
        let metrics = measure(&limit::sources(&layout).unwrap(), &place, 1).unwrap();
        let value = |peer: &str| metrics.iter().find(|m| m.peer.as_deref() == Some(peer)).unwrap().value;
        let parts = ["read", "sha256 compressed", "inflate (ISA-L)", "sha256 plain", "write"];
        let sum: f64 = parts.iter().map(|part| value(part)).sum();
        assert!((value("all") - sum).abs() < 1e-9 && value("inflate (ISA-L)") > 0.0 && value("sha256 plain") > 0.0);
    }
}
