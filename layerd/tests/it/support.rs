//! A directory with a store, images made by `mkfs.erofs`, and the program run on them.

use converter::manifest::{
    self, CONFIG_MEDIA_TYPE, DATA_MEDIA_TYPE, Image, Layer, MANIFEST_MEDIA_TYPE, METADATA_MEDIA_TYPE, OverlayXattrs,
};
use fs3_client::StoreDir;
use layerd::mount::table;
use rustix::fs::{CWD, FileType, Mode, XattrFlags, mknodat, setxattr};
use rustix::mount::{MountFlags, UnmountFlags};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A place for one test. What is mounted below it is unmounted when it goes.
pub(crate) struct Place {
    dir: tempfile::TempDir,
    pub(crate) store: StoreDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        Self::with_store("store")
    }

    /// With the store at `below` the place's directory.
    pub(crate) fn with_store(below: impl AsRef<Path>) -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        fs::create_dir(dir.path().join("root")).unwrap();
        let store = StoreDir::create(&dir.path().join(below)).unwrap();
        Self { dir, store }
    }

    /// With the store on a tmpfs.
    pub(crate) fn on_tmpfs() -> Self {
        let mut place = Self::new();
        let path = place.path("tmpfs");
        fs::create_dir(&path).unwrap();
        rustix::mount::mount("tmpfs", &path, "tmpfs", MountFlags::empty(), None)
            .expect("this test needs root, to mount a tmpfs");
        place.store = StoreDir::create(&path.join("store")).unwrap();
        place
    }

    pub(crate) fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The usual mountpoint.
    pub(crate) fn root(&self) -> PathBuf {
        self.path("root")
    }

    /// A layer whose tree `build` makes, with its data in a blob.
    pub(crate) fn layer(&self, build: impl FnOnce(&Tree)) -> Layer {
        self.make_layer(build, true)
    }

    /// The same in one metadata image, without a data blob.
    pub(crate) fn layer_without_data(&self, build: impl FnOnce(&Tree)) -> Layer {
        self.make_layer(build, false)
    }

    fn make_layer(&self, build: impl FnOnce(&Tree), with_data: bool) -> Layer {
        let scratch = tempfile::tempdir_in(self.dir.path()).unwrap();
        let tree = Tree { root: scratch.path().join("tree"), marks: Cell::new(false), user: Cell::new(false) };
        fs::create_dir(&tree.root).unwrap();
        build(&tree);
        let (metadata, data) = (scratch.path().join("metadata"), scratch.path().join("data"));
        let mut command = Command::new("mkfs.erofs");
        command.arg("-T0");
        if with_data {
            command.arg("--chunksize=65536").arg(format!("--blobdev={}", data.display()));
        }
        let output = command.args([&metadata, &tree.root]).output();
        let output = output.expect("this test needs mkfs.erofs, of the package erofs-utils");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let publish = |path: &Path, media_type: &str| {
            let published = self.store.publish_bytes(&fs::read(path).unwrap()).unwrap();
            manifest::descriptor(media_type, published.digest, published.size, &[])
        };
        Layer {
            metadata: publish(&metadata, METADATA_MEDIA_TYPE),
            data: if with_data { vec![publish(&data, DATA_MEDIA_TYPE)] } else { vec![] },
            chunk_tables: Vec::new(),
            whiteouts: tree.marks.get(),
            overlay_xattrs: if tree.user.get() { OverlayXattrs::User } else { OverlayXattrs::Trusted },
        }
    }

    /// Publishes an image of these layers, bottom first.
    pub(crate) fn image(&self, name: &str, layers: &[Layer]) {
        let config = self.store.publish_bytes(b"{}").unwrap();
        let config = manifest::descriptor(CONFIG_MEDIA_TYPE, config.digest, config.size, &[]);
        let image = Image { config, layers: layers.to_vec(), annotations: BTreeMap::new() };
        let published = self.store.publish_bytes(&image.to_json()).unwrap();
        let descriptor = manifest::descriptor(MANIFEST_MEDIA_TYPE, published.digest, published.size, &[]);
        self.store.write_ref(&name.parse().unwrap(), &descriptor).unwrap();
    }

    /// Runs `layerd mount --json --store STORE ARGS… ROOT`.
    pub(crate) fn mount<A: AsRef<OsStr>>(&self, args: &[A]) -> Run {
        let mut command = Command::new(env!("CARGO_BIN_EXE_layerd"));
        command.args(["mount", "--json", "--store"]).arg(self.store.root()).args(args).arg(self.root());
        run(&mut command)
    }

    pub(crate) fn umount(&self) -> Run {
        umount(&[self.root()])
    }

    /// Mounts below this place, as (target, type).
    pub(crate) fn mounts(&self) -> Vec<(PathBuf, String)> {
        let mounts = table::read().unwrap().into_iter();
        mounts.filter(|m| m.target.starts_with(self.dir.path())).map(|m| (m.target, m.fs_type)).collect()
    }

    /// How many loop devices are over files below this place.
    pub(crate) fn loops(&self) -> usize {
        let devices = fs::read_dir("/sys/block").unwrap().map(|entry| entry.unwrap().path().join("loop/backing_file"));
        devices
            .filter(|file| fs::read_to_string(file).is_ok_and(|text| Path::new(&text).starts_with(self.dir.path())))
            .count()
    }

    /// Asserts that nothing is mounted on the root and no loop device is left; the kernel frees those with a delay.
    pub(crate) fn assert_nothing_left(&self) {
        let root = self.root();
        assert!(!self.mounts().iter().any(|(target, _)| *target == root), "{:?}", self.mounts());
        let start = Instant::now();
        while self.loops() > 0 {
            assert!(start.elapsed() < Duration::from_secs(20), "{} loop devices are left", self.loops());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for (target, _) in self.mounts().iter().rev() {
            let _ = rustix::mount::unmount(target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
        }
    }
}

/// Runs `layerd umount --json ARGS…`.
pub(crate) fn umount<A: AsRef<OsStr>>(args: &[A]) -> Run {
    run(Command::new(env!("CARGO_BIN_EXE_layerd")).args(["umount", "--json"]).args(args))
}

/// A layer's tree before it becomes an image.
pub(crate) struct Tree {
    pub(crate) root: PathBuf,
    marks: Cell<bool>,
    user: Cell<bool>,
}

impl Tree {
    /// A file, with the directories above it.
    pub(crate) fn file(&self, path: &str, contents: impl AsRef<[u8]>) {
        let path = self.root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, contents).unwrap();
    }

    pub(crate) fn dir(&self, path: &str) {
        fs::create_dir_all(self.root.join(path)).unwrap();
    }

    /// A whiteout as overlayfs has it, with the directories above it.
    pub(crate) fn whiteout(&self, path: &str) {
        self.marks.set(true);
        let path = self.root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        mknodat(CWD, path, FileType::CharacterDevice, Mode::empty(), 0).expect("this test needs root, to make devices");
    }

    /// Marks a directory opaque, in `trusted.overlay.*`.
    pub(crate) fn opaque(&self, path: &str) {
        self.xattr(path, "trusted.overlay.opaque", b"y");
        self.marks.set(true);
    }

    /// Marks a directory opaque, in `user.overlay.*`.
    pub(crate) fn user_opaque(&self, path: &str) {
        self.xattr(path, "user.overlay.opaque", b"y");
        self.marks.set(true);
        self.user.set(true);
    }

    pub(crate) fn xattr(&self, path: &str, name: &str, value: &[u8]) {
        self.dir(path);
        setxattr(self.root.join(path), name, value, XattrFlags::empty()).expect("this test needs root, for xattrs");
    }
}

/// What a run of the program gave.
pub(crate) struct Run(Output, u32);

fn run(command: &mut Command) -> Run {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = child.id();
    Run(child.wait_with_output().unwrap(), pid)
}

impl Run {
    /// Asserts that it left no directory with parked layers.
    #[track_caller]
    pub(crate) fn parked_nothing(&self) {
        let prefix = format!("layerd.{}.", self.1);
        assert!(!list("/run").iter().any(|name| name.starts_with(&prefix)), "{:?}", list("/run"));
    }

    /// The JSON that it printed; it must have succeeded.
    #[track_caller]
    pub(crate) fn ok(&self) -> serde_json::Value {
        assert!(self.0.status.success(), "{}", self.stderr());
        serde_json::from_slice(&self.0.stdout).unwrap()
    }

    /// What it said when it failed with `code`.
    #[track_caller]
    pub(crate) fn fails(&self, code: i32) -> String {
        assert_eq!(self.0.status.code(), Some(code), "{}", self.stderr());
        assert!(self.0.stdout.is_empty());
        self.stderr()
    }

    pub(crate) fn stderr(&self) -> String {
        String::from_utf8(self.0.stderr.clone()).unwrap()
    }
}

/// The names in a directory, sorted.
#[track_caller]
pub(crate) fn list(dir: impl AsRef<Path>) -> Vec<String> {
    let entries = fs::read_dir(dir.as_ref()).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The text of a file.
#[track_caller]
pub(crate) fn text(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path.as_ref()).unwrap_or_else(|e| panic!("{}: {e}", path.as_ref().display()))
}
