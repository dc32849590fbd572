//! Stores, images and judges that several tests need.

use converter::chunk_table::ChunkTable;
use converter::compress::{Algorithm, Compress};
use converter::convert::{ConvertError, Converted, Request, convert_as};
use converter::entry::Timestamp;
use converter::erofs::format::FileType;
use converter::erofs::read::Image;
use converter::erofs::read::check::{DeviceInfo, check};
use converter::layer::{BlobRef, Existing, Options, Record};
use converter::manifest;
use converter::progress::Silent;
use converter::read_at::ReadAt;
use converter::source::Platform;
use converter::verify::verify;
use fixtures::content::Content;
use fixtures::model::Layer;
use fixtures::mounts::{self, Mounted};
use fixtures::oci::{self, Layout};
use fixtures::tar::Format;
use fixtures::tree::{Digest as ContentDigest, Kind, Snapshot};
use fs3_client::{Digest, Store};
use proptest::test_runner::{Config, RngSeed};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

/// A place for one test, on a real disk, with a store in it.
pub(crate) struct Place {
    dir: tempfile::TempDir,
    pub(crate) store: Store,
}

impl Place {
    pub(crate) fn new() -> Self {
        let dir = mounts::scratch();
        let store = Store::create(&dir.path().join("store")).unwrap();
        Self { dir, store }
    }

    pub(crate) fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a layout `oci` with these layers as its image `t`; returns how a converter is told of it.
    pub(crate) fn layout(&self, layers: &[oci::Layer]) -> String {
        let image = layers.iter().fold(oci::Image::new(), |image, layer| image.layer(layer.clone()));
        Layout::new().image("t", image).write(&self.path("oci")).unwrap();
        format!("oci:{}:t", self.path("oci").display())
    }

    /// As [`Place::layout`], of a model's layers.
    pub(crate) fn layout_of(&self, layers: &[Layer]) -> String {
        self.layout(&layers.iter().map(|layer| oci::Layer::tar(layer.to_tar(Format::Pax))).collect::<Vec<_>>())
    }

    /// Converts in this process, and judges every image that comes of it by our own checker and by fsck.erofs.
    pub(crate) fn convert(&self, source: &str) -> Result<Converted, ConvertError> {
        let converted = convert(&self.store, source, 2)?;
        for layer in &converted.layers {
            judge(&self.store, &layer.record);
        }
        Ok(converted)
    }

    /// As [`Place::convert`], compressed.
    pub(crate) fn convert_compressed(&self, source: &str, codec: &str, cluster_bits: u8) -> Converted {
        let options = Options { compress: Some(compress(codec, cluster_bits)), ..Options::default() };
        let converted = convert_by(&self.store, source, 2, options).unwrap();
        for layer in &converted.layers {
            judge(&self.store, &layer.record);
        }
        converted
    }

    /// Mounts a layer as the kernel sees it alone.
    pub(crate) fn mount(&self, record: &Record) -> Mounted {
        let devices: Vec<PathBuf> =
            record.data.iter().map(|blob| self.store.local_dir().unwrap().blob_path(&blob.digest)).collect();
        let devices: Vec<&Path> = devices.iter().map(PathBuf::as_path).collect();
        mounts::erofs(&self.store.local_dir().unwrap().blob_path(&record.metadata.digest), &devices).unwrap()
    }

    /// Mounts all layers, and the overlay over them; what is returned must live as long as the overlay is looked at.
    pub(crate) fn mount_all(&self, converted: &Converted) -> (Mounted, Vec<Mounted>) {
        let layers: Vec<Mounted> = converted.layers.iter().map(|layer| self.mount(&layer.record)).collect();
        let lowers: Vec<&Path> = layers.iter().map(Mounted::path).collect();
        (mounts::overlay(&lowers, None).unwrap(), layers)
    }
}

/// How a layer is compressed: `zstd:3`, …
pub(crate) fn compress(codec: &str, cluster_bits: u8) -> Compress {
    Compress { codec: codec.parse().unwrap(), cluster_bits }
}

/// Converts `source` in this process, as `t:t`.
pub(crate) fn convert(store: &Store, source: &str, jobs: usize) -> Result<Converted, ConvertError> {
    convert_by(store, source, jobs, Options::default())
}

/// As [`convert`], with other options.
pub(crate) fn convert_by(
    store: &Store,
    source: &str,
    jobs: usize,
    options: Options,
) -> Result<Converted, ConvertError> {
    let request = Request {
        source: source.parse().unwrap(),
        platform: Platform::host(),
        options,
        jobs,
        registry: Default::default(),
        dedup: None,
    };
    convert_as(&"t:t".parse().unwrap(), &request, store, &Silent)
}

/// `cases` in an ordinary run, always the same ones: what other tools do with a tree is part of these tests, and a
/// change must not fail for what it has nothing to do with. As many as PROPTEST_CASES says, new ones each time, to look
/// for faults.
pub(crate) fn cases(cases: u32) -> Config {
    let told = std::env::var("PROPTEST_CASES").ok().map(|text| text.parse().expect("PROPTEST_CASES is a number"));
    let rng_seed = if told.is_some() { RngSeed::Random } else { RngSeed::Fixed(20_261_130) };
    Config {
        cases: told.unwrap_or(cases),
        rng_seed,
        failure_persistence: None,
        max_shrink_iters: 500,
        ..Config::default()
    }
}

fn open(store: &Store, record: &Record) -> (Image<File>, Vec<File>) {
    let open = |blob: &BlobRef| store.open_blob(&blob.digest, blob.size).unwrap();
    (Image::open(open(&record.metadata)).unwrap(), record.data.iter().map(open).collect())
}

/// Nothing may be wrong with a layer's metadata image, by our checker and by fsck.erofs, which also reads every file.
/// Debian's fsck.erofs 1.5 does not know zstd: those images are judged by the kernel, and by another fsck.erofs where
/// DSEC_FSCK names one (which then looks at all compressed images too).
pub(crate) fn judge(store: &Store, record: &Record) {
    let (image, _) = open(store, record);
    let device = |existing: Existing| {
        let packed = existing.table.is_some_and(|table| {
            let table = store.open_blob(&table.digest, table.size).unwrap();
            ChunkTable::open(table).unwrap().has_inputs()
        });
        DeviceInfo { blocks: existing.blob.size / 4096, packed }
    };
    let devices: Vec<DeviceInfo> = record.existing().map(device).collect();
    assert_eq!(check(&image, &devices), []);
    let paths: Vec<PathBuf> =
        record.data.iter().map(|blob| store.local_dir().unwrap().blob_path(&blob.digest)).collect();
    let paths: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
    let metadata = store.local_dir().unwrap().blob_path(&record.metadata.digest);
    if record.algorithms.is_empty() {
        mounts::fsck(&metadata, &paths).unwrap();
        return;
    }
    let joined = joined(&image, &metadata, &paths);
    if !record.algorithms.contains(&Algorithm::Zstd) {
        mounts::fsck(joined.path(), &paths).unwrap();
    }
    if let Some(other) = std::env::var_os("DSEC_FSCK") {
        mounts::fsck_by(Path::new(&other), joined.path(), &paths).unwrap();
    }
}

/// A metadata image with its data blobs behind it, where they are in the unified address space: fsck.erofs does not look
/// for compressed data on other devices.
fn joined(image: &Image<File>, metadata: &Path, data: &[&Path]) -> tempfile::NamedTempFile {
    let mut joined = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
    std::io::copy(&mut File::open(metadata).unwrap(), &mut joined).unwrap();
    for (device, path) in image.devices().iter().zip(data) {
        joined.seek(SeekFrom::Start(device.unified_start * 4096)).unwrap();
        std::io::copy(&mut File::open(path).unwrap(), &mut joined).unwrap();
    }
    joined
}

/// What our reader tells of a layer that differs from what the kernel's mount shows.
pub(crate) fn reader_differs(store: &Store, record: &Record, mounted: &Snapshot) -> Vec<String> {
    let (image, data) = open(store, record);
    let devices: Vec<&dyn ReadAt> = data.iter().map(|file| file as &dyn ReadAt).collect();
    let mut found = Vec::new();
    let mut names = 0;
    let mut groups: BTreeMap<u64, BTreeSet<usize>> = BTreeMap::new();
    let mut walk = image.walk();
    while let Some(visit) = walk.next() {
        let visit = visit.unwrap();
        names += 1;
        let path = fixtures::escaped(visit.path);
        let Some(node) = mounted.find(visit.path) else {
            found.push(format!("{path}: not in the mount"));
            continue;
        };
        if node.kind != Kind::Directory {
            groups.entry(visit.inode.nid).or_default().insert(node.group);
        }
        let inode = visit.inode;
        let time = Timestamp { secs: node.mtime.secs, nanos: node.mtime.nanos };
        let xattrs: BTreeMap<_, _> = image.xattrs(inode).unwrap().into_iter().map(|x| (x.name, x.value)).collect();
        let mut tell = |same: bool, what: &str| {
            if !same {
                found.push(format!("{path}: {what} | {node:?} | {inode:?}"));
            }
        };
        tell(kind(inode.file_type()) == node.kind, "type");
        tell(inode.mode & 0o7777 == node.mode, "mode");
        tell((inode.uid, inode.gid) == (node.uid, node.gid), "owner");
        tell(inode.mtime == time, "mtime");
        tell(u64::from(inode.nlink) == node.nlink, "link count");
        tell(inode.device_number().unwrap_or_default() == node.rdev, "device");
        tell(xattrs == node.xattrs, "xattrs");
        tell(node.kind == Kind::Directory || inode.size == node.size, "size");
        if let Some(target) = &node.target {
            tell(image.read_link(inode).unwrap() == *target, "target");
        }
        if let Some(content) = &node.content {
            let mut bytes = vec![0; usize::try_from(inode.size).unwrap()];
            let read = image.read_file_at(inode, &devices, 0, &mut bytes).unwrap();
            tell(read == bytes.len(), "length read");
            tell(ContentDigest::of_content(&Content::Bytes(bytes)) == *content, "content");
        }
    }
    if names != mounted.len() {
        found.push(format!("{names} names, {} in the mount", mounted.len()));
    }
    if groups.values().any(|of_one| of_one.len() != 1) {
        found.push(format!("links: {groups:?}"));
    }
    found
}

fn kind(file_type: FileType) -> Kind {
    match file_type {
        FileType::Regular => Kind::Regular,
        FileType::Directory => Kind::Directory,
        FileType::Symlink => Kind::Symlink,
        FileType::CharDevice => Kind::Char,
        FileType::BlockDevice => Kind::Block,
        FileType::Fifo => Kind::Fifo,
        FileType::Socket => Kind::Socket,
        FileType::Unknown => panic!("an inode of no type"),
    }
}

/// What of a store was found sound: blobs by name, and manifests that refs name.
#[derive(Default)]
pub(crate) struct Hashed(BTreeSet<String>, BTreeSet<Digest>);

impl Hashed {
    /// Asserts that every blob of the store is what its name says, and every ref a whole and sound image. Neither
    /// changes, so what was seen before is not looked at again.
    pub(crate) fn assert_sound(&mut self, store: &Store) {
        for entry in fs::read_dir(store.local_dir().unwrap().root().join("blobs/sha256")).unwrap() {
            let name = entry.unwrap().file_name().into_string().expect("a digest");
            if !self.0.contains(&name) {
                let bytes = fs::read(store.local_dir().unwrap().root().join("blobs/sha256").join(&name)).unwrap();
                let digest = Digest::of(&bytes);
                assert_eq!(digest.hex(), name, "a blob of {} bytes is not what its name says", bytes.len());
                self.0.insert(name);
            }
        }
        for (name, descriptor) in store.list_refs().unwrap() {
            let digest = manifest::digest_of(&descriptor).unwrap();
            if !self.1.insert(digest) {
                continue;
            }
            let bytes = store.read_blob(&digest, descriptor.size()).unwrap_or_else(|e| panic!("{name}: {e}"));
            let image = manifest::Image::from_json(&bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
            let found = verify(store, &image, false, &mut |_| ());
            assert!(found.is_sound(), "{name}: {:#?}", found.problems);
        }
    }

    pub(crate) fn all(store: &Store) -> Self {
        let mut hashed = Self::default();
        hashed.assert_sound(store);
        hashed
    }

    /// The names of all blobs.
    pub(crate) fn names(&self) -> Vec<&str> {
        self.0.iter().map(String::as_str).collect()
    }
}

/// Names of what is in a directory, sorted.
pub(crate) fn list(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}
