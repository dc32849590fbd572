//! Converters that end before they are done: by signals, and for want of room.

use crate::program::{convert, layers, report, run, said, signal};
use crate::support::{Hashed, Place, list};
use fixtures::content::splitmix64;
use fixtures::{mounts, require};
use fs3_client::Store;
use rustix::process::Signal;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Rounds of the test of kill -9; DSEC_KILL_ROUNDS says otherwise.
fn rounds() -> u64 {
    std::env::var("DSEC_KILL_ROUNDS").map_or(200, |text| text.parse().expect("DSEC_KILL_ROUNDS is a number"))
}

fn reused(report: &serde_json::Value) -> usize {
    report["layers"].as_array().unwrap().iter().filter(|layer| layer["reused"] == true).count()
}

fn records(store: &Store) -> usize {
    list(&store.local_dir().unwrap().root().join("converted")).len()
}

/// One converter of many in the same store: each has its own limit for inline files, so all its layers are new.
fn attempt(source: &str, store: &Store, inline_max: u64) -> Command {
    let mut command = convert(source, store.local_dir().unwrap().root(), &format!("killed:{inline_max}"));
    command.arg("--inline-max").arg(inline_max.to_string());
    command
}

#[test]
fn killed_at_any_instant() {
    let place = Place::new();
    let source = place.layout(&layers(1, 60));
    let mut hashed = Hashed::default();
    // A run that is not interrupted tells how long one takes.
    let began = Instant::now();
    run(&mut attempt(&source, &place.store, 1));
    let mut whole = began.elapsed();
    let mut inline_max = 2;
    let (mut killed, mut finished_layers, mut reused_layers) = (0, 0, 0);
    let mut before = records(&place.store);
    for round in 0..rounds() {
        let mut child = attempt(&source, &place.store, inline_max).spawn().unwrap();
        let part = u32::try_from(splitmix64(round) % 1000).unwrap();
        std::thread::sleep(whole * part / 1000);
        signal(&child, Signal::KILL);
        let status = child.wait().unwrap();
        hashed.assert_sound(&place.store);
        let done = records(&place.store) - before;
        assert!(done <= 3, "{done} records of three layers");
        if status.signal() == Some(9) {
            killed += 1;
        } else {
            // It was done before: the machine was busier when the length was taken.
            whole = whole * 9 / 10;
        }
        if status.success() || done == 3 || round % 4 == 3 {
            // What was finished before counts, whatever killed its converter; nothing of the killed ones stays.
            let report = run(&mut attempt(&source, &place.store, inline_max));
            assert_eq!(reused(&report), done, "layers reused in round {round}");
            assert_eq!(list(&place.store.scratch()), [""; 0], "round {round}");
            hashed.assert_sound(&place.store);
            (finished_layers, reused_layers) = (finished_layers + done, reused_layers + reused(&report));
            inline_max += 1;
            before = records(&place.store);
        }
    }
    assert!(killed * 2 > rounds(), "only {killed} of {} were killed, at up to {whole:?}", rounds());
    assert!(finished_layers > 0 && reused_layers > 0, "no round was interrupted between layers");
    // All that was named is as if nothing had happened.
    let other = Place::new();
    let expected = run(&mut attempt(&source, &other.store, 2));
    let found = run(&mut attempt(&source, &place.store, 2));
    assert_eq!(found["manifest"], expected["manifest"]);
    Hashed::all(&place.store);
}

#[test]
fn interrupted_and_terminated() {
    let place = Place::new();
    let source = place.layout(&layers(5, 200));
    for (name, number) in [(Signal::INT, 2), (Signal::TERM, 15), (Signal::HUP, 1)] {
        let mut child = convert(&source, place.store.local_dir().unwrap().root(), "a:b").spawn().unwrap();
        std::thread::sleep(Duration::from_millis(30));
        signal(&child, name);
        let status = child.wait().unwrap();
        // Dead by the signal, as a shell and its scripts expect, or with the number that stands for it.
        assert!(status.signal() == Some(number) || status.code() == Some(128 + number), "{status}");
        assert_eq!(place.store.list_refs().unwrap().len(), 0);
        Hashed::all(&place.store);
    }
    run(&mut convert(&source, place.store.local_dir().unwrap().root(), "a:b"));
    assert_eq!(list(&place.store.scratch()), [""; 0]);
}

fn resize(tmpfs: &Path, bytes: u64) {
    let output = Command::new("mount").arg("-o").arg(format!("remount,size={bytes}")).arg(tmpfs).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
}

#[test]
fn privileged_no_space() {
    if !require::root() {
        return;
    }
    mounts::in_private_namespace(|| {
        let place = Place::new();
        let source = place.layout(&layers(9, 60));
        let disk = mounts::tmpfs(64 << 10).unwrap();
        let root = disk.path().join("store");
        let mut size = 64 << 10;
        let mut failures = 0;
        let report = loop {
            let output = convert(&source, &root, "a:b").args(["--jobs", "1"]).output().unwrap();
            if output.status.success() {
                break report(&output);
            }
            failures += 1;
            let said = said(&output);
            assert_eq!(output.status.code(), Some(1), "{said}");
            assert!(said.contains("No space left on device") && said.lines().count() <= 2, "{said}");
            let store = Store::create(&root).unwrap();
            assert_eq!(store.list_refs().unwrap().len(), 0);
            assert_eq!(list(&store.scratch()), [""; 0], "at {size} bytes");
            Hashed::all(&store);
            size += 512 << 10;
            resize(disk.path(), size);
        };
        assert!(failures > 3, "{failures} runs had too little room");
        assert!(reused(&report) > 0, "a layer that was finished is not made again: {report}");
        let store = Store::open(&root).unwrap();
        let expected = run(&mut convert(&source, place.store.local_dir().unwrap().root(), "a:b"));
        assert_eq!(report["manifest"], expected["manifest"]);
        Hashed::all(&store);
    });
}
