//! An image of a few lines a layer, converted, and what the kernel makes of it.

use crate::support::convert_by;
use converter::convert::{ConvertError, Converted};
use converter::layer::{Options, Record};
use converter::manifest::OverlayXattrs;
use fixtures::content::Content;
use fixtures::mounts::{self, Mounted};
use fixtures::oci::{Image, Layer, Layout};
use fixtures::tree::{Compare, Digest, Kind, Node, Snapshot, assert_same, diff};
use fs3_client::Store;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Both namespaces that overlayfs' attributes can be in.
pub(crate) const BOTH: [OverlayXattrs; 2] = [OverlayXattrs::Trusted, OverlayXattrs::User];

/// A converted image beside its source.
pub(crate) struct Case {
    dir: TempDir,
    pub(crate) store: Store,
    pub(crate) converted: Converted,
    overlay: OverlayXattrs,
}

impl Case {
    /// An image of layers in the words of [`fixtures::tar`], bottom first.
    #[track_caller]
    pub(crate) fn new(layers: &[&str]) -> Self {
        Self::in_namespace(OverlayXattrs::Trusted, layers)
    }

    #[track_caller]
    pub(crate) fn in_namespace(overlay: OverlayXattrs, layers: &[&str]) -> Self {
        let layers: Vec<Layer> = layers.iter().map(|script| Layer::text(script)).collect();
        Self::of(&layers, Options { overlay, ..Options::default() }).unwrap_or_else(|e| panic!("{e}"))
    }

    /// Every metadata image that comes of it has been looked at by fsck.erofs.
    pub(crate) fn of(layers: &[Layer], options: Options) -> Result<Self, ConvertError> {
        let dir = mounts::scratch();
        let image = layers.iter().cloned().fold(Image::new(), Image::layer);
        Layout::new().image("t", image).write(&dir.path().join("oci")).unwrap();
        let source = format!("oci:{}:t", dir.path().join("oci").display());
        Self::convert(dir, &source, options)
    }

    /// One tar, without what may be below.
    pub(crate) fn of_tar(tar: &[u8]) -> Result<Self, ConvertError> {
        let dir = mounts::scratch();
        let file = dir.path().join("layer.tar");
        std::fs::write(&file, tar).unwrap();
        Self::convert(dir, &format!("tar:{}", file.display()), Options::default())
    }

    fn convert(dir: TempDir, source: &str, options: Options) -> Result<Self, ConvertError> {
        let store = Store::create(&dir.path().join("store")).unwrap();
        let converted = convert_by(&store, source, 2, options)?;
        for layer in &converted.layers {
            let (image, devices) = blobs(&store, &layer.record);
            mounts::fsck(&image, &devices.iter().map(PathBuf::as_path).collect::<Vec<_>>()).unwrap();
        }
        Ok(Self { dir, store, converted, overlay: options.overlay })
    }

    pub(crate) fn record(&self, layer: usize) -> &Record {
        &self.converted.layers[layer].record
    }

    /// What was warned of, as `entry: message`.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let layers = self.converted.layers.iter().flat_map(|layer| &layer.record.warnings);
        layers.map(|w| format!("{}: {}", w.entry, w.message)).collect()
    }

    /// What the layers together show.
    #[track_caller]
    pub(crate) fn tree(&self) -> Snapshot {
        self.at_root(|root| Snapshot::of(root).unwrap())
    }

    /// Calls `look` where all layers are mounted together, in a mount namespace of its own.
    #[track_caller]
    pub(crate) fn at_root<T: Send>(&self, look: impl FnOnce(&Path) -> T + Send) -> T {
        let records: Vec<&Record> = self.converted.layers.iter().map(|layer| &layer.record).collect();
        mount(&self.store, &records, self.overlay, look)
    }

    /// One layer as EROFS shows it, without overlayfs.
    pub(crate) fn layer(&self, index: usize) -> Snapshot {
        mounts::in_private_namespace(|| Snapshot::of(mount_one(&self.store, self.record(index)).path()).unwrap())
    }

    /// How a converter is told of the source.
    pub(crate) fn source(&self) -> String {
        format!("oci:{}:t", self.dir.path().join("oci").display())
    }

    /// What umoci unpacks, in its own words where it refuses.
    pub(crate) fn umoci(&self) -> anyhow::Result<Snapshot> {
        Snapshot::of(&mounts::umoci_unpack(&self.dir.path().join("oci"), "t")?.rootfs())
    }

    /// The layers together show what umoci unpacks. umoci does not keep the times of directories that it or a later
    /// layer changed, nor xattrs without a value, and it knows no root directory of the layer's own.
    #[track_caller]
    pub(crate) fn assert_as_umoci(&self) -> Snapshot {
        let tree = self.tree();
        assert_same(&self.umoci().unwrap(), &tree, &as_umoci());
        tree
    }

    /// As [`Case::assert_as_umoci`], except for which names are one inode: a link into a lower layer takes along the one
    /// name that it links to, as overlayfs' own copying up would, and others that file has stay what they were.
    #[track_caller]
    pub(crate) fn assert_as_umoci_but_links(&self) -> Snapshot {
        let tree = self.tree();
        assert_same(&self.umoci().unwrap(), &tree, &Compare { groups: false, ..as_umoci() });
        tree
    }
}

pub(crate) fn as_umoci() -> Compare {
    Compare { dir_mtime: false, root: false, empty_xattrs: false, ..Compare::overlay() }
}

fn blobs(store: &Store, record: &Record) -> (PathBuf, Vec<PathBuf>) {
    let data = record.data.iter().map(|blob| store.local_dir().unwrap().blob_path(&blob.digest));
    (store.local_dir().unwrap().blob_path(&record.metadata.digest), data.collect())
}

fn mount_one(store: &Store, record: &Record) -> Mounted {
    let (image, devices) = blobs(store, record);
    mounts::erofs(&image, &devices.iter().map(PathBuf::as_path).collect::<Vec<_>>()).unwrap()
}

/// Calls `look` where the layers are mounted together, bottom first.
#[track_caller]
pub(crate) fn mount<T: Send>(
    store: &Store,
    records: &[&Record],
    overlay: OverlayXattrs,
    look: impl FnOnce(&Path) -> T + Send,
) -> T {
    mounts::in_private_namespace(|| {
        let layers: Vec<Mounted> = records.iter().map(|record| mount_one(store, record)).collect();
        // One layer alone is a root too, and its whiteouts must not show.
        let empty = mounts::scratch();
        let mut lowers: Vec<&Path> = layers.iter().map(Mounted::path).collect();
        if lowers.len() == 1 {
            lowers.insert(0, empty.path());
        }
        let more: &[&str] = if overlay == OverlayXattrs::User { &["userxattr"] } else { &[] };
        let root = mounts::overlay_with(&lowers, None, more).unwrap();
        look(root.path())
    })
}

/// All paths but the root's, sorted.
pub(crate) fn paths(tree: &Snapshot) -> Vec<String> {
    let mut paths: Vec<String> = (1..tree.len()).map(|index| tree.path(index)).collect();
    paths.sort();
    paths
}

/// The node at `path`.
#[track_caller]
pub(crate) fn node<'t>(tree: &'t Snapshot, path: &str) -> &'t Node {
    tree.find(path.as_bytes()).unwrap_or_else(|| panic!("no {path} in {:?}", paths(tree)))
}

/// `path` is a file with this content.
#[track_caller]
pub(crate) fn assert_text(tree: &Snapshot, path: &str, text: &str) {
    assert_content(tree, path, &Content::Bytes(text.as_bytes().to_vec()));
}

#[track_caller]
pub(crate) fn assert_content(tree: &Snapshot, path: &str, content: &Content) {
    let node = node(tree, path);
    assert_eq!((node.kind, node.content.as_ref()), (Kind::Regular, Some(&Digest::of_content(content))), "{path}");
}

/// All these are names of one inode, and nothing else is.
#[track_caller]
pub(crate) fn assert_one_inode(tree: &Snapshot, names: &[&str]) {
    let group = node(tree, names[0]).group;
    let mut of_group: Vec<String> =
        (1..tree.len()).filter(|index| tree.node(*index).group == group).map(|index| tree.path(index)).collect();
    of_group.sort();
    let mut names = names.to_vec();
    names.sort_unstable();
    assert_eq!(of_group, names);
}

/// The two trees differ in nothing that an overlay shows.
#[track_caller]
pub(crate) fn assert_same_overlay(a: &Snapshot, b: &Snapshot) {
    assert_eq!(diff(a, b, &Compare::overlay()), Vec::<String>::new());
}

/// The extended attributes of `path`, as text.
#[track_caller]
pub(crate) fn xattrs(tree: &Snapshot, path: &str) -> Vec<(String, String)> {
    let all = node(tree, path).xattrs.iter();
    all.map(|(name, value)| (fixtures::escaped(name), fixtures::escaped(value))).collect()
}
