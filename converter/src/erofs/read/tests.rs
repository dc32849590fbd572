//! The reader against images of `mkfs.erofs`, of a builder of odd images, and of chance.

pub(crate) mod builder;
mod compressed;
mod hostile;
pub(crate) mod mkfs;

use super::check::{DeviceInfo, Finding, Severity, check};
use super::{Features, Image, KernelVersion, ReadError};
use crate::erofs::format::{COMPAT_CHECKSUM, FileType};
use crate::erofs::read::Data;
use mkfs::{Mkfs, compare, make_tree};
use proptest::prelude::*;
use std::fs;

fn broken(findings: Vec<Finding>) -> Vec<Finding> {
    findings.into_iter().filter(|f| f.severity == Severity::Broken).collect()
}

/// The ways of `mkfs.erofs` that the reader reads whole.
const READABLE: &[&[&str]] = &[
    &[],
    &["-x1"],
    &["-Eforce-inode-extended"],
    &["-Enoinline_data"],
    &["--chunksize=4096"],
    &["--chunksize=16384", "-Eforce-chunk-indexes"],
    &["--chunksize=4096", "--blobdev"],
    &["--chunksize=65536", "--blobdev"],
];

fn reads_as_its_source(seed: u64, root: bool) -> Result<(), TestCaseError> {
    let work = tempfile::tempdir().unwrap();
    let source = work.path().join("source");
    make_tree(&source, seed, root);
    for options in READABLE {
        let made = Mkfs::run(work.path(), &source, options);
        let image = Image::open(made.image.as_slice()).unwrap();
        let differences = compare(&image, &made.devices(), &source);
        prop_assert!(differences.is_empty(), "{options:?}: {differences:#?}");
        let blob = made.blob.iter().map(|blob| DeviceInfo { blocks: blob.len() as u64 / 4096, packed: false });
        let findings = broken(check(&image, &blob.collect::<Vec<_>>()));
        prop_assert!(findings.is_empty(), "{options:?}: {findings:#?}");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, max_shrink_iters: 0, ..ProptestConfig::default() })]

    #[test]
    fn random_trees_read_as_their_source(seed: u64) {
        reads_as_its_source(seed, false)?;
    }

    #[test]
    fn privileged_random_trees_with_owners_devices_and_capabilities(seed: u64) {
        reads_as_its_source(seed, true)?;
    }
}

#[test]
fn compressed_metadata_is_readable_and_its_data_refused_by_name() {
    let work = tempfile::tempdir().unwrap();
    let source = work.path().join("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("text"), "the same line again\n".repeat(10_000)).unwrap();
    let made = Mkfs::run(work.path(), &source, &["-zlz4"]);
    let image = Image::open(made.image.as_slice()).unwrap();
    let root = image.root().unwrap();
    let entry = image.dir(&root).unwrap().map(Result::unwrap).find(|e| e.name == b"text").unwrap();
    let inode = image.inode(entry.nid).unwrap();
    assert_eq!((inode.size, inode.is_compressed()), (200_000, true));
    let error = image.read_file_at(&inode, &[], 0, &mut [0; 16]).unwrap_err();
    assert!(!error.is_corruption());
    assert!(error.to_string().contains("compressed data"), "{error}");
    let findings = check(&image, &[]);
    assert!(findings.iter().any(|f| f.severity == Severity::Foreign && f.path == "text"), "{findings:?}");
    assert_eq!(broken(findings), []);
}

#[test]
fn other_block_sizes_are_read() {
    for bits in [9, 10, 11, 13, 16] {
        let mut built = builder::Builder::new(bits);
        let file = built.file(b"hello world");
        let bytes = built.root(&[(b"f", file, FileType::Regular)]).finish();
        let image = Image::open(bytes.as_slice()).unwrap();
        assert_eq!(image.superblock().block_size(), 1 << bits);
        let inode = image.inode(file).unwrap();
        let mut buf = [0; 32];
        assert_eq!(image.read_file_at(&inode, &[], 6, &mut buf).unwrap(), 5);
        assert_eq!(&buf[..5], b"world");
        assert_eq!(broken(check(&image, &[])), []);
    }
}

#[test]
fn extents_join_and_holes_stay() {
    let mut built = builder::Builder::new(12);
    let hole = u32::MAX;
    let file = built.chunked(4096 * 6 - 1, 0, &[(1, 5), (1, 6), (0, hole), (0, hole), (1, 7), (2, 8)]);
    let devices = [100, 9];
    let bytes = built.root(&[(b"f", file, FileType::Regular)]).devices(&devices).finish();
    let image = Image::open(bytes.as_slice()).unwrap();
    let inode = image.inode(file).unwrap();
    let extents: Vec<(u64, u64, Data)> =
        image.extents(&inode).map(|e| e.unwrap()).map(|e| (e.file_offset, e.len, e.data)).collect();
    assert_eq!(
        extents,
        [
            (0, 8192, Data::Block { device: 1, block: 5 }),
            (8192, 8192, Data::Hole),
            (16384, 4096, Data::Block { device: 1, block: 7 }),
            (20480, 4095, Data::Block { device: 2, block: 8 }),
        ]
    );
    assert_eq!(image.chunks(&inode).count(), 6);
    assert_eq!(
        check(&image, &[DeviceInfo { blocks: 100, packed: false }, DeviceInfo { blocks: 9, packed: false }]),
        []
    );
    let short = check(&image, &[DeviceInfo { blocks: 100, packed: false }, DeviceInfo { blocks: 8, packed: false }]);
    assert_eq!(short.len(), 2, "{short:?}");
    assert!(short[1].what.contains("are not on device 2 as it is"), "{short:?}");
}

#[test]
fn unified_addresses_find_their_device() {
    let mut built = builder::Builder::new(12).without_checksum();
    let file = built.chunked(8192, 0, &[(0, 1000), (0, 1009)]);
    let mut bytes = built.root(&[(b"f", file, FileType::Regular)]).devices(&[10]).finish();
    let table = usize::try_from(Image::open(bytes.as_slice()).unwrap().superblock().device_table).unwrap();
    bytes[table + 68..table + 72].copy_from_slice(&1000u32.to_le_bytes());
    let image = Image::open(bytes.as_slice()).unwrap();
    let inode = image.inode(file).unwrap();
    let blocks: Vec<Data> = image.chunks(&inode).map(|e| e.unwrap().data).collect();
    assert_eq!(blocks, [Data::Block { device: 1, block: 0 }, Data::Block { device: 1, block: 9 }]);
}

#[test]
fn features_and_kernels() {
    let features = |incompat, devices, algorithms| Features::new(COMPAT_CHECKSUM, incompat, devices, algorithms, 12);
    assert_eq!(features(0, 0, 0).least_kernel(), KernelVersion(5, 4));
    assert_eq!(features(0x4, 0, 0).least_kernel(), KernelVersion(5, 15));
    assert_eq!(features(0xc, 1, 0).least_kernel(), KernelVersion(5, 16));
    assert_eq!(features(0xc, 1, 0).names(), ["checksum", "chunked-files", "device-table"]);
    assert_eq!(features(0x40, 0, 0).least_kernel(), KernelVersion(6, 4));
    assert_eq!(features(0x3, 0, 1 << 3).least_kernel(), KernelVersion(6, 10));
    assert_eq!(features(0x80, 0, 0).least_kernel(), KernelVersion(6, 15));
    assert_eq!(features(0x1ff, 0, 0).least_kernel().to_string(), "6.17");
    assert_eq!(features(0x80c, 1, 0).unknown_incompat(), 0x800);
    assert!(features(0xc, 1, 0).least_kernel() > features(0x4, 1, 0).least_kernel());
}

#[test]
fn what_is_no_image_is_refused_by_name() {
    let open = |bytes: &[u8]| Image::open(bytes).unwrap_err();
    assert!(matches!(open(&[]), ReadError::TooShort { size: 0 }));
    assert!(matches!(open(&[0; 4096]), ReadError::NotErofs { found: 0 }));
    let good = builder::Builder::new(12).root(&[]).finish();
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[1024 + at] = byte;
        open(&bytes)
    };
    assert!(matches!(with(82, 8), ReadError::UnknownFeatures { bits: 0x8_0000 }));
    assert!(with(4, 0xff).to_string().starts_with("superblock: checksum: stored "));
    assert!(with(12, 30).to_string().starts_with("superblock: blkszbits: 30"));
    assert!(with(90, 1).to_string().starts_with("superblock: dirblkbits"));
}
