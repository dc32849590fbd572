//! Images that are out to get the reader: loops, sharing, depth, flipped bits.

use super::super::check::check;
use super::super::{Image, ReadError};
use super::builder::Builder;
use super::mkfs::{Mkfs, make_tree};
use crate::erofs::format::FileType::{Directory, Regular};
use crate::fuzzing::erofs::erofs;
use proptest::prelude::*;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// All errors of a walk.
fn errors(bytes: &[u8]) -> Vec<ReadError> {
    let image = Image::open(bytes).unwrap();
    let mut walk = image.walk();
    let mut found = Vec::new();
    while let Some(visit) = walk.next() {
        found.extend(visit.err());
    }
    found
}

fn texts(bytes: &[u8]) -> String {
    errors(bytes).iter().map(|e| format!("{e}\n")).collect()
}

fn findings(bytes: &[u8]) -> String {
    let image = Image::open(bytes).unwrap();
    check(&image, &[]).iter().map(|f| format!("/{}: {}\n", f.path, f.what)).collect()
}

#[test]
fn a_directory_in_itself_is_a_loop() {
    let mut built = Builder::new(12);
    let inner = built.dir(None, &[(b"again", 0, Directory)]);
    let at = usize::try_from(inner).unwrap() * 32 + 32;
    // The third entry of the block is `again`: let it name its own directory.
    built.bytes()[at + 24..at + 32].copy_from_slice(&inner.to_le_bytes());
    let bytes = built.root(&[(b"d", inner, Directory)]).finish();
    let text = texts(&bytes);
    assert_eq!(text, format!("inode {inner}: directory: the directory is reached twice (a loop or a hard link)\n"));
    assert!(findings(&bytes).contains("/d/again: "), "{}", findings(&bytes));
}

#[test]
fn a_directory_with_two_names_is_refused() {
    let mut built = Builder::new(12);
    let inner = built.dir(None, &[]);
    let bytes = built.root(&[(b"a", inner, Directory), (b"b", inner, Directory)]).finish();
    assert!(texts(&bytes).contains("reached twice"));
}

#[test]
fn inodes_that_overlap_are_refused() {
    let mut built = Builder::new(12);
    let outer = built.file(&[0x22; 256]);
    let inner = Builder::inode(0o100_644, 2, 1, 100);
    let at = usize::try_from(outer).unwrap() * 32 + 64;
    built.bytes()[at..at + 32].copy_from_slice(zerocopy::IntoBytes::as_bytes(&inner));
    let bytes = built.root(&[(b"a", outer, Regular), (b"b", outer + 2, Regular)]).finish();
    assert_eq!(texts(&bytes), format!("inode {}: nid: it overlaps another inode\n", outer + 2));
}

#[test]
fn directories_that_share_a_large_block_run_cannot_multiply_it() {
    let mut built = Builder::new(12);
    let count = 4000u64;
    // Every directory claims the same megabyte of blocks, and the image has only one.
    let nids: Vec<u64> = (0..count).map(|_| built.raw(Builder::inode(0o040_755, 0, 2, 1 << 20), &[])).collect();
    let names: Vec<String> = (0..count).map(|n| format!("{n:04}")).collect();
    let mut blocks = Vec::new();
    for chunk in names.iter().zip(&nids).collect::<Vec<_>>().chunks(200) {
        let entries: Vec<_> = chunk.iter().map(|(name, nid)| (name.as_bytes(), **nid, Directory)).collect();
        let mut block = Builder::dir_block(&entries);
        block.resize(4096, 0);
        blocks.extend(block);
    }
    let len = blocks.len();
    built.bytes().resize(1 << 18, 0);
    let mut root = Builder::inode(0o040_755, 0, 2, len);
    root.data = (1u32 << 6).into();
    built.bytes().extend(blocks);
    let root = built.raw(root, &[]);
    let bytes = built.root_is(root).finish();
    let started = Instant::now();
    let found = errors(&bytes);
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert!(found.iter().any(|e| e.to_string().contains("add up to more bytes than the image has")));
}

#[test]
fn depth_costs_no_stack_and_little_time() {
    let mut built = Builder::new(12).without_checksum();
    let depth = 50_000;
    let mut child = built.file(b"bottom");
    let mut entry: (&[u8], u64, crate::erofs::format::FileType) = (b"f", child, Regular);
    for _ in 0..depth {
        let dir = built.dir(None, &[entry]);
        if entry.2 == Directory {
            built.set_parent(child, dir);
        }
        child = dir;
        entry = (b"d", dir, Directory);
    }
    // The root's nid has 16 bits: the metadata area starts where the root is.
    let root = usize::try_from(child).unwrap() * 32;
    let mut bytes = built.root_is(0).finish();
    let meta_block = root / 4096;
    let nid = u16::try_from((root % 4096) / 32).unwrap();
    bytes[1024 + 14..1024 + 16].copy_from_slice(&nid.to_le_bytes());
    bytes[1024 + 40..1024 + 44].copy_from_slice(&u32::try_from(meta_block).unwrap().to_le_bytes());
    let image = Image::open(bytes.as_slice()).unwrap();
    // Nids below the root cannot be named from it, so the chain ends with an error at once: that is bounded too.
    assert!(image.walk().next().unwrap().is_ok());
    bytes[1024 + 40..1024 + 44].fill(0);
    bytes[1024 + 80..1024 + 84].copy_from_slice(&0x8cu32.to_le_bytes());
    bytes[1024 + 14..1024 + 16].fill(0);
    bytes[1024 + 112..1024 + 120].copy_from_slice(&(root as u64 / 32).to_le_bytes());
    let started = Instant::now();
    let image = Image::open(bytes.as_slice()).unwrap();
    let mut walk = image.walk();
    let mut deepest = 0;
    while let Some(visit) = walk.next() {
        deepest = deepest.max(visit.unwrap().path.len());
    }
    assert_eq!(walk.inodes(), depth + 1);
    assert_eq!(deepest, 2 * (usize::try_from(depth).unwrap() - 1) + 1);
    assert_eq!(findings(&bytes), "/: superblock: it has no checksum\n");
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
}

#[test]
fn each_broken_structure_is_named() {
    let check_one = |change: &dyn Fn(&mut Builder, u64, u64), expected: &str| {
        let mut built = Builder::new(12).without_checksum();
        let file = built.file(b"data");
        let dir = built.dir(None, &[(b"in", file, Regular)]);
        change(&mut built, file, dir);
        let found = findings(&built.root(&[(b"dir", dir, Directory)]).finish());
        assert!(found.contains(expected), "expected {expected}, found:\n{found}");
    };
    let put = |nid: u64, at: usize, bytes: &'static [u8]| {
        move |built: &mut Builder, file: u64, dir: u64| {
            let nid = if nid == 0 { file } else { dir };
            let start = usize::try_from(nid).unwrap() * 32 + at;
            built.bytes()[start..start + bytes.len()].copy_from_slice(bytes);
        }
    };
    // The inode of a file: format, xattr count, mode, nlink, size.
    check_one(&put(0, 0, &[0xe4, 0]), "i_format: 0xe4 has undefined bits");
    check_one(&put(0, 0, &[0x0a, 0]), "i_format: data layout 5 is not defined");
    check_one(&put(0, 2, &[0xff, 0xff]), "i_xattr_icount: the xattrs are not inside the image");
    check_one(&put(0, 4, &[0xa4, 0xe1]), "i_mode: 0o160644 is no file type");
    check_one(&put(0, 5, &[0xa1]), "the entry's type is Regular, the inode's Symlink");
    check_one(&put(0, 6, &[2]), "/dir/in: nlink is 2, but the inode has 1 names");
    // The directory: nlink, then entries of 12 bytes (`.`, `..`, `in`), then the names.
    check_one(&put(1, 6, &[9]), "/dir: nlink is 9, with 0 directories in it");
    check_one(&put(1, 32, &[0x7f]), "/dir: `.` is inode");
    check_one(&put(1, 32 + 8, &[25]), "block 0, entry 0: the first name offset is impossible");
    check_one(&put(1, 32 + 10, &[1]), "`.` is not a directory entry");
    check_one(&put(1, 32 + 20, &[2, 1]), "its name is not inside the block");
    check_one(&put(1, 32 + 36, b"x"), "the names `x` and `..` are not in order");
    check_one(&put(1, 32 + 36, b"/"), "its name is empty or has a slash");
    check_one(&put(1, 32 + 36, b"\0"), "its name has a NUL");
    check_one(&put(1, 32 + 30, &[0xff]), "the inode is not inside the image");
}

#[test]
fn an_inline_tail_across_blocks_is_named() {
    let mut built = Builder::new(12).without_checksum();
    let file = built.file(&[7; 3000]);
    let dir = built.dir(None, &[(b"in", file, Regular)]);
    let end = built.file(&[7; 100]);
    let at = usize::try_from(end).unwrap() * 32;
    built.bytes()[at + 8..at + 10].copy_from_slice(&4000u16.to_le_bytes());
    built.bytes().resize(16 << 10, 0);
    let root = Builder::dir_block(&[
        (b".", 256, Directory),
        (b"..", 256, Directory),
        (b"d", dir, Directory),
        (b"end", end, Regular),
    ]);
    let mut inode = Builder::inode(0o040_755, 0, 3, root.len());
    inode.data = 5.into();
    built.bytes().resize(5 << 12, 0);
    built.bytes().extend(&root);
    let nid = built.raw(inode, &[]);
    let found = findings(&built.root_is(nid).finish());
    assert!(found.contains(&format!("/end: inode {end}: inline data: the tail crosses a block")), "{found}");
}

/// Images that the mutations start from, their checksums switched off so that a flipped bit reaches the code behind.
fn seeds() -> &'static Vec<Vec<u8>> {
    static SEEDS: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    SEEDS.get_or_init(|| {
        let work = tempfile::tempdir().unwrap();
        let source = work.path().join("source");
        make_tree(&source, 7, false);
        let options: [&[&str]; 4] = [&["-x1"], &["--chunksize=4096", "--blobdev"], &["--chunksize=8192"], &["-zlz4"]];
        let mut seeds: Vec<Vec<u8>> =
            options.iter().map(|options| Mkfs::run(work.path(), &source, options).image).collect();
        let mut built = Builder::new(9);
        let file = built.file(b"x");
        let chunked = built.chunked(70_000, 6, &[(1, 0), (2, 8), (0, u32::MAX)]);
        let dir = built.dir(None, &[(b"in", file, Regular)]);
        let root = built.root(&[(b"c", chunked, Regular), (b"d", dir, Directory)]);
        seeds.push(root.devices(&[100, 200]).finish());
        for seed in &mut seeds {
            seed[1024 + 8] &= !1;
        }
        seeds
    })
}

#[test]
fn the_seeds_themselves_pass_the_fuzz_body() {
    for seed in seeds() {
        erofs(seed);
        assert!(errors(seed).is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn mutated_images_never_panic_and_finish_fast(
        which in 0..5usize,
        flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4u8), 0..24),
        cut in proptest::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let mut bytes = seeds()[which].clone();
        let len = bytes.len();
        for (index, value, place) in &flips {
            // Half of them in the superblock's block or just behind, where structure is dense.
            let at = match place {
                0 => 1024 + index.index(128),
                1 => 1024 + index.index(len.min(16 << 10) - 1024),
                _ => index.index(len),
            };
            if let Some(byte) = bytes.get_mut(at) {
                *byte = if place % 2 == 0 { *value } else { *byte ^ (1 << (value % 8)) };
            }
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(len));
        }
        let started = Instant::now();
        erofs(&bytes);
        prop_assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    }

    #[test]
    fn any_bytes_behind_a_superblock_never_panic(body in proptest::collection::vec(any::<u8>(), 0..2000), root in 0..64u16) {
        let mut bytes = Builder::new(9).without_checksum().root(&[]).finish();
        let end = bytes.len().min(1152 + body.len());
        bytes[1152..end].copy_from_slice(&body[..end - 1152]);
        bytes[1024 + 14..1024 + 16].copy_from_slice(&(36 + root).to_le_bytes());
        erofs(&bytes);
    }
}
