//! Images and streams that other tools made: skopeo, umoci, gzip, pigz, zstd, GNU tar.

use converter::source::{LayerOrigin, Platform, SourceImage, SourceLayer, SourceRef, resolve};
use converter::unpack::{Compression, HashingReader, Limits, Unpacker, declared_as};
use fs3_client::Digest;
use fs3_client::registry::Options;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

/// Runs `program` (of Debian package `package`) in `dir` and returns its output; anything but success is a failure.
fn run(dir: &Path, package: &str, program: &str, args: &[&str]) -> Vec<u8> {
    let mut command = Command::new(program);
    command.args(args).current_dir(dir).stdin(Stdio::null());
    let output = command.output().unwrap_or_else(|e| panic!("{program} does not start ({e}); install {package}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {}: {said}", args.join(" "));
    output.stdout
}

fn skopeo(dir: &Path, args: &[&str]) {
    run(dir, "skopeo", "skopeo", &[&["--insecure-policy", "copy", "--quiet"], args].concat());
}

/// A layout `oci` with image `web` of two layers, made by umoci.
struct Made {
    dir: tempfile::TempDir,
    /// diffIDs by umoci's account, bottom first.
    diff_ids: Vec<Digest>,
}

impl Made {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path();
        let umoci = |args: &[&str]| run(path, "umoci", "umoci", args);
        umoci(&["init", "--layout", "oci"]);
        umoci(&["new", "--image", "oci:web"]);
        for layer in ["bottom", "top"] {
            let tree = path.join(layer);
            fs::create_dir_all(tree.join("etc")).unwrap();
            fs::write(tree.join("etc").join(layer), sample(300_000)).unwrap();
            symlink("etc", tree.join("link")).unwrap();
            umoci(&["insert", "--image", "oci:web", layer, &format!("/{layer}")]);
        }
        let config = run(path, "skopeo", "skopeo", &["inspect", "--config", "--raw", "oci:oci:web"]);
        let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
        let ids = config["rootfs"]["diff_ids"].as_array().unwrap();
        let diff_ids: Vec<Digest> = ids.iter().map(|id| id.as_str().unwrap().parse().unwrap()).collect();
        assert_eq!(diff_ids.len(), 2);
        Self { dir, diff_ids }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn resolve(&self, reference: &str) -> SourceImage {
        let (transport, rest) = reference.split_once(':').unwrap();
        let reference: SourceRef = format!("{transport}:{}/{rest}", self.path().display()).parse().unwrap();
        resolve(&reference, &Platform::host(), self.path(), &Options::default())
            .unwrap_or_else(|e| panic!("{reference}: {e}"))
    }

    /// Resolves `reference` and reads all its layers, which must be the image's and compressed like `compression`.
    fn check(&self, reference: &str, compression: Compression) -> SourceImage {
        let image = self.resolve(reference);
        assert!(image.config.is_some());
        assert_eq!(image.platform, Some(Platform::host()), "{reference}");
        assert!(image.warnings.is_empty(), "{reference}: {:?}", image.warnings);
        let ids: Vec<Digest> = image.layers.iter().map(|l| l.diff_id.unwrap()).collect();
        assert_eq!(ids, self.diff_ids, "{reference}");
        for layer in &image.layers {
            let (found, diff_id, plain) = read(layer);
            assert_eq!((found, diff_id), (compression, layer.diff_id.unwrap()), "{reference}");
            assert!(plain > 300_000);
            assert_eq!(declared_as(&layer.media_type, found), None, "{reference}");
        }
        image
    }
}

/// Bytes that compress, but not to nothing.
fn sample(len: usize) -> Vec<u8> {
    let words = ["layer", "whiteout", "blob", "chunk", "manifest", "digest", "\n", " 7 ", "\0\0\0\0"];
    let mut x = 7u32;
    let mut out = Vec::new();
    while out.len() < len {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        out.extend_from_slice(words[(x >> 20) as usize % words.len()].as_bytes());
    }
    out.truncate(len);
    out
}

/// Reads a layer as a converter does: what it is compressed with, the digest and the length of its tar.
fn read(layer: &SourceLayer) -> (Compression, Digest, u64) {
    let LayerOrigin::Range { path, offset, len } = &layer.origin else { panic!("{:?}", layer.origin) };
    let mut file = File::open(path).unwrap();
    file.seek(SeekFrom::Start(*offset)).unwrap();
    let mut unpacker = Unpacker::new(HashingReader::new(file.take(*len)), Limits::default()).unwrap();
    let compression = unpacker.compression();
    let mut plain = HashingReader::new(&mut unpacker);
    std::io::copy(&mut plain, &mut std::io::sink()).unwrap();
    let (diff_id, bytes) = plain.finish();
    unpacker.into_inner().verify(layer.digest.as_ref(), layer.size).unwrap();
    (compression, diff_id, bytes)
}

fn unpack(packed: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    Unpacker::new(packed, Limits::default()).unwrap().read_to_end(&mut plain).unwrap();
    plain
}

#[test]
fn umoci_and_skopeo_layouts() {
    let made = Made::new();
    let image = made.check("oci:oci:web", Compression::Gzip);
    assert_eq!(made.check("oci:oci", Compression::Gzip).manifest, image.manifest);
    skopeo(made.path(), &["oci:oci:web", "oci:copy:latest"]);
    let copy = made.check("oci:copy:latest", Compression::Gzip);
    assert_eq!((copy.manifest, copy.config), (image.manifest, image.config));
    // Several tags in one layout.
    run(made.path(), "umoci", "umoci", &["config", "--image", "copy:latest", "--tag", "other", "--author", "someone"]);
    made.check("oci:copy:latest", Compression::Gzip);
    let reference: SourceRef = format!("oci:{}/copy", made.path().display()).parse().unwrap();
    let e = resolve(&reference, &Platform::host(), made.path(), &Options::default()).unwrap_err().to_string();
    assert!(e.contains("latest") && e.contains("other"), "{e}");
}

#[test]
fn zstd_layouts() {
    let made = Made::new();
    // skopeo keeps gzip when it copies a layout; only from plain layers does it compress anew.
    skopeo(made.path(), &["oci:oci:web", "docker-archive:plain.tar:web:1"]);
    skopeo(made.path(), &["--dest-compress-format", "zstd", "docker-archive:plain.tar", "oci:zstd:web"]);
    let image = made.check("oci:zstd:web", Compression::Zstd);
    assert!(image.layers.iter().all(|l| l.media_type == "application/vnd.oci.image.layer.v1.tar+zstd"));
}

#[test]
fn oci_archives() {
    let made = Made::new();
    skopeo(made.path(), &["oci:oci:web", "oci-archive:image.tar:example.org/web:1"]);
    for reference in ["oci-archive:image.tar", "oci-archive:image.tar:example.org/web:1"] {
        let image = made.check(reference, Compression::Gzip);
        let in_place = |l: &SourceLayer| matches!(&l.origin, LayerOrigin::Range { path, offset, .. } if path.ends_with("image.tar") && *offset > 0);
        assert!(image.layers.iter().all(in_place), "read in place");
    }
    // The layout packed by GNU tar in its several formats, with `./` in front, and the whole compressed.
    for format in ["gnu", "posix", "ustar", "oldgnu"] {
        run(made.path(), "tar", "tar", &["-C", "oci", "--format", format, "-cf", "tar.tar", "."]);
        made.check("oci-archive:tar.tar:web", Compression::Gzip);
    }
    run(made.path(), "gzip", "gzip", &["-kf", "tar.tar"]);
    made.check("oci-archive:tar.tar.gz:web", Compression::Gzip);
    run(made.path(), "zstd", "zstd", &["-qf", "tar.tar"]);
    made.check("oci-archive:tar.tar.zst", Compression::Gzip);
}

#[test]
fn docker_archives() {
    let made = Made::new();
    skopeo(made.path(), &["oci:oci:web", "docker-archive:image.tar:web:1"]);
    for reference in ["image.tar", "image.tar:web:1", "image.tar:docker.io/library/web:1", "image.tar:@0"] {
        made.check(&format!("docker-archive:{reference}"), Compression::None);
    }
    // The same layers as symbolic and hard links, as `docker save` of old wrote them.
    run(made.path(), "tar", "tar", &["--one-top-level=x", "-xf", "image.tar"]);
    let image = made.resolve("docker-archive:image.tar");
    for (index, diff_id) in made.diff_ids.iter().enumerate() {
        let file = made.path().join("x").join(format!("{}.tar", diff_id.hex()));
        let store = made.path().join("x/store").join(index.to_string());
        fs::create_dir_all(store.parent().unwrap()).unwrap();
        fs::remove_file(&file).or_else(|_| fs::remove_dir_all(&file)).unwrap();
        fs::write(&store, bytes(&image.layers[index])).unwrap();
        if index == 0 {
            symlink(format!("store/{index}"), &file).unwrap();
        } else {
            fs::hard_link(&store, &file).unwrap();
        }
    }
    run(made.path(), "tar", "tar", &["-C", "x", "-cf", "linked.tar", "."]);
    let listing = String::from_utf8(run(made.path(), "tar", "tar", &["-tvf", "linked.tar"])).unwrap();
    assert!(listing.contains(" -> ") && listing.contains(" link to "), "{listing}");
    made.check("docker-archive:linked.tar:web:1", Compression::None);
    run(made.path(), "pigz", "pigz", &["-k", "linked.tar"]);
    made.check("docker-archive:linked.tar.gz", Compression::None);
}

fn bytes(layer: &SourceLayer) -> Vec<u8> {
    let LayerOrigin::Range { path, offset, len } = &layer.origin else { panic!("{:?}", layer.origin) };
    let start = usize::try_from(*offset).unwrap();
    fs::read(path).unwrap()[start..start + usize::try_from(*len).unwrap()].to_vec()
}

#[test]
fn docker_schema_2() {
    let made = Made::new();
    // skopeo's `dir:` keeps a manifest in the asked format; a layout around it makes an image of schema 2.
    skopeo(made.path(), &["--format", "v2s2", "oci:oci:web", "dir:flat"]);
    let (flat, layout) = (made.path().join("flat"), made.path().join("schema2"));
    fs::create_dir_all(layout.join("blobs/sha256")).unwrap();
    for entry in fs::read_dir(&flat).unwrap() {
        let bytes = fs::read(entry.unwrap().path()).unwrap();
        fs::write(layout.join("blobs/sha256").join(Digest::of(&bytes).hex()), bytes).unwrap();
    }
    let manifest = fs::read(flat.join("manifest.json")).unwrap();
    let descriptor = serde_json::json!({
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "digest": Digest::of(&manifest).to_string(), "size": manifest.len(),
    });
    let index = serde_json::json!({ "schemaVersion": 2, "manifests": [descriptor] });
    fs::write(layout.join("index.json"), index.to_string()).unwrap();
    let image = made.check("oci:schema2", Compression::Gzip);
    assert!(image.layers[0].media_type.starts_with("application/vnd.docker."));
}

#[test]
fn streams_of_real_compressors() {
    let dir = tempfile::tempdir().unwrap();
    let plain = sample(2_000_000);
    let (head, tail) = plain.split_at(800_001);
    for (name, data) in
        [("all", &plain[..]), ("head", head), ("tail", tail), ("none", b""), ("small", &plain[..90_000])]
    {
        fs::write(dir.path().join(name), data).unwrap();
    }
    let out = |program: &str, args: &[&str]| run(dir.path(), program, program, args);
    for level in ["-1", "-6", "-9"] {
        assert!(unpack(&out("gzip", &[level, "-c", "all"])) == plain, "gzip {level}");
        assert!(unpack(&out("pigz", &[level, "-p", "4", "-b", "128", "-c", "all"])) == plain, "pigz {level}");
    }
    assert!(unpack(&out("pigz", &["-11", "-c", "small"])) == plain[..90_000], "zopfli");
    assert!(unpack(&out("pigz", &["-i", "-c", "all"])) == plain, "independent blocks");
    for args in [
        &["-qc", "--rsyncable", "all"][..],
        &["-qc", "-19", "--long=27", "all"],
        &["-qc", "-T2", "-B600000", "all"],
        &["-qc", "--no-check", "--fast", "all"],
    ] {
        assert!(unpack(&out("zstd", args)) == plain, "zstd {args:?}");
    }
    // Case T05: members of different writers, an empty one between, padding behind.
    let mut members = out("gzip", &["-c", "head"]);
    members.extend(out("gzip", &["-c", "none"]));
    members.extend(out("pigz", &["-c", "tail"]));
    fs::write(dir.path().join("members.gz"), &members).unwrap();
    assert!(out("gzip", &["-dc", "members.gz"]) == plain, "gzip agrees");
    assert!(unpack(&members) == plain);
    members.extend([0; 1000]);
    assert!(unpack(&members) == plain);
    let frames = [out("zstd", &["-qc", "head"]), out("zstd", &["-qc", "none"]), out("zstd", &["-qc", "tail"])].concat();
    assert!(unpack(&frames) == plain);
    for (package, program) in [("xz-utils", "xz"), ("bzip2", "bzip2")] {
        let packed = run(dir.path(), package, program, &["-c", "head"]);
        let e = Unpacker::new(&packed[..], Limits::default()).unwrap_err().to_string();
        assert!(e.contains(program), "{e}");
    }
}

#[test]
fn an_archive_path_with_a_colon() {
    let made = Made::new();
    fs::rename(made.path().join("oci"), made.path().join("web:1")).unwrap();
    made.check("oci:web:1", Compression::Gzip);
    made.check("oci:web:1:web", Compression::Gzip);
}
