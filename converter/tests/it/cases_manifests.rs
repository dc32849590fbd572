//! Manifests, configs and blobs that lie, and what the program answers to the shell.

use std::fs;
use std::process::{Output, Stdio};

use converter::convert::Converted;
use fixtures::oci::{Compression, Image, Layer, Layout, Member, digest, media, write_docker_archive};
use fixtures::tree::{Compare, assert_same};
use fixtures::{require, tar};
use serde_json::{Value, json};

use crate::support_tar::{Place, directory, dsec_convert, file, model, warnings};

const ONE: &str = "d etc/\nf etc/a \"1\"\nf big size=100K fill=text:1";
const TWO: &str = "w etc/a\nf etc/b \"2\"";

fn assert_both_layers(place: &Place, converted: &Converted) {
    let content = fixtures::content::Content::Text { seed: 1, size: 100 << 10 };
    let big = crate::support_tar::put("big", fixtures::model::Kind::Regular(content), 0o644);
    let want = model([directory("etc"), file("etc/b", "2"), big]);
    assert_same(&place.mount(converted).snapshot(), &want, &Compare::overlay());
}

fn archive(place: &Place, image: &Image) {
    write_docker_archive(&[(image, &["made:1"])], &place.path("docker.tar")).unwrap();
}

#[test]
fn privileged_m01_attestation_in_the_index() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let image = || Image::new().layer(Layer::text(ONE).compression(Compression::Gzip)).layer(Layer::text(TWO));
    let other = Image::new().layer(Layer::text("f other \"x\"")).platform("linux/s390x");
    let attestation = || Image::attestation(&image().manifest_digest());
    for members in [
        vec![image().into(), attestation().into()],
        vec![attestation().into(), other.clone().into(), image().into()],
        vec![Member::Index(vec![attestation().into(), image().into()]), other.clone().into()],
    ] {
        let _ = fs::remove_dir_all(place.path("oci"));
        Layout::new().index("made", members).write(&place.path("oci")).unwrap();
        let converted = place.convert("oci:oci").unwrap();
        assert_eq!(converted.layers.len(), 2);
        assert_both_layers(&place, &converted);
    }
    // An index of nothing that runs is no image.
    fs::remove_dir_all(place.path("oci")).unwrap();
    Layout::new().index("made", vec![attestation().into(), other.into()]).write(&place.path("oci")).unwrap();
    let error = place.refused("oci:oci");
    assert!(error.contains("there is no image for linux/") && error.contains("linux/s390x"), "{error}");
    assert!(!error.contains("unknown"), "{error}");
}

#[test]
fn privileged_m02_the_media_type_lies() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let two = || Layer::text(TWO);
    for (packed, claimed, docker) in [
        (Compression::Gzip, media::LAYER_TAR, false),
        (Compression::None, media::LAYER_GZIP, false),
        (Compression::Zstd, media::LAYER_GZIP, false),
        (Compression::Gzip, media::LAYER_ZSTD, false),
        (Compression::None, media::DOCKER_LAYER, true),
        (Compression::Zstd, media::DOCKER_LAYER, true),
    ] {
        let image = Image::new().layer(Layer::text(ONE).compression(packed).media_type(claimed)).layer(two());
        // A store of its own: a layer that an earlier run finished keeps what was said of it then.
        let place = Place::new();
        place.layout(if docker { image.docker() } else { image });
        let converted = place.convert("oci:oci").unwrap();
        assert_both_layers(&place, &converted);
        let warned = &converted.layers[0].record.warnings;
        assert!(warned.iter().any(|w| w.message.contains(claimed)), "{packed:?} {claimed}: {warned:?}");
    }
    // Docker archives name no type at all.
    for compression in [Compression::Gzip, Compression::Zstd, Compression::None] {
        archive(&place, &Image::new().layer(Layer::text(ONE).compression(compression)).layer(two()));
        let converted = place.convert("docker-archive:docker.tar").unwrap();
        assert_both_layers(&place, &converted);
        assert_eq!(warnings(&converted), [""; 0]);
    }
    // The diffID is of the plain tar, whatever the blob is packed with.
    let wrong = digest(b"something else");
    for compression in [Compression::Gzip, Compression::None] {
        let layer = Layer::text(ONE).compression(compression).media_type(media::LAYER_TAR).claimed_diff_id(&wrong);
        place.layout(Image::new().layer(layer));
        let error = place.refused("oci:oci");
        assert!(
            error.contains("layer 0 (sha256:") && error.contains(&format!("the image's config says {wrong}")),
            "{error}"
        );
    }
}

#[test]
fn privileged_m03_diff_ids_and_layers() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let image = || Image::new().layer(Layer::text(ONE)).layer(Layer::text(TWO)).layer(Layer::text("f c \"3\""));
    let id = |script: &str| digest(&tar::build(script));
    let short = image().diff_ids(&[&id(ONE), &id(TWO)]);
    let long = image().diff_ids(&[&id(ONE), &id(TWO), &id("f c \"3\""), &id(ONE)]);
    for (image, count) in [(short, 2), (long, 4)] {
        place.layout(image.clone());
        archive(&place, &image);
        for source in ["oci:oci", "docker-archive:docker.tar"] {
            let error = place.refused(source);
            assert_eq!(error, format!("the image has 3 layers but its config has {count} diff_ids"));
        }
    }
    let swapped = image().diff_ids(&[&id(TWO), &id(ONE), &id("f c \"3\"")]);
    place.layout(swapped);
    let error = place.convert("oci:oci").unwrap_err();
    assert!(error.is_corrupt() && error.to_string().contains("(diff_ids)"), "{error}");

    let history = json!([
        {"created_by": "one"}, {"created_by": "ENV", "empty_layer": true}, {"created_by": "two"},
        {"created_by": "CMD", "empty_layer": true},
    ]);
    let fine = Image::new().layer(Layer::text(ONE)).layer(Layer::text(TWO)).history(history);
    place.layout(fine.clone());
    archive(&place, &fine);
    for source in ["oci:oci", "docker-archive:docker.tar"] {
        assert_both_layers(&place, &place.convert(source).unwrap());
    }
}

#[test]
fn privileged_m04_empty_things() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let empty = || model([]);
    for tar in [Vec::new(), vec![0; 512], vec![0; 1024], vec![0; 10240]] {
        for compression in [Compression::None, Compression::Gzip, Compression::Zstd] {
            let packed = Layer::tar(tar.clone()).compression(compression);
            let converted = place.tar(&packed.blob()).unwrap();
            assert_same(&place.only_layer(&converted), &empty(), &Compare::exact());
            assert_eq!(converted.layers[0].record.data, []);
            // Between layers it changes nothing.
            let image = Image::new().layer(Layer::text(ONE)).layer(packed).layer(Layer::text(TWO));
            place.layout(image.clone());
            archive(&place, &image);
            for source in ["oci:oci", "docker-archive:docker.tar"] {
                let converted = place.convert(source).unwrap();
                assert_eq!(converted.layers.len(), 3);
                assert_both_layers(&place, &converted);
            }
        }
    }
    // No layers: an image with a config and nothing to mount.
    place.layout(Image::new());
    archive(&place, &Image::new());
    for source in ["oci:oci", "docker-archive:docker.tar"] {
        assert_eq!(place.convert(source).unwrap().layers.len(), 0);
    }
    // The empty descriptor stands for no file system, be it alone or among layers.
    let nothing = || Layer::tar(b"{}".to_vec()).media_type(media::EMPTY);
    for image in [Image::new().layer(nothing()), Image::new().layer(Layer::text(ONE)).layer(nothing())] {
        for image in [image.clone(), image.config(b"{}", media::EMPTY)] {
            place.layout(image);
            let error = place.refused("oci:oci");
            assert!(error.contains("empty placeholder, not a filesystem layer"), "{error}");
        }
    }
}

#[test]
fn m05_wrong_sizes_and_digests() {
    let place = Place::new();
    for compression in [Compression::None, Compression::Gzip, Compression::Zstd] {
        let good = Layer::text(ONE).compression(compression);
        let blob = good.blob();
        let size = i64::try_from(blob.len()).unwrap();
        for claimed in [size - 1, size + 1] {
            place.layout(Image::new().layer(good.clone().claimed_size(claimed)));
            refused_as_damaged(&place, &[&format!("descriptor says {claimed}"), "layer 0"]);
        }
        let short = good.clone().stored(blob[..blob.len() - 1].to_vec());
        let short = short.claimed_digest(&digest(&blob)).claimed_size(size);
        place.layout(Image::new().layer(short));
        refused_as_damaged(&place, &[&format!("{} bytes, its descriptor says {size}", size - 1), "layer 0"]);
        // Each byte's change is found, the last one's too.
        for at in [0, blob.len() / 2, blob.len() - 1] {
            let mut flipped = blob.clone();
            flipped[at] ^= 1;
            let layer = good.clone().stored(flipped).claimed_digest(&digest(&blob));
            place.layout(Image::new().layer(Layer::text("f below \"x\"")).layer(layer));
            let error = place.convert("oci:oci").unwrap_err();
            assert!(error.is_corrupt(), "{compression:?}, byte {at}: {error}");
            let name = format!("layer 1 ({})", digest(&blob));
            assert!(error.to_string().contains(&name), "{error}");
        }
    }
    // In the padding behind the end of the archive, where no reader of tars looks.
    let mut padded = tar::build(ONE);
    padded.resize(padded.len() + 8192, 0);
    let good = Layer::tar(padded.clone());
    *padded.last_mut().unwrap() = 1;
    let place = Place::new();
    place.layout(Image::new().layer(good.clone().stored(padded.clone()).claimed_digest(&digest(good.tar_bytes()))));
    refused_as_damaged(&place, &[&format!("its digest is {}", digest(&padded))]);
    // And only the plain tar's digest could tell.
    let packed = Layer::tar(padded).compression(Compression::Gzip).claimed_diff_id(&digest(good.tar_bytes()));
    place.layout(Image::new().layer(packed.clone()));
    refused_as_damaged(&place, &["(diff_ids)", "layer 0"]);
    archive(&place, &Image::new().layer(packed));
    let error = place.refused("docker-archive:docker.tar");
    assert!(error.contains("(diff_ids)"), "{error}");
}

/// The layout is refused with a sentence that has all of `parts` in it, by the library and the program, and nothing of
/// it is in the store.
#[track_caller]
fn refused_as_damaged(place: &Place, parts: &[&str]) {
    let before = place.contents();
    let error = place.refused("oci:oci");
    assert!(parts.iter().all(|part| error.contains(part)), "{parts:?}: {error}");
    let output = run(place, &["oci:oci"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains(&error), "{said}");
    assert_eq!(place.contents(), before);
}

fn run(place: &Place, args: &[&str]) -> Output {
    let all = [&["convert", "--store", "store", "--name", "made:1", "--json"], args].concat();
    dsec_convert(place.dir(), &all, Stdio::null())
}

#[test]
fn m06_foreign_and_unknown_layers() {
    let place = Place::new();
    let bottom = || Layer::text(ONE);
    let foreign = Layer::text(TWO).media_type(media::DOCKER_FOREIGN).absent(Some("https://example.org/layer"));
    let unknown = Layer::text(TWO).media_type("application/octet-stream");
    let encrypted = Layer::text(TWO).media_type("application/vnd.oci.image.layer.v1.tar+gzip+encrypted");
    for (layer, part) in [(foreign, "foreign"), (unknown, "application/octet-stream"), (encrypted, "encrypted")] {
        let name = format!("layer 1 ({})", digest(&layer.blob()));
        place.layout(Image::new().layer(bottom()).layer(layer));
        let error = place.refused("oci:oci");
        assert!(error.contains(&name) && error.contains(part), "{error}");
        let output = run(&place, &["oci:oci"]);
        assert_eq!(output.status.code(), Some(1), "not supported is not damaged");
        assert!(String::from_utf8_lossy(&output.stderr).contains(&error));
    }
    // A blob that should be there and is not.
    let absent = Layer::text(TWO).absent(None);
    let name = format!("layer 1 ({})", digest(&absent.blob()));
    place.layout(Image::new().layer(bottom()).layer(absent));
    let error = place.refused("oci:oci");
    assert!(error.contains(&name) && error.contains("is missing"), "{error}");
}

#[test]
fn exit_codes_and_sentences() {
    let place = Place::new();
    place.layout(Image::new().layer(Layer::text(ONE)).layer(Layer::text(TWO)));
    fs::write(place.path("long.tar"), tar::build(&format!("f dir/{} \"1\"", "x".repeat(256)))).unwrap();
    fs::write(place.path("cut.tar"), tar::build("f dir/cut size=4K fill=text:1\ntruncate 2K")).unwrap();
    fs::write(place.path("a.tar.xz"), b"\xfd7zXZ\0and so on").unwrap();
    fs::write(place.path("not.tar"), "no archive at all, ".repeat(100)).unwrap();
    let before = place.contents();
    for (args, code, parts) in [
        (&["tar:long.tar"][..], 1, &["layer 0", "long.tar", "is longer than 255 bytes"][..]),
        (&["tar:a.tar.xz"], 1, &["layer 0", "xz, which is not supported"]),
        (&["tar:none.tar"], 1, &["none.tar"]),
        (&["oci:oci:other"], 1, &["`other`", "made"]),
        (&["oci:oci", "--platform", "linux/s390x"], 1, &["linux/s390x"]),
        (&["tar:cut.tar", "--max-inodes", "1"], 1, &["dir/cut", "more than 1 inodes"]),
        (&["tar:cut.tar"], 3, &["layer 0", "dir/cut", "ends in the middle"]),
        (&["tar:not.tar"], 3, &["layer 0", "not.tar", "not a tar archive"]),
        (&["docker-archive:not.tar"], 3, &["not.tar"]),
        (&["floppy:a"], 2, &["floppy"]),
        (&["oci:oci", "--jobs", "0"], 2, &["--jobs"]),
        (&["oci:oci", "--platform", "linux"], 2, &["--platform"]),
        (&["oci:oci", "--inline-max", "4097"], 2, &["--inline-max"]),
        (&["oci:oci", "--quiet"], 2, &["--quiet"]),
        (&["oci:oci", "--name", "Made:1"], 2, &["--name"]),
        (&[], 2, &["<SOURCE>"]),
    ] {
        let output = run(&place, args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
        assert!(parts.iter().all(|part| said.contains(part)), "{args:?}: {said}");
        assert!(output.stdout.is_empty(), "{args:?}");
        assert!(code == 2 || said.starts_with("error: "), "{said}");
        assert_eq!(place.contents(), before, "{args:?} left something");
    }
}

fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

/// The document's shape is what scripts rely on: a key that goes or changes its type is a break.
#[test]
fn json_has_its_shape() {
    let place = Place::new();
    let lie = Layer::text(ONE).compression(Compression::Gzip).media_type(media::LAYER_TAR);
    place.layout(Image::new().layer(lie.clone()).layer(Layer::text(TWO)).layer(Layer::text("o etc")));
    let output = run(&place, &["oci:oci"]);
    assert!(output.status.success());
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "--json says nothing else");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(keys(&report), ["config", "image", "layers", "manifest", "merged", "platform", "totals", "warnings"]);
    assert_eq!(report["image"], "made:1");
    assert!(report["platform"].as_str().unwrap().starts_with("linux/"));
    let layers = report["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 3);
    for layer in layers {
        assert_eq!(
            keys(layer),
            [
                "chunk_tables",
                "compressed_files",
                "compressed_plain_bytes",
                "compressed_stored_bytes",
                "compression",
                "data",
                "deduplicated_bytes",
                "diff_id",
                "directories",
                "escaped",
                "file_bytes",
                "files",
                "inline_bytes",
                "inline_files",
                "inodes",
                "lookups",
                "metadata",
                "opaques",
                "own_bytes",
                "referred_blobs",
                "referred_bytes",
                "referred_chunks",
                "reused",
                "seconds",
                "source",
                "source_bytes",
                "symlinks",
                "warnings",
                "whiteouts",
            ]
        );
        assert!(layer["seconds"].is_f64());
        for blob in layer["data"].as_array().unwrap().iter().chain([&layer["metadata"]]) {
            assert_eq!(keys(blob), ["digest", "size"]);
            let found: fs3_client::Digest = blob["digest"].as_str().unwrap().parse().unwrap();
            let bytes = fs::read(place.store.local_dir().unwrap().blob_path(&found)).unwrap();
            assert_eq!(blob["size"], bytes.len());
            assert_eq!(fs3_client::Digest::of(&bytes), found);
        }
    }
    let [one, two, three] = &layers[..] else { unreachable!() };
    assert_eq!(one["source"], digest(&lie.blob()));
    assert_eq!(one["source_bytes"], lie.blob().len());
    assert_eq!(one["diff_id"], digest(lie.tar_bytes()));
    assert_eq!((&one["files"], &one["inline_files"], &one["file_bytes"]), (&json!(2), &json!(1), &json!(102_401)));
    assert_eq!(keys(&one["warnings"][0]), ["entry", "message"]);
    assert_eq!(keys(&one["chunk_tables"][0]), ["digest", "of", "size"]);
    assert_eq!((&two["whiteouts"], &two["opaques"], &two["data"]), (&json!(1), &json!(0), &json!([])));
    assert_eq!((&three["whiteouts"], &three["opaques"], &three["chunk_tables"]), (&json!(0), &json!(1), &json!([])));
    let [merged] = &report["merged"].as_array().unwrap()[..] else { panic!("{}", report["merged"]) };
    assert_eq!((&merged["from"], &merged["reused"]), (&json!([0, 1, 2]), &json!(false)));
    assert_eq!((&merged["data"], &merged["files"]), (&one["data"], &json!(1)));
    let totals = &report["totals"];
    assert_eq!(
        keys(totals),
        [
            "compressed_files",
            "compressed_plain_bytes",
            "compressed_stored_bytes",
            "data_bytes",
            "deduplicated_bytes",
            "files",
            "inline_files",
            "inodes",
            "layers",
            "layers_reused",
            "lookups",
            "metadata_bytes",
            "opaques",
            "own_bytes",
            "referred_blobs",
            "referred_bytes",
            "referred_chunks",
            "seconds",
            "source_bytes",
            "whiteouts",
        ]
    );
    for key in ["files", "inline_files", "inodes", "whiteouts", "opaques", "source_bytes", "deduplicated_bytes"] {
        let sum: u64 = layers.iter().map(|layer| layer[key].as_u64().unwrap()).sum();
        assert_eq!(totals[key], sum, "{key}");
    }
    // The ref leads to the manifest that is named.
    let named = place.store.read_ref(&"made:1".parse().unwrap()).unwrap();
    assert_eq!(report["manifest"], named.digest().to_string());
    // Again: the same image, nothing done.
    let again: Value = serde_json::from_slice(&run(&place, &["oci:oci"]).stdout).unwrap();
    assert_eq!(again["manifest"], report["manifest"]);
    assert_eq!(again["totals"]["layers_reused"], 3);
    assert!(again["layers"].as_array().unwrap().iter().all(|layer| layer["reused"] == true));
    assert_eq!(again["layers"][0]["warnings"], one["warnings"]);
    // One line for each warning where no JSON is asked for.
    let args = ["convert", "oci:oci", "--store", "store", "--name", "made:2", "--quiet"];
    let quiet = dsec_convert(place.dir(), &args, Stdio::null());
    let said = String::from_utf8_lossy(&quiet.stderr);
    assert!(said.starts_with("warning: layer 0: ") && said.lines().count() == 1, "{said}");
    assert!(quiet.stdout.is_empty());
}
