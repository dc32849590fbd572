//! Bench `overlaybd`: lookups in indexes, reads and writes through the engine against those of plain files, blocks of ZFiles
//! against the bare decompressor, layers written against what copying and compressing costs alone, and what requests notice
//! of a seal.
//!
//! What runs in one thread is measured in its processor time, so that others on the machine disturb it less.

mod lookup;
mod read;
mod ring;
mod upper;
mod write;
mod zfile;

use crate::measure::Spread;
use crate::place::Place;
use crate::report::{Better, Metric, Report};
use anyhow::Result;
use std::path::PathBuf;

/// Options of bench `overlaybd`.
#[derive(Debug, clap::Args)]
pub(crate) struct OverlaybdArgs {
    /// Write layers here, on a real disk, instead of in memory.
    #[arg(long)]
    pub(crate) dir: Option<PathBuf>,
    /// How many times everything is measured.
    #[arg(long, default_value_t = 5, value_parser = crate::cli::parse_count)]
    pub(crate) rounds: usize,
    /// Only these parts: lookup, zfile, write, read, upper, seal.
    #[arg(long, value_delimiter = ',')]
    pub(crate) only: Vec<String>,
    /// Megabytes of data in a layer.
    #[arg(long, default_value_t = 128, value_parser = crate::cli::parse_count)]
    pub(crate) megabytes: usize,
}

/// Runs it.
pub(crate) fn run(args: &OverlaybdArgs) -> Result<Report> {
    let data = plain(args.megabytes << 20);
    let place = Place::new(args.dir.as_deref(), 6 * data.len() as u64 + (512 << 20))?;
    let wanted = |part: &str| args.only.is_empty() || args.only.iter().any(|only| only == part);
    let mut metrics = Vec::new();
    if wanted("lookup") {
        metrics.extend(lookup::measure(args.rounds));
    }
    if wanted("zfile") {
        metrics.extend(zfile::measure(&data[..data.len().min(32 << 20)], args.rounds)?);
    }
    if wanted("write") {
        metrics.extend(write::measure(&data, &place, args.rounds)?);
    }
    if wanted("read") {
        metrics.extend(read::measure(&data, &place, args.rounds)?);
    }
    if wanted("upper") {
        metrics.extend(upper::writes(args.megabytes, &place, args.rounds)?);
    }
    if wanted("seal") {
        // A layer of one megabyte is enough for a thousand mappings.
        metrics.extend(upper::seals(args.megabytes * 4000, &place)?);
    }
    let setting = vec![format!("layers of {} MiB, {}, {} rounds", args.megabytes, place.description, args.rounds)];
    Ok(Report { bench: "overlaybd", setting, metrics, missing: Vec::new() })
}

/// Numbers that look random and are always the same.
#[derive(Debug)]
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// One below `most`.
    fn below(&mut self, most: usize) -> usize {
        usize::try_from(self.next() % most as u64).unwrap_or(0)
    }
}

/// Bytes that compress to about half, as a root file system does.
fn plain(len: usize) -> Vec<u8> {
    let mut numbers = Numbers(0x9E37_79B9_7F4A_7C15);
    let words: Vec<[u8; 8]> = (0..4096).map(|_| numbers.next().to_le_bytes()).collect();
    let mut bytes = Vec::with_capacity(len + 16);
    while bytes.len() < len {
        let number = numbers.next();
        let [low, high, rest @ ..] = number.to_le_bytes();
        bytes.extend(words[usize::from(u16::from_le_bytes([low, high]) % 4096)]);
        if number.is_multiple_of(3) {
            bytes.extend(rest);
        }
    }
    bytes.truncate(len);
    bytes
}

/// `ours / theirs`, round by round.
fn ratio(name: &'static str, peer: &str, ours: &[f64], theirs: &[f64]) -> Metric {
    let spread = Spread::of(ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs));
    Metric::spread(name, spread, "x", Better::Lower).peer(peer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_measured() {
        let report = run(&OverlaybdArgs { dir: None, rounds: 1, only: Vec::new(), megabytes: 2 }).unwrap();
        assert!(report.metrics.len() > 25);
        assert!(report.metrics.iter().all(|metric| metric.value > 0.0));
    }
}
