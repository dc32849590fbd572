//! `dsec-convert convert --dedup`: several at once, killed ones, and what they say.

use crate::program::{convert, layers, report, run, said};
use crate::support::{Hashed, Place};
use fixtures::oci;
use serde_json::json;
use std::process::{Child, Command};

/// Related images: each has a layer of its own, and copies of files of the others.
fn related(place: &Place, images: u64) -> Vec<String> {
    (0..images)
        .map(|n| {
            let mut script = String::new();
            for m in 0..6 {
                let seed = n + m;
                script += &format!("f d/{m} size={} fill=random:{seed} mtime=3\n", 100_000 + seed * 40_000);
            }
            let dir = place.path(format!("oci{n}"));
            let image = oci::Image::new().layer(oci::Layer::text(&script));
            oci::Layout::new().image("t", image).write(&dir).unwrap();
            format!("oci:{}:t", dir.display())
        })
        .collect()
}

fn verify(place: &Place, name: &str) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dsec-convert"));
    let output =
        command.arg("verify").arg(place.store.local_dir().unwrap().root()).args([name, "--deep"]).output().unwrap();
    assert!(output.status.success(), "{name}: {}", said(&output));
}

#[test]
fn bytes_saved_are_reported() {
    let place = Place::new();
    let sources = related(&place, 2);
    run(&mut convert(&sources[0], place.store.local_dir().unwrap().root(), "a:1"));
    let report = run(convert(&sources[1], place.store.local_dir().unwrap().root(), "a:2").args([
        "--dedup",
        "tables",
        "--min-saved",
        "0",
    ]));
    let (layer, totals) = (&report["layers"][0], &report["totals"]);
    // Five files of six: 140, 180, 220, 260 and 300 thousand bytes, in blocks.
    let saved: u64 = [140_000u64, 180_000, 220_000, 260_000, 300_000].iter().map(|n| n.next_multiple_of(4096)).sum();
    assert!(layer["referred_bytes"].as_u64().unwrap() >= saved, "{layer}");
    assert_eq!((&layer["referred_blobs"], &totals["referred_blobs"]), (&json!(1), &json!(1)));
    assert_eq!(layer["referred_bytes"], totals["referred_bytes"]);
    assert!(layer["lookups"].as_u64() >= layer["referred_chunks"].as_u64());
    verify(&place, "a:2");
}

/// Any number of converters with indexes of their own.
#[test]
fn several_at_once() {
    let place = Place::new();
    let sources = related(&place, 4);
    for round in 0..3 {
        let start = |n: usize| -> Child {
            let mut command =
                convert(&sources[n % 4], place.store.local_dir().unwrap().root(), &format!("i{n}:{round}"));
            command.args(["--dedup", "tables", "--min-saved", "0", "--max-devices", &(round + 1).to_string()]);
            command.spawn().unwrap()
        };
        let children: Vec<Child> = (0..8).map(start).collect();
        for child in children {
            report(&child.wait_with_output().unwrap());
        }
    }
    Hashed::all(&place.store);
    for (name, _) in place.store.list_refs().unwrap() {
        verify(&place, &name.to_string());
    }
}

#[test]
fn command_lines_that_make_no_sense() {
    let place = Place::new();
    let source = place.layout(&layers(1, 4));
    for (args, what) in [
        (&["--dedup", "some"][..], "it is none, tables, db or db:DIR"),
        (&["--dedup-against", "a:b"], "--dedup-against goes with --dedup tables"),
        (&["--dedup", "tables", "--max-devices", "65001"], "65001"),
        (&["--dedup", "tables", "--dedup-memory", "1 MB"], "is no unit"),
    ] {
        let output = convert(&source, place.store.local_dir().unwrap().root(), "a:b").args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", said(&output));
        assert!(said(&output).contains(what), "{args:?}: {}", said(&output));
    }
    let against = ["--dedup", "tables", "--dedup-against", "a:none"];
    let output = convert(&source, place.store.local_dir().unwrap().root(), "a:b").args(against).output().unwrap();
    assert!(output.status.code() == Some(1) && said(&output).contains("a:none"), "{}", said(&output));
}

#[cfg(not(feature = "dictionary"))]
#[test]
fn without_a_database_the_other_way_is_named() {
    let place = Place::new();
    let source = place.layout(&layers(1, 4));
    let output =
        convert(&source, place.store.local_dir().unwrap().root(), "a:b").args(["--dedup", "db"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("built without RocksDB") && said(&output).contains("--dedup tables"));
}

#[cfg(feature = "dictionary")]
mod database {
    use super::*;
    use crate::program::signal;
    use fixtures::content::splitmix64;
    use rustix::process::Signal;
    use std::path::PathBuf;
    use std::time::{Duration, Instant};

    fn dictionary(place: &Place) -> PathBuf {
        let mut path = place.store.local_dir().unwrap().root().as_os_str().to_owned();
        path.push(".dict");
        path.into()
    }

    fn with_db(source: &str, place: &Place, name: &str) -> Command {
        let mut command = convert(source, place.store.local_dir().unwrap().root(), name);
        command.args(["--dedup", "db", "--min-saved", "0"]);
        command
    }

    fn look(place: &Place, command: &str) -> serde_json::Value {
        let mut program = Command::new(env!("CARGO_BIN_EXE_dsec-convert"));
        run(program.args(["dictionary", command]).arg(place.store.local_dir().unwrap().root()).arg("--json"))
    }

    #[test]
    fn a_second_writer_is_told() {
        let place = Place::new();
        let source = place.layout(&layers(1, 4));
        let held = converter::dictionary::db::Db::open(&dictionary(&place)).unwrap();
        let output = with_db(&source, &place, "a:b").output().unwrap();
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("is in use by another process") && said.contains("hint: ") && said.contains("tables"));
        assert_eq!(said.lines().count(), 2, "{said}");
        drop(held);
        run(&mut with_db(&source, &place, "a:b"));
    }

    #[test]
    fn it_is_counted_and_made_anew() {
        let place = Place::new();
        let sources = related(&place, 3);
        for (n, source) in sources.iter().enumerate() {
            run(&mut with_db(source, &place, &format!("i:{n}")));
        }
        let before = look(&place, "stat");
        assert_eq!((&before["blobs"], &before["incomplete"]), (&json!(3), &json!(0)));
        std::fs::remove_dir_all(dictionary(&place)).unwrap();
        for _ in 0..2 {
            let after = look(&place, "rebuild");
            assert_eq!((&after["blobs"], &after["chunks"]), (&before["blobs"], &before["chunks"]));
            assert_eq!(after["warnings"], json!([]));
        }
    }

    #[test]
    fn files_that_are_no_database_are_refused_and_made_anew() {
        let place = Place::new();
        let source = place.layout(&layers(1, 4));
        run(&mut with_db(&source, &place, "a:b"));
        for entry in std::fs::read_dir(dictionary(&place)).unwrap() {
            let path = entry.unwrap().path();
            if path.file_name().unwrap().to_string_lossy().starts_with("MANIFEST") {
                std::fs::write(path, b"nonsense").unwrap();
            }
        }
        let output = with_db(&source, &place, "a:b").output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(said(&output).contains("dictionary rebuild"), "{}", said(&output));
        look(&place, "rebuild");
        run(&mut with_db(&source, &place, "a:b"));
    }

    /// Whatever instant a converter dies at: the dictionary opens, and what it says is true.
    #[test]
    fn killed_at_any_instant() {
        let place = Place::new();
        let sources = related(&place, 5);
        let began = Instant::now();
        run(&mut with_db(&sources[0], &place, "whole:0"));
        let whole = began.elapsed();
        let mut killed = 0;
        for round in 0..40u64 {
            let source = &sources[usize::try_from(round % 5).unwrap()];
            let mut command = with_db(source, &place, &format!("i:{round}"));
            // A layer of its own each time.
            command.args(["--inline-max", &(round + 1).to_string()]);
            let mut child = command.spawn().unwrap();
            std::thread::sleep(
                whole * u32::try_from(splitmix64(round) % 1200).unwrap() / 1000 + Duration::from_millis(1),
            );
            signal(&child, Signal::KILL);
            killed += u32::from(!child.wait().unwrap().success());
            Hashed::all(&place.store);
        }
        assert!(killed > 10, "{killed}");
        for (n, source) in sources.iter().enumerate() {
            let name = format!("last:{n}");
            run(&mut with_db(source, &place, &name));
            verify(&place, &name);
        }
        // All chunks of the ten files, whichever blobs have them.
        let chunks: u64 = (0..10u64).map(|seed| (100_000 + seed * 40_000).div_ceil(16 << 10)).sum();
        let stat = look(&place, "stat");
        assert!(stat["chunks"].as_u64() >= Some(chunks) && stat["blobs"].as_u64() >= Some(2), "{stat}");
    }
}
