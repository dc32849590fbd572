//! Many images in one run: what becomes of each, and of the rest.

use crate::program::{layer, layers, report, said, signal};
use crate::support::{Hashed, list};
use fixtures::faulty_proxy::{Fault, FaultyProxy};
use fixtures::mounts;
use fixtures::oci::{Compression, Image, Layer, Layout};
use fixtures::registry::Registry;
use fs3_client::{Store, StoreLocation};
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant, SystemTime};

struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self { dir: mounts::scratch() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn store(&self) -> Store {
        Store::open(&self.path("store")).unwrap()
    }

    /// Writes a layout with one image.
    fn layout(&self, name: &str, layers: &[Layer]) -> String {
        let image = layers.iter().fold(Image::new(), |image, layer| image.layer(layer.clone()));
        Layout::new().image("t", image).write(&self.path(name)).unwrap();
        format!("oci:{}:t", self.path(name).display())
    }

    /// Writes `count` images that share a base, and their list.
    fn family(&self, count: u64, files: u64) -> Vec<String> {
        let base = layer(1, files, Compression::Gzip);
        let image = |n| self.layout(&format!("oci{n}"), &[base.clone(), layer(100 + n, files, Compression::Gzip)]);
        let sources: Vec<String> = (0..count).map(image).collect();
        let lines = sources.iter().enumerate().map(|(n, source)| format!("{source} family/{n}:1"));
        fs::write(self.path("list"), lines.collect::<Vec<_>>().join("\n")).unwrap();
        sources
    }

    fn batch(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dsec-convert"));
        command.arg("batch").arg(self.path("list")).arg("--store").arg(self.path("store")).args(args);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn run(&self, args: &[&str]) -> Told {
        Told::of(self.batch(args).output().unwrap())
    }
}

/// What a batch said.
#[derive(Debug)]
struct Told {
    images: Vec<Value>,
    totals: Value,
    said: String,
    code: Option<i32>,
}

impl Told {
    fn of(output: Output) -> Self {
        let mut lines: Vec<Value> = String::from_utf8(output.stdout.clone())
            .unwrap()
            .lines()
            .map(|l| serde_json::from_str(l).unwrap())
            .collect();
        let totals = lines.pop().unwrap_or_default()["totals"].clone();
        lines.sort_by_key(|line| line["line"].as_u64());
        Self { images: lines, totals, said: said(&output), code: output.status.code() }
    }

    fn statuses(&self) -> Vec<&str> {
        self.images.iter().map(|image| image["status"].as_str().unwrap()).collect()
    }
}

/// Everything below a directory: paths, sizes, times.
fn everything(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let meta = fs::symlink_metadata(&path).unwrap();
        found.push(format!("{} {} {:?}", path.display(), meta.len(), meta.modified().unwrap()));
        if meta.is_dir() {
            found.extend(everything(&path));
        }
    }
    found.sort();
    found
}

#[test]
fn goes_on_past_failures_and_reports_each() {
    let place = Place::new();
    let sources = place.family(3, 20);
    // One source is not there, one is damaged: the largest blob is a layer.
    let blobs = fs::read_dir(place.path("oci1/blobs/sha256")).unwrap().map(|entry| entry.unwrap().path());
    let largest = blobs.max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap();
    let mut bytes = fs::read(&largest).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&largest, bytes).unwrap();
    let text = format!(
        "# three and a half\n{}  a:1\n{} b # later\noci:/nowhere c\n\n{} d\n",
        sources[0], sources[1], sources[2]
    );
    fs::write(place.path("list"), text).unwrap();
    let told = place.run(&["--jobs", "2"]);
    assert_eq!(told.statuses(), ["ok", "failed", "failed", "ok"], "{told:?}");
    assert_eq!(told.code, Some(3), "{}", told.said);
    let [a, b, c, d] = &told.images[..] else { panic!("{told:?}") };
    assert_eq!((&a["name"], &a["source"], &a["layers"]), (&"a:1".into(), &sources[0].clone().into(), &2.into()));
    assert!(a["manifest"].as_str().unwrap().starts_with("sha256:") && a["bytes"].as_u64().unwrap() > 100_000);
    assert_eq!((&b["exit"], &c["exit"], &c["line"]), (&3.into(), &1.into(), &4.into()));
    assert!(c["error"].as_str().unwrap().contains("/nowhere"), "{c}");
    // What another image had done is not done again; which of them was first is chance.
    let reused: u64 = [a, d].iter().map(|image| image["layers_reused"].as_u64().unwrap()).sum();
    assert!(reused <= 2);
    assert_eq!((&told.totals["ok"], &told.totals["failed"], &told.totals["left"]), (&2.into(), &2.into(), &0.into()));
    assert!(told.said.contains("2 of 4 images converted, 0 skipped, 2 failed"), "{}", told.said);
    assert_eq!(place.store().list_refs().unwrap().len(), 2);
    // Alone, a missing source is no corruption; and images of a batch are those of single runs.
    fs::write(place.path("list"), "oci:/nowhere c").unwrap();
    assert_eq!(place.run(&[]).code, Some(1));
    let alone = crate::support::Place::new();
    let expected =
        crate::program::run(&mut crate::program::convert(&sources[2], alone.store.local_dir().unwrap().root(), "d"));
    assert_eq!(expected["manifest"], d["manifest"]);
    Hashed::all(&place.store());
    assert_eq!(list(&place.store().scratch()), [""; 0]);
}

#[test]
fn a_list_that_is_wrong_begins_nothing() {
    let place = Place::new();
    for (text, expected) in [
        ("oci:a x\noci:b x:latest\n", "lines 1 and 2 both are to become x:latest"),
        ("oci:a\n", "line 1: a source and"),
    ] {
        fs::write(place.path("list"), text).unwrap();
        let output = place.batch(&[]).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(said(&output).contains(expected) && output.stdout.is_empty(), "{}", said(&output));
        assert!(!place.path("store").exists());
    }
    let missing = Command::new(env!("CARGO_BIN_EXE_dsec-convert"))
        .args(["batch", "/nowhere/list", "--store"])
        .arg(place.path("store"))
        .output()
        .unwrap();
    assert_eq!(missing.status.code(), Some(1));
    assert!(said(&missing).contains("/nowhere/list"));
}

#[test]
fn the_list_may_come_by_standard_input() {
    let place = Place::new();
    place.family(1, 10);
    let text = fs::read(place.path("list")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_dsec-convert"));
    command.args(["batch", "-", "--store"]).arg(place.path("store"));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&text).unwrap();
    assert_eq!(Told::of(child.wait_with_output().unwrap()).statuses(), ["ok"]);
}

#[test]
fn what_was_done_is_not_done_again() {
    let place = Place::new();
    place.family(3, 20);
    let first = place.run(&["--jobs", "1"]);
    assert_eq!((first.code, &first.totals["layers_reused"]), (Some(0), &2.into()), "{first:?}");
    let again = place.run(&[]);
    assert_eq!((again.code, &again.totals["layers_reused"]), (Some(0), &6.into()), "{again:?}");
    assert_eq!(again.images[2]["manifest"], first.images[2]["manifest"]);
    // No layer is read for it: without its layers, a layout is resolved all the same.
    for n in 0..3 {
        for entry in fs::read_dir(place.path(&format!("oci{n}/blobs/sha256"))).unwrap() {
            let path = entry.unwrap().path();
            let len = fs::metadata(&path).unwrap().len();
            if len > 20_000 {
                fs::File::create(&path).unwrap().set_len(len).unwrap();
            }
        }
    }
    let skipped = place.run(&["--skip-existing"]);
    assert_eq!(skipped.statuses(), ["skipped"; 3], "{skipped:?}");
    assert_eq!(skipped.images[0]["manifest"], first.images[0]["manifest"]);
    // Other options are another image.
    let other = place.run(&["--skip-existing", "--inline-max", "0"]);
    assert_eq!((other.statuses(), other.code), (vec!["failed"; 3], Some(3)), "{other:?}");
    // A ref that lost a blob is made again.
    let blobs = fs::read_dir(place.path("store/blobs/sha256")).unwrap().map(|entry| entry.unwrap().path());
    let largest = blobs.max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap();
    fs::remove_file(largest).unwrap();
    assert!(place.run(&["--skip-existing"]).statuses().contains(&"failed"));
}

#[test]
fn a_dry_run_writes_nothing() {
    let place = Place::new();
    let sources = place.family(2, 20);
    let told = place.run(&["--dry-run"]);
    assert_eq!((told.statuses(), told.code), (vec!["ok"; 2], Some(0)), "{told:?}");
    assert_eq!((&told.images[0]["layers"], &told.images[0]["layers_reused"]), (&2.into(), &0.into()));
    assert!(told.said.contains("2 of 2 images would be converted"), "{}", told.said);
    let convert = || {
        let mut command = crate::program::convert(&sources[0], &place.path("store"), "x:1");
        report(&command.arg("--dry-run").output().unwrap())
    };
    assert_eq!(convert()["plan"]["layers"][1]["reused"], false);
    assert!(!place.path("store").exists(), "not even the store");
    place.run(&[]);
    let long_ago = SystemTime::now() - Duration::from_secs(86_400);
    for blob in list(&place.path("store/blobs/sha256")) {
        fs::File::open(place.path("store/blobs/sha256").join(blob)).unwrap().set_modified(long_ago).unwrap();
    }
    // With their ages: who only looks renews nothing.
    let before = everything(&place.path("store"));
    let told = place.run(&["--dry-run"]);
    assert_eq!((&told.totals["layers"], &told.totals["layers_reused"]), (&4.into(), &4.into()));
    assert_eq!(place.run(&["--dry-run", "--skip-existing"]).statuses(), ["skipped"; 2]);
    assert_eq!(convert()["plan"]["layers"][1]["reused"], true);
    assert_eq!(everything(&place.path("store")), before);
}

#[test]
fn an_image_that_takes_too_long_is_ended() {
    let place = Place::new();
    let sources = place.family(1, 10);
    let big = place.layout("big", &layers(7, 400));
    fs::write(place.path("list"), format!("{big} big\n{} small", sources[0])).unwrap();
    let told = place.run(&["--timeout", "0s", "--jobs", "1"]);
    assert_eq!((told.statuses()[0], told.code), ("timeout", Some(1)), "{told:?}");
    assert!(told.images[0]["error"].as_str().unwrap().contains("it was not done after"), "{told:?}");
    assert_eq!(list(&place.store().scratch()), [""; 0]);
    assert_eq!(place.store().leases().unwrap(), []);
    assert_eq!(place.run(&["--timeout", "1h"]).statuses(), ["ok", "ok"]);
}

/// A registry that takes a request and never answers costs its image, and no other.
#[test]
fn a_source_that_hangs_is_left() {
    let place = Place::new();
    let sources = place.family(2, 10);
    let registry = Registry::start();
    registry.push(&sources[0], "hangs");
    let proxy = FaultyProxy::honest(registry.address());
    proxy.set_script(|request| (request.method == "GET").then(|| Fault::Stall(Duration::from_secs(600))));
    let text = format!("docker://{}/hangs:latest a\n{} b\n", proxy.address(), sources[1]);
    fs::write(place.path("list"), text).unwrap();
    let began = Instant::now();
    let told = place.run(&["--timeout", "3s", "--jobs", "1"]);
    assert_eq!((told.statuses(), told.code), (vec!["timeout", "ok"], Some(1)), "{told:?}");
    assert!(began.elapsed() < Duration::from_secs(60), "it waited for {:?}", began.elapsed());
    assert_eq!((list(&place.store().scratch()), place.store().leases().unwrap()), (Vec::new(), Vec::new()));
}

#[test]
fn the_first_failure_may_end_it() {
    let place = Place::new();
    place.family(3, 10);
    let text = format!("oci:/nowhere x\n{}", fs::read_to_string(place.path("list")).unwrap());
    fs::write(place.path("list"), text).unwrap();
    let told = place.run(&["--fail-fast", "--jobs", "1"]);
    assert_eq!((told.statuses(), told.code, &told.totals["left"]), (vec!["failed"], Some(1), &3.into()), "{told:?}");
}

#[test]
fn a_signal_ends_it_cleanly() {
    for (number, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let place = Place::new();
        place.family(12, 60);
        let mut child = place.batch(&["--jobs", "1"]).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let mut first = String::new();
        lines.read_line(&mut first).unwrap();
        signal(&child, number);
        let rest: Vec<String> = lines.lines().map(Result::unwrap).collect();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{}", said(&output));
        let totals: Value = serde_json::from_str(rest.last().unwrap()).unwrap();
        let left = totals["totals"]["left"].as_u64().unwrap();
        assert!(left > 0 && said(&output).contains(&format!("{left} left; the same command")), "{}", said(&output));
        let store = place.store();
        assert_eq!((list(&store.scratch()), store.leases().unwrap()), (Vec::new(), Vec::new()));
        Hashed::all(&store);
        let after = place.run(&["--skip-existing"]);
        assert_eq!((after.code, &after.totals["images"]), (Some(0), &12.into()), "{after:?}");
        assert_eq!(after.totals["skipped"].as_u64().unwrap(), 12 - left);
    }
}

#[test]
fn killed_and_run_again() {
    let place = Place::new();
    place.family(6, 30);
    let mut hashed = Hashed::default();
    for round in 0..12 {
        let mut child = place.batch(&[]).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(20 + 35 * round));
        signal(&child, Signal::KILL);
        child.wait().unwrap();
        if place.path("store").exists() {
            hashed.assert_sound(&place.store());
        }
    }
    let told = place.run(&["--skip-existing"]);
    assert_eq!(told.code, Some(0), "{told:?}");
    assert_eq!((list(&place.store().scratch()), place.store().list_refs().unwrap().len()), (Vec::new(), 6));
    let location = StoreLocation::Dir(place.path("store"));
    assert_eq!(place.store().location(), location);
}
