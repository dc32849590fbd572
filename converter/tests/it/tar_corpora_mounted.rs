//! The archives of the Go, Python and tar-split packages, converted and mounted, beside what GNU tar extracts of them as
//! root.
//!
//! What is refused, and every difference, stands in a table with its reason; a line that is no longer true fails.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use converter::entry::{Entry, EntryKind, EntrySink};
use converter::tar::{Limits, Parser, drive};
use fixtures::require;
use fixtures::tree::{Compare, Snapshot, diff};
use sha2::{Digest as _, Sha256};

use crate::support_tar::Place;
use crate::tar_corpora::{REFUSED, corpora, gunzip};

/// Converted, but GNU tar fails: file name, part of its message, why we do not.
const NOT_EXTRACTED: &[(&str, &str, &str)] = &[
    (
        "pax-global-records.tar",
        "empty member name",
        "an empty path= takes the record back, and the header's name holds",
    ),
    (
        "sparse-formats.tar",
        "Unexpected EOF",
        "GNU tar misreads sparse segments that do not begin a block, as these of Go's",
    ),
];

/// Trees that differ: file name, part of each line that tells a difference (ours | GNU tar's), the reason.
const DIFFERENT: &[(&str, &[&str], &str)] = &[
    (
        "invalid-go17.tar",
        &["/: link count 3 | 2", "aaaa: only in the first", "foo: only in the second"],
        "a path prefix under GNU magic, which Go before 1.8 wrote: GNU tar loses it",
    ),
    (
        "pax-bad-mtime-file.tar",
        &["foo: mtime 1442282516.000000000 | 999.000000000"],
        "GNU tar reads mtime 999 from \"999xxx9324.4\": we keep the header's",
    ),
];

#[test]
fn privileged_corpora_are_mounted_as_gnu_tar_extracts_them() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let mut contents = BTreeSet::new();
    let mut used = BTreeSet::new();
    let mut wrong = Vec::new();
    let mut same = 0;
    for file in corpora() {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let archive = fs::read(&file).unwrap();
        let plain = if name.ends_with(".gz") { gunzip(&archive) } else { archive.clone() };
        if !contents.insert(Sha256::digest(&plain)) {
            continue;
        }
        // As it is, gzip or not.
        fs::write(place.path("layer.tar"), &archive).unwrap();
        let refused = REFUSED.iter().find(|line| line.0 == name);
        let converted = match (place.convert("tar:layer.tar"), refused) {
            (Ok(converted), None) => converted,
            (Ok(_), Some(_)) => {
                wrong.push(format!("{}: listed as refused, but converted", file.display()));
                continue;
            }
            (Err(error), Some((_, part, _))) if error.to_string().contains(part) => {
                used.insert(name);
                continue;
            }
            (Err(error), _) => {
                wrong.push(format!("{}: {error}", file.display()));
                continue;
            }
        };
        // fsck.erofs looks at it on the way.
        let ours = place.only_layer(&converted);
        let theirs = extract(&place, &plain);
        if let Some((_, part, _)) = NOT_EXTRACTED.iter().find(|line| line.0 == name) {
            match theirs {
                Err(said) if said.contains(part) => drop(used.insert(name)),
                Err(said) => wrong.push(format!("{}: GNU tar says {said}", file.display())),
                Ok(_) => wrong.push(format!("{}: listed, but GNU tar extracts it", file.display())),
            }
            continue;
        }
        let theirs = match theirs {
            Ok(theirs) => theirs,
            Err(said) => {
                wrong.push(format!("{}: GNU tar says {said}", file.display()));
                continue;
            }
        };
        let options = Compare { any_mtime: without_entry(&plain), cap: 100, ..Compare::exact() };
        let mut found = diff(&ours, &theirs, &options);
        if let Some((_, parts, _)) = DIFFERENT.iter().find(|line| line.0 == name) {
            for part in *parts {
                if !found.iter().any(|line| line.contains(part)) {
                    wrong.push(format!("{}: no difference with {part:?}", file.display()));
                }
            }
            found.retain(|line| !parts.iter().any(|part| line.contains(part)));
            used.insert(name);
        }
        if !found.is_empty() {
            wrong.push(format!("{}:\n    {}", file.display(), found.join("\n    ")));
        }
        same += 1;
    }
    let listed = REFUSED.iter().chain(NOT_EXTRACTED).map(|line| line.0);
    for name in listed.chain(DIFFERENT.iter().map(|line| line.0)) {
        if !used.contains(name) {
            wrong.push(format!("{name} is listed for nothing"));
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert!(same > 30, "only {same} archives were compared");
}

/// The tree that GNU tar makes, or what it complains of.
fn extract(place: &Place, archive: &[u8]) -> Result<Snapshot, String> {
    let (file, out) = (place.path("plain.tar"), place.path("extracted"));
    let _ = fs::remove_dir_all(&out);
    fs::create_dir(&out).unwrap();
    fs::write(&file, archive).unwrap();
    let output = Command::new(require::tool("tar", "tar"))
        .args(["--numeric-owner", "--same-owner", "-p", "--xattrs", "--xattrs-include=*", "--acls", "-C"])
        .arg(&out)
        .arg("-xf")
        .arg(&file)
        .env("LC_ALL", "C")
        .output()
        .unwrap();
    if output.status.success() {
        Ok(Snapshot::of(&out).unwrap())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

/// Directories that have no entry, the root too: their times are of the moment that GNU tar made them.
fn without_entry(archive: &[u8]) -> Vec<Vec<u8>> {
    let mut parser = Parser::new(Limits::default());
    let mut paths = Paths::default();
    let mut input = archive;
    drive(&mut parser, &mut input, &mut paths).expect("it was converted");
    paths.parents.difference(&paths.directories).cloned().collect()
}

#[derive(Default)]
struct Paths {
    directories: BTreeSet<Vec<u8>>,
    parents: BTreeSet<Vec<u8>>,
}

impl EntrySink for Paths {
    type Error = std::convert::Infallible;

    fn entry(&mut self, entry: Entry) -> Result<(), Self::Error> {
        let names = entry.path.split(|&byte| byte == b'/').filter(|name| !name.is_empty() && *name != b".");
        let names: Vec<&[u8]> = names.collect();
        for count in 0..names.len() {
            self.parents.insert(names[..count].join(&b'/'));
        }
        if entry.kind == EntryKind::Directory {
            self.directories.insert(names.join(&b'/'));
        }
        Ok(())
    }

    fn data(&mut self, _: u64, _: &[u8]) -> Result<(), Self::Error> {
        Ok(())
    }

    fn end_entry(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }
}
