//! Every real file of the C++ implementation reads as it says, and what it refuses is refused, or read right.

use crate::support::{image, read_all, samples, sha256};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use ublk_overlaybd::backend::{FileSource, ReadError, Source, ZFile};
use ublk_overlaybd::layer::{Form, Layer};

fn manifest() -> Value {
    serde_json::from_slice(&std::fs::read(samples().join("MANIFEST.json")).unwrap()).unwrap()
}

fn lowers(entry: &Value) -> Vec<Layer> {
    let paths = entry["lowers"].as_array().unwrap().iter();
    paths.map(|path| Layer::open_file(&samples().join(path.as_str().unwrap())).unwrap()).collect()
}

#[test]
fn the_files_are_what_the_manifest_says() {
    let manifest = manifest();
    let files = manifest["files"].as_object().unwrap();
    assert!(files.len() >= 30);
    for (path, about) in files {
        let bytes = std::fs::read(samples().join(path)).unwrap();
        assert_eq!(bytes.len() as u64, about[0].as_u64().unwrap(), "{path}");
        assert_eq!(sha256(&bytes), about[1].as_str().unwrap(), "{path}");
    }
}

#[test]
fn every_stack_reads_as_it_should() {
    let manifest = manifest();
    let stacks = manifest["stacks"].as_array().unwrap();
    assert_eq!(stacks.len(), 13);
    for stack in stacks {
        let name = &stack["name"];
        let image = image(lowers(stack));
        assert_eq!(image.size(), stack["vsize"].as_u64().unwrap(), "{name}");
        assert_eq!(sha256(&read_all(&image)), stack["sha256"].as_str().unwrap(), "{name}");
        // The same in small and crooked pieces.
        let whole = read_all(&image);
        let mut at = 0;
        for step in (1usize..).map(|i| 1 + i * 7919 % 30_000) {
            let end = whole.len().min(at + step);
            let mut piece = vec![0; end - at];
            assert!(image.try_read_at(&mut piece, at as u64).unwrap());
            assert!(piece == whole[at..end], "{name}: {at}..{end}");
            at = end;
            if at == whole.len() {
                break;
            }
        }
    }
}

#[test]
fn every_writable_layer_reads_as_it_should() {
    let manifest = manifest();
    let layers = manifest["rw"].as_array().unwrap();
    assert_eq!(layers.len(), 3);
    for entry in layers {
        let path = |key: &str| entry[key].as_str().map(|path| samples().join(path));
        let mut stack = lowers(entry);
        let top = Layer::open_pair(&path("data").unwrap(), path("index").as_deref()).unwrap();
        assert_eq!(top.about().form, Form::Writable);
        assert_eq!(top.about().replayed.as_ref().and_then(|replayed| replayed.dropped.clone()), None);
        stack.push(top);
        assert_eq!(sha256(&read_all(&image(stack))), entry["sha256"].as_str().unwrap(), "{}", entry["name"]);
    }
}

#[test]
fn a_sparse_layer_with_its_holes_maps_less() {
    let dir = tempfile::tempdir().unwrap();
    let tar = fixtures::require::tool("tar", "tar");
    let archive = samples().join("rw/sp.rw.data.sparse.tar");
    let status = std::process::Command::new(tar).arg("-xSf").arg(archive).current_dir(&dir).status().unwrap();
    assert!(status.success());
    let data = std::fs::read_dir(&dir).unwrap().next().unwrap().unwrap().path();
    let layer = Layer::open_pair(&data, None).unwrap();
    let mapped: u64 = layer.index().iter().map(|extent| extent.len * 512).sum();
    assert!(mapped < layer.virtual_size() / 2, "{mapped} bytes are mapped");
    let expected = manifest()["rw"][2]["sha256"].as_str().unwrap().to_owned();
    assert_eq!(sha256(&read_all(&image([layer]))), expected);
    // An index file beside it, which their tools make, is empty and means nothing.
    let index = samples().join("rw/empty.rw.index");
    assert_eq!(sha256(&read_all(&image([Layer::open_pair(&data, Some(&index)).unwrap()]))), expected);
}

#[test]
fn compressed_files_that_are_no_layers() {
    for (path, about) in manifest()["zfile_plain"].as_object().unwrap() {
        let expected = about.as_str().unwrap().split(' ').next().unwrap();
        let file = FileSource::open(samples().join(path)).unwrap();
        assert_eq!(sha256(&read_all(&ZFile::open(Arc::new(file), path.as_str()).unwrap())), expected);
        let error = Layer::open_file(&samples().join(path)).unwrap_err();
        assert!(error.is_corrupt() && error.to_string().contains("LSMT header: not LSMT"), "{error}");
    }
}

fn refusal(path: &Path) -> ReadError {
    match Layer::open_file(path) {
        Err(error) => error,
        Ok(layer) => {
            let mut bytes = vec![0; usize::try_from(layer.data().size()).unwrap()];
            layer.data().read_exact_at(&mut bytes, 0).unwrap_err()
        }
    }
}

#[test]
fn what_is_bad_is_refused_by_name_or_read_right() {
    let manifest = manifest();
    let mut tried = 0;
    for (path, _) in manifest["bad"].as_object().unwrap() {
        let full = samples().join(path);
        tried += 1;
        let says = |words: &[&str]| {
            let error = refusal(&full);
            let text = error.to_string();
            assert!(error.is_corrupt() && words.iter().all(|word| text.contains(word)), "{path}: {text}");
        };
        match path.as_str() {
            "bad/header_digest_flip.zfile" => says(&["ZFile header", "digest"]),
            "bad/jump_table_flip.zfile" => says(&["jump table", "index_crc"]),
            "bad/block_flip.zfile" => says(&["block", "checksum"]),
            "bad/magic1_flip.lsmt" => says(&["LSMT header", "magic1"]),
            "bad/index_unsorted.lsmt" => says(&["LSMT index", "offset"]),
            "bad/index_size_huge.lsmt" => says(&["LSMT trailer", "index_size"]),
            // Theirs writes it and cannot read it.
            "bad/incompressible.lz4.64k.zfile" => {
                let file = ZFile::open(Arc::new(FileSource::open(&full).unwrap()), "z").unwrap();
                let expected = "790f6efcea262df49536f71b9cc9152a2f14d601cfe70b97eeb9d7ad4f03a305";
                assert_eq!(sha256(&read_all(&file)), expected);
            }
            // Theirs refuses both; nothing in the rest of these indexes was ever flushed.
            "bad/rw_t4.data+index" => torn("bad/rw_t4", "outside the data"),
            "bad/rw_t6.data+index" => torn("bad/rw_t6", "length is 0"),
            other => panic!("nobody said what is right for {other}"),
        }
    }
    assert_eq!(tried, 9);
}

fn torn(path: &str, why: &str) {
    let file = |kind: &str| samples().join(format!("{path}.{kind}"));
    let layer = Layer::open_pair(&file("data"), Some(&file("index"))).unwrap();
    let replayed = layer.about().replayed.clone().unwrap();
    let dropped = replayed.dropped.unwrap();
    assert!(dropped.why.contains(why), "{dropped:?}");
    let index = std::fs::read(file("index")).unwrap();
    assert_eq!(dropped.offset + dropped.bytes, index.len() as u64);
    // What was there before reads as it was written.
    let whole = usize::try_from(dropped.offset).unwrap();
    assert_eq!((whole - 4096) / 16, usize::try_from(replayed.entries + replayed.padding).unwrap());
    assert_eq!(read_all(&image([layer])).len() % 512, 0);
}
