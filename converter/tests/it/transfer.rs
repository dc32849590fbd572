//! Converted images to registries and layouts and back.

use crate::program::{layers, run, signal};
use crate::support::{Hashed, Place, list};
use crate::support_registry::{dsec, fails};
use fixtures::content::splitmix64;
use fixtures::faulty_proxy::{Fault, FaultyProxy, Request};
use fixtures::oci::Layer;
use fixtures::registry::{Registry, skopeo_copy};
use fixtures::require;
use fs3_client::Store;
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A place whose store has the image `a:b`.
fn converted(files: u64) -> (Place, Value) {
    let place = Place::new();
    let source = place.layout(&layers(1, files));
    let mut command = crate::program::convert(&source, place.root(), "a:b");
    let manifest = run(&mut command)["manifest"].clone();
    (place, manifest)
}

impl Place {
    fn root(&self) -> &Path {
        self.store.local_dir().unwrap().root()
    }
}

fn push(place: &Place, target: &str) -> Command {
    dsec(&place.path("home"), &["push", place.root().to_str().unwrap(), "a:b", target, "--json"])
}

fn pull(place: &Place, source: &str, store: &str) -> Command {
    let store = place.path(store);
    dsec(&place.path("home"), &["pull", source, store.to_str().unwrap(), "--name", "c:d", "--json"])
}

fn export(place: &Place, target: &str) -> Command {
    dsec(&place.path("home"), &["export", place.root().to_str().unwrap(), "a:b", target, "--json"])
}

/// Asserts that the image in `store` is the one that was converted, and that nothing is wrong with it.
#[track_caller]
fn whole(place: &Place, store: &str, manifest: &Value) {
    let store = place.path(store);
    let verified = run(&mut dsec(&place.path("home"), &["verify", store.to_str().unwrap(), "c:d", "--deep", "--json"]));
    assert_eq!((&verified["digest"], &verified["sound"]), (manifest, &Value::from(true)));
    Hashed::all(&Store::open(&store).unwrap());
}

#[test]
fn to_a_registry_and_back() {
    let (place, manifest) = converted(20);
    let registry = Registry::start();
    let proxy = FaultyProxy::honest(registry.address());
    let target = format!("docker://{}/team/converted:1", proxy.address());
    let sent = run(&mut push(&place, &target));
    assert_eq!((&sent["manifest"], &sent["blobs_there"]), (&manifest, &Value::from(0)));
    assert!(sent["blobs"].as_u64().unwrap() > 8, "{sent}");
    // What is there is not sent again.
    let before = proxy.log().len();
    let again = run(&mut push(&place, &target));
    assert_eq!((&again["blobs"], &again["blobs_there"]), (&Value::from(0), &sent["blobs"]));
    assert!(proxy.log()[before..].iter().all(|handled| handled.request.method == "HEAD"), "{:?}", proxy.log());
    let pulled = run(&mut pull(&place, &target, "pulled"));
    assert_eq!((&pulled["manifest"], &pulled["blobs"], &pulled["bytes"]), (&manifest, &sent["blobs"], &sent["bytes"]));
    whole(&place, "pulled", &manifest);
    assert_eq!(run(&mut pull(&place, &target, "pulled"))["blobs"], 0);
    // The tag of the image, where none is given.
    run(&mut push(&place, &format!("docker://{}", registry.name("other"))));
    let by_digest = format!("docker://{}@{}", registry.name("other"), manifest.as_str().unwrap());
    assert_eq!(run(&mut pull(&place, &by_digest, "by-digest"))["manifest"], manifest);
    assert_eq!(
        run(&mut pull(&place, &format!("docker://{}:b", registry.name("other")), "by-tag"))["manifest"],
        manifest
    );
    fails(&mut push(&place, &by_digest), 2, &["not to a digest"]);
    fails(&mut push(&place, "oci:x"), 2, &["docker://"]);
}

#[test]
fn skopeo_carries_it() {
    let (place, manifest) = converted(6);
    let (first, second) = (Registry::start(), Registry::start());
    let name = |registry: &Registry, image: &str| format!("docker://{}", registry.name(image));
    run(&mut push(&place, &name(&first, "app:1")));
    skopeo_copy(&[
        "--src-tls-verify=false",
        "--dest-tls-verify=false",
        &name(&first, "app:1"),
        &name(&second, "copy:2"),
    ]);
    run(&mut pull(&place, &name(&second, "copy:2"), "second"));
    whole(&place, "second", &manifest);
    let at = |name: &str| format!("oci:{}", place.path(name).display());
    skopeo_copy(&["--src-tls-verify=false", &name(&second, "copy:2"), &format!("{}:x", at("layout"))]);
    run(&mut pull(&place, &format!("{}:x", at("layout")), "layout-store"));
    whole(&place, "layout-store", &manifest);
    // From our own layout, by skopeo, to an archive and a registry.
    run(&mut export(&place, &format!("{}:mine", at("exported"))));
    let archive = format!("oci-archive:{}", place.path("archive.tar").display());
    skopeo_copy(&[&format!("{}:mine", at("exported")), &format!("{archive}:mine")]);
    run(&mut pull(&place, &archive, "archive-store"));
    whole(&place, "archive-store", &manifest);
    skopeo_copy(&["--dest-tls-verify=false", &format!("{}:mine", at("exported")), &name(&first, "again:1")]);
    run(&mut pull(&place, &name(&first, "again:1"), "again"));
    whole(&place, "again", &manifest);
}

#[test]
fn a_layout_keeps_its_other_images() {
    let (place, manifest) = converted(6);
    // A layout of another tool, with an image in it.
    let ordinary = place.path("oci");
    let target = format!("oci:{}:mine", ordinary.display());
    let written = run(&mut export(&place, &target));
    assert_eq!(written["manifest"], manifest);
    run(&mut pull(&place, &target, "pulled"));
    whole(&place, "pulled", &manifest);
    let again = run(&mut export(&place, &target));
    // The config is the ordinary image's, and was there before.
    assert_eq!(written["blobs_there"], 1);
    assert_eq!(
        (&again["blobs"], again["blobs_there"].as_u64()),
        (&Value::from(0), written["blobs"].as_u64().map(|n| n + 1))
    );
    let index: Value = serde_json::from_slice(&fs::read(ordinary.join("index.json")).unwrap()).unwrap();
    assert_eq!(index["manifests"].as_array().unwrap().len(), 2, "{index}");
    let source = format!("oci:{}:t", ordinary.display());
    run(&mut crate::program::convert(&source, &place.path("still"), "a:b"));
    // A blob that is damaged there is written anew.
    let blob = ordinary.join("blobs/sha256").join(&manifest.as_str().unwrap()[7..]);
    let mut bytes = fs::read(&blob).unwrap();
    bytes[10] ^= 1;
    fs::remove_file(&blob).unwrap();
    fs::write(&blob, bytes).unwrap();
    fs::write(ordinary.join("blobs/sha256/0.dsec-partial"), "of one that was killed").unwrap();
    assert_eq!(run(&mut export(&place, &target))["blobs"], 1);
    run(&mut pull(&place, &target, "mended"));
    whole(&place, "mended", &manifest);
    assert!(list(&ordinary.join("blobs/sha256")).iter().all(|name| name.len() == 64));
    // Hard links, where wanted.
    let linked = place.path("linked");
    run(export(&place, &format!("oci:{}", linked.display())).arg("--link"));
    let name = linked.join("blobs/sha256").join(&manifest.as_str().unwrap()[7..]);
    assert!(fs::metadata(name).unwrap().nlink() > 1);
    run(&mut pull(&place, &format!("oci:{}:b", linked.display()), "from-linked"));
    whole(&place, "from-linked", &manifest);
    fs::write(linked.join("index.json"), "[]").unwrap();
    fails(&mut export(&place, &format!("oci:{}", linked.display())), 1, &["index.json: it is not an image index"]);
    fails(&mut export(&place, "docker://a.b/c"), 2, &["oci:DIR"]);
}

#[test]
fn many_exports_at_once() {
    let (place, manifest) = converted(6);
    let dir = place.path("shared");
    let children: Vec<_> =
        (0..6).map(|n| export(&place, &format!("oci:{}:t{}", dir.display(), n % 4)).spawn().unwrap()).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    for n in 0..4 {
        run(&mut pull(&place, &format!("oci:{}:t{n}", dir.display()), "pulled"));
    }
    whole(&place, "pulled", &manifest);
    let index: Value = serde_json::from_slice(&fs::read(dir.join("index.json")).unwrap()).unwrap();
    assert_eq!(index["manifests"].as_array().unwrap().len(), 4, "{index}");
}

#[test]
fn what_is_no_converted_image() {
    let (place, _) = converted(4);
    let registry = Registry::start();
    let ordinary = format!("oci:{}:t", place.path("oci").display());
    registry.push(&ordinary, "app:1");
    for source in [&ordinary, &format!("docker://{}", registry.name("app:1"))] {
        fails(&mut pull(&place, source, "none"), 1, &["no converted image but an ordinary image of 3 layers"]);
    }
    fails(&mut pull(&place, "dir:/tmp", "none"), 1, &["can hold a converted image"]);
    fails(&mut pull(&place, &format!("docker://{}", registry.name("none:1")), "none"), 1, &["is not in"]);
    let target = format!("docker://{}", registry.name("converted:1"));
    run(&mut push(&place, &target));
    let mut convert = dsec(&place.path("home"), &["convert", &target, "--name", "x:y", "--store"]);
    fails(convert.arg(place.path("none")), 1, &["it is a converted image already; `dsec-convert pull`"]);
    assert_eq!(Store::open(&place.path("none")).unwrap().list_refs().unwrap().len(), 0);
}

#[test]
fn faults_on_the_way_there() {
    let (place, manifest) = converted(8);
    let registry = Registry::start();
    let all: [fn(&Request) -> Option<Fault>; 8] = [
        |r| (r.number % 4 == 1 && r.method != "HEAD").then_some(Fault::Reset),
        |r| (r.number % 5 == 0).then_some(Fault::LoseAnswer),
        |r| (r.method == "PUT" && r.nth_of_target == 0).then_some(Fault::LoseAnswer),
        |r| (r.method == "HEAD" && r.nth_of_target == 0).then_some(Fault::Status { status: 429, retry_after: Some(1) }),
        |r| (r.method == "POST" && r.number % 3 == 0).then_some(Fault::Status { status: 503, retry_after: None }),
        |r| (r.method == "PUT" && r.number % 4 == 0).then_some(Fault::WrongRequestBytes { at: 5 }),
        // An upload that the registry has lost is begun again; a manifest that it will not find is a refusal.
        |r| {
            (r.method == "PUT" && r.target.contains("/blobs/") && r.number % 4 == 0)
                .then_some(Fault::Status { status: 404, retry_after: None })
        },
        |r| (r.number % 6 == 0).then_some(Fault::Stall(Duration::from_secs(3))),
    ];
    for (at, script) in all.into_iter().enumerate() {
        let proxy = FaultyProxy::start(registry.address(), script);
        let target = format!("docker://{}/fault-{at}:1", proxy.address());
        run(push(&place, &target).args(["--attempts", "12", "--connection-timeout", "2"]));
        assert!(proxy.log().iter().any(|handled| handled.fault.is_some()), "{at}");
        run(&mut pull(&place, &format!("docker://{}", registry.name(&format!("fault-{at}:1"))), &format!("s{at}")));
        whole(&place, &format!("s{at}"), &manifest);
    }
    let proxy =
        FaultyProxy::start(registry.address(), |r| (r.method == "PUT").then_some(Fault::WrongRequestBytes { at: 5 }));
    let target = format!("docker://{}/never:1", proxy.address());
    fails(push(&place, &target).args(["--attempts", "2"]), 1, &["failed to write sha256:"]);
    fails(&mut pull(&place, &format!("docker://{}", registry.name("never:1")), "never"), 1, &["manifest 1 is not in"]);
}

#[test]
fn damage_is_found_on_the_way() {
    let (place, manifest) = converted(8);
    let registry = Registry::start();
    let target = format!("docker://{}", registry.name("app:1"));
    run(&mut push(&place, &target));
    let blob = |r: &Request| r.method == "GET" && r.target.contains("/blobs/");
    let proxy = FaultyProxy::start(registry.address(), move |r| blob(r).then_some(Fault::WrongBytes { at: 1000 }));
    let through = format!("docker://{}/app:1", proxy.address());
    fails(&mut pull(&place, &through, "pulled"), 3, &["is damaged: its contents have sha256:"]);
    assert_eq!(Store::open(&place.path("pulled")).unwrap().list_refs().unwrap().len(), 0);
    proxy.set_script(move |r| blob(r).then_some(Fault::Shorten { to: 10 }));
    fails(&mut pull(&place, &through, "pulled"), 3, &["10 bytes where"]);
    proxy.set_script(|_| None);
    run(&mut pull(&place, &through, "pulled"));
    whole(&place, "pulled", &manifest);
    // A store's own damage does not spread.
    let (name, size) = list(&place.root().join("blobs/sha256"))
        .into_iter()
        .map(|name| (name.clone(), fs::metadata(place.root().join("blobs/sha256").join(name)).unwrap().len()))
        .max_by_key(|(_, size)| *size)
        .unwrap();
    let path = place.root().join("blobs/sha256").join(&name);
    let mut bytes = fs::read(&path).unwrap();
    bytes[usize::try_from(size / 2).unwrap()] ^= 1;
    fs::remove_file(&path).unwrap();
    fs::write(&path, bytes).unwrap();
    fails(&mut push(&place, &format!("docker://{}", registry.name("other:1"))), 3, &[&name, "is corrupt"]);
    fails(&mut export(&place, &format!("oci:{}", place.path("x").display())), 3, &[&name, "is damaged"]);
    assert!(!place.path("x/index.json").exists());
}

/// Pushes, pulls and exports that are killed, again and again, and then end well.
#[test]
fn killed_in_the_middle() {
    let (place, manifest) = converted(60);
    let registry = Registry::start();
    let target = |round: u64| format!("docker://{}", registry.name(&format!("killed-{}:1", round / 8)));
    // How long each takes when nobody kills it.
    let timed = |mut command: Command| {
        let began = Instant::now();
        run(&mut command);
        began.elapsed()
    };
    let whole_times = [
        timed(push(&place, &target(1000))),
        timed(pull(&place, &target(1000), "store-whole")),
        timed(export(&place, &format!("oci:{}:t", place.path("layout-whole").display()))),
    ];
    let (mut killed, mut taken_up) = (0, 0);
    for round in 0..24 {
        let part = u32::try_from(splitmix64(round) % 1000).unwrap();
        let layout = format!("oci:{}:t", place.path(format!("layout-{}", round / 8)).display());
        let store = format!("store-{}", round / 8);
        let mut commands = [push(&place, &target(round)), pull(&place, &target(1000), &store), export(&place, &layout)];
        for (command, whole_time) in commands.iter_mut().zip(whole_times) {
            let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            std::thread::sleep(whole_time * part / 1000);
            signal(&child, Signal::KILL);
            killed += u32::from(child.wait().unwrap().signal() == Some(9));
        }
        if let Ok(store) = Store::open(&place.path(&store)) {
            Hashed::all(&store);
        }
        if round % 8 == 7 {
            for command in &mut commands {
                taken_up += u32::from(run(command.stdout(Stdio::piped()).stderr(Stdio::piped()))["blobs_there"] != 0);
            }
            whole(&place, &store, &manifest);
            assert_eq!(list(&place.path(&store).join("tmp")), [""; 0]);
            run(&mut pull(&place, &target(round), &format!("back-{round}")));
            whole(&place, &format!("back-{round}"), &manifest);
            run(&mut pull(&place, &layout, &format!("out-{round}")));
            whole(&place, &format!("out-{round}"), &manifest);
        }
    }
    // Once a first try has brought some blobs, the next ones take less time and are often done before they are killed.
    assert!(killed >= 8 && taken_up >= 5, "{killed} killed, {taken_up} taken up");
}

/// What buildah writes when it commits, where there is one.
#[test]
fn privileged_buildah_archives() {
    if !require::root() {
        return;
    }
    let place = Place::new();
    let buildah = require::tool("buildah", "buildah");
    let storage = place.path("containers");
    let buildah = |args: &[&str]| {
        let mut command = Command::new(&buildah);
        command.args(["--root"]).arg(storage.join("root")).arg("--runroot").arg(storage.join("run"));
        command.args(["--storage-driver", "vfs"]).args(args).env("BUILDAH_ISOLATION", "chroot");
        let output = command.output().unwrap();
        assert!(output.status.success(), "buildah {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    let container = buildah(&["from", "--name", "dsec", "scratch"]);
    for (n, text) in ["one", "two"].into_iter().enumerate() {
        let file = place.path(format!("file-{n}"));
        fs::write(&file, text).unwrap();
        buildah(&["copy", &container, file.to_str().unwrap(), "/etc/"]);
    }
    let archive = format!("oci-archive:{}", place.path("built.tar").display());
    buildah(&["commit", &container, &format!("{archive}:built:1")]);
    let report = run(&mut crate::program::convert(&archive, place.root(), "a:b"));
    assert_eq!(report["totals"]["files"], 2, "{report}");
    let plain = place.layout(&[Layer::text("d etc/\nf etc/file-0 \"one\"\nf etc/file-1 \"two\"")]);
    let expected = run(&mut crate::program::convert(&plain, &place.path("plain"), "a:b"));
    assert_eq!(report["totals"]["inodes"], expected["totals"]["inodes"]);
}

/// While an image is sent, a gc takes nothing of it, whatever becomes of its ref.
#[test]
fn what_is_being_sent_is_not_collected() {
    let (place, manifest) = converted(40);
    let registry = Registry::start();
    let proxy = FaultyProxy::honest(registry.address());
    proxy.set_script(|request| (request.method == "HEAD").then(|| Fault::Stall(Duration::from_millis(700))));
    let target = format!("docker://{}/sent:1", proxy.address());
    let mut command = push(&place, &target);
    let pushing = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    while proxy.log().is_empty() {
        assert!(Instant::now() < until, "it does not begin");
        std::thread::sleep(Duration::from_millis(10));
    }
    place.store.remove_ref(&"a:b".parse().unwrap()).unwrap();
    let gc =
        dsec(&place.path("home"), &["gc", place.root().to_str().unwrap(), "--grace", "0s", "--wait", "0s"]).output();
    assert!(gc.unwrap().status.code().is_some());
    let output = pushing.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    run(&mut pull(&place, &target, "pulled"));
    whole(&place, "pulled", &manifest);
    // When it is done, nothing holds the image any more.
    run(&mut dsec(
        &place.path("home"),
        &["gc", place.root().to_str().unwrap(), "--grace", "0s", "--wait", "0s", "--json"],
    ));
    assert_eq!(list(&place.root().join("blobs/sha256")), [""; 0]);
    assert_eq!(list(&place.root().join("leases")), [""; 0]);
}
