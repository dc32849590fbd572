//! Images in an S3 bucket: a real server, a proxy before it that breaks things, and the program.

use crate::program::{convert, layers, report, run, said};
use crate::support::Place;
use fixtures::faulty_proxy::{Fault, FaultyProxy};
use fixtures::s3::S3Server;
use fs3_client::Digest;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::mpsc;
use std::time::Duration;

const STORE: &str = "s3://images/team/store";

/// A server with a bucket, and a proxy that every program goes through.
struct Cloud {
    server: S3Server,
    proxy: FaultyProxy,
    caches: tempfile::TempDir,
}

impl Cloud {
    fn new() -> Self {
        let server = S3Server::start(&["images"]);
        let proxy = FaultyProxy::honest(server.address());
        Self { server, proxy, caches: tempfile::tempdir().unwrap() }
    }

    /// The same command on the machine `name`, which has its own cache.
    fn on(&self, name: &str, mut command: Command) -> Command {
        command.envs(S3Server::environment(&self.proxy.url()));
        command.env("DSEC_STORE_CACHE", self.caches.path().join(name));
        command
    }

    fn convert(&self, machine: &str, source: &str, name: &str) -> Command {
        self.on(machine, convert(source, Path::new(STORE), name))
    }

    fn ask(&self, machine: &str, words: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dsec-convert"));
        command.args(words);
        self.on(machine, command).output().unwrap()
    }

    fn dir(&self, part: &str) -> PathBuf {
        self.server.bucket("images").join("team/store").join(part)
    }

    fn names(&self, part: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.dir(part)) else { return Vec::new() };
        let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// All blobs in the bucket, each of them what its name says.
    fn sound_blobs(&self) -> Vec<String> {
        let names = self.names("blobs/sha256");
        for name in &names {
            let bytes = fs::read(self.dir("blobs/sha256").join(name)).unwrap();
            assert_eq!(&Digest::of(&bytes).hex(), name, "a blob in the bucket is damaged");
        }
        names
    }
}

fn json(output: &Output) -> serde_json::Value {
    assert!(output.status.success(), "{}", said(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Converted through a bad network, an image is the same as in a directory; and list, inspect and verify see it from
/// another machine.
#[test]
fn an_image_goes_to_s3_and_is_read_from_there() {
    let (place, cloud) = (Place::new(), Cloud::new());
    let source = place.layout(&layers(40, 80));
    let expected = run(&mut convert(&source, place.store.local_dir().unwrap().root(), "a:b"));
    let faults = [
        Fault::Reset,
        Fault::LoseAnswer,
        Fault::Status { status: 503, retry_after: None },
        Fault::ResetBody { after: 3000 },
        Fault::Truncate { after: 100 },
        Fault::ClaimWhole,
        Fault::WrongRequestBytes { at: 100 },
    ];
    let mut met = 0;
    cloud.proxy.set_script(move |request| {
        if request.number % 6 != 4 {
            return None;
        }
        met += 1;
        Some(faults[met % faults.len()].clone())
    });
    let found = run(&mut cloud.convert("one", &source, "team/app:1"));
    assert_eq!(found["manifest"], expected["manifest"]);
    assert!(cloud.proxy.log().iter().filter(|handled| handled.fault.is_some()).count() > 3);
    assert_eq!(cloud.sound_blobs(), {
        let mut names: Vec<String> = place.store.list_blobs().unwrap().iter().map(|l| l.digest.hex()).collect();
        names.sort();
        names
    });
    assert_eq!(cloud.names("leases"), [""; 0], "the lease ended with its run");

    let again = run(&mut cloud.convert("two", &source, "team/app:2"));
    assert_eq!(again["totals"]["layers_reused"], 3, "another machine finds the layers");
    let listed = json(&cloud.ask("two", &["list", STORE, "--json"]));
    let images: Vec<&str> = listed["images"].as_array().unwrap().iter().map(|i| i["tag"].as_str().unwrap()).collect();
    assert_eq!(images, ["1", "2"]);
    let verified = json(&cloud.ask("three", &["verify", STORE, "team/app:1", "--deep", "--json"]));
    assert_eq!(verified["sound"], true);
    let inspected = cloud.ask("three", &["inspect", STORE, "team/app:1", "--tree"]);
    assert!(inspected.status.success(), "{}", said(&inspected));
    let local = Command::new(env!("CARGO_BIN_EXE_dsec-convert"))
        .args(["inspect", place.store.local_dir().unwrap().root().to_str().unwrap(), "a:b", "--tree"])
        .output()
        .unwrap();
    let tree = |output: &Output| {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines().filter(|line| line.contains(" /")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert!(tree(&inspected).len() > 100);
    assert_eq!(tree(&inspected), tree(&local));
}

/// Damage in the bucket is found, whatever good copies this machine has.
#[test]
fn verify_reads_the_bucket_and_not_the_copies() {
    let (place, cloud) = (Place::new(), Cloud::new());
    let source = place.layout(&layers(41, 40));
    run(&mut cloud.convert("one", &source, "a:b"));
    assert!(cloud.ask("one", &["verify", STORE, "a:b"]).status.success());
    let image = json(&cloud.ask("one", &["inspect", STORE, "a:b", "--json"]));
    let blob = image["layers"][0]["metadata"]["digest"].as_str().unwrap().trim_start_matches("sha256:").to_owned();
    let path = cloud.dir("blobs/sha256").join(&blob);
    let mut bytes = fs::read(&path).unwrap();
    bytes[2000] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let output = cloud.ask("one", &["verify", STORE, "a:b"]);
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    let problems = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(problems.contains("is corrupt: its contents have sha256:"), "{problems}");
    fs::remove_file(&path).unwrap();
    let output = cloud.ask("one", &["verify", STORE, "a:b"]);
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    let problems = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(problems.contains("is not in the store (s3://images/team/store/blobs/"), "{problems}");
}

/// Killed while its uploads are under way, a converter leaves no name and no half blob; the next run does the rest.
#[test]
fn killed_while_uploading() {
    let place = Place::new();
    let source = place.layout(&layers(42, 60));
    let expected = run(&mut convert(&source, place.store.local_dir().unwrap().root(), "a:b"));
    for stop_at in [1, 4, 7, 10] {
        let cloud = Cloud::new();
        let (tell, hear) = mpsc::channel();
        let mut puts = 0;
        cloud.proxy.set_script(move |request| {
            puts += u64::from(request.method == "PUT" && request.target.contains("/blobs/"));
            if puts < stop_at {
                return None;
            }
            let _ = tell.send(());
            Some(Fault::Stall(Duration::from_secs(2)))
        });
        let mut child = cloud.convert("one", &source, "a:b").spawn().unwrap();
        hear.recv_timeout(Duration::from_secs(60)).expect("the upload never began");
        child.kill().unwrap();
        assert!(!child.wait().unwrap().success());
        cloud.proxy.set_script(|_| None);
        assert_eq!(cloud.names("refs"), [""; 0], "a name although the image was not whole");
        cloud.sound_blobs();
        let found = run(&mut cloud.convert("one", &source, "a:b"));
        assert_eq!(found["manifest"], expected["manifest"]);
        assert!(cloud.ask("two", &["verify", STORE, "a:b", "--deep"]).status.success());
        cloud.sound_blobs();
    }
}

/// Several machines convert to one name at once: each succeeds, and the name is one of theirs, whole.
#[test]
fn machines_race_on_a_name() {
    let (place, cloud) = (Place::new(), Cloud::new());
    let sources: Vec<(Place, String)> = (0..3)
        .map(|n| {
            let own = Place::new();
            let source = own.layout(&layers(50 + n, 20));
            (own, source)
        })
        .collect();
    drop(place);
    let children: Vec<_> = sources
        .iter()
        .enumerate()
        .map(|(n, (_, source))| cloud.convert(&format!("m{n}"), source, "a:b").spawn().unwrap())
        .collect();
    let manifests: Vec<serde_json::Value> =
        children.into_iter().map(|child| report(&child.wait_with_output().unwrap())["manifest"].clone()).collect();
    let listed = json(&cloud.ask("m9", &["list", STORE, "--json"]));
    assert!(manifests.contains(&listed["images"][0]["digest"]), "{listed} is none of {manifests:?}");
    assert!(cloud.ask("m9", &["verify", STORE, "a:b"]).status.success());
}

#[test]
fn what_goes_wrong_is_said_with_the_stores_address() {
    let (place, cloud) = (Place::new(), Cloud::new());
    let output = cloud.ask("x", &["list", STORE]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("s3://images/team/store is not a store"), "{}", said(&output));
    assert!(said(&output).contains("--store"), "no hint: {}", said(&output));
    let source = place.layout(&layers(43, 5));
    let output = cloud.on("x", convert(&source, Path::new("s3://nowhere/x"), "a:b")).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("there is no such bucket"), "{}", said(&output));
    let mut command = cloud.convert("x", &source, "a:b");
    let output = command.env("AWS_SECRET_ACCESS_KEY", "wrong").output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("the secret key is wrong"), "{}", said(&output));
    run(&mut cloud.convert("x", &source, "a:b"));
    let output = cloud.ask("x", &["inspect", STORE, "none:1"]);
    assert!(said(&output).contains("none:1 is not in the store s3://images/team/store"), "{}", said(&output));
    assert!(said(&output).contains("`dsec-convert list s3://images/team/store`"), "{}", said(&output));
    for usage in [["list", "s3:bucket"], ["list", "ftp://x/y"], ["inspect", "s3://images/x"]] {
        assert_eq!(cloud.ask("x", &usage).status.code(), Some(2), "{usage:?}");
    }
}

/// By the rules of 3FS an image is the same as in a plain directory, and needs no local copy to be read from paths.
#[test]
fn an_image_on_3fs_is_the_same() {
    let (place, cloud) = (Place::new(), Cloud::new());
    let source = place.layout(&layers(44, 60));
    let expected = run(&mut convert(&source, place.store.local_dir().unwrap().root(), "a:b"));
    let shared = place.path("shared");
    let location = format!("3fs:{}", shared.display());
    let found = run(&mut cloud.on("one", convert(&source, Path::new(&location), "a:b")));
    assert_eq!(found["manifest"], expected["manifest"]);
    assert!(cloud.ask("two", &["verify", &location, "a:b", "--deep"]).status.success());
    // It is a plain store too, for whoever mounts it.
    assert!(cloud.ask("two", &["verify", shared.to_str().unwrap(), "a:b"]).status.success());
    assert_eq!(crate::support::list(&shared.join("tmp")), [""; 0]);
}

/// From one bucket's store to a registry and into another store, through a network that fails now and then.
#[test]
fn an_image_goes_from_s3_to_a_registry_and_back() {
    let (place, cloud) = (Place::new(), Cloud::new());
    let source = place.layout(&layers(41, 60));
    let manifest = run(&mut cloud.convert("one", &source, "a:b"))["manifest"].clone();
    let registry = fixtures::registry::Registry::start();
    let between = FaultyProxy::honest(registry.address());
    let faults = [Fault::Reset, Fault::Status { status: 503, retry_after: None }, Fault::Truncate { after: 500 }];
    let break_some = move |every: u64| {
        let faults = faults.clone();
        move |request: &fixtures::faulty_proxy::Request| {
            let fault = usize::try_from(request.number / every).unwrap() % faults.len();
            (request.number % every == every - 1).then(|| faults[fault].clone())
        }
    };
    between.set_script(break_some(7));
    cloud.proxy.set_script(break_some(9));
    let target = format!("docker://{}/team/app:1", between.address());
    let sent = json(&cloud.ask("one", &["push", STORE, "a:b", &target, "--json"]));
    assert_eq!(sent["manifest"], manifest);
    const OTHER: &str = "s3://images/other";
    let got = json(&cloud.ask("two", &["pull", &target, OTHER, "--name", "c:d", "--json"]));
    assert_eq!((&got["manifest"], &got["blobs"]), (&manifest, &sent["blobs"]));
    assert_eq!(json(&cloud.ask("three", &["verify", OTHER, "c:d", "--deep", "--json"]))["sound"], true);
    let faulty = |proxy: &FaultyProxy| proxy.log().iter().filter(|handled| handled.fault.is_some()).count();
    assert!(faulty(&between) > 2 && faulty(&cloud.proxy) > 2, "nothing was broken");
    let layout = place.path("exported");
    let exported = format!("oci:{}", layout.display());
    assert_eq!(json(&cloud.ask("two", &["export", OTHER, "c:d", &exported, "--json"]))["manifest"], manifest);
}
