//! Removing what no ref reaches: nothing else, whatever happens meanwhile.

use crate::program::{self, layer, report, run, said, signal};
use crate::support::{Hashed, Place, list};
use converter::convert::plan::existing;
use converter::gc::Reach;
use converter::manifest::{CONFIG_MEDIA_TYPE, MANIFEST_MEDIA_TYPE, descriptor};
use fixtures::content::splitmix64;
use fixtures::oci::Compression;
use fixtures::{mounts, require};
use fs3_client::gc::Marks as _;
use fs3_client::{RefName, Store};
use rustix::process::Signal;
use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn gc(store: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dsec-convert"));
    command.arg("gc").arg(store).arg("--json").args(args);
    for option in ["--grace", "--wait"].into_iter().filter(|option| !args.contains(option)) {
        command.args([option, "0s"]);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A conversion whose layers stay as they are: of merged ones, nobody needs the single metadata images.
fn convert(source: &str, store: &Path, name: &str) -> Command {
    let mut command = program::convert(source, store, name);
    command.args(["--merge-under", "none"]);
    command
}

fn root(store: &Store) -> &Path {
    store.local_dir().unwrap().root()
}

fn remove(store: &Store, name: &str) {
    store.remove_ref(&name.parse::<RefName>().unwrap()).unwrap();
}

/// Exactly what the refs reach is there.
fn assert_exact(store: &Store) {
    let needed = Reach::new(store).reachable(&[]).unwrap();
    let found: HashSet<_> = store.list_blobs().unwrap().into_iter().map(|blob| blob.digest).collect();
    assert_eq!(found.difference(&needed).count(), 0, "some are not needed");
    Hashed::all(store);
}

/// Two images that share a layer.
fn two(place: &Place) -> [String; 2] {
    let shared = layer(1, 30, Compression::Gzip);
    [2, 3].map(|seed| {
        let image = [shared.clone(), layer(seed, 30, Compression::None)];
        let image = image.iter().fold(fixtures::oci::Image::new(), |image, layer| image.layer(layer.clone()));
        let dir = place.path(format!("oci{seed}"));
        fixtures::oci::Layout::new().image("t", image).write(&dir).unwrap();
        format!("oci:{}:t", dir.display())
    })
}

#[test]
fn what_an_image_alone_needed_goes_with_it() {
    let place = Place::new();
    let store = root(&place.store);
    let [one, other] = two(&place);
    let first = run(&mut convert(&one, store, "a:1"));
    run(&mut convert(&other, store, "b:1"));
    let all = list(&store.join("blobs/sha256")).len();
    assert_eq!(run(&mut gc(store, &[]))["removed"], serde_json::json!([]));
    remove(&place.store, "b:1");
    let dry = run(&mut gc(store, &["--dry-run"]));
    assert_eq!(list(&store.join("blobs/sha256")).len(), all);
    assert_eq!((list(&store.join("converted")).len(), &dry["records_removed"]), (3, &1.into()));
    let kept = run(&mut gc(store, &["--grace", "1h"]));
    assert_eq!(
        (kept["removed"].as_array().unwrap().len(), &kept["young"]),
        (0, &dry["removed"].as_array().unwrap().len().into())
    );
    let done = run(&mut gc(store, &[]));
    assert_eq!((&done["removed"], &done["records_removed"]), (&dry["removed"], &1.into()));
    // Metadata, data and table of the layer, the config and the manifest.
    assert_eq!((done["removed"].as_array().unwrap().len(), list(&store.join("blobs/sha256")).len()), (5, all - 5));
    assert_exact(&place.store);
    for dir in ["gc", "leases", "tmp"] {
        let left = if store.join(dir).exists() { list(&store.join(dir)) } else { Vec::new() };
        assert!(left.is_empty() || left == ["rescued"], "{dir}: {left:?}");
    }
    // It comes back as it was, and the shared layer was there all the time.
    let again = run(&mut convert(&other, store, "b:1"));
    assert_eq!(again["totals"]["layers_reused"], 1);
    assert_eq!(run(&mut convert(&one, store, "a:1"))["manifest"], first["manifest"]);
}

/// Chunks in another image's blob keep that blob, with the table that describes it, and nothing else of the image.
#[test]
fn what_another_image_took_chunks_of_stays() {
    let place = Place::new();
    let store = root(&place.store);
    // The same files in layers of their own: equal chunks, other blobs.
    let image = |name: &str, more: u64| {
        let files: String = (0..40).map(|file| format!("f d/{file} size=40000 fill=random:{file}\n")).collect();
        let text = format!("{files}f own size=90000 fill=random:{more}\n");
        let dir = place.path(name);
        let image = fixtures::oci::Image::new().layer(fixtures::oci::Layer::text(&text));
        fixtures::oci::Layout::new().image("t", image).write(&dir).unwrap();
        format!("oci:{}:t", dir.display())
    };
    let dedup = |source: &str, name: &str| {
        let mut command = convert(source, store, name);
        run(command.args(["--dedup", "tables", "--min-saved", "0"]))
    };
    dedup(&image("one", 1000), "a:1");
    let second = dedup(&image("two", 2000), "b:1");
    let data = second["layers"][0]["data"].as_array().unwrap();
    assert_eq!(data.len(), 2, "it refers to the other's blob: {second}");
    let all = list(&store.join("blobs/sha256")).len();
    remove(&place.store, "a:1");
    let done = run(&mut gc(store, &[]));
    // Of the first image its manifest, config and metadata go.
    assert_eq!((done["removed"].as_array().unwrap().len(), list(&store.join("blobs/sha256")).len()), (3, all - 3));
    assert_exact(&place.store);
    let mut verify = Command::new(env!("CARGO_BIN_EXE_dsec-convert"));
    assert_eq!(run(verify.arg("verify").arg(store).args(["b:1", "--deep", "--json"]))["sound"], true);
    // And what is left of it still gives chunks to others.
    let third = dedup(&image("three", 3000), "c:1");
    assert!(third["layers"][0]["data"].as_array().unwrap().len() >= 2, "{third}");
    for name in ["b:1", "c:1"] {
        remove(&place.store, name);
    }
    run(&mut gc(store, &[]));
    assert_eq!(list(&store.join("blobs/sha256")), [""; 0]);
}

/// An index may name another many times, and that the next: each is read once.
#[test]
fn nested_indexes_cost_what_they_are() {
    let place = Place::new();
    let media_type = "application/vnd.oci.image.index.v1+json";
    let mut inner = place.store.publish_bytes(b"{\"schemaVersion\":2,\"manifests\":[]}").unwrap();
    let mut all = 1;
    for level in 0..40 {
        let entry = format!(r#"{{"mediaType":"{media_type}","digest":"{}","size":{}}}"#, inner.digest, inner.size);
        let entries = vec![entry; 50].join(",");
        let index = format!(r#"{{"schemaVersion":2,"level":{level},"manifests":[{entries}]}}"#);
        inner = place.store.publish_bytes(index.as_bytes()).unwrap();
        all += 1;
    }
    let top = descriptor(media_type, inner.digest, inner.size, &[]);
    place.store.write_ref(&"a:b".parse().unwrap(), &top).unwrap();
    place.store.publish_bytes(b"not reached").unwrap();
    let reached = Reach::new(&place.store).of("a:b", &top).unwrap();
    assert_eq!(reached.len(), all);
    assert_eq!(run(&mut gc(root(&place.store), &[]))["removed"].as_array().unwrap().len(), 1);
}

/// A pipe where a ref should be is no ref, and nobody waits for it.
#[test]
fn pipes_in_the_store_are_not_waited_for() {
    let place = Place::new();
    let store = root(&place.store);
    let [one, _] = two(&place);
    run(&mut convert(&one, store, "a:1"));
    let pipe = |path: &Path| {
        use rustix::fs::{CWD, FileType, Mode, mknodat};
        mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    };
    for record in list(&store.join("converted")) {
        fs::remove_file(store.join("converted").join(&record)).unwrap();
        pipe(&store.join("converted").join(&record));
    }
    // A record is only a note: without it the layer is made again.
    let again = run(&mut convert(&one, store, "a:2"));
    assert_eq!(again["totals"]["layers_reused"], 0);
    fs::remove_file(store.join("refs/a/1")).unwrap();
    pipe(&store.join("refs/a/1"));
    let output = gc(store, &[]).output().unwrap();
    assert!(!output.status.success() && said(&output).contains("refs/a/1"), "{}", said(&output));
}

#[test]
fn what_cannot_be_read_stops_it_by_its_name() {
    let place = Place::new();
    let store = root(&place.store);
    let [one, other] = two(&place);
    run(&mut convert(&one, store, "a:1"));
    let manifest = run(&mut convert(&other, store, "b:1"))["manifest"].as_str().unwrap().to_owned();
    remove(&place.store, "a:1");
    let all = list(&store.join("blobs/sha256"));
    let fails = |expected: &str| {
        for args in [&[][..], &["--dry-run"]] {
            let output = gc(store, args).output().unwrap();
            assert_eq!(output.status.code(), Some(3), "{}", said(&output));
            assert!(said(&output).contains(expected), "{}", said(&output));
        }
    };
    let good = fs::read(store.join("refs/b/1")).unwrap();
    fs::write(store.join("refs/b/1"), "{\"digest\"").unwrap();
    fails("refs/b/1");
    fs::write(store.join("refs/b/1"), &good).unwrap();
    let blob = store.join("blobs/sha256").join(manifest.trim_start_matches("sha256:"));
    let bytes = fs::read(&blob).unwrap();
    fs::remove_file(&blob).unwrap();
    fails("b:1");
    fs::write(&blob, vec![b'x'; bytes.len()]).unwrap();
    fails("b:1");
    fs::remove_file(&blob).unwrap();
    fs::write(&blob, &bytes).unwrap();
    assert_eq!(list(&store.join("blobs/sha256")), all);
    assert_eq!(run(&mut gc(store, &[]))["removed"].as_array().unwrap().len(), 5);
    assert_exact(&place.store);
}

#[test]
fn manifests_of_others_keep_what_they_name() {
    let place = Place::new();
    let put = |bytes: &[u8]| {
        let published = place.store.publish_bytes(bytes).unwrap();
        (published.digest, published.size)
    };
    let (layer, config, alone, lost) = (put(b"a layer"), put(b"{}"), put(b"alone"), put(b"lost"));
    let inner = format!(
        r#"{{"schemaVersion":2,"config":{{"mediaType":"{CONFIG_MEDIA_TYPE}","digest":"{}","size":2}},"layers":[{{"mediaType":"x/y","digest":"{}","size":7}}]}}"#,
        config.0, layer.0
    );
    let inner = put(inner.as_bytes());
    // An index with one manifest that is there, and one for another platform that is not.
    let index = format!(
        r#"{{"schemaVersion":2,"manifests":[{{"mediaType":"{MANIFEST_MEDIA_TYPE}","digest":"{}","size":{}}},{{"mediaType":"{MANIFEST_MEDIA_TYPE}","digest":"sha256:{}","size":9}}]}}"#,
        inner.0,
        inner.1,
        "0".repeat(64)
    );
    let index = put(index.as_bytes());
    let name = |name: &str, media_type: &str, (digest, size): (fs3_client::Digest, u64)| {
        place.store.write_ref(&name.parse().unwrap(), &descriptor(media_type, digest, size, &[])).unwrap();
    };
    name("index:1", "application/vnd.oci.image.index.v1+json", index);
    name("alone:1", "application/octet-stream", alone);
    let done = run(&mut gc(root(&place.store), &[]));
    assert_eq!(done["removed"], serde_json::json!([{ "digest": lost.0.to_string(), "size": 4 }]));
    assert_eq!(place.store.list_blobs().unwrap().len(), 5);
}

/// How long the processes run; DSEC_GC_SECONDS says otherwise.
fn seconds() -> u64 {
    std::env::var("DSEC_GC_SECONDS").map_or(15, |text| text.parse().expect("DSEC_GC_SECONDS is a number"))
}

/// Converters in a loop beside collectors in a loop, both killed at any instant, while refs are moved and removed.
#[test]
fn converters_and_collectors_that_are_killed() {
    let place = Place::new();
    let store = root(&place.store).to_owned();
    let sources: Vec<String> = (0..3)
        .map(|n| {
            let image = [layer(1, 20, Compression::Gzip), layer(n + 2, 20, Compression::Gzip)];
            let image = image.iter().fold(fixtures::oci::Image::new(), |image, layer| image.layer(layer.clone()));
            let dir = place.path(format!("oci{n}"));
            fixtures::oci::Layout::new().image("t", image).write(&dir).unwrap();
            format!("oci:{}:t", dir.display())
        })
        .collect();
    let began = Instant::now();
    let mut hashed = Hashed::default();
    let (mut round, mut killed, mut finished, mut collected, mut removed) = (0u64, 0, 0, 0, 0u64);
    while began.elapsed() < Duration::from_secs(seconds()) {
        round += 1;
        let luck = |n: u64| splitmix64(round * 10 + n);
        let source = |n: u64| &sources[usize::try_from(luck(n) % 3).unwrap()];
        let name = |n: u64| format!("image:{}", luck(n) % 2);
        let mut children: Vec<(bool, Child)> =
            (0..2).map(|n| (false, program::convert(source(n), &store, &name(n + 2)).spawn().unwrap())).collect();
        children.push((true, gc(&store, &["--wait", "1s"]).spawn().unwrap()));
        if luck(4) % 2 == 0 {
            let _ = place.store.remove_ref(&name(5).parse().unwrap());
        }
        for (n, (_, child)) in (6..).zip(&children) {
            if luck(n) % 3 == 0 {
                std::thread::sleep(Duration::from_millis(luck(9) % 150));
                signal(child, Signal::KILL);
                killed += 1;
            }
        }
        for (is_gc, child) in children {
            let output = child.wait_with_output().unwrap();
            match (is_gc, output.status.code()) {
                (_, None) => {}
                (true, Some(0)) => {
                    collected += 1;
                    removed += report(&output)["removed"].as_array().unwrap().len() as u64;
                }
                (false, Some(0)) => finished += 1,
                _ => panic!("{is_gc}: {}", said(&output)),
            }
        }
        // All that is named is whole.
        hashed.assert_sound(&place.store);
    }
    assert!(killed > 3 && finished > 3 && collected > 3 && removed > 0, "{killed} {finished} {collected} {removed}");
    // When all is quiet, nothing is left over.
    for name in ["image:0", "image:1"] {
        run(&mut convert(&sources[0], &store, name));
    }
    while !run(&mut gc(&store, &[]))["removed"].as_array().unwrap().is_empty() {}
    assert_exact(&place.store);
    assert_eq!(list(&place.store.scratch()), [""; 0]);
    assert_eq!(place.store.list_objects("gc").unwrap(), []);
}

/// A full disk is where a collector is needed most.
#[test]
fn privileged_on_a_full_disk() {
    if !require::root() {
        return;
    }
    mounts::in_private_namespace(|| {
        let place = Place::new();
        let [one, other] = two(&place);
        let disk = mounts::tmpfs(32 << 20).unwrap();
        let store = disk.path().join("store");
        run(&mut convert(&one, &store, "a:1"));
        run(&mut convert(&other, &store, "b:1"));
        let opened = Store::open(&store).unwrap();
        remove(&opened, "b:1");
        // Every last block.
        let filler = disk.path().join("filler");
        let mut size = 64u64 << 20;
        while size >= 4096 {
            let command = format!("head -c {size} /dev/zero >>{} 2>/dev/null", filler.display());
            if !Command::new("sh").arg("-c").arg(command).status().unwrap().success() {
                size /= 2;
                continue;
            }
        }
        let output = gc(&store, &[]).output().unwrap();
        if !output.status.success() {
            // Not even its lease had room. That is said, and one block is enough.
            assert!(output.status.code() == Some(1) && said(&output).contains("No space left"), "{}", said(&output));
            let len = fs::metadata(&filler).unwrap().len();
            fs::OpenOptions::new().write(true).open(&filler).unwrap().set_len(len - 8 * 4096).unwrap();
            run(&mut gc(&store, &[]));
        }
        assert_exact(&opened);
        assert_eq!(opened.list_refs().unwrap().len(), 1);
        let request = converter::convert::Request {
            source: one.parse().unwrap(),
            platform: converter::source::Platform::host(),
            options: converter::layer::Options::default(),
            jobs: 1,
            registry: fs3_client::registry::Options::default(),
            dedup: None,
        };
        let under = converter::merge::Under::Never;
        let found = existing(&"a:1".parse().unwrap(), &request, under, &opened, &std::env::temp_dir()).unwrap();
        assert!(found.is_some());
    });
}
