//! `dsec-convert merge` and `--merge-under` as programs: what they say, what they leave, and what they refuse.

use crate::program::{convert, in_shell, layers, report, run, said, signal};
use crate::support::{Hashed, Place, list};
use fixtures::content::splitmix64;
use fixtures::{mounts, require};
use fs3_client::Store;
use rustix::process::Signal;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

fn merge(store: &Path, images: &[&str], name: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dsec-convert"));
    command.arg("merge").arg(store).args(images).args(["--name", name, "--json"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn unmerged(source: &str, store: &Path, name: &str) -> Command {
    let mut command = convert(source, store, name);
    command.args(["--merge-under", "none"]);
    command
}

fn inspect(store: &Path, name: &str) -> serde_json::Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dsec-convert"));
    run(command.arg("inspect").arg(store).arg(name).arg("--json"))
}

#[test]
fn merged_at_conversion_or_later_is_the_same() {
    let place = Place::new();
    let source = place.layout(&layers(1, 20));
    let root = place.store.local_dir().unwrap().root();
    let whole = run(&mut convert(&source, root, "a:whole"));
    assert_eq!(whole["layers"].as_array().unwrap().len(), 3);
    assert_eq!(whole["merged"][0]["from"], serde_json::json!([0, 1, 2]));
    let separate = run(&mut unmerged(&source, root, "a:separate"));
    assert_eq!(separate["merged"], serde_json::json!([]));
    assert!(separate["layers"].as_array().unwrap().iter().all(|layer| layer["reused"] == true));
    assert_ne!(whole["manifest"], separate["manifest"]);
    let later = run(&mut merge(root, &["a:separate"], "a:later"));
    assert_eq!(later["layers"][0]["metadata"], whole["merged"][0]["metadata"]);
    assert_ne!(later["manifest"], whole["manifest"], "only a conversion says with which options");
    assert_eq!((&later["layers_before"], &later["layers"][0]["reused"]), (&3.into(), &true.into()));
    // As many runs as fit.
    let sizes: Vec<u64> = separate["layers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|l| l["metadata"]["size"].as_u64().unwrap() + l["data"][0]["size"].as_u64().unwrap())
        .collect();
    let under = (sizes[0] + sizes[1] + 1).to_string();
    let some = run(merge(root, &["a:separate"], "a:some").args(["--merge-under", &under]));
    let from: Vec<_> = some["layers"].as_array().unwrap().iter().map(|l| l["from"].clone()).collect();
    assert_eq!(from, [serde_json::json!([0, 1]), serde_json::json!([2])]);
    let none = run(merge(root, &["a:separate"], "a:none").args(["--merge-under", "none"]));
    assert_eq!(none["manifest"], separate["manifest"]);
    // Several images lie on one another, with the lists of both in the config.
    let stacked = run(&mut merge(root, &["a:separate", "a:some"], "a:stacked"));
    assert_eq!(stacked["layers"][0]["from"], serde_json::json!([0, 1, 2, 3, 4]));
    let config: serde_json::Value = {
        let digest: fs3_client::Digest = stacked["config"].as_str().unwrap().parse().unwrap();
        serde_json::from_slice(&std::fs::read(place.store.local_dir().unwrap().blob_path(&digest)).unwrap()).unwrap()
    };
    assert_eq!(config["rootfs"]["diff_ids"].as_array().unwrap().len(), 6);
    let shown = inspect(root, "a:whole");
    assert_eq!(shown["layers"][0]["parts"].as_array().unwrap().len(), 3, "{shown}");
    for name in ["a:whole", "a:some", "a:stacked"] {
        let mut verify = Command::new(env!("CARGO_BIN_EXE_dsec-convert"));
        let found = run(verify.arg("verify").arg(root).args([name, "--deep", "--json"]));
        assert_eq!(found["sound"], true, "{found}");
    }
    Hashed::all(&place.store);
}

#[test]
fn surroundings_do_not_show_in_merged_layers() {
    let place = Place::new();
    let source = place.layout(&layers(40, 40));
    let blobs = |jobs: &str, settings: &str| {
        let store = Place::new();
        let mut command = convert(&source, store.store.local_dir().unwrap().root(), "a:b");
        command.args(["--jobs", jobs]);
        let manifest = run(&mut in_shell(settings, &command))["manifest"].clone();
        (manifest, Hashed::all(&store.store).names().into_iter().map(str::to_owned).collect::<Vec<_>>())
    };
    let expected = blobs("1", "true");
    for jobs in ["2", "8"] {
        assert_eq!(blobs(jobs, "true"), expected, "--jobs {jobs}");
    }
    assert_eq!(blobs("2", "umask 0; cd /; export TZ=Pacific/Apia LC_ALL=tr_TR.UTF-8"), expected);
}

/// Damage to an input is found, named, and not passed on under a new name.
#[test]
fn damaged_images_are_refused_by_name() {
    for (what, at) in [("superblock", 1030_u64), ("inodes", 4096 + 100), ("inline", u64::MAX)] {
        let place = Place::new();
        let source = place.layout(&layers(3, 200));
        let root = place.store.local_dir().unwrap().root();
        let report = run(&mut unmerged(&source, root, "a:b"));
        let digest = report["layers"][1]["metadata"]["digest"].as_str().unwrap().to_owned();
        let path = place.store.local_dir().unwrap().blob_path(&digest.parse().unwrap());
        let mut bytes = std::fs::read(&path).unwrap();
        let at = if at == u64::MAX { bytes.len() / 2 } else { usize::try_from(at).unwrap() };
        bytes[at] ^= 0x20;
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, bytes).unwrap();
        let blobs = list(&root.join("blobs/sha256"));
        let output = merge(root, &["a:b"], "a:merged").output().unwrap();
        let said = said(&output);
        assert_eq!(output.status.code(), Some(3), "{what}: {said}");
        assert!(said.contains(&digest) && said.contains("layer 1"), "{what}: {said}");
        assert_eq!(list(&root.join("blobs/sha256")), blobs, "{what}: something was published");
        assert_eq!(list(&place.store.scratch()), [""; 0]);
        assert_eq!(place.store.list_refs().unwrap().len(), 1);
    }
}

#[test]
fn damaged_data_is_not_packed() {
    damaged(&[]);
}

#[test]
fn damaged_clusters_are_not_packed() {
    damaged(&["--compress", "lz4"]);
}

fn damaged(form: &[&str]) {
    let place = Place::new();
    let source = place.layout(&layers(3, 20));
    let root = place.store.local_dir().unwrap().root();
    let report = run(unmerged(&source, root, "a:b").args(form));
    let digest = report["layers"][2]["data"][0]["digest"].as_str().unwrap().to_owned();
    let path = place.store.local_dir().unwrap().blob_path(&digest.parse().unwrap());
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[5000] ^= 1;
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, &bytes).unwrap();
    let output = merge(root, &["a:b"], "a:merged").arg("--pack").output().unwrap();
    let told = said(&output);
    assert_eq!(output.status.code(), Some(3), "{told}");
    assert!(told.contains(&digest) && told.contains("does not match the chunk table"), "{told}");
    // Linked, nothing of it is read. Missing, it is missed.
    run(&mut merge(root, &["a:b"], "a:merged"));
    std::fs::remove_file(&path).unwrap();
    std::fs::remove_dir_all(root.join("converted")).unwrap();
    let output = merge(root, &["a:b"], "a:again").output().unwrap();
    assert!(output.status.code() != Some(0) && said(&output).contains(&digest), "{}", said(&output));
}

/// What an image names has to be there before another image names it too; and `verify` says what is not.
#[test]
fn missing_and_mistaken_tables_are_told() {
    let place = Place::new();
    let source = place.layout(&layers(3, 20));
    let root = place.store.local_dir().unwrap().root();
    let made = run(&mut unmerged(&source, root, "a:b"));
    let verify = |name: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dsec-convert"));
        command.arg("verify").arg(root).arg(name).output().unwrap()
    };
    // A manifest with the tables of two blobs for one another.
    let store = &place.store;
    let digest: fs3_client::Digest = made["manifest"].as_str().unwrap().parse().unwrap();
    let bytes = std::fs::read(store.local_dir().unwrap().blob_path(&digest)).unwrap();
    let mut image = converter::manifest::Image::from_json(&bytes).unwrap();
    let of = converter::manifest::annotation::CHUNK_TABLE_OF;
    let mut annotations = image.layers[0].chunk_tables[0].annotations().clone().unwrap();
    annotations.insert(of.to_owned(), image.layers[1].data[0].digest().to_string());
    image.layers[0].chunk_tables[0].set_annotations(Some(annotations));
    let published = store.publish_bytes(&image.to_json()).unwrap();
    let media_type = converter::manifest::MANIFEST_MEDIA_TYPE;
    let named = converter::manifest::descriptor(media_type, published.digest, published.size, &[]);
    store.write_ref(&"a:mistaken".parse().unwrap(), &named).unwrap();
    let output = verify("a:mistaken");
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    let problems = String::from_utf8_lossy(&output.stdout);
    assert!(problems.contains("as the chunk table of"), "{problems}");
    let table = made["layers"][2]["chunk_tables"][0]["blob"]["digest"].as_str();
    let table = table.map_or_else(|| image.layers[2].chunk_tables[0].digest().to_string(), str::to_owned);
    std::fs::remove_file(store.local_dir().unwrap().blob_path(&table.parse().unwrap())).unwrap();
    let output = merge(root, &["a:b"], "a:merged").output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    assert!(said(&output).contains(&table) && said(&output).contains("is not in the store"), "{}", said(&output));
    assert!(!root.join("refs/a/merged").exists());
    // Without its manifest an image is as broken as can be.
    std::fs::remove_file(store.local_dir().unwrap().blob_path(&digest)).unwrap();
    assert_eq!(verify("a:b").status.code(), Some(3));
}

#[test]
fn layers_of_two_kinds_are_not_stacked() {
    let place = Place::new();
    let root = place.store.local_dir().unwrap().root();
    run(&mut unmerged(&place.layout(&layers(3, 4)), root, "a:trusted"));
    run(unmerged(&place.layout(&layers(4, 4)), root, "a:user").arg("--userxattr"));
    for under in ["none", "all"] {
        let output = merge(root, &["a:trusted", "a:user"], "a:both").args(["--merge-under", under]).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{under}: {}", said(&output));
        assert!(said(&output).contains("user.overlay."), "{}", said(&output));
    }
}

#[test]
fn what_is_asked_wrongly_is_refused() {
    let place = Place::new();
    let source = place.layout(&layers(3, 4));
    let root = place.store.local_dir().unwrap().root();
    run(&mut unmerged(&source, root, "a:b"));
    for (args, code, words) in [
        (&["a:b", "--merge-under", "3GB"][..], 2, "neither `none`, `all`, nor a size"),
        (&["a:none"], 1, "list"),
        (&[], 2, "NAME:TAG"),
        (&["A:b"], 2, ""),
    ] {
        let output = merge(root, args, "a:merged").output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", said(&output));
        assert!(said(&output).contains(words), "{args:?}: {}", said(&output));
    }
}

#[test]
fn merging_killed_at_any_instant() {
    let place = Place::new();
    let source = place.layout(&layers(1, 300));
    let root = place.store.local_dir().unwrap().root();
    run(&mut unmerged(&source, root, "a:b"));
    let before = list(&root.join("blobs/sha256"));
    let mut expected = None;
    let mut hashed = Hashed::default();
    let began = Instant::now();
    for pack in [false, true] {
        let other = Place::new();
        run(&mut unmerged(&source, other.store.local_dir().unwrap().root(), "a:b"));
        let mut command = merge(other.store.local_dir().unwrap().root(), &["a:b"], "a:merged");
        let manifest = run(if pack { command.arg("--pack") } else { &mut command })["manifest"].clone();
        expected = Some(manifest);
    }
    let whole = began.elapsed() / 4;
    let mut killed = 0;
    for round in 0..40_u64 {
        let mut child = merge(root, &["a:b"], "a:merged").arg("--pack").spawn().unwrap();
        let part = u32::try_from(splitmix64(round) % 1000).unwrap();
        std::thread::sleep(whole * part / 1000);
        signal(&child, Signal::KILL);
        let status = child.wait().unwrap();
        killed += u32::from(status.signal() == Some(9));
        hashed.assert_sound(&place.store);
        if status.success() {
            // As if nothing had been done yet, for the next round.
            std::fs::remove_dir_all(root.join("converted")).unwrap();
            for name in list(&root.join("blobs/sha256")).iter().filter(|name| !before.contains(name)) {
                std::fs::remove_file(root.join("blobs/sha256").join(name)).unwrap();
            }
            place.store.remove_ref(&"a:merged".parse().unwrap()).unwrap();
        }
    }
    assert!(killed > 5, "only {killed} of 40 were killed");
    let report = run(merge(root, &["a:b"], "a:merged").arg("--pack"));
    assert_eq!(Some(&report["manifest"]), expected.as_ref());
    assert_eq!(list(&place.store.scratch()), [""; 0]);
    hashed.assert_sound(&place.store);
}

#[test]
fn privileged_merging_without_space() {
    if !require::root() {
        return;
    }
    mounts::in_private_namespace(|| {
        let place = Place::new();
        let source = place.layout(&layers(9, 60));
        run(&mut unmerged(&source, place.store.local_dir().unwrap().root(), "a:b"));
        let used: u64 = list(&place.store.local_dir().unwrap().root().join("blobs/sha256"))
            .iter()
            .map(|name| {
                std::fs::metadata(place.store.local_dir().unwrap().root().join("blobs/sha256").join(name))
                    .unwrap()
                    .len()
            })
            .sum();
        let mut size = used + (256 << 10);
        let disk = mounts::tmpfs(size).unwrap();
        let root = disk.path().join("store");
        let copied =
            Command::new("cp").arg("-a").arg(place.store.local_dir().unwrap().root()).arg(&root).status().unwrap();
        assert!(copied.success());
        let mut failures = 0;
        loop {
            let output = merge(&root, &["a:b"], "a:merged").arg("--pack").output().unwrap();
            let store = Store::open(&root).unwrap();
            Hashed::all(&store);
            assert_eq!(list(&store.scratch()), [""; 0], "at {size} bytes");
            if output.status.success() {
                report(&output);
                break;
            }
            failures += 1;
            let said = said(&output);
            assert_eq!(output.status.code(), Some(1), "{said}");
            assert!(said.contains("No space left on device"), "{said}");
            assert_eq!(store.list_refs().unwrap().len(), 1);
            size += 1 << 20;
            let remount = Command::new("mount").arg("-o").arg(format!("remount,size={size}")).arg(disk.path()).status();
            assert!(remount.unwrap().success());
        }
        assert!(failures > 1, "{failures} runs had too little room");
    });
}
