//! A generated set of layers, for merging: names, types and sizes as in real images, contents that cost little room.
//!
//! Six layers: a Debian-like base (a quarter of the inodes), Python packages (a fifth), a web application's dependencies
//! (two fifths), a toolkit (a tenth), an update that replaces and removes files of the application, whole packages
//! included, and a small workspace. Of the files seven in ten are of up to 4,000 bytes (1.1 KB on average, most of them
//! beside their inode after conversion), the others of 4 to 20 KB; one name in twelve is a symbolic link, one in nine a
//! directory. Contents of the larger files come from few seeds, so that the data blobs stay small: what is measured does
//! not read them.

use anyhow::Result;
use fixtures::content::{Content, splitmix64};
use fixtures::tar::{Entry, Kind, Time, Writer};
use std::io::Write;

/// (name, share of all inodes in a thousand)
pub(super) const LAYERS: [(&str, u64); 6] =
    [("base", 250), ("python", 200), ("node", 400), ("toolkit", 100), ("update", 40), ("workspace", 10)];

/// Seeds of large files' contents.
const SEEDS: u64 = 16;
const STEMS: [&str; 16] = [
    "index",
    "package",
    "README",
    "utils",
    "types.d",
    "__init__",
    "config",
    "LICENSE",
    "changelog",
    "core",
    "parser",
    "test_basic",
    "constants",
    "lib",
    "main",
    "copyright",
];
const ENDS: [&str; 8] = [".js", ".json", ".md", ".py", ".d.ts", ".so.1", ".txt", ".h"];

/// Writes the tar of layer `number` of a set of about `inodes` inodes. The same arguments give the same bytes.
pub(super) fn write(number: usize, inodes: u64, out: impl Write) -> Result<()> {
    let (name, share) = LAYERS[number];
    let mut layer = Layer { tar: Writer::new(out), state: number as u64 * 0x1_0000_0000 };
    let count = inodes * share / 1000;
    match name {
        "update" => layer.update(inodes * LAYERS[2].1 / 1000, count)?,
        _ => layer.packages(name, count)?,
    }
    layer.tar.finish()?;
    Ok(())
}

struct Layer<W> {
    tar: Writer<W>,
    state: u64,
}

/// Inodes of one package, its directories included.
const PACKAGE: u64 = 18;
/// Packages to a directory.
const TOGETHER: u64 = 200;

fn package(root: &str, number: u64) -> String {
    format!("srv/{root}/group-{:02}/package-{number:05}", number / TOGETHER)
}

impl<W: Write> Layer<W> {
    fn random(&mut self, below: u64) -> u64 {
        self.state += 1;
        splitmix64(self.state) % below
    }

    fn put(&mut self, path: String, kind: Kind) -> Result<()> {
        let directory = matches!(kind, Kind::Directory);
        let mut entry = Entry::new(path.into_bytes(), kind);
        entry.mode = if directory { 0o755 } else { 0o644 };
        // Most of a package has one time, and packages have different ones.
        entry.mtime = Time { secs: 1_700_000_000, nanos: 0 };
        if self.random(6) == 0 {
            entry.mtime.secs += i64::try_from(self.random(100_000))?;
        }
        self.tar.entry(&entry)
    }

    fn directory(&mut self, path: &str) -> Result<()> {
        self.put(format!("{path}/"), Kind::Directory)
    }

    fn file(&mut self, path: String) -> Result<()> {
        let (size, seed) = if self.random(10) < 7 {
            // Between 0 and 4,000, small ones the likelier.
            let (a, b) = (self.random(64), self.random(64));
            ((a * b).min(4000), self.state)
        } else {
            (4100 + self.random(16_000), self.random(SEEDS))
        };
        self.put(path, Kind::Regular(Content::Text { seed, size }))
    }

    fn packages(&mut self, root: &str, inodes: u64) -> Result<()> {
        self.directory("srv")?;
        self.directory(&format!("srv/{root}"))?;
        for number in 0..inodes / PACKAGE {
            if number % TOGETHER == 0 {
                self.directory(&format!("srv/{root}/group-{:02}", number / TOGETHER))?;
            }
            self.package(&package(root, number))?;
        }
        Ok(())
    }

    fn package(&mut self, path: &str) -> Result<()> {
        self.directory(path)?;
        for n in 0..7 {
            let name = self.name(n);
            self.file(format!("{path}/{name}"))?;
        }
        self.directory(&format!("{path}/lib"))?;
        for n in 0..7 {
            let name = self.name(n);
            self.file(format!("{path}/lib/{name}"))?;
        }
        self.put(format!("{path}/module"), Kind::Symlink(b"lib/index.js".to_vec()))?;
        self.put(format!("{path}/zz-latest"), Kind::Symlink(b"../package-00000".to_vec()))
    }

    fn name(&mut self, n: u64) -> String {
        let pick = |of: &[&'static str], at: u64| of[usize::try_from(at).unwrap_or(0) % of.len()];
        let (stem, end, tag) = (self.random(16), self.random(8), self.random(4096));
        // The number keeps names apart, and in order.
        format!("{n}-{}-{tag:x}{}", pick(&STEMS, stem), pick(&ENDS, end))
    }

    /// Every fifth package it touches is removed, every fifth removed and made again, of the others two files change.
    fn update(&mut self, node: u64, inodes: u64) -> Result<()> {
        self.directory("srv")?;
        self.directory("srv/node")?;
        let packages = node / PACKAGE;
        let touched = inodes / 5;
        let step = (packages / touched.max(1)).max(1);
        let mut group = u64::MAX;
        for number in (0..packages).step_by(usize::try_from(step)?) {
            if number / TOGETHER != group {
                group = number / TOGETHER;
                self.directory(&format!("srv/node/group-{group:02}"))?;
            }
            let path = package("node", number);
            match number / step % 5 {
                0 => {
                    let (parent, name) = path.rsplit_once('/').unwrap_or(("", &path));
                    self.put(format!("{parent}/.wh.{name}"), Kind::Regular(Content::Bytes(Vec::new())))?;
                }
                1 => {
                    self.package(&path)?;
                    self.put(format!("{path}/.wh..wh..opq"), Kind::Regular(Content::Bytes(Vec::new())))?;
                }
                _ => {
                    self.directory(&path)?;
                    self.put(format!("{path}/.wh.module"), Kind::Regular(Content::Bytes(Vec::new())))?;
                    let name = self.name(9);
                    self.file(format!("{path}/{name}"))?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_set_is_the_same_each_time_and_about_as_large_as_asked() {
        let bytes = |number| {
            let mut out = Vec::new();
            write(number, 4000, &mut out).unwrap();
            out
        };
        for (number, (name, _)) in LAYERS.iter().enumerate() {
            let tar = bytes(number);
            assert!(tar.len() > 10_000 && tar == bytes(number), "{name}");
        }
        assert_eq!(LAYERS.iter().map(|(_, share)| share).sum::<u64>(), 1000);
    }
}
