//! Cluster maps, made by hand, broken and at random.

use super::builder::Builder;
use crate::compress::Algorithm;
use crate::erofs::format::FileType;
use crate::erofs::read::{Data, Extent, Image, Inode, ReadError};
use crate::read_at::ReadAt;
use proptest::prelude::*;

/// Blocks of the one device, which stands from block 256 of the unified address space.
const DEVICE: u32 = 64;
const START: u32 = 256;

struct Map {
    advise: u16,
    algorithms: u8,
    bits: u8,
    /// Algorithms that the superblock has.
    available: u16,
    incompat: u32,
}

const SOUND: Map = Map { advise: 2, algorithms: 0, bits: 0, available: 1 | 1 << 3, incompat: 0x1 | 0x2 };

impl Map {
    /// An image with one file of `size` bytes, `/f`, and these entries: (advise, offset, value).
    fn image(&self, size: usize, entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let mut builder = Builder::new(12).without_checksum().devices(&[DEVICE]);
        let mut body = vec![0; 4];
        body.extend(self.advise.to_le_bytes());
        body.extend([self.algorithms, self.bits, 0, 0, 0, 0, 0, 0, 0, 0]);
        for (advise, offset, value) in entries {
            body.extend(advise.to_le_bytes());
            body.extend(offset.to_le_bytes());
            body.extend(value.to_le_bytes());
        }
        let file = builder.raw(Builder::inode(0o100_644, 1, 1, size), &body);
        let mut bytes = builder.root(&[(b"f", file, FileType::Regular)]).finish();
        let incompat = u32::from_le_bytes(bytes[1104..1108].try_into().unwrap()) | self.incompat;
        bytes[1104..1108].copy_from_slice(&incompat.to_le_bytes());
        bytes[1108..1110].copy_from_slice(&self.available.to_le_bytes());
        let table = usize::from(u16::from_le_bytes([bytes[1112], bytes[1113]])) * 128;
        bytes[table + 68..table + 72].copy_from_slice(&START.to_le_bytes());
        bytes
    }
}

fn file(image: &Image<Vec<u8>>) -> Inode {
    let root = image.root().unwrap();
    image.inode(image.lookup(&root, b"f").unwrap().unwrap()).unwrap()
}

fn extents(bytes: Vec<u8>) -> Result<Vec<Extent>, ReadError> {
    let image = Image::open(bytes).unwrap();
    image.chunks(&file(&image)).collect()
}

const fn inside(before: u16, after: u16) -> (u16, u16, u32) {
    (2, 0, before as u32 | (after as u32) << 16)
}

#[test]
fn clusters_of_all_kinds() {
    let entries =
        [(1, 0, START + 3), inside(0x802, 2), inside(2, 1), (0, 0, START + 9), (1, 0, START + 5), (0, 100, 0)];
    let found = extents(SOUND.image(5 * 4096 + 100, &entries)).unwrap();
    let compressed = |block, blocks| Data::Compressed { device: 1, block, blocks, algorithm: Algorithm::Lz4 };
    assert_eq!(
        found,
        [
            Extent { file_offset: 0, len: 12_288, data: compressed(3, 2) },
            Extent { file_offset: 12_288, len: 4096, data: Data::Block { device: 1, block: 9 } },
            Extent { file_offset: 16_384, len: 4196, data: compressed(5, 1) },
        ]
    );
    // Heads inside a logical cluster, as mkfs.erofs makes them; logical clusters of 8 KiB.
    let entries = [(1, 0, START), inside(0x801, 1), (3, 1000, START + 1)];
    let map = Map { advise: 2, algorithms: 0x30, bits: 1, ..SOUND };
    let found = extents(map.image(3 * 8192, &entries)).unwrap();
    let zstd = Data::Compressed { device: 1, block: 1, blocks: 1, algorithm: Algorithm::Zstd };
    assert_eq!(found[0].len, 2 * 8192 + 1000);
    assert_eq!(found[1], Extent { file_offset: 2 * 8192 + 1000, len: 8192 - 1000, data: zstd });
}

#[test]
fn broken_maps_are_refused_by_what_is_wrong() {
    let error =
        |map: Map, size: usize, entries: &[(u16, u16, u32)]| extents(map.image(size, entries)).unwrap_err().to_string();
    for (map, size, entries, what) in [
        (SOUND, 8192, vec![inside(1, 1), (0, 0, START)], "byte 0 has no head before it"),
        (SOUND, 4096, vec![(1, 4096, START)], "offset 4096 is not inside a logical cluster"),
        (SOUND, 4096, vec![(4, 0, START)], "0x4 has undefined bits"),
        (SOUND, 4096, vec![(0x8001, 0, START)], "a reference to part of a cluster"),
        (SOUND, 8192, vec![(1, 0, START), inside(1, 1)], "does not say how many blocks it has"),
        (SOUND, 8192, vec![(1, 0, START), inside(0x800, 1)], "does not say how many blocks it has"),
        (SOUND, 8192, vec![(1, 0, START + DEVICE), inside(0x801, 1)], "are not inside the image"),
        (SOUND, 8192, vec![(1, 0, START + DEVICE - 1), inside(0x802, 1)], "are not inside device 1 of 64 blocks"),
        (SOUND, 8192, vec![(1, 0, START), inside(0x800 | 257, 1)], "a cluster of 8192 bytes in 1052672"),
        (SOUND, 4096 * 1000, vec![(1, 0, START)], "1000 entries have no room in the image"),
        (Map { available: 8, ..SOUND }, 4096, vec![(1, 0, START)], "algorithm 0, which the superblock does not have"),
        (Map { algorithms: 1, available: 2, ..SOUND }, 4096, vec![(1, 0, START)], "LZMA data, which this program"),
        (Map { incompat: 2, ..SOUND }, 4096, vec![(1, 0, START)], "compressed data without zero padding"),
        (Map { advise: 0x20, ..SOUND }, 4096, vec![(1, 0, START)], "fragments"),
        (Map { advise: 1, ..SOUND }, 4096, vec![(1, 0, START)], "(extents)"),
        (Map { advise: 8, ..SOUND }, 4096, vec![(1, 0, START)], "inline tail"),
        (Map { advise: 0x10, ..SOUND }, 4096, vec![(1, 0, START)], "interlaced"),
        (Map { advise: 0x40, ..SOUND }, 4096, vec![(1, 0, START)], "an unknown form"),
        (Map { bits: 0x80, ..SOUND }, 4096, vec![(1, 0, START)], "fragments"),
    ] {
        let found = error(map, size, &entries);
        assert!(found.contains(what), "{found} / {what}");
    }
}

struct Zeros;

impl ReadAt for Zeros {
    fn read_exact_at(&self, buf: &mut [u8], _offset: u64) -> std::io::Result<()> {
        buf.fill(0);
        Ok(())
    }

    fn size(&self) -> std::io::Result<u64> {
        Ok(u64::MAX)
    }
}

proptest! {
    #[test]
    fn any_entries_are_extents_in_order_or_an_error(
        entries in proptest::collection::vec((0..5u16, prop_oneof![Just(0u16), 0..5000u16], prop_oneof![
            (START..START + DEVICE).boxed(), any::<u32>().boxed(),
            (0..6u16, 0..6u16).prop_map(|(a, b)| u32::from(a) | u32::from(b) << 16).boxed(),
            (0..6u16, 0..6u16).prop_map(|(a, b)| u32::from(a | 0x800) | u32::from(b) << 16).boxed(),
        ]), 1..40),
        short in 0..4096usize,
        bits in 0..3u8,
    ) {
        let size = (entries.len() << (12 + bits)) - short;
        let bytes = Map { bits, ..SOUND }.image(size, &entries);
        let image = Image::open(bytes).unwrap();
        let file = file(&image);
        let mut end = 0;
        for extent in image.chunks(&file) {
            let Ok(extent) = extent else { return Ok(()) };
            prop_assert!(extent.file_offset <= end && extent.end() > end);
            end = extent.end();
            let _ = image.read_file_at(&file, &[&Zeros], extent.file_offset, &mut [0; 100]);
        }
        prop_assert_eq!(end, size as u64);
    }
}
