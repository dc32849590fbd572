use super::*;
use crate::erofs::format::FileType::{Directory, Regular};
use crate::erofs::read::check::{DeviceInfo, Severity, check};
use crate::erofs::read::tests::builder::Builder;
use crate::erofs::read::tests::mkfs::{Mkfs, compare, make_tree};
use proptest::prelude::*;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

/// Blocks of a segment of 1 MiB.
const SEGMENT: u32 = 256;

/// A device for each segment of a blob, each with the blob's addresses.
fn segments(blob_blocks: u32) -> Vec<NewDevice> {
    (0..blob_blocks.div_ceil(SEGMENT))
        .map(|n| NewDevice { tag: format!("segment {n}").into_bytes(), blocks: blob_blocks.min((n + 1) * SEGMENT) })
        .collect()
}

/// Chunks of one block never cross a segment; others may.
fn segment_of(_: u16, block: u32, blocks: u32) -> Place {
    if block / SEGMENT != (block + blocks - 1) / SEGMENT {
        return Err("it crosses a segment".into());
    }
    Ok((u16::try_from(block / SEGMENT)? + 1, block))
}

fn names(image: &Image<&[u8]>) -> Vec<(Vec<u8>, u64)> {
    let mut walk = image.walk();
    let mut names = Vec::new();
    while let Some(visit) = walk.next() {
        let visit = visit.unwrap();
        names.push((visit.path.to_vec(), visit.inode.nid));
    }
    names
}

/// A tree with two megabytes in large files besides the random ones.
fn source(work: &Path, seed: u64, root: bool) -> PathBuf {
    let source = work.join("source");
    make_tree(&source, seed, root);
    for n in 0..8u32 {
        let bytes: Vec<u8> =
            (0..400_000u32).flat_map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(n)).to_le_bytes()).collect();
        fs::write(source.join(format!("large{n}")), &bytes[..300_000 + 40_000 * n as usize]).unwrap();
    }
    source
}

#[test]
fn segment_devices_read_the_same() {
    let work = tempfile::tempdir().unwrap();
    let source = source(work.path(), 3, false);
    let made = Mkfs::run(work.path(), &source, &["--chunksize=4096", "--blobdev"]);
    let blob = made.blob.as_ref().unwrap();
    let blocks = u32::try_from(blob.len() / 4096).unwrap();
    let mut out = Vec::new();
    remap(made.image.as_slice(), &segments(blocks), segment_of, &mut out).unwrap();
    let image = Image::open(out.as_slice()).unwrap();
    assert!(image.devices().len() >= 3, "{} devices", image.devices().len());
    assert_eq!(image.devices()[1].tag, b"segment 1");
    assert_eq!(names(&image), names(&Image::open(made.image.as_slice()).unwrap()));
    let devices: Vec<&dyn ReadAt> = image.devices().iter().map(|_| blob as &dyn ReadAt).collect();
    assert_eq!(compare(&image, &devices, &source), Vec::<String>::new());
    let infos: Vec<DeviceInfo> =
        image.devices().iter().map(|d| DeviceInfo { blocks: d.blocks, packed: false }).collect();
    assert_eq!(check(&image, &infos), []);

    // And back: one device again, in a table that is shorter than its place.
    let mut back = Vec::new();
    let one = [NewDevice { tag: Vec::new(), blocks }];
    remap(out.as_slice(), &one, |_, block, _| Ok((1, block)), &mut back).unwrap();
    assert_eq!(back.len(), out.len());
    let image = Image::open(back.as_slice()).unwrap();
    assert_eq!(compare(&image, &made.devices(), &source), Vec::<String>::new());
}

/// An image of a little more than `bytes` whose files lie on device 1, in the image's own blocks, and inline.
fn large(bytes: usize) -> (Vec<u8>, u64, u64, u64) {
    let mut built = Builder::new(12);
    let remote = built.chunked(8192, 0, &[(1, 7), (0, u32::MAX)]);
    let own = built.chunked(4096, 0, &[(0, 2)]);
    let mut flat = Builder::inode(0o100_644, 0, 1, 5000);
    flat.data = 2.into();
    let flat = built.raw(flat, &[]);
    let dir = built.dir(None, &[]);
    let mut built = built.root(&[
        (b"dir", dir, Directory),
        (b"flat", flat, Regular),
        (b"own", own, Regular),
        (b"remote", remote, Regular),
    ]);
    built.bytes().resize(2 * 4096, 0);
    built.bytes().extend([b'p'; 8192]);
    built.bytes().resize(bytes, 0);
    (built.devices(&[10]).finish(), remote, own, flat)
}

#[test]
fn a_table_that_cannot_be_appended_moves_the_image() {
    for (size, shift) in [(1 << 20, 0), (9 << 20, 3)] {
        let (old, remote, own, flat) = large(size);
        let devices = vec![NewDevice { tag: b"t".to_vec(), blocks: 100 }; 70];
        let mut out = Vec::new();
        remap(old.as_slice(), &devices, |_, block, _| Ok((70, block + 50)), &mut out).unwrap();
        let image = Image::open(out.as_slice()).unwrap();
        assert_eq!(image.superblock().meta_block, shift);
        assert_eq!(image.superblock().blocks * 4096, out.len() as u64);
        assert_eq!(image.devices().len(), 70);
        assert_eq!(names(&image), names(&Image::open(old.as_slice()).unwrap()));
        let place = |nid| image.extents(&image.inode(nid).unwrap()).map(|e| e.unwrap().data).collect::<Vec<_>>();
        let own_block = Data::Block { device: 0, block: 2 + u64::from(shift) };
        assert_eq!(place(remote), [Data::Block { device: 70, block: 57 }, Data::Hole]);
        assert_eq!(place(own), [own_block]);
        assert_eq!(place(flat), [own_block]);
        let mut bytes = vec![0; 5000];
        assert_eq!(image.read_file_at(&image.inode(flat).unwrap(), &[], 0, &mut bytes).unwrap(), 5000);
        assert!(bytes.iter().all(|b| *b == b'p'));
        let infos = vec![DeviceInfo { blocks: 100, packed: false }; 70];
        let broken: Vec<_> = check(&image, &infos).into_iter().filter(|f| f.severity == Severity::Broken).collect();
        assert_eq!(broken, []);
    }
}

#[test]
fn what_cannot_be_rewritten_is_named() {
    let (old, ..) = large(1 << 16);
    let one = |blocks| [NewDevice { tag: Vec::new(), blocks }];
    let run = |devices: &[NewDevice], map: fn(u16, u32, u32) -> Place| {
        remap(old.as_slice(), devices, map, io::sink()).unwrap_err().to_string()
    };
    assert!(run(&one(10), |_, _, _| Err("not today".into())).ends_with("of device 1 have no new place: not today"));
    assert!(run(&one(10), |_, block, _| Ok((2, block))).ends_with("1 blocks from block 7 are not inside new device 2"));
    assert!(run(&one(7), |_, block, _| Ok((1, block))).ends_with("are not inside new device 1"));
    assert!(run(&[], |_, block, _| Ok((0, block))).ends_with("are not inside new device 0"));
    let tag = [NewDevice { tag: vec![b'x'; 65], blocks: 1 }];
    assert_eq!(run(&tag, |_, b, _| Ok((1, b))), "new devices: the tag of device 1 has 65 bytes, 64 is the most");
    let many = vec![NewDevice { tag: Vec::new(), blocks: 1 }; 65_536];
    assert_eq!(run(&many, |_, b, _| Ok((1, b))), "new devices: 65536 are more than 65535");
}

#[test]
fn as_many_devices_as_there_can_be() {
    let (old, remote, ..) = large(1 << 16);
    let devices = vec![NewDevice { tag: Vec::new(), blocks: 100 }; 65_535];
    let mut out = Vec::new();
    remap(old.as_slice(), &devices, |_, block, _| Ok((65_535, block)), &mut out).unwrap();
    let image = Image::open(out.as_slice()).unwrap();
    let inode = image.inode(remote).unwrap();
    let first = image.extents(&inode).next().unwrap().unwrap();
    assert_eq!(first.data, Data::Block { device: 65_535, block: 7 });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4, max_shrink_iters: 0, ..ProptestConfig::default() })]

    #[test]
    fn the_same_image_with_the_same_devices_is_the_same(seed: u64) {
        let work = tempfile::tempdir().unwrap();
        let source = work.path().join("source");
        make_tree(&source, seed, false);
        let made = Mkfs::run(work.path(), &source, &["--chunksize=4096", "--blobdev"]);
        let blocks = u32::try_from(made.blob.as_ref().unwrap().len() / 4096).unwrap();
        let one = [NewDevice { tag: b"blob".to_vec(), blocks }];
        let (mut first, mut second) = (Vec::new(), Vec::new());
        remap(made.image.as_slice(), &one, |device, block, _| Ok((device, block)), &mut first).unwrap();
        remap(first.as_slice(), &one, |device, block, _| Ok((device, block)), &mut second).unwrap();
        prop_assert_eq!(first, second);
    }
}

/// A file-backed EROFS mount that is undone when dropped.
struct Mount(PathBuf);

impl Mount {
    fn new(image: &Path, devices: &[PathBuf], at: &Path) -> Self {
        fs::create_dir_all(at).unwrap();
        let fs = rustix::mount::fsopen("erofs", FsOpenFlags::FSOPEN_CLOEXEC).unwrap();
        rustix::mount::fsconfig_set_string(&fs, "source", image).unwrap();
        for device in devices {
            rustix::mount::fsconfig_set_string(&fs, "device", device).unwrap();
        }
        rustix::mount::fsconfig_create(&fs).unwrap();
        let mount =
            rustix::mount::fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::MOUNT_ATTR_RDONLY).unwrap();
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        rustix::mount::move_mount(&mount, "", rustix::fs::CWD, at, flags).unwrap();
        Self(at.to_owned())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// The proof by a kernel: segments, each a file of its own with its data at its offset in the blob.
#[test]
fn privileged_a_kernel_reads_segment_devices() {
    let work = tempfile::tempdir().unwrap();
    let source = source(work.path(), 11, true);
    let made = Mkfs::run(work.path(), &source, &["--chunksize=4096", "--blobdev"]);
    let blob = made.blob.as_ref().unwrap();
    let devices = segments(u32::try_from(blob.len() / 4096).unwrap());
    assert!(devices.len() >= 3);
    let paths: Vec<PathBuf> = (0..devices.len()).map(|n| work.path().join(format!("segment{n}"))).collect();
    for (path, number) in paths.iter().zip(0..) {
        let start = number * SEGMENT as usize * 4096;
        let end = blob.len().min(start + SEGMENT as usize * 4096);
        let file = fs::File::create(path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &blob[start..end], start as u64).unwrap();
    }
    let image_path = work.path().join("segments.erofs");
    remap(made.image.as_slice(), &devices, segment_of, fs::File::create(&image_path).unwrap()).unwrap();
    let mount = Mount::new(&image_path, &paths, &work.path().join("mnt"));
    // What the reader sees is what the kernel shows, and both are the source.
    let bytes = fs::read(&image_path).unwrap();
    let image = Image::open(bytes.as_slice()).unwrap();
    let media: Vec<&dyn ReadAt> = paths.iter().map(|_| blob as &dyn ReadAt).collect();
    assert_eq!(compare(&image, &media, &source), Vec::<String>::new());
    assert_eq!(compare(&image, &media, &mount.0), Vec::<String>::new());
}

/// The image behind a table at its front, with its own blocks moved.
#[test]
fn privileged_a_kernel_reads_a_moved_image() {
    let work = tempfile::tempdir().unwrap();
    let (old, ..) = large(9 << 20);
    let devices = vec![NewDevice { tag: Vec::new(), blocks: 100 }; 40];
    let (image_path, blob_path) = (work.path().join("image"), work.path().join("blob"));
    let file = fs::File::create(&image_path).unwrap();
    remap(old.as_slice(), &devices, |_, block, _| Ok((40, block + 1)), file).unwrap();
    let mut blob = vec![0; 100 * 4096];
    blob[8 * 4096..9 * 4096].fill(b'r');
    fs::write(&blob_path, blob).unwrap();
    let mount = Mount::new(&image_path, &vec![blob_path; 40], &work.path().join("mnt"));
    let read = |name: &str| fs::read(mount.0.join(OsStr::from_bytes(name.as_bytes()))).unwrap();
    assert_eq!(read("flat"), [b'p'; 5000]);
    assert_eq!(read("own"), [b'p'; 4096]);
    assert_eq!(read("remote"), [vec![b'r'; 4096], vec![0; 4096]].concat());
    assert!(mount.0.join("dir").is_dir());
}
