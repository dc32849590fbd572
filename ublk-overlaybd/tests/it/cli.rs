//! The program on real files: what it writes, what it says, and how it ends.

use crate::support::{run, run_ok, samples, sha256};
use serde_json::Value;
use std::path::Path;

fn sample(path: &str) -> String {
    samples().join(path).display().to_string()
}

fn manifest() -> Value {
    serde_json::from_slice(&std::fs::read(samples().join("MANIFEST.json")).unwrap()).unwrap()
}

fn file_sha256(path: &Path) -> String {
    sha256(&std::fs::read(path).unwrap())
}

#[test]
fn every_stack_is_exported() {
    let dir = tempfile::tempdir().unwrap();
    let manifest = manifest();
    for (number, entry) in
        manifest["stacks"].as_array().unwrap().iter().chain(manifest["rw"].as_array().unwrap()).enumerate()
    {
        let lowers: Vec<String> =
            entry["lowers"].as_array().unwrap().iter().map(|path| sample(path.as_str().unwrap())).collect();
        let out = dir.path().join(number.to_string());
        let mut args = vec!["export".to_owned()];
        args.extend(lowers.clone());
        if let Some(data) = entry["data"].as_str() {
            args.extend(["--upper".to_owned(), sample(data)]);
            args.push(entry["index"].as_str().map_or("-".to_owned(), sample));
        }
        args.extend([out.display().to_string(), "--json".to_owned()]);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let said: Value = serde_json::from_slice(&run_ok(&args)).unwrap();
        assert_eq!(said["bytes"].as_u64().unwrap(), out.metadata().unwrap().len());
        assert_eq!(file_sha256(&out), entry["sha256"].as_str().unwrap(), "{}", entry["name"]);
        assert_ne!(run(&args).status.code(), Some(0), "it must not overwrite");

        // And by a configuration, in a place of its own.
        if entry["index"].is_null() && entry["data"].is_string() {
            continue;
        }
        let config = dir.path().join(format!("{number}.json"));
        let lowers: Vec<Value> = lowers.iter().map(|file| serde_json::json!({ "file": file })).collect();
        let mut document = serde_json::json!({ "repoBlobUrl": "", "lowers": lowers, "resultFile": "" });
        if let (Some(data), Some(index)) = (entry["data"].as_str(), entry["index"].as_str()) {
            document["upper"] = serde_json::json!({ "data": sample(data), "index": sample(index) });
        }
        std::fs::write(&config, document.to_string()).unwrap();
        let out = out.with_extension("by-config");
        run_ok(&["export", "--config", &config.display().to_string(), &out.display().to_string()]);
        assert_eq!(file_sha256(&out), entry["sha256"].as_str().unwrap(), "{}", entry["name"]);
    }
}

/// Given the same names, our raw layers are theirs, byte for byte.
#[test]
fn committed_layers_have_the_bytes_of_theirs() {
    let dir = tempfile::tempdir().unwrap();
    for (layer, uuid, extra) in [
        ("l0", "11111111-0000-4000-8000-000000000001", ["-m", "layer0 sample"]),
        ("l1", "22222222-0000-4000-8000-000000000002", ["--parent", "11111111-0000-4000-8000-000000000001"]),
    ] {
        let out = dir.path().join(layer).display().to_string();
        let (data, index) = (sample(&format!("rw/{layer}.rw.data")), sample(&format!("rw/{layer}.rw.index")));
        let args = ["commit", &data, &index, &out, "--uuid", uuid];
        run_ok(&[&args[..], &extra].concat());
        assert_eq!(std::fs::read(&out).unwrap(), std::fs::read(sample(&format!("lsmt/{layer}.lsmt"))).unwrap());
    }
}

/// The same layer in every wrapping reads the same, and threads change nothing.
#[test]
fn every_wrapping_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    let (data, index) = (sample("rw/l0.rw.data"), sample("rw/l0.rw.index"));
    let expected = manifest()["rw"][0]["sha256"].as_str().unwrap().to_owned();
    let mut number = 0;
    let mut wrappings: Vec<Vec<&str>> = vec![vec![]];
    for codec in ["lz4", "zstd"] {
        for size in ["4KiB", "8", "16KiB", "32768"] {
            wrappings.push(vec!["--zfile", codec, "--block-size", size]);
        }
    }
    for wrapping in wrappings {
        for tar in [&[][..], &["--tar"]] {
            let outs = ["1", "2", "7"].map(|threads| {
                number += 1;
                let out = dir.path().join(number.to_string()).display().to_string();
                let args = ["commit", &data, &index, &out, "--json", "--digest", "--threads", threads];
                let said: Value = serde_json::from_slice(&run_ok(&[&args[..], &wrapping, tar].concat())).unwrap();
                assert_eq!(said["digest"], format!("sha256:{}", file_sha256(Path::new(&out))));
                out
            });
            let first = std::fs::read(&outs[0]).unwrap();
            assert!(outs.iter().all(|out| std::fs::read(out).unwrap() == first), "{wrapping:?} {tar:?}");
            let raw = dir.path().join("raw").display().to_string();
            run_ok(&["export", "--force", &outs[1], &raw]);
            assert_eq!(file_sha256(Path::new(&raw)), expected, "{wrapping:?} {tar:?}");
            run_ok(&["check", &outs[2]]);
        }
    }
    let out = dir.path().join("never").display().to_string();
    let wrong = run(&["commit", &data, &index, &out, "--zfile", "lz4", "--block-size", "64KiB"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(!Path::new(&out).exists());
}

#[test]
fn merged_and_sealed_layers_read_as_what_they_were_made_of() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let [l0, l1, l2] = ["l0", "l1", "l2"].map(|layer| sample(&format!("lsmt/{layer}.lsmt")));
    run_ok(&["merge", &l0, &l1, &l2, &path("all"), "--zfile", "lz4", "--tar"]);
    run_ok(&["merge", &l1, &l2, &path("upper two")]);
    run_ok(&["merge", &l0, &path("upper two"), &path("all 2"), "--bottom"]);
    run_ok(&["diff", &path("all"), &sample("lsmt/merged012.lsmt")]);
    run_ok(&["diff", &path("all 2"), &sample("lsmt/merged012.lsmt")]);
    let differ = run(&["diff", &path("all"), &l0, "--json"]);
    assert_eq!(differ.status.code(), Some(1));
    let said: Value = serde_json::from_slice(&differ.stdout).unwrap();
    assert_eq!(said["same"], false);

    run_ok(&["seal", &sample("rw/l1.rw.data"), &sample("rw/l1.rw.index"), &path("sealed")]);
    run_ok(&["diff", &format!("{l0},{}", path("sealed")), &format!("{l0},{l1}")]);
    // In place, on copies.
    std::fs::copy(sample("rw/l1.rw.data"), path("data")).unwrap();
    run_ok(&["seal", &path("data"), &sample("rw/l1.rw.index")]);
    assert_eq!(std::fs::read(path("data")).unwrap(), std::fs::read(path("sealed")).unwrap());
    // A sealed file is still the data of its index.
    run_ok(&["export", &l0, "--upper", &path("data"), &sample("rw/l1.rw.index"), &path("raw")]);
    assert_eq!(file_sha256(Path::new(&path("raw"))), manifest()["rw"][1]["sha256"].as_str().unwrap());
    run_ok(&["commit", &path("sealed"), &path("committed")]);
    run_ok(&["diff", &format!("{l0},{}", path("committed")), &format!("{l0},{l1}")]);
}

#[test]
fn new_layers_are_empty_and_can_be_resized() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    run_ok(&["create", &path("d"), &path("i"), "--size", "4MiB", "--uuid", "E4D360C7-926F-4124-932D-E69316895E3F"]);
    assert_eq!(std::fs::read(path("d")).unwrap(), std::fs::read(sample("rw/empty.rw.data")).unwrap());
    assert_eq!(std::fs::read(path("i")).unwrap(), std::fs::read(sample("rw/empty.rw.index")).unwrap());
    assert_eq!(run(&["create", &path("d"), &path("i2"), "--size", "4MiB"]).status.code(), Some(1));
    assert!(!Path::new(&path("i2")).exists());
    run_ok(&["resize", &path("d"), &path("i"), "--size", "1GiB"]);
    assert_eq!(run(&["resize", &path("d"), &path("i"), "--size", "1MiB"]).status.code(), Some(2));
    run_ok(&["export", "--upper", &path("d"), &path("i"), &path("raw")]);
    assert_eq!(Path::new(&path("raw")).metadata().unwrap().len(), 1 << 30);

    run_ok(&["create", &path("sd"), &path("si"), "--size", "1MiB", "--sparse"]);
    run_ok(&["commit", &path("sd"), "-", &path("sparse")]);
    let info: Value = serde_json::from_slice(&run_ok(&["info", &path("sparse"), "--json"])).unwrap();
    assert_eq!((info["mappings"].as_u64(), info["bytes"].as_u64()), (Some(0), Some(8192)));
}

#[test]
fn disks_are_imported() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    run_ok(&["export", &sample("lsmt/merged012.lsmt"), &path("raw")]);
    run_ok(&["import", &path("raw"), &path("layer"), "--zfile", "zstd"]);
    run_ok(&["diff", &path("layer"), &path("raw")]);
    let qemu = fixtures::require::tool("qemu-img", "qemu-utils");
    let status =
        std::process::Command::new(qemu).args(["convert", "-O", "qcow2", &path("raw"), &path("qcow2")]).status();
    assert!(status.unwrap().success());
    run_ok(&["import", &path("qcow2"), &path("from qcow2"), "--zfile", "zstd"]);
    assert_eq!(std::fs::read(path("layer")).unwrap(), std::fs::read(path("from qcow2")).unwrap());
    // Nothing else is left there.
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 4);
}

#[test]
fn what_is_bad_ends_with_3_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out").display().to_string();
    for bad in [
        "header_digest_flip.zfile",
        "jump_table_flip.zfile",
        "block_flip.zfile",
        "magic1_flip.lsmt",
        "index_unsorted.lsmt",
        "index_size_huge.lsmt",
    ] {
        let bad = sample(&format!("bad/{bad}"));
        for args in [&["export", &bad, &out][..], &["check", &bad], &["merge", &bad, &out], &["commit", &bad, &out]] {
            let output = run(args);
            assert_eq!(output.status.code(), Some(3), "{args:?}");
            assert!(!output.stderr.is_empty());
        }
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
    }
    for torn in ["rw_t4", "rw_t6"] {
        let (data, index) = (sample(&format!("bad/{torn}.data")), sample(&format!("bad/{torn}.index")));
        assert_eq!(run(&["check", "--upper", &data, &index]).status.code(), Some(3));
        let repaired = dir.path().join(format!("{torn}.index")).display().to_string();
        assert_eq!(run(&["check", "--upper", &data, &index, "--repair", &repaired]).status.code(), Some(3));
        run_ok(&["check", "--upper", &data, &repaired]);
        let (a, b) = (dir.path().join("a").display().to_string(), dir.path().join("b").display().to_string());
        run_ok(&["export", "--force", "--upper", &data, &index, &a]);
        run_ok(&["export", "--force", "--upper", &data, &repaired, &b]);
        assert_eq!(std::fs::read(a).unwrap(), std::fs::read(b).unwrap());
    }
    assert_eq!(run(&["export", "/nowhere/layer", &out]).status.code(), Some(1));
    assert_eq!(run(&["export", &out]).status.code(), Some(2));
    assert_eq!(run(&["info", &sample("rw/l0.rw.data"), "-"]).status.code(), Some(3));
}

#[test]
fn maps_and_lists_are_lines_of_json() {
    let layers = [sample("lsmt/l0.lsmt"), sample("lsmt/l1.lsmt")];
    let out = run_ok(&["map", &layers[0], &layers[1], "--json", "--range", "4KiB..1MiB"]);
    let mut at = 4096;
    for line in out.split(|&b| b == b'\n').filter(|line| !line.is_empty()) {
        let piece: Value = serde_json::from_slice(line).unwrap();
        assert_eq!(piece["start"].as_u64(), Some(at));
        at += piece["bytes"].as_u64().unwrap();
        if piece["kind"] == "data" {
            let layer = usize::try_from(piece["layer"].as_u64().unwrap()).unwrap();
            assert_eq!(piece["file"], layers[layer]);
        }
    }
    assert_eq!(at, 1 << 20);
    let listed = run_ok(&["ls", "--json", &sample("lsmt"), &sample("rw"), &sample("tar")]);
    assert_eq!(listed.split(|&b| b == b'\n').filter(|line| !line.is_empty()).count(), 7 + 7 + 1);
}
