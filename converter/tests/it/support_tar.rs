//! A store to convert into, and its layers and images as the kernel shows them.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use converter::convert::{ConvertError, Converted, ConvertedLayer, Request, convert_as};
use converter::layer::Options;
use converter::progress::Silent;
use converter::source::Platform;
use fixtures::model::{Change, Kind, Layer, Meta, Model};
use fixtures::mounts::{self, Mounted, Unpacked};
use fixtures::oci::{Image, Layout};
use fixtures::tar::{self, Time};
use fixtures::tree::{Compare, Snapshot, assert_same};
use fs3_client::{Digest, Store};

/// A directory with a store in it.
pub(crate) struct Place {
    dir: tempfile::TempDir,
    pub(crate) store: Store,
}

/// An image's layers, mounted one by one and together.
pub(crate) struct Root {
    overlay: Mounted,
    layers: Vec<Mounted>,
}

impl Root {
    /// All layers together, as overlayfs shows them.
    pub(crate) fn snapshot(&self) -> Snapshot {
        Snapshot::of(self.overlay.path()).unwrap()
    }

    /// One layer alone; 0 is the bottom.
    pub(crate) fn layer(&self, index: usize) -> Snapshot {
        Snapshot::of(self.layers[index].path()).unwrap()
    }
}

impl Place {
    pub(crate) fn new() -> Self {
        let dir = mounts::scratch();
        let store = Store::create(&dir.path().join("store")).unwrap();
        Self { dir, store }
    }

    /// The directory that all of it is in.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Converts `source`, its path below this place: `tar:x.tar` is `tar:/…/x.tar`.
    pub(crate) fn convert(&self, source: &str) -> Result<Converted, ConvertError> {
        let (transport, path) = source.split_once(':').unwrap();
        let request = Request {
            source: format!("{transport}:{}", self.path(path).display()).parse().unwrap(),
            platform: Platform::host(),
            options: Options::default(),
            jobs: 2,
            registry: Default::default(),
            dedup: None,
        };
        convert_as(&"made:1".parse().unwrap(), &request, &self.store, &Silent)
    }

    /// The sentence with which `source` is refused; nothing of it may be left in the store.
    pub(crate) fn refused(&self, source: &str) -> String {
        let before = self.contents();
        let error = self.convert(source).map(drop).expect_err("it was converted").to_string();
        assert_eq!(self.contents(), before, "{error}");
        error
    }

    /// All files of the store but its records of finished layers, and its lock files.
    pub(crate) fn contents(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for part in ["blobs", "refs", "tmp"] {
            files(&self.store.local_dir().unwrap().root().join(part), &mut found);
        }
        found.sort();
        found
    }

    /// Asserts that the store has nothing under a final or a temporary name.
    #[track_caller]
    pub(crate) fn assert_empty(&self) {
        assert_eq!(self.contents(), Vec::<PathBuf>::new());
    }

    /// Converts one layer from the bytes of a tar.
    pub(crate) fn tar(&self, bytes: &[u8]) -> Result<Converted, ConvertError> {
        std::fs::write(self.path("layer.tar"), bytes).unwrap();
        self.convert("tar:layer.tar")
    }

    /// Converts one layer from a script of [`tar`].
    pub(crate) fn script(&self, script: &str) -> Converted {
        let mut out = BufWriter::new(File::create(self.path("layer.tar")).unwrap());
        tar::write(script, &mut out).unwrap();
        out.flush().unwrap();
        self.convert("tar:layer.tar").unwrap()
    }

    /// What the kernel shows of the only layer that `script` makes.
    pub(crate) fn shown(&self, script: &str) -> Snapshot {
        self.only_layer(&self.script(script))
    }

    /// The sentence with which the layer is refused.
    pub(crate) fn script_refused(&self, script: &str) -> String {
        std::fs::write(self.path("layer.tar"), tar::build(script)).unwrap();
        self.refused("tar:layer.tar")
    }

    /// Writes `image` as the layout `oci`, replacing another.
    pub(crate) fn layout(&self, image: Image) {
        let _ = std::fs::remove_dir_all(self.path("oci"));
        Layout::new().image("made", image).write(&self.path("oci")).unwrap();
    }

    /// Converts an image of these layers (scripts), bottom first.
    pub(crate) fn image(&self, scripts: &[&str]) -> Result<Converted, ConvertError> {
        self.layout(scripts.iter().fold(Image::new(), |image, script| image.layer(fixtures::oci::Layer::text(script))));
        self.convert("oci:oci")
    }

    /// umoci's extraction of the layout made last.
    pub(crate) fn umoci(&self) -> anyhow::Result<Unpacked> {
        mounts::umoci_unpack(&self.path("oci"), "made")
    }

    /// Checks a layer's image with fsck.erofs and mounts it.
    pub(crate) fn mount_layer(&self, layer: &ConvertedLayer) -> Mounted {
        let image = self.store.local_dir().unwrap().blob_path(&layer.record.metadata.digest);
        let data: Vec<PathBuf> =
            layer.record.data.iter().map(|blob| self.store.local_dir().unwrap().blob_path(&blob.digest)).collect();
        let data: Vec<&Path> = data.iter().map(PathBuf::as_path).collect();
        mounts::fsck(&image, &data).unwrap();
        mounts::erofs(&image, &data).unwrap()
    }

    /// What the kernel shows of an image's only layer.
    pub(crate) fn only_layer(&self, converted: &Converted) -> Snapshot {
        let [layer] = &converted.layers[..] else { panic!("{} layers", converted.layers.len()) };
        Snapshot::of(self.mount_layer(layer).path()).unwrap()
    }

    /// Mounts all layers of an image.
    pub(crate) fn mount(&self, converted: &Converted) -> Root {
        let layers: Vec<Mounted> = converted.layers.iter().map(|layer| self.mount_layer(layer)).collect();
        let paths: Vec<&Path> = layers.iter().map(Mounted::path).collect();
        Root { overlay: mounts::overlay(&paths, None).unwrap(), layers }
    }
}

fn files(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else {
            found.push(path);
        }
    }
}

/// The digests that a layer's bytes are known by: its metadata image and its data blobs.
pub(crate) fn digests(layer: &ConvertedLayer) -> (Digest, Vec<Digest>) {
    (layer.record.metadata.digest, layer.record.data.iter().map(|blob| blob.digest).collect())
}

/// Messages of all warnings, each with its entry before it.
pub(crate) fn warnings(converted: &Converted) -> Vec<String> {
    let layers = converted.layers.iter().flat_map(|layer| &layer.record.warnings);
    converted.warnings.iter().chain(layers).map(|w| format!("{}: {}", w.entry, w.message)).collect()
}

/// An object of a model, root's from 1970.
pub(crate) fn put(path: &str, kind: Kind, mode: u16) -> Change {
    Change::Put(path.as_bytes().to_vec(), kind, Meta::new(mode))
}

/// A file of a model, 0644.
pub(crate) fn file(path: &str, text: &str) -> Change {
    put(path, Kind::Regular(fixtures::content::Content::Bytes(text.into())), 0o644)
}

/// A directory of a model, 0755.
pub(crate) fn directory(path: &str) -> Change {
    put(path, Kind::Directory, 0o755)
}

/// A symbolic link of a model.
pub(crate) fn symlink(path: &str, target: &str) -> Change {
    put(path, Kind::Symlink(target.as_bytes().to_vec()), 0o777)
}

/// Methods for writing a model's objects down in one line.
pub(crate) trait With: Sized {
    fn meta(&mut self) -> &mut Meta;

    fn owner(mut self, uid: u32, gid: u32) -> Self {
        (self.meta().uid, self.meta().gid) = (uid, gid);
        self
    }

    fn mode(mut self, mode: u16) -> Self {
        self.meta().mode = mode;
        self
    }

    fn mtime(mut self, secs: i64, nanos: u32) -> Self {
        self.meta().mtime = Time { secs, nanos };
        self
    }

    fn xattr(mut self, name: &str, value: &[u8]) -> Self {
        self.meta().xattrs.insert(name.into(), value.to_vec());
        self
    }
}

impl With for Change {
    fn meta(&mut self) -> &mut Meta {
        match self {
            Self::Put(_, _, meta) => meta,
            _ => panic!("only objects have metadata"),
        }
    }
}

/// The tree that `changes` make.
pub(crate) fn model(changes: impl IntoIterator<Item = Change>) -> Snapshot {
    Snapshot::of_model(&Model::merged([&Layer { changes: changes.into_iter().collect() }]))
}

/// Asserts that a layer's mount shows exactly the tree that `changes` make.
#[track_caller]
pub(crate) fn assert_shows(shown: &Snapshot, changes: impl IntoIterator<Item = Change>) {
    assert_same(shown, &model(changes), &Compare::exact());
}

/// Runs a tool of a Debian package in `dir`; anything but success is a failure.
pub(crate) fn tool(dir: &Path, package: &str, program: &str, args: &[&str]) -> Vec<u8> {
    let output = Command::new(fixtures::require::tool(program, package))
        .args(args)
        .current_dir(dir)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// Runs `dsec-convert` in `dir` on `input`.
pub(crate) fn dsec_convert(dir: &Path, args: &[&str], input: Stdio) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dsec-convert"));
    command.args(args).current_dir(dir).stdin(input).output().unwrap()
}

/// `dsec-convert convert SOURCE` into the store of `place`, as a program that dies if it ever needs more than `limit`
/// bytes of memory of its own.
pub(crate) fn dsec_convert_within(place: &Place, limit: u64, source: &str) -> Command {
    let mut command = Command::new(fixtures::require::tool("prlimit", "util-linux"));
    command.arg(format!("--data={limit}")).arg(env!("CARGO_BIN_EXE_dsec-convert"));
    command.args(["convert", source, "--store", "store", "--name", "made:2", "--json"]).current_dir(place.dir());
    command
}

/// The report of a program that should have succeeded.
#[track_caller]
pub(crate) fn report(output: &Output) -> serde_json::Value {
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}
