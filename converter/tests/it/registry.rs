//! Images in a real registry, and what happens on the way to it.

use crate::program::{layers, report, run};
use crate::support::{Hashed, Place, list};
use crate::support_registry::{dsec, fails};
use fixtures::content::Content;
use fixtures::faulty_proxy::{Fault, FaultyProxy, Request};
use fixtures::oci::{self, Layer, Layout};
use fixtures::registry::{PASSWORD, Registry, TokenServer, USER, skopeo_copy};
use fixtures::tar::{Entry, Kind, Writer};
use fs3_client::Store;
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// A layer of one file that does not compress, so that its blob is about `size` bytes.
fn large(seed: u64, size: u64) -> Layer {
    let mut writer = Writer::new(Vec::new());
    writer.entry(&Entry::new("./large", Kind::Regular(Content::Random { seed, size }))).unwrap();
    Layer::tar(writer.finish().unwrap()).compression(oci::Compression::Gzip)
}

fn convert(place: &Place, source: &str, store: &str) -> Command {
    let store = place.path(store);
    dsec(&place.path("home"), &["convert", source, "--store", store.to_str().unwrap(), "--name", "a:b", "--json"])
}

/// What the image becomes without a registry.
fn expected(place: &Place, source: &str) -> Value {
    run(&mut convert(place, source, "expected"))["manifest"].clone()
}

/// Asserts that nothing of a failed conversion has a name, and that what is there is sound.
fn nothing_named(store: &Path) {
    if let Ok(store) = Store::open(store) {
        assert_eq!(store.list_refs().unwrap().len(), 0);
        Hashed::all(&store);
    }
}

fn is_blob(request: &Request) -> bool {
    request.method == "GET" && request.target.contains("/blobs/")
}

#[test]
fn equals_the_same_image_from_a_layout() {
    let place = Place::new();
    let source = place.layout(&layers(1, 20));
    let expected = expected(&place, &source);
    let registry = Registry::start();
    registry.push(&source, "team/app:1");
    let by_tag = run(&mut convert(&place, &format!("docker://{}", registry.name("team/app:1")), "by-tag"));
    assert_eq!(by_tag["manifest"], expected);
    Hashed::all(&Store::open(&place.path("by-tag")).unwrap());
    // The same store again: no layer is fetched.
    let proxy = FaultyProxy::honest(registry.address());
    let name = format!("docker://{}/team/app:1", proxy.address());
    let again = run(&mut convert(&place, &name, "by-tag"));
    assert_eq!((&again["manifest"], &again["totals"]["layers_reused"]), (&expected, &Value::from(3)));
    let blobs = proxy.log().iter().filter(|handled| is_blob(&handled.request)).count();
    assert_eq!(blobs, 1, "only the config");
    // By digest.
    let source_manifest = by_tag_manifest(&place);
    let by_digest = format!("docker://{}@{source_manifest}", registry.name("team/app"));
    assert_eq!(run(&mut convert(&place, &by_digest, "by-digest"))["manifest"], expected);
}

/// The source manifest's digest, as the conversion noted it.
fn by_tag_manifest(place: &Place) -> String {
    let store = Store::open(&place.path("by-tag")).unwrap();
    let (_, descriptor) = store.list_refs().unwrap().remove(0);
    let digest = converter::manifest::digest_of(&descriptor).unwrap();
    let bytes = store.read_blob(&digest, descriptor.size()).unwrap();
    let manifest: Value = serde_json::from_slice(&bytes).unwrap();
    manifest["annotations"]["dev.dsec.source.manifest"].as_str().unwrap().to_owned()
}

#[test]
fn indexes_and_docker_manifests() {
    let place = Place::new();
    let registry = Registry::start();
    let other = oci::Image::new().platform("linux/s390x").layer(Layer::text("f a \"other\""));
    let host = oci::Image::new().layer(Layer::text("f a \"host\"").compression(oci::Compression::Gzip));
    let layout = Layout::new().index("t", vec![other.clone().into(), host.into()]).image("other", other);
    layout.write(&place.path("oci")).unwrap();
    let source = format!("oci:{}:t", place.path("oci").display());
    let expected = expected(&place, &source);
    registry.push(&source, "multi:1");
    let name = format!("docker://{}", registry.name("multi:1"));
    assert_eq!(run(&mut convert(&place, &name, "index"))["manifest"], expected);
    fails(
        convert(&place, &name, "none").args(["--platform", "linux/riscv64"]),
        1,
        &["no image for linux/riscv64", "s390x"],
    );
    let theirs = run(convert(&place, &name, "theirs").args(["--platform", "linux/s390x"]));
    assert_ne!(theirs["manifest"], expected);
    registry.push(&format!("oci:{}:other", place.path("oci").display()), "other:1");
    fails(
        &mut convert(&place, &format!("docker://{}", registry.name("other:1")), "none"),
        1,
        &["no image for", "s390x"],
    );
    // The same image as Docker's schema 2: its layers have the same bytes.
    let target = format!("docker://{}", registry.name("docker:1"));
    skopeo_copy(&[
        "--format=v2s2",
        "--dest-tls-verify=false",
        &format!("oci:{}:t", place.path("oci").display()),
        &target,
    ]);
    let docker = run(&mut convert(&place, &target, "docker"));
    let oci = run(&mut convert(&place, &name, "index"));
    assert_eq!(docker["layers"][0]["metadata"], oci["layers"][0]["metadata"]);
    fails(
        &mut convert(&place, &format!("docker://{}", registry.name("nowhere:1")), "none"),
        1,
        &["manifest 1 is not in", "nowhere"],
    );
    nothing_named(&place.path("none"));
}

#[test]
fn faults_are_survived() {
    let place = Place::new();
    let mut all = layers(3, 12);
    all.push(large(9, 20 << 20));
    let source = place.layout(&all);
    let expected = expected(&place, &source);
    let registry = Registry::start();
    registry.push(&source, "app:1");
    let faults = [
        Fault::Reset,
        Fault::LoseAnswer,
        Fault::Status { status: 429, retry_after: Some(1) },
        Fault::Status { status: 503, retry_after: None },
        Fault::ResetBody { after: 100_000 },
        Fault::Truncate { after: 150_000 },
    ];
    let all = faults.iter().flat_map(|fault| [(fault, "1"), (fault, "3")]);
    for (at, (fault, ranges)) in all.enumerate() {
        let told = fault.clone();
        let once =
            move |request: &Request| (request.method == "GET" && request.nth_of_target == 0).then(|| told.clone());
        let proxy = FaultyProxy::start(registry.address(), once);
        let name = format!("docker://{}/app:1", proxy.address());
        let converted = run(convert(&place, &name, &format!("fault-{at}")).args(["--ranges", ranges]));
        assert_eq!(converted["manifest"], expected, "{fault:?}");
        assert!(proxy.log().iter().filter(|handled| handled.fault.is_some()).count() >= 5, "{fault:?}");
        if matches!(fault, Fault::ResetBody { .. } | Fault::Truncate { .. }) {
            let goes_on =
                |request: &Request| request.header("range").is_some_and(|range| !range.starts_with("bytes=0-"));
            assert!(
                proxy.log().iter().any(|handled| goes_on(&handled.request)),
                "nothing began in the middle: {fault:?}"
            );
        }
    }
    // A server without ranges, whose connections break; silence; and everything at once.
    let ranges = |request: &Request| {
        let broken = request.nth_of_target.is_multiple_of(2);
        is_blob(request).then_some(if broken { Fault::ResetBody { after: 6 << 20 } } else { Fault::IgnoreRange })
    };
    for count in ["1", "3"] {
        let proxy = FaultyProxy::start(registry.address(), ranges);
        let name = format!("docker://{}/app:1", proxy.address());
        let converted = run(convert(&place, &name, &format!("ranges-{count}")).args(["--ranges", count]));
        assert_eq!(converted["manifest"], expected);
        assert!(proxy.log().iter().any(|handled| handled.fault == Some(Fault::IgnoreRange)));
    }
    let stall = |request: &Request| (request.nth_of_target == 0).then_some(Fault::Stall(Duration::from_secs(4)));
    let proxy = FaultyProxy::start(registry.address(), stall);
    let name = format!("docker://{}/app:1", proxy.address());
    assert_eq!(run(convert(&place, &name, "stall").args(["--connection-timeout", "1"]))["manifest"], expected);
    let mixed = vec![
        Fault::Reset,
        Fault::Status { status: 502, retry_after: None },
        Fault::ResetBody { after: 700_000 },
        Fault::IgnoreRange,
    ];
    for count in ["1", "3"] {
        let proxy = FaultyProxy::seeded(registry.address(), 5, 30, mixed.clone());
        let name = format!("docker://{}/app:1", proxy.address());
        let store = format!("mixed-{count}");
        let converted = run(convert(&place, &name, &store).args(["--attempts", "12", "--ranges", count]));
        assert_eq!(converted["manifest"], expected);
    }
}

#[test]
fn faults_that_are_refused() {
    let place = Place::new();
    let source = place.layout(&[large(1, 6 << 20), large(2, 18 << 20)]);
    let registry = Registry::start();
    registry.push(&source, "app:1");
    let proxy = FaultyProxy::honest(registry.address());
    let name = format!("docker://{}/app:1", proxy.address());
    let mut store = 0;
    let mut attempt = |script: fn(&Request) -> Option<Fault>, code: i32, parts: &[&str]| {
        proxy.set_script(script);
        store += 1;
        let store = format!("refused-{store}");
        fails(convert(&place, &name, &store).args(["--attempts", "2", "--ranges", "3"]), code, parts);
        nothing_named(&place.path(&store));
    };
    attempt(|request| is_blob(request).then_some(Fault::WrongBytes { at: 3000 }), 3, &["sha256:", "is damaged"]);
    // In the middle of a layer that comes in ranges.
    attempt(
        |r| {
            (r.header("range").is_some_and(|range| range.starts_with("bytes=8388608-")))
                .then_some(Fault::WrongBytes { at: 5 })
        },
        3,
        &["is not what its descriptor says"],
    );
    attempt(
        |r| r.target.contains("/manifests/").then_some(Fault::WrongBytes { at: 30 }),
        3,
        &["manifest 1", "is corrupt", "its digest is"],
    );
    attempt(|r| is_blob(r).then_some(Fault::Shorten { to: 100 }), 3, &["100 bytes where"]);
    attempt(|r| is_blob(r).then_some(Fault::Status { status: 404, retry_after: None }), 1, &["is not in"]);
    attempt(|r| is_blob(r).then_some(Fault::Status { status: 503, retry_after: None }), 1, &["503"]);
    attempt(|r| is_blob(r).then_some(Fault::Status { status: 429, retry_after: Some(100_000) }), 1, &["429"]);
    attempt(|_| Some(Fault::Reset), 1, &["failed to read manifest 1"]);
    // In the middle of a layer that comes in one stream.
    let blobs = place.path("oci/blobs/sha256");
    let layer = list(&blobs).into_iter().max_by_key(|name| std::fs::metadata(blobs.join(name)).unwrap().len()).unwrap();
    proxy.set_script(move |r| (is_blob(r) && r.target.contains(&layer)).then_some(Fault::WrongBytes { at: 9_000_000 }));
    fails(&mut convert(&place, &name, "one-stream"), 3, &["is not what its descriptor says"]);
    nothing_named(&place.path("one-stream"));
    drop(proxy);
    fails(convert(&place, &name, "gone").args(["--attempts", "1"]), 1, &["failed to read manifest 1", "onnect"]);
    fails(&mut convert(&place, "docker://UPPER/x", "gone"), 2, &["is not an image in a registry"]);
}

#[test]
fn passwords() {
    let place = Place::new();
    let source = place.layout(&layers(1, 4));
    let expected = expected(&place, &source);
    let registry = Registry::with_password();
    registry.push(&source, "team/app:1");
    let name = format!("docker://{}", registry.name("team/app:1"));
    fails(&mut convert(&place, &name, "s"), 1, &["401", "somebody without credentials", "hint: `docker login`"]);
    let wrong = registry.auth_file(USER, "wrong");
    fails(convert(&place, &name, "s").arg("--authfile").arg(&wrong), 1, &["401", "user `tester`"]);
    fails(convert(&place, &name, "s").args(["--authfile", "/nowhere/x"]), 1, &["/nowhere/x: there is no such file"]);
    nothing_named(&place.path("s"));
    let right = registry.auth_file(USER, PASSWORD);
    let with_file = run(convert(&place, &name, "s").arg("--authfile").arg(&right));
    assert_eq!(with_file["manifest"], expected);
    assert_eq!(run(convert(&place, &name, "s").env("REGISTRY_AUTH_FILE", &right))["manifest"], expected);
    // docker's file, with a helper that it names.
    let docker = place.path("home/.docker");
    std::fs::create_dir_all(&docker).unwrap();
    let config = serde_json::json!({ "credHelpers": { registry.address().to_string(): "dsec-test" } });
    std::fs::write(docker.join("config.json"), config.to_string()).unwrap();
    let helper = place.path("home/docker-credential-dsec-test");
    let path = format!("{}:{}", place.path("home").display(), std::env::var("PATH").unwrap());
    let with_helper = |script: &str| {
        std::fs::write(&helper, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&helper, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let mut command = convert(&place, &name, "helped");
        command.env("PATH", &path);
        command
    };
    let address = registry.address();
    let good = format!(
        "[ \"$1\" = get ] && [ \"$(cat)\" = {address} ] && echo '{{\"Username\":\"{USER}\",\"Secret\":\"{PASSWORD}\"}}'"
    );
    assert_eq!(run(&mut with_helper(&good))["manifest"], expected);
    fails(
        &mut with_helper("echo credentials not found in native keychain; exit 1"),
        1,
        &["somebody without credentials"],
    );
    fails(&mut with_helper("echo no key; exit 4"), 1, &["docker-credential-dsec-test", "no key"]);
    fails(&mut with_helper("echo '{}'"), 1, &["docker-credential-dsec-test", "not valid"]);
}

#[test]
fn tokens() {
    let place = Place::new();
    let source = place.layout(&layers(1, 4));
    let expected = expected(&place, &source);
    let server = TokenServer::start();
    let registry = Registry::with_tokens(&server);
    registry.push(&source, "team/app:1");
    let name = format!("docker://{}", registry.name("team/app:1"));
    let asked = server.asked().len();
    assert_eq!(run(&mut convert(&place, &name, "anonymous"))["manifest"], expected);
    assert_eq!(server.asked()[asked..], ["pull by somebody"], "one token for everything");
    let right = registry.auth_file(USER, PASSWORD);
    assert_eq!(run(convert(&place, &name, "user").arg("--authfile").arg(&right))["manifest"], expected);
    let wrong = registry.auth_file(USER, "wrong");
    fails(convert(&place, &name, "s").arg("--authfile").arg(&wrong), 1, &["gives no token to user `tester`", "hint:"]);
    let identity = place.path("identity.json");
    let auths = serde_json::json!({ "auths": { format!("{}/team", registry.address()): { "identitytoken": TokenServer::IDENTITY } } });
    std::fs::write(&identity, auths.to_string()).unwrap();
    assert_eq!(run(convert(&place, &name, "identity").arg("--authfile").arg(&identity))["manifest"], expected);
    assert_eq!(server.asked().last().unwrap(), "pull by identity");
    // A token that ends before its time: the registry says so in the middle of the work, and is asked with another.
    server.set_life(2);
    let slow = |request: &Request| {
        (is_blob(request) && request.nth_of_target == 0).then_some(Fault::Stall(Duration::from_secs(4)))
    };
    let proxy = FaultyProxy::start(registry.address(), slow);
    let asked = server.asked().len();
    let through = format!("docker://{}/team/app:1", proxy.address());
    assert_eq!(run(&mut convert(&place, &through, "renewed"))["manifest"], expected);
    assert!(server.asked().len() >= asked + 2, "{:?}", server.asked());
    // Pushing needs more than pulling.
    server.set_life(300);
    let store = place.path("anonymous");
    let push = |target: &str| dsec(&place.path("home"), &["push", store.to_str().unwrap(), "a:b", target, "--json"]);
    let target = format!("docker://{}", registry.name("team/converted:1"));
    fails(&mut push(&target), 1, &["401", "somebody without credentials"]);
    report(&push(&target).arg("--authfile").arg(&right).output().unwrap());
    assert!(server.asked().contains(&"pull,push by tester".to_owned()), "{:?}", server.asked());
}

#[test]
fn certificates() {
    let place = Place::new();
    let source = place.layout(&layers(1, 4));
    let registry = Registry::with_tls();
    registry.push(&source, "app:1");
    let name = format!("docker://{}", registry.name("app:1"));
    fails(&mut convert(&place, &name, "s"), 1, &["certificate", "hint: --ca-file"]);
    let certificate = registry.certificate();
    let trusted = run(convert(&place, &name, "s").arg("--ca-file").arg(&certificate));
    assert_eq!(trusted["manifest"], expected(&place, &source));
    let none = place.path("none.pem");
    std::fs::write(&none, "no certificate").unwrap();
    fails(convert(&place, &name, "t").arg("--ca-file").arg(&none), 1, &["none.pem"]);
    fails(convert(&place, &name, "t").arg("--plain-http"), 1, &["400"]);
}

#[test]
fn mirrors() {
    let place = Place::new();
    let source = place.layout(&layers(1, 4));
    let expected = expected(&place, &source);
    let (mirror, origin) = (Registry::start(), Registry::start());
    origin.push(&source, "team/app:1");
    let seen = FaultyProxy::honest(origin.address());
    let name = format!("docker://{}/team/app:1", seen.address());
    let rule = format!("{}/team={}/copies", seen.address(), mirror.address());
    // The mirror has no such image.
    assert_eq!(run(convert(&place, &name, "s").args(["--mirror", &rule]))["manifest"], expected);
    let asked = seen.log().len();
    assert!(asked > 0);
    mirror.push(&source, "copies/app:1");
    assert_eq!(run(convert(&place, &name, "t").args(["--mirror", &rule]))["manifest"], expected);
    assert_eq!(seen.log().len(), asked, "the mirror has everything");
    // By registries.conf; and a mirror whose blobs fail is left in the middle.
    let broken =
        FaultyProxy::start(mirror.address(), |request| is_blob(request).then_some(Fault::ResetBody { after: 10 }));
    let conf = place.path("registries.conf");
    let text = format!(
        "[[registry]]\nprefix = \"{}/team\"\nlocation = \"{}/team\"\n[[registry.mirror]]\nlocation = \"{}/copies\"\n",
        seen.address(),
        seen.address(),
        broken.address()
    );
    std::fs::write(&conf, text).unwrap();
    let mut command = convert(&place, &name, "u");
    command.env("CONTAINERS_REGISTRIES_CONF", &conf).args(["--attempts", "2"]);
    assert_eq!(run(&mut command)["manifest"], expected);
    assert!(broken.log().iter().any(|handled| handled.fault.is_some()) && seen.log().len() > asked);
    std::fs::write(&conf, "[[registry]]\nlocation = 5").unwrap();
    fails(
        convert(&place, &name, "u").env("CONTAINERS_REGISTRIES_CONF", &conf),
        1,
        &["registries.conf: it is not valid"],
    );
    std::fs::write(&conf, format!("[[registry]]\nlocation = \"{}\"\nblocked = true\n", seen.address())).unwrap();
    fails(convert(&place, &name, "u").env("CONTAINERS_REGISTRIES_CONF", &conf), 1, &["is blocked"]);
}
