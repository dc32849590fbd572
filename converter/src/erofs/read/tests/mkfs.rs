//! Random trees in a directory, `mkfs.erofs` over them, and comparing what the reader sees with the directory.

use super::super::Image;
use crate::erofs::format::FileType;
use crate::read_at::ReadAt;
use rustix::fs::{AtFlags, CWD, FileType as Kind, Gid, Mode, Timespec, Timestamps, Uid, XattrFlags};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A small generator of numbers: what a test makes of a seed must not change with a crate's version.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed ^ 0x9E37_79B9_7F4A_7C15)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn bytes(&mut self, len: u64) -> Vec<u8> {
        (0..len).map(|_| self.next().to_le_bytes()[0]).collect()
    }

    fn name(&mut self) -> Vec<u8> {
        // mkfs.erofs 1.5 fails on names of 255 bytes.
        let len = if self.below(10) == 0 { 250 } else { 1 + self.below(20) };
        let mut name = self.bytes(len);
        for byte in &mut name {
            *byte = match *byte {
                0 | b'/' => b'_',
                other if other < 200 => b'a' + other % 26,
                other => other,
            };
        }
        name
    }
}

/// What `mkfs.erofs` made.
pub(crate) struct Mkfs {
    pub(crate) image: Vec<u8>,
    pub(crate) blob: Option<Vec<u8>>,
}

impl Mkfs {
    /// Runs `mkfs.erofs`; an option `--blobdev` gets the path of a new blob.
    pub(crate) fn run(work: &Path, source: &Path, options: &[&str]) -> Self {
        let (image_path, blob_path) = (work.join("image"), work.join("blob"));
        let _ = (fs::remove_file(&image_path), fs::remove_file(&blob_path));
        let mut command = Command::new("mkfs.erofs");
        for option in options {
            match *option {
                "--blobdev" => command.arg(format!("--blobdev={}", blob_path.display())),
                other => command.arg(other),
            };
        }
        let output = command
            .args([&image_path, source])
            .output()
            .expect("mkfs.erofs cannot be run: install the package erofs-utils");
        assert!(output.status.success(), "mkfs.erofs {options:?}: {}", String::from_utf8_lossy(&output.stderr));
        let image = fs::read(&image_path).unwrap();
        Self { image, blob: fs::read(&blob_path).ok() }
    }

    pub(crate) fn devices(&self) -> Vec<&dyn ReadAt> {
        self.blob.iter().map(|blob| blob as &dyn ReadAt).collect()
    }
}

/// Makes a tree of about 100 objects at `dir`; with `root`, owners and device nodes and security xattrs too.
pub(crate) fn make_tree(dir: &Path, seed: u64, root: bool) {
    let mut rng = Rng::new(seed);
    fs::create_dir(dir).unwrap();
    let mut dirs = vec![dir.to_owned()];
    let mut files: Vec<PathBuf> = Vec::new();
    for _ in 0..60 + rng.below(60) {
        let parent = dirs[usize::try_from(rng.below(dirs.len() as u64)).unwrap()].clone();
        let path = parent.join(OsStr::from_bytes(&rng.name()));
        if path.symlink_metadata().is_ok() || path.as_os_str().len() > 3500 {
            continue;
        }
        match rng.below(12) {
            0..3 => {
                fs::create_dir(&path).unwrap();
                dirs.push(path.clone());
            }
            3 => {
                let len = 1 + rng.below(300);
                let target: Vec<u8> = rng.bytes(len).into_iter().map(|b| b.max(1)).collect();
                std::os::unix::fs::symlink(OsStr::from_bytes(&target), &path).unwrap();
            }
            4 if !files.is_empty() => {
                let target = &files[usize::try_from(rng.below(files.len() as u64)).unwrap()];
                fs::hard_link(target, &path).unwrap();
                continue;
            }
            5 => special(&path, &mut rng, root),
            _ => {
                file(&path, &mut rng);
                files.push(path.clone());
            }
        }
        attributes(&path, &mut rng, root);
    }
    // A directory of several blocks.
    let wide = dir.join("wide");
    fs::create_dir(&wide).unwrap();
    for n in 0..300 {
        fs::write(wide.join(format!("{n:0>40}")), []).unwrap();
    }
    // Contents change their directories' times, so those come last, deepest first.
    for path in dirs.iter().rev() {
        times(path, &mut rng);
    }
}

fn special(path: &Path, rng: &mut Rng, root: bool) {
    let mode = Mode::from_raw_mode(0o640);
    let device =
        rustix::fs::makedev(u32::try_from(rng.below(4096)).unwrap(), u32::try_from(rng.below(1 << 20)).unwrap());
    let (kind, device) = match rng.below(4) {
        0 if root => (Kind::CharacterDevice, device),
        1 if root => (Kind::BlockDevice, device),
        2 => (Kind::Socket, 0),
        _ => (Kind::Fifo, 0),
    };
    rustix::fs::mknodat(CWD, path, kind, mode, device).unwrap();
}

fn file(path: &Path, rng: &mut Rng) {
    let len = match rng.below(6) {
        0 => 0,
        1 => rng.below(100),
        2 => 4096 * (1 + rng.below(4)),
        3 => 100_000 + rng.below(200_000),
        _ => rng.below(9000),
    };
    let mut bytes = rng.bytes(len);
    if rng.below(4) == 0 {
        // Blocks of zeros, and the same block again.
        for block in bytes.chunks_mut(4096).step_by(3) {
            block.fill(0);
        }
    }
    fs::write(path, bytes).unwrap();
}

fn attributes(path: &Path, rng: &mut Rng, root: bool) {
    let link = path.is_symlink();
    if root {
        let id = |rng: &mut Rng| {
            u32::try_from(if rng.below(3) == 0 { rng.below(1 << 32) } else { rng.below(2000) }).unwrap()
        };
        let (uid, gid) = (id(rng) & !(1 << 31), id(rng) & !(1 << 31));
        rustix::fs::chownat(CWD, path, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)), AtFlags::SYMLINK_NOFOLLOW)
            .unwrap();
    }
    let plain = path.symlink_metadata().unwrap().file_type();
    if !link {
        let mode = u32::try_from(rng.below(0o10000)).unwrap() | if plain.is_dir() { 0o700 } else { 0o400 };
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    if plain.is_file() || plain.is_dir() {
        for _ in 0..rng.below(4) {
            let name = format!("user.{}", rng.below(5));
            let value = if rng.below(2) == 0 { b"shared by many".to_vec() } else { rng.bytes(40) };
            set_xattr(path, &name, &value);
        }
        if root && rng.below(3) == 0 {
            set_xattr(path, "trusted.overlay.opaque", b"y");
            set_xattr(path, "security.dsec", b"");
        }
    }
    times(path, rng);
}

fn set_xattr(path: &Path, name: &str, value: &[u8]) {
    // A file without write permission refuses `user.` xattrs to anyone but root.
    match rustix::fs::lsetxattr(path, name, value, XattrFlags::empty()) {
        Ok(()) | Err(rustix::io::Errno::ACCESS) => {}
        Err(e) => panic!("cannot set {name} on {}: {e} (the tests' directory must have xattrs)", path.display()),
    }
}

fn times(path: &Path, rng: &mut Rng) {
    let secs = i64::try_from(rng.below(1 << 33)).unwrap() - (1 << 30);
    let time = Timespec { tv_sec: secs, tv_nsec: i64::try_from(rng.below(1_000_000_000)).unwrap() };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

fn xattrs_of(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = vec![0; 64 << 10];
    let len = rustix::fs::llistxattr(path, &mut names[..]).unwrap();
    let names = names[..len].split(|b| *b == 0).filter(|n| !n.is_empty());
    names
        .map(|name| {
            let mut value = vec![0; 64 << 10];
            let len = rustix::fs::lgetxattr(path, name, &mut value[..]).unwrap();
            value.truncate(len);
            (name.to_vec(), value)
        })
        .collect()
}

/// What differs between an image and the directory it was made of.
pub(crate) fn compare<R: ReadAt>(image: &Image<R>, devices: &[&dyn ReadAt], source: &Path) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut names = 0;
    let mut walk = image.walk();
    while let Some(visit) = walk.next() {
        let visit = match visit {
            Ok(visit) => visit,
            Err(e) => return vec![e.to_string()],
        };
        names += 1;
        let path = source.join(OsStr::from_bytes(visit.path));
        let meta = match path.symlink_metadata() {
            Ok(meta) => meta,
            Err(e) => {
                wrong.push(format!("{}: {e}", path.display()));
                continue;
            }
        };
        let inode = visit.inode;
        let mut same = |what: &str, a: &dyn std::fmt::Debug, b: &dyn std::fmt::Debug| {
            let (a, b) = (format!("{a:?}"), format!("{b:?}"));
            if a != b {
                wrong.push(format!(
                    "{}: {what}: {} where the source has {}",
                    path.display(),
                    &a[..a.len().min(200)],
                    &b[..b.len().min(200)]
                ));
            }
        };
        same("mode", &u32::from(inode.mode), &meta.mode());
        same("owner", &(inode.uid, inode.gid), &(meta.uid(), meta.gid()));
        same("mtime", &(inode.mtime.secs, i64::from(inode.mtime.nanos)), &(meta.mtime(), meta.mtime_nsec()));
        let xattrs: BTreeMap<_, _> = image.xattrs(inode).unwrap().into_iter().map(|x| (x.name, x.value)).collect();
        same("xattrs", &xattrs, &xattrs_of(&path));
        if !inode.is_dir() {
            same("nlink", &u64::from(inode.nlink), &meta.nlink());
        }
        match inode.file_type() {
            FileType::Regular => {
                let size = usize::try_from(inode.size).unwrap();
                let mut bytes = vec![0xaa; size + 10];
                let read = image.read_file_at(inode, devices, 0, &mut bytes).unwrap();
                same("size", &read, &usize::try_from(meta.len()).unwrap());
                if bytes[..read] != fs::read(&path).unwrap() {
                    same("bytes", &"others", &"these");
                }
            }
            FileType::Symlink => {
                let target = fs::read_link(&path).unwrap();
                same("link", &image.read_link(inode).unwrap(), &target.as_os_str().as_bytes());
            }
            FileType::CharDevice | FileType::BlockDevice => {
                let device = (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev()));
                same("device", &inode.device_number().unwrap(), &device);
            }
            _ => {}
        }
    }
    let expected = count(source);
    if names != expected {
        wrong.push(format!("{names} names where the source has {expected}"));
    }
    wrong
}

fn count(path: &Path) -> u64 {
    1 + if path.is_dir() && !path.is_symlink() {
        fs::read_dir(path).unwrap().map(|entry| count(&entry.unwrap().path())).sum()
    } else {
        0
    }
}
