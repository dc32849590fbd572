use super::archive_index::ArchiveIndex;
use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::fs;
use std::io::Write as _;

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const EMPTY: &str = "application/vnd.oci.empty.v1+json";

/// An OCI layout in a temporary directory.
struct Layout(tempfile::TempDir);

impl Layout {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("blobs/sha256")).unwrap();
        Self(dir)
    }

    fn blob(&self, media_type: &str, bytes: &[u8]) -> Value {
        let digest = Digest::of(bytes);
        fs::write(self.path(&digest), bytes).unwrap();
        json!({ "mediaType": media_type, "digest": digest.to_string(), "size": bytes.len() })
    }

    fn document(&self, media_type: &str, document: &Value) -> Value {
        self.blob(media_type, document.to_string().as_bytes())
    }

    fn path(&self, digest: &Digest) -> PathBuf {
        self.0.path().join("blobs/sha256").join(digest.hex())
    }

    /// An image of `layers` (as tars that say so) for `platform`.
    fn image(&self, platform: &str, layers: &[&[u8]]) -> Value {
        let descriptors: Vec<Value> = layers.iter().map(|l| self.blob(TAR_MEDIA_TYPE, l)).collect();
        let diff_ids: Vec<String> = layers.iter().map(|l| Digest::of(l).to_string()).collect();
        self.image_of(&descriptors, &config(platform, &diff_ids))
    }

    fn image_of(&self, layers: &[Value], config: &Value) -> Value {
        let config = self.document(CONFIG, config);
        self.document(MANIFEST, &json!({ "schemaVersion": 2, "config": config, "layers": layers }))
    }

    fn index(&self, manifests: &[Value]) -> Value {
        self.document(INDEX, &json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": manifests }))
    }

    fn finish(&self, manifests: &[Value]) {
        let index = json!({ "schemaVersion": 2, "manifests": manifests });
        fs::write(self.0.path().join("index.json"), index.to_string()).unwrap();
    }

    fn resolve(&self, tag: Option<&str>, platform: &str) -> Result<SourceImage, SourceError> {
        let reference = SourceRef::Oci { dir: self.0.path().to_owned(), tag: tag.map(str::to_owned) };
        resolve(&reference, &platform.parse().unwrap(), self.0.path(), &Options::default())
    }

    fn error(&self, tag: Option<&str>, platform: &str) -> String {
        self.resolve(tag, platform).unwrap_err().to_string()
    }
}

fn config(platform: &str, diff_ids: &[String]) -> Value {
    let p: Platform = platform.parse().unwrap();
    let mut config =
        json!({ "os": p.os, "architecture": p.architecture, "rootfs": { "type": "layers", "diff_ids": diff_ids } });
    if let Some(variant) = p.variant {
        config["variant"] = json!(variant);
    }
    config
}

/// `descriptor` with a `key` that is not there yet.
fn with(mut descriptor: Value, key: &str, value: Value) -> Value {
    descriptor[key] = value;
    descriptor
}

fn on(descriptor: Value, platform: &str) -> Value {
    let p: Platform = platform.parse().unwrap();
    with(descriptor, "platform", json!({ "os": p.os, "architecture": p.architecture, "variant": p.variant }))
}

fn tagged(descriptor: Value, tag: &str) -> Value {
    with(descriptor, "annotations", json!({ "org.opencontainers.image.ref.name": tag }))
}

/// The bytes of each layer.
fn layers(image: &SourceImage) -> Vec<Vec<u8>> {
    let read = |layer: &SourceLayer| match &layer.origin {
        LayerOrigin::Range { path, offset, len } => {
            let location = layout::Location { path: path.clone(), offset: *offset, len: *len };
            layout::read(&location, "layer", u64::MAX).unwrap()
        }
        other => panic!("{other:?}"),
    };
    image.layers.iter().map(read).collect()
}

#[test]
fn references() {
    let parse = |s: &str| s.parse::<SourceRef>();
    let oci = |dir: &str, tag: Option<&str>| Ok(SourceRef::Oci { dir: dir.into(), tag: tag.map(str::to_owned) });
    assert_eq!(parse("oci:/a/b"), oci("/a/b", None));
    assert_eq!(parse("oci:/a/b:"), oci("/a/b", None));
    assert_eq!(parse("oci:dir:example.org/x:1"), oci("dir", Some("example.org/x:1")));
    assert_eq!(parse("tar:-"), Ok(SourceRef::Tar(TarInput::Stdin)));
    assert_eq!(parse("tar:a:b"), Ok(SourceRef::Tar(TarInput::File("a:b".into()))));
    assert_eq!(parse("dir:/x:y"), Ok(SourceRef::Dir("/x:y".into())));
    for same in ["oci:/a:b", "oci-archive:/a", "docker-archive:/a:busybox:1", "tar:-", "tar:x", "dir:/"] {
        assert_eq!(parse(same).unwrap().to_string(), same);
    }
    assert_eq!(parse("docker://busybox").unwrap().to_string(), "docker://docker.io/library/busybox:latest");
    assert!(matches!(parse("docker:busybox"), Err(ReferenceError::NoSlashes(_))));
    assert!(matches!(parse("docker://UPPER"), Err(ReferenceError::Image(_))));
    for (bad, text) in [
        ("busybox", "names no transport"),
        ("./a:b", "names no transport"),
        ("containers-storage:x", "docker-archive:FILE[:REF]"),
        ("oci:", "names no path"),
        ("oci::tag", "names no path"),
        ("dir:", "names no path"),
    ] {
        let e = parse(bad).unwrap_err().to_string();
        assert!(e.contains(text), "{bad}: {e}");
    }
}

#[test]
fn colons_in_directories() {
    let scratch = tempfile::tempdir().unwrap();
    let make = |name: &str| fs::create_dir(scratch.path().join(name)).unwrap();
    let locate = |path: &str, image: &str| {
        let (path, image) = reference::locate(&scratch.path().join(path), Some(image), Path::is_dir);
        (path.file_name().unwrap().to_str().unwrap().to_owned(), image)
    };
    make("a:b");
    assert_eq!(locate("a", "b"), ("a:b".to_owned(), None));
    assert_eq!(locate("a", "b:1"), ("a:b".to_owned(), Some("1".to_owned())));
    make("a:b:1");
    assert_eq!(locate("a", "b:1"), ("a:b:1".to_owned(), None), "the longest");
    assert_eq!(locate("a", "c:1"), ("a".to_owned(), Some("c:1".to_owned())), "nothing there: as parsed");
    make("a");
    assert_eq!(locate("a", "b:1"), ("a".to_owned(), Some("b:1".to_owned())), "skopeo's rule first");
}

#[test]
fn platforms() {
    let p = |s: &str| s.parse::<Platform>().unwrap();
    assert_eq!(p("linux/x86_64"), p("linux/amd64"));
    assert_eq!(p("Linux/aarch64/8").to_string(), "linux/arm64/v8");
    for bad in ["", "linux", "linux/", "/amd64", "a/b/c/d", "linux/a b"] {
        assert!(bad.parse::<Platform>().is_err(), "{bad}");
    }
    for (asked, found, serves) in [
        ("linux/amd64", "linux/amd64", true),
        ("linux/amd64", "linux/amd64/v1", true),
        ("linux/amd64", "linux/amd64/v3", false),
        ("linux/amd64/v3", "linux/amd64", true),
        ("linux/arm64", "linux/arm64/v8", true),
        ("linux/arm", "linux/arm/v6", true),
        ("linux/arm/v6", "linux/arm/v7", false),
        ("linux/amd64", "windows/amd64", false),
        ("linux/riscv64", "linux/riscv64", true),
        ("linux/riscv64/odd", "linux/riscv64", false),
    ] {
        assert_eq!(p(asked).rank(&p(found)).is_some(), serves, "{asked} {found}");
    }
    assert!(p("linux/arm/v7").rank(&p("linux/arm/v6")) > p("linux/arm/v7").rank(&p("linux/arm/v5")));
    assert!(Platform::host().rank(&Platform::host()).is_some());
}

#[test]
fn one_image_with_all_its_fields() {
    let layout = Layout::new();
    layout.finish(&[layout.image("linux/amd64", &[b"bottom", b"top"])]);
    let image = layout.resolve(None, "linux/amd64").unwrap();
    assert_eq!(layers(&image), [b"bottom".to_vec(), b"top".to_vec()]);
    assert_eq!(image.platform, Some("linux/amd64".parse().unwrap()));
    assert!(image.warnings.is_empty() && image.manifest.is_some());
    let layer = &image.layers[1];
    assert_eq!((layer.digest, layer.diff_id), (Some(Digest::of(b"top")), Some(Digest::of(b"top"))));
    assert_eq!((layer.size, layer.media_type.as_str()), (Some(3), TAR_MEDIA_TYPE));
    assert!(image.config.unwrap().starts_with(b"{"));
    let e = layout.error(None, "linux/arm64");
    assert!(e.contains("no image for linux/arm64; there is linux/amd64"), "{e}");
}

#[test]
fn platform_selection_in_nested_indexes() {
    let layout = Layout::new();
    let image = |platform: &str| layout.image(platform, &[platform.as_bytes()]);
    let inner = layout.index(&[on(image("linux/arm/v6"), "linux/arm/v6"), on(image("linux/arm/v5"), "linux/arm/v5")]);
    // amd64 and s390x are known from their configs only.
    let outer = layout.index(&[
        image("linux/amd64"),
        on(image("linux/arm64/v8"), "linux/arm64/v8"),
        inner,
        image("linux/s390x"),
    ]);
    layout.finish(&[tagged(outer, "latest")]);
    for (asked, found) in [
        ("linux/amd64", "linux/amd64"),
        ("linux/amd64/v2", "linux/amd64"),
        ("linux/arm64", "linux/arm64/v8"),
        ("linux/arm", "linux/arm/v6"),
        ("linux/arm/v5", "linux/arm/v5"),
        ("linux/s390x", "linux/s390x"),
    ] {
        let image = layout.resolve(Some("latest"), asked).unwrap();
        assert_eq!(layers(&image), [found.as_bytes().to_vec()], "{asked}");
    }
    let e = layout.error(None, "linux/386");
    assert!(e.contains("linux/arm/v6") && e.contains("linux/s390x"), "{e}");
}

#[test]
fn an_index_that_lies_about_a_platform() {
    let layout = Layout::new();
    let image = layout.image("linux/s390x", &[b"x"]);
    layout.finish(&[layout.index(&[on(image, "linux/amd64")])]);
    assert!(matches!(layout.resolve(None, "linux/amd64"), Err(SourceError::OtherPlatform { .. })));
}

#[test]
fn tags() {
    let layout = Layout::new();
    let (a, b) = (layout.image("linux/amd64", &[b"a"]), layout.image("linux/amd64", &[b"b"]));
    let full = json!({ "io.containerd.image.name": "docker.io/library/web:2" });
    layout.finish(&[tagged(a.clone(), "one"), with(b.clone(), "annotations", full), tagged(a.clone(), "uno")]);
    assert_eq!(layers(&layout.resolve(Some("one"), "linux/amd64").unwrap()), [b"a"]);
    assert_eq!(layers(&layout.resolve(Some("uno"), "linux/amd64").unwrap()), [b"a"]);
    for name in ["web:2", "docker.io/library/web:2", "library/web:2"] {
        assert_eq!(layers(&layout.resolve(Some(name), "linux/amd64").unwrap()), [b"b"], "{name}");
    }
    let e = layout.error(Some("web"), "linux/amd64");
    assert!(e.contains("`web`") && e.contains("one, docker.io/library/web:2, uno"), "{e}");
    let e = layout.error(None, "linux/amd64");
    assert!(e.contains("name one of them: one, docker.io/library/web:2, uno"), "{e}");
    // Two names of one image are no choice; two images of one name are.
    layout.finish(&[tagged(a.clone(), "one"), tagged(a.clone(), "uno")]);
    assert!(layout.resolve(None, "linux/amd64").is_ok());
    layout.finish(&[tagged(a.clone(), "one"), tagged(b.clone(), "one")]);
    assert!(matches!(layout.resolve(Some("one"), "linux/amd64"), Err(SourceError::Ambiguous { .. })));
    layout.finish(&[a, b]);
    assert!(layout.error(None, "linux/amd64").contains("(no name)"));
    // A platform decides between unnamed ones.
    layout.finish(&[layout.image("linux/amd64", &[b"a"]), layout.image("linux/arm64", &[b"b"])]);
    assert_eq!(layers(&layout.resolve(None, "linux/arm64").unwrap()), [b"b"]);
    layout.finish(&[]);
    assert!(layout.error(None, "linux/amd64").contains("there is nothing"));
}

// Case M01.
#[test]
fn attestations_are_skipped() {
    let layout = Layout::new();
    let image = layout.image("linux/amd64", &[b"x"]);
    let statement = layout.blob("application/vnd.in-toto+json", b"{}");
    let attestation = layout.image_of(&[statement], &config("unknown/unknown", &[]));
    let note = json!({ "vnd.docker.reference.type": "attestation-manifest" });
    let noted = with(attestation.clone(), "annotations", note.clone());
    for attestation in [on(noted.clone(), "unknown/unknown"), on(attestation, "unknown/unknown"), noted] {
        layout.finish(&[layout.index(&[attestation.clone(), on(image.clone(), "linux/amd64"), attestation.clone()])]);
        assert_eq!(layers(&layout.resolve(None, "linux/amd64").unwrap()), [b"x"]);
        layout.finish(&[attestation]);
        assert!(matches!(layout.resolve(None, "linux/amd64"), Err(SourceError::NoPlatform { .. })));
    }
}

// Case M03.
#[test]
fn diff_ids_must_match_in_number() {
    let layout = Layout::new();
    let layer = |n: u8| layout.blob(TAR_MEDIA_TYPE, &[n]);
    let ids: Vec<String> = (0..3).map(|n| Digest::of(&[n]).to_string()).collect();
    let three = [layer(0), layer(1), layer(2)];
    layout.finish(&[layout.image_of(&three, &config("linux/amd64", &ids[..2]))]);
    assert!(layout.error(None, "linux/amd64").contains("3 layers but its config has 2 diff_ids"));
    let history = json!([{ "empty_layer": true }, {}, { "empty_layer": true }, {}, {}, { "empty_layer": true }]);
    layout.finish(&[layout.image_of(&three, &with(config("linux/amd64", &ids), "history", history))]);
    assert_eq!(layout.resolve(None, "linux/amd64").unwrap().layers.len(), 3);
    layout.finish(&[layout.image_of(&three, &json!({ "rootfs": null }))]);
    assert!(layout.error(None, "linux/amd64").contains("0 diff_ids"));
    let bad = ["sha512:00".to_owned(), ids[1].clone(), ids[2].clone()];
    layout.finish(&[layout.image_of(&three, &config("linux/amd64", &bad))]);
    assert!(layout.error(None, "linux/amd64").contains("diff_id of layer 0: digest algorithm `sha512`"));
}

// Case M04.
#[test]
fn empty_things() {
    let layout = Layout::new();
    layout.finish(&[layout.image("linux/amd64", &[])]);
    assert!(layout.resolve(None, "linux/amd64").unwrap().layers.is_empty());
    layout.finish(&[layout.image("linux/amd64", &[b""])]);
    assert_eq!(layers(&layout.resolve(None, "linux/amd64").unwrap()), [b""]);
    let empty = layout.blob(EMPTY, b"{}");
    let artifact = |layers: &[Value]| {
        let manifest = json!({ "schemaVersion": 2, "artifactType": "x/y", "config": empty, "layers": layers });
        layout.document(MANIFEST, &manifest)
    };
    layout.finish(&[artifact(std::slice::from_ref(&empty))]);
    let e = layout.error(None, "linux/amd64");
    assert!(e.starts_with("layer 0 (sha256:44136fa355b3678a") && e.contains("not a filesystem layer"), "{e}");
    layout.finish(&[artifact(&[layout.blob(TAR_MEDIA_TYPE, b"t")])]);
    let image = layout.resolve(None, "linux/amd64").unwrap();
    assert!(image.config.is_none() && image.layers[0].diff_id.is_none());
    assert!(image.warnings[0].message.contains("vnd.oci.empty"), "{:?}", image.warnings);
}

// Case M05: what can be seen without reading a layer.
#[test]
fn sizes_and_digests() {
    let layout = Layout::new();
    let image = layout.image("linux/amd64", &[b"layer"]);
    layout.finish(std::slice::from_ref(&image));
    let layer = layout.path(&Digest::of(b"layer"));
    fs::write(&layer, b"laye").unwrap();
    let e = layout.error(None, "linux/amd64");
    assert!(e.contains(&Digest::of(b"layer").to_string()) && e.contains("has 4 bytes, its descriptor says 5"), "{e}");
    fs::remove_file(&layer).unwrap();
    let e = layout.error(None, "linux/amd64");
    assert!(e.starts_with("layer 0") && e.contains("is missing") && e.contains("blobs/sha256/"), "{e}");
    fs::write(&layer, b"layer").unwrap();

    let digest: Digest = image["digest"].as_str().unwrap().parse().unwrap();
    let mut bytes = fs::read(layout.path(&digest)).unwrap();
    bytes.push(b' ');
    fs::write(layout.path(&digest), &bytes).unwrap();
    assert!(matches!(layout.resolve(None, "linux/amd64"), Err(SourceError::Size { .. })));
    bytes[0] = b' ';
    bytes.pop();
    fs::write(layout.path(&digest), &bytes).unwrap();
    let e = layout.error(None, "linux/amd64");
    assert!(e.starts_with("image manifest sha256:") && e.contains("is damaged"), "{e}");

    let huge = vec![b' '; usize::try_from(documents::MANIFEST_LIMIT).unwrap() + 1];
    layout.finish(&[layout.blob(MANIFEST, &huge)]);
    assert!(matches!(layout.resolve(None, "linux/amd64"), Err(SourceError::TooLarge { .. })));
    let bad = with(image, "digest", json!("md5:00"));
    layout.finish(&[bad]);
    assert!(layout.error(None, "linux/amd64").contains("digest algorithm `md5`"));
    fs::write(layout.0.path().join("index.json"), "{").unwrap();
    assert!(layout.error(None, "linux/amd64").contains("index.json is not valid"));
    fs::remove_file(layout.0.path().join("index.json")).unwrap();
    assert!(layout.error(None, "linux/amd64").contains("not an OCI layout"));
}

// Case M06.
#[test]
fn foreign_and_unknown_layers() {
    for (media_type, text) in [
        ("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", "is foreign"),
        ("application/vnd.oci.image.layer.nondistributable.v1.tar+gzip", "is foreign"),
        ("application/octet-stream", "is not a filesystem layer"),
        ("application/vnd.oci.image.layer.v1.tar+gzip+encrypted", "is encrypted"),
        ("application/vnd.oci.image.layer.v1.tarball", "is not a filesystem layer"),
        ("", "has no media type"),
    ] {
        let layout = Layout::new();
        let id = Digest::of(b"nowhere").to_string();
        let urls = json!(["https://example.org/layer"]);
        let layer = json!({ "mediaType": media_type, "digest": id, "size": 7, "urls": urls });
        layout.finish(&[layout.image_of(&[layout.blob(TAR_MEDIA_TYPE, b"a"), layer], &config("linux/amd64", &[]))]);
        let e = layout.error(None, "linux/amd64");
        assert!(e.starts_with(&format!("layer 1 ({id})")) && e.contains(text), "{e}");
    }
}

#[test]
fn documents_that_could_be_two_things() {
    use documents::Document;
    let refused = |text: &str, media_type: &str| Document::parse(text.as_bytes(), media_type).unwrap_err().to_string();
    let d = r#"{"mediaType":"x","digest":"sha256:00","size":1}"#;
    let both = format!(r#"{{"config":{d},"layers":[],"manifests":[]}}"#);
    assert!(refused(&both, MANIFEST).contains("at once") && refused(&both, INDEX).contains("at once"));
    assert!(refused(r#"{"manifests":[]}"#, MANIFEST).contains("is an index"));
    assert!(refused(&format!(r#"{{"config":{d}}}"#), INDEX).contains("is a manifest"));
    assert!(refused(&format!(r#"{{"mediaType":"{INDEX}","config":{d}}}"#), MANIFEST).contains("calls itself"));
    assert!(refused("{}", "application/vnd.docker.distribution.manifest.v1+prettyjws").contains("schema 1"));
    assert!(refused(r#"{"layers":[],"layers":[]}"#, MANIFEST).contains("duplicate"));
    // Docker's schema 2 and lists, nulls, and no mediaType inside.
    let manifest = format!(r#"{{"schemaVersion":2,"config":{d},"layers":null,"annotations":null}}"#);
    for media_type in [MANIFEST, "application/vnd.docker.distribution.manifest.v2+json"] {
        assert!(matches!(Document::parse(manifest.as_bytes(), media_type), Ok(Document::Manifest(_))));
    }
    // Some images have Docker's name inside and OCI's outside.
    let docker = manifest.replacen('{', r#"{"mediaType":"application/vnd.docker.distribution.manifest.v2+json","#, 1);
    assert!(matches!(Document::parse(docker.as_bytes(), MANIFEST), Ok(Document::Manifest(_))));
    assert!(refused(&docker.replace("docker.distribution.manifest.v2", "other"), MANIFEST).contains("calls itself"));
    let list = r#"{"manifests":null}"#;
    for media_type in [INDEX, "application/vnd.docker.distribution.manifest.list.v2+json"] {
        assert_eq!(Document::parse(list.as_bytes(), media_type).unwrap(), Document::Index(vec![]));
    }
}

#[test]
fn indexes_cannot_explode() {
    let layout = Layout::new();
    let mut index = layout.index(&[layout.image("linux/s390x", &[])]);
    for _ in 0..4 {
        index = layout.index(&vec![index; 10]);
    }
    layout.finish(&[index.clone()]);
    assert!(layout.error(None, "linux/amd64").contains("without finding an image"));
    let mut deep = layout.index(&[]);
    for _ in 0..10 {
        deep = layout.index(&[deep]);
    }
    layout.finish(&[deep]);
    assert!(layout.error(None, "linux/amd64").contains("nested too deeply"));
}

/// One ustar member; `link` only for links.
fn member(kind: u8, name: &str, link: &str, data: &[u8]) -> Vec<u8> {
    let mut header = vec![0; 512];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[124..136].copy_from_slice(format!("{:011o}\0", data.len()).as_bytes());
    header[156] = kind;
    header[157..157 + link.len()].copy_from_slice(link.as_bytes());
    header[257..265].copy_from_slice(b"ustar\x0000");
    checksum(&mut header);
    header.extend_from_slice(data);
    header.resize(header.len().next_multiple_of(512), 0);
    header
}

fn checksum(header: &mut [u8]) {
    header[148..156].fill(b' ');
    let sum: u32 = header[..512].iter().map(|&b| u32::from(b)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

/// A docker-archive in a file.
struct Docker {
    dir: tempfile::TempDir,
    members: Vec<u8>,
}

impl Docker {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), members: Vec::new() }
    }

    fn add(&mut self, name: &str, data: &[u8]) {
        self.members.extend(member(b'0', name, "", data));
    }

    fn link(&mut self, kind: u8, name: &str, target: &str) {
        self.members.extend(member(kind, name, target, b""));
    }

    fn resolve(&self, reference: Option<&str>) -> Result<SourceImage, SourceError> {
        self.resolve_bytes(&self.members, reference)
    }

    fn resolve_bytes(&self, bytes: &[u8], reference: Option<&str>) -> Result<SourceImage, SourceError> {
        let file = self.dir.path().join("image.tar");
        fs::write(&file, bytes).unwrap();
        let source = SourceRef::DockerArchive { file, reference: reference.map(str::to_owned) };
        resolve(&source, &"linux/amd64".parse().unwrap(), self.dir.path(), &Options::default())
    }

    fn error(&self, reference: Option<&str>) -> String {
        self.resolve(reference).unwrap_err().to_string()
    }

    /// An archive of the old kind: layer 2 is a link of `kind` to layer 1.
    fn old(kind: u8, target: &str) -> Self {
        let mut docker = Self::new();
        docker.add("a1/layer.tar", b"bottom");
        docker.link(kind, "b2/layer.tar", target);
        let ids = vec![Digest::of(b"bottom").to_string(); 2];
        docker.add("c.json", config("linux/amd64", &ids).to_string().as_bytes());
        let manifest =
            json!([{ "Config": "c.json", "RepoTags": ["web:1"], "Layers": ["a1/layer.tar", "b2/layer.tar"] }]);
        docker.add("manifest.json", manifest.to_string().as_bytes());
        docker
    }
}

#[test]
fn old_docker_archives_link_their_layers() {
    for (kind, target) in [(b'2', "../a1/layer.tar"), (b'1', "a1/layer.tar"), (b'1', "./a1//layer.tar")] {
        let docker = Docker::old(kind, target);
        let image = docker.resolve(None).unwrap();
        assert_eq!(layers(&image), [b"bottom", b"bottom"]);
        let layer = &image.layers[1];
        assert_eq!((layer.digest, layer.diff_id), (None, Some(Digest::of(b"bottom"))));
        assert!(image.warnings.is_empty());
    }
    for (kind, target, text) in [
        (b'2', "../../a1/layer.tar", "leads out of the archive"),
        (b'2', "/etc/passwd", "leads out of the archive"),
        (b'2', "layer.tar", "have no end"),
        (b'2', "../nowhere", "is missing"),
        (b'1', "b2/layer.tar", "is missing"),
    ] {
        let e = Docker::old(kind, target).error(None);
        assert!(e.contains(text), "{target}: {e}");
    }
}

#[test]
fn new_docker_archives() {
    let (layer, mut docker) = (b"layer".as_slice(), Docker::new());
    let id = Digest::of(layer);
    let config = config("linux/amd64", &[id.to_string()]).to_string();
    let named = |bytes: &[u8]| format!("blobs/sha256/{}", Digest::of(bytes).hex());
    docker.add(&named(layer), layer);
    docker.add(&named(config.as_bytes()), config.as_bytes());
    let source = json!({ id.to_string(): { "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "size": 5, "digest": id } });
    let image = json!({ "Config": named(config.as_bytes()), "RepoTags": null, "Layers": [named(layer)], "LayerSources": source });
    docker.add("manifest.json", json!([image]).to_string().as_bytes());
    let found = docker.resolve(None).unwrap();
    assert_eq!(layers(&found), [layer]);
    assert_eq!(found.layers[0].digest, Some(id));
    assert_eq!(found.layers[0].media_type, "application/vnd.oci.image.layer.v1.tar+gzip");
    // A later member of the same name counts, and its digest is not what its name says.
    docker.add(&named(config.as_bytes()), b"{}");
    assert!(docker.error(None).contains("is damaged"));
}

#[test]
fn docker_references() {
    let mut docker = Docker::new();
    for (n, name) in [b"0", b"1", b"2"].into_iter().zip(["a", "b", "c"]) {
        docker.add(&format!("{name}/layer.tar"), n);
        docker.add(&format!("{name}.json"), config("linux/amd64", &[Digest::of(n).to_string()]).to_string().as_bytes());
    }
    let image = |name: &str, tags: Value| json!({ "Config": format!("{name}.json"), "RepoTags": tags, "Layers": [format!("{name}/layer.tar")] });
    let images = json!([
        image("a", json!(["busybox:latest", "x.org/y:5"])),
        image("b", json!([])),
        image("c", json!(["localhost/c:1"]))
    ]);
    docker.add("manifest.json", images.to_string().as_bytes());
    for (reference, layer) in [
        ("busybox", b"0"),
        ("docker.io/library/busybox:latest", b"0"),
        ("x.org/y:5", b"0"),
        ("localhost/c:1", b"2"),
        ("@1", b"1"),
    ] {
        assert_eq!(layers(&docker.resolve(Some(reference)).unwrap()), [layer], "{reference}");
    }
    let available = "busybox:latest = x.org/y:5, @1 (no name), localhost/c:1";
    for (reference, text) in [
        (None, "name one of them"),
        (Some("busybox:2"), "no image `busybox:2`"),
        (Some("@3"), "no image `@3`"),
        (Some("@x"), "no image"),
    ] {
        let e = docker.error(reference);
        assert!(e.contains(text) && e.contains(available), "{e}");
    }
}

#[test]
fn odd_docker_manifests() {
    for (manifest, text) in [
        ("null", "lists none"),
        ("[]", "lists none"),
        ("[null]", "lists none"),
        ("{}", "is not valid"),
        (r#"[{"Config":"../c.json","Layers":[]}]"#, "leads out of the archive"),
        (r#"[{"Config":"/c.json","Layers":[]}]"#, "leads out of the archive"),
        (r#"[{"Config":"none.json","Layers":[]}]"#, "image config none.json is missing"),
        (r#"[{"Config":"c.json","Layers":["a/../../x"]}]"#, "layer 0 (a/../../x) cannot be used"),
        (r#"[{"Config":"c.json","Layers":["x"]}]"#, "layer 0 (x) is missing"),
    ] {
        let mut docker = Docker::new();
        docker.add("c.json", b"{}");
        docker.add("manifest.json", manifest.as_bytes());
        let e = docker.error(None);
        assert!(e.contains(text), "{manifest}: {e}");
    }
    let mut docker = Docker::new();
    docker.add("c.json", b"{}");
    assert!(docker.error(None).contains("no manifest.json"));
    docker.add("manifest.json", br#"[{"Config":"c.json","Layers":null}]"#);
    let image = docker.resolve(None).unwrap();
    assert!(image.layers.is_empty() && image.platform.is_none());
    // The old form of a config's name is only a name.
    let name = format!("{}.json", Digest::of(b"other").hex());
    docker.add(&name, b"{ }");
    docker.add("manifest.json", json!([{ "Config": name, "Layers": [] }]).to_string().as_bytes());
    assert!(docker.resolve(None).unwrap().warnings[0].message.contains("was changed"));
    assert!(matches!(docker.resolve(Some("x")), Err(SourceError::NoSuchImage { .. })));
}

#[test]
fn compressed_archives_are_unpacked_once() {
    let docker = Docker::old(b'2', "../a1/layer.tar");
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&docker.members).unwrap();
    let zstd = zstd::encode_all(&docker.members[..], 1).unwrap();
    for packed in [gzip.finish().unwrap(), zstd] {
        let image = docker.resolve_bytes(&packed, None).unwrap();
        assert_eq!(layers(&image), [b"bottom", b"bottom"]);
        assert!(
            matches!(&image.layers[0].origin, LayerOrigin::Range { path, .. } if path.starts_with("/proc/self/fd"))
        );
        let names: Vec<_> = fs::read_dir(docker.dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["image.tar"], "no named scratch file");
        let e = docker.resolve_bytes(&packed[..packed.len() - 3], None).unwrap_err().to_string();
        assert!(e.contains("image.tar") && e.contains("cut off"), "{e}");
    }
    let e = docker.resolve_bytes(b"\xfd7zXZ\0\0\0", None).unwrap_err().to_string();
    assert!(e.contains("xz"), "{e}");
    // Cut anywhere, an archive is refused or lacks what it needs; it never yields short layers.
    for cut in (0..docker.members.len()).step_by(100) {
        if let Ok(image) = docker.resolve_bytes(&docker.members[..cut], None) {
            assert_eq!(layers(&image), [b"bottom", b"bottom"], "{cut}");
        }
    }
}

#[test]
fn archive_names_long_and_odd() {
    let long = "d/".repeat(80) + "file";
    let record = |key: &str, value: &str| {
        let body = format!(" {key}={value}\n");
        let mut len = body.len() + 1;
        while len.to_string().len() + body.len() != len {
            len += 1;
        }
        format!("{len}{body}")
    };
    let mut prefixed = member(b'0', "name", "", b"prefix");
    prefixed[345..348].copy_from_slice(b"dir");
    checksum(&mut prefixed);
    let mut base256 = member(b'0', "big", "", b"256");
    base256[124..136].copy_from_slice(&[0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3]);
    checksum(&mut base256);
    // A size that only the PAX header has.
    let mut sized = member(b'0', "x", "", b"sized");
    sized[124..136].fill(b'0');
    checksum(&mut sized);
    let tar = [
        prefixed,
        base256,
        member(b'L', "././@LongLink", "", long.as_bytes()),
        member(b'0', "short", "", b"long"),
        member(b'g', "pax_global_header", "", record("comment", "hello").as_bytes()),
        member(
            b'x',
            "PaxHeaders/x",
            "",
            (record("path", "pax\nname") + &record("size", "5") + &record("mtime", "1.5")).as_bytes(),
        ),
        sized,
        member(b'0', "../outside", "", b"out"),
        member(b'5', "dir/", "", b""),
        member(b'0', "twice", "", b"first"),
        member(b'1', "hard", "twice", b""),
        member(b'2', "soft", "twice", b""),
        member(b'0', "twice", "", b"second"),
        member(b'0', "./after", "", b"after"),
        vec![0; 1024],
        b"not looked at".to_vec(),
    ]
    .concat();
    let index = ArchiveIndex::read(&tar).unwrap();
    let get = |name: &str| {
        let (offset, len) = index.find(name.as_bytes()).unwrap()?;
        let start = usize::try_from(offset).unwrap();
        Some(tar[start..start + usize::try_from(len).unwrap()].to_vec())
    };
    for (name, data) in [
        ("dir/name", "prefix"),
        ("big", "256"),
        (&long, "long"),
        ("pax\nname", "sized"),
        ("after", "after"),
        ("twice", "second"),
        ("hard", "first"),
        ("soft", "second"),
    ] {
        assert_eq!(get(name).as_deref(), Some(data.as_bytes()), "{name}");
    }
    for name in ["../outside", "outside", "dir", "short", "x", ""] {
        assert_eq!(get(name), None, "{name}");
    }
}

#[test]
fn tars_and_directories() {
    let dir = tempfile::tempdir().unwrap();
    let platform = Platform::host();
    let file = dir.path().join("layer:1.tar");
    fs::write(&file, b"12345").unwrap();
    let get = |r: SourceRef| resolve(&r, &platform, dir.path(), &Options::default());
    let image = get(SourceRef::Tar(TarInput::File(file.clone()))).unwrap();
    assert_eq!(layers(&image), [b"12345"]);
    assert!(image.config.is_none() && image.layers[0].size == Some(5));
    assert_eq!(get(SourceRef::Tar(TarInput::Stdin)).unwrap().layers[0].origin, LayerOrigin::Stdin);
    let tree = get(SourceRef::Dir(dir.path().to_owned())).unwrap();
    assert_eq!(tree.layers[0].origin, LayerOrigin::Dir(dir.path().to_owned()));
    assert!(tree.warnings.is_empty());
    fs::write(dir.path().join("manifest.json"), "{}").unwrap();
    fs::write(dir.path().join("version"), "Directory Transport Version: 1.1\n").unwrap();
    assert_eq!(get(SourceRef::Dir(dir.path().to_owned())).unwrap().warnings.len(), 1);
    let none = dir.path().join("none");
    for reference in [
        SourceRef::Tar(TarInput::File(dir.path().to_owned())),
        SourceRef::Dir(file),
        SourceRef::Tar(TarInput::File(none.clone())),
        SourceRef::Dir(none.clone()),
        SourceRef::Oci { dir: none.clone(), tag: None },
        SourceRef::OciArchive { file: none.clone(), tag: None },
        SourceRef::DockerArchive { file: dir.path().to_owned(), reference: None },
    ] {
        let e = get(reference).unwrap_err().to_string();
        assert!(e.starts_with(dir.path().to_str().unwrap()), "{e}");
    }
}

/// JSON of about the right shape, with odd values in it.
fn document() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just(json!(null)),
        Just(json!("application/vnd.oci.image.layer.v1.tar+gzip")),
        Just(json!(-1)),
        any::<u64>().prop_map(|n| json!(n)),
        ".{0,12}".prop_map(|s| json!(s)),
        Just(json!(Digest::of(b"").to_string())),
    ];
    let key = prop::sample::select(vec![
        "mediaType",
        "config",
        "layers",
        "manifests",
        "digest",
        "size",
        "annotations",
        "platform",
        "os",
        "architecture",
        "variant",
        "rootfs",
        "diff_ids",
        "Config",
        "Layers",
        "RepoTags",
        "LayerSources",
    ]);
    let tree = leaf.prop_recursive(4, 60, 5, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(key.clone().prop_map(str::to_owned), inner, 0..6)
                .prop_map(|m| Value::Object(m.into_iter().collect())),
        ]
    });
    tree.prop_map(|v| v.to_string())
}

proptest! {
    #[test]
    fn any_document(text in document(), cut in any::<prop::sample::Index>()) {
        crate::fuzzing::manifest::manifest(text.as_bytes());
        crate::fuzzing::manifest::manifest(&text.as_bytes()[..cut.index(text.len() + 1)]);
    }

    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        crate::fuzzing::manifest::manifest(&bytes);
    }

    #[test]
    fn any_archive_header(
        kinds in prop::collection::vec(prop::sample::select(b"0125xgLKS7\0".to_vec()), 1..6),
        size in prop_oneof![any::<[u8; 12]>(), "[0-7]{11} ".prop_map(|s| s.into_bytes().try_into().unwrap())],
        data in prop::collection::vec(any::<u8>(), 0..1500),
        name in "[a./]{0,20}",
    ) {
        let mut tar = Vec::new();
        for kind in kinds {
            tar.extend(member(kind, &name, "a", &data));
        }
        let mut last = member(b'0', "a", "", &data);
        last[124..136].copy_from_slice(&size);
        checksum(&mut last);
        tar.extend(last);
        crate::fuzzing::manifest::manifest(&tar);
    }

    #[test]
    fn any_reference(text in "(oci|tar|dir|docker-archive|x)?:?.{0,12}") {
        if let Ok(reference) = text.parse::<SourceRef>() {
            prop_assert_eq!(reference.to_string().parse::<SourceRef>(), Ok(reference));
        }
    }
}
