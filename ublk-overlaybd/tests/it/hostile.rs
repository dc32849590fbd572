//! Damaged and invented files: an error, or what is right; never a panic, a loop, or memory that the file's size does not
//! explain.

use crate::support::{run, samples};
use fixtures::overlaybd::{Oddities, Write, ZStyle, committed, indexed_gzip, zfile};
use proptest::prelude::*;
use std::process::Command;
use ublk_overlaybd::format::lsmt::{Entry, Flags, Header, PADDING};
use ublk_overlaybd::format::zfile::{Algorithm, Geometry};
use ublk_overlaybd::fuzzing;

/// The real files, and a few in forms that are not among them.
fn files() -> Vec<Vec<u8>> {
    let mut files = Vec::new();
    for dir in ["lsmt", "zfile", "tar", "bad"] {
        let mut paths: Vec<_> = std::fs::read_dir(samples().join(dir)).unwrap().map(|e| e.unwrap().path()).collect();
        paths.sort();
        files.extend(
            paths.iter().filter(|path| path.extension().is_none_or(|e| e != "zst")).map(|p| std::fs::read(p).unwrap()),
        );
    }
    let small = committed(1 << 20, &[Write::Data { at: 3, bytes: vec![5; 1024] }], &Oddities::default());
    let style = ZStyle { zstd: true, block: 4096, verify: false, header: false, old: true };
    files.push(zfile(&small, style));
    files.push(small);
    files
}

/// What is done to a file.
#[derive(Debug, Clone)]
enum Damage {
    Flip(proptest::sample::Index, u8),
    /// Near either end, where headers and trailers are.
    FlipNear(bool, usize, u8),
    Number(proptest::sample::Index, u64),
    Cut(proptest::sample::Index),
    Extend(Vec<u8>),
}

fn damage() -> impl Strategy<Value = Damage> {
    let number = prop_oneof![Just(u64::MAX), Just(0), Just(1 << 40), Just(u64::MAX - 511), any::<u64>()];
    prop_oneof![
        (any::<proptest::sample::Index>(), 1..=255u8).prop_map(|(at, mask)| Damage::Flip(at, mask)),
        (any::<bool>(), 0..600usize, 1..=255u8).prop_map(|(end, at, mask)| Damage::FlipNear(end, at, mask)),
        (any::<proptest::sample::Index>(), number).prop_map(|(at, number)| Damage::Number(at, number)),
        any::<proptest::sample::Index>().prop_map(Damage::Cut),
        proptest::collection::vec(any::<u8>(), 1..600).prop_map(Damage::Extend),
    ]
}

fn apply(bytes: &mut Vec<u8>, damage: &Damage) {
    if bytes.is_empty() {
        return;
    }
    let len = bytes.len();
    match damage {
        Damage::Flip(at, mask) => bytes[at.index(len)] ^= mask,
        Damage::FlipNear(end, at, mask) => {
            let at = (*at).min(len - 1);
            bytes[if *end { len - 1 - at } else { at }] ^= mask;
        }
        Damage::Number(at, number) => {
            // Where headers and tables have theirs.
            let at = at.index(len) / 8 * 8;
            for (place, byte) in bytes[at..].iter_mut().zip(number.to_le_bytes()) {
                *place = byte;
            }
        }
        Damage::Cut(at) => bytes.truncate(at.index(len)),
        Damage::Extend(more) => bytes.extend(more),
    }
}

proptest! {
    // Each syncs a dozen times.
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.div_ceil(6), ..ProptestConfig::default() })]

    /// Entries that may be, that may not, padding and nonsense, behind the right headers.
    #[test]
    fn invented_writable_layers(
        data in proptest::collection::vec(any::<u8>(), 0..9000),
        entries in proptest::collection::vec((0..2100u64, 0..40u32, 0..30u64, any::<bool>(), 0..12u8), 0..40),
        log in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let index: Vec<u8> = entries.iter().flat_map(|&(offset, length, moffset, zeroed, oddity)| match oddity {
            0 => PADDING,
            1 => [0; 16],
            2 => [0xFF; 16],
            _ => Entry { offset, length: length + 1, moffset: moffset + 6, zeroed, tag: oddity }.encode().unwrap(),
        }).collect();
        let cuts = [data.len(), index.len()].map(|len| u16::try_from(len).unwrap().to_le_bytes()).concat();
        fuzzing::upper(&[&cuts[..], &data, &index, &log].concat());
    }

    #[test]
    fn any_bytes_behind_a_writable_layer(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
        fuzzing::upper(&bytes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn damaged_layers(which in any::<proptest::sample::Index>(), damages in proptest::collection::vec(damage(), 1..4)) {
        let files = files();
        let mut bytes = files[which.index(files.len())].clone();
        damages.iter().for_each(|damage| apply(&mut bytes, damage));
        fuzzing::layer(&bytes);
    }

    /// ZFiles with right digests and wrong numbers, which a digest does not keep out.
    #[test]
    fn invented_zfiles(
        numbers in (any::<u64>(), any::<u64>(), any::<u64>(), 0..20u32),
        small in (0..3000u64, 0..300u64, 0..70_000u64, any::<bool>()),
        tail in proptest::collection::vec(any::<u8>(), 0..3000),
    ) {
        let (index_offset, blocks, original_size, bits) = numbers;
        for (index_offset, blocks, original_size) in
            [(index_offset, blocks, original_size), (512 + small.0, small.1, small.2), (512, 0, 0)]
        {
            let geometry = Geometry {
                index_offset,
                blocks,
                original_size,
                block_size: 1 << bits,
                algorithm: Algorithm::Lz4,
                verify: small.3,
                first_block: 512,
                index_crc: Some(0),
                header_overwritten: true,
                digest: true,
            };
            let (header, trailer) = geometry.encode();
            fuzzing::layer(&[&header[..], &tail, &trailer].concat());
        }
    }

    #[test]
    fn invented_layers(
        index in (any::<u64>(), any::<u64>(), 0..2000u64, 0..60u64),
        size in any::<u64>(),
        body in proptest::collection::vec(any::<u64>(), 0..300),
        flags in 0..64u32,
    ) {
        let mut header = Header::new(Flags::COMMITTED_HEADER, 1 << 30);
        let mut bytes = header.encode().unwrap().to_vec();
        for word in &body {
            // Mostly small numbers in both halves of an entry.
            bytes.extend(((word % 3) << 50 | (word >> 56)).to_le_bytes());
            bytes.extend((word >> 40 & 0x1FF).to_le_bytes());
        }
        header.flags = Flags::TRAILER;
        header.virtual_size = size % (1 << 40);
        for (at, count) in [(index.0, index.1), (4096 + index.2 / 16 * 16, index.3)] {
            (header.index_offset, header.index_size) = (at, count);
            let mut file = bytes.clone();
            file.extend(header.encode().unwrap());
            if flags == 0 {
                let at = file.len() - 4096 + 28;
                file[at] = 0x33;
            }
            fuzzing::layer(&file);
        }
    }

    #[test]
    fn damaged_pairs(which in 0..4usize, damages in proptest::collection::vec((any::<bool>(), damage()), 0..4), sparse: bool) {
        let name = ["rw/l0.rw", "rw/l1.rw", "bad/rw_t4", "bad/rw_t6"][which];
        let name = if sparse { "rw/sp.rw" } else { name };
        let read = |kind: &str| std::fs::read(samples().join(format!("{name}.{kind}"))).unwrap_or_default();
        let (mut data, mut index) = (read("data"), read("index"));
        for (on_data, damage) in &damages {
            apply(if *on_data { &mut data } else { &mut index }, damage);
        }
        let cut = u32::try_from(data.len()).unwrap().to_le_bytes();
        fuzzing::pair(&[&cut[..], &data, &index].concat());
    }

    #[test]
    fn damaged_gzip(damages in proptest::collection::vec((any::<bool>(), damage()), 1..4), compressed: bool) {
        let plain: Vec<u8> = (0..50_000u32).map(|i| (i / 100).to_le_bytes()[0]).collect();
        let (mut stored, mut index) = indexed_gzip(&plain, 7777, compressed);
        for (on_stored, damage) in &damages {
            apply(if *on_stored { &mut stored } else { &mut index }, damage);
        }
        // Else only the checksum of the header is tried.
        if index.len() >= 333 {
            let crc = ublk_overlaybd::format::checksum::raw_crc32c(0, &index[..329]);
            index[329..333].copy_from_slice(&crc.to_le_bytes());
        }
        let cut = u32::try_from(stored.len()).unwrap().to_le_bytes();
        fuzzing::gzip(&[&cut[..], &stored, &index].concat());
    }

    #[test]
    fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
        fuzzing::layer(&bytes);
        fuzzing::trace(&bytes);
        fuzzing::spec(&bytes);
        fuzzing::gzip(&bytes);
    }

    #[test]
    fn json_of_any_shape(text in "[\\[\\]{}\":,a-zA-Z0-9 ]{0,200}", key in "[a-zA-Z]{0,20}", value in "[0-9a-z\"{}\\[\\]-]{0,20}") {
        fuzzing::spec(text.as_bytes());
        fuzzing::spec(format!("{{\"{key}\": {value}, \"lowers\": [{{\"{key}\": {value}}}]}}").as_bytes());
    }
}

/// Files that claim to be huge, read by the program with little memory.
#[test]
fn claims_are_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    let huge = |index_offset, blocks, original_size| {
        let geometry = Geometry {
            index_offset,
            blocks,
            original_size,
            block_size: 65536,
            algorithm: Algorithm::Zstd,
            verify: true,
            first_block: 512,
            index_crc: Some(0),
            header_overwritten: true,
            digest: true,
        };
        let (header, trailer) = geometry.encode();
        [&header[..], &[0; 4096], &trailer].concat()
    };
    let mut lsmt = std::fs::read(samples().join("bad/index_size_huge.lsmt")).unwrap();
    let mut files =
        vec![huge(512, 1 << 50, 1 << 62), huge(600, 1 << 33, 1 << 49), huge(512, u64::MAX, u64::MAX), lsmt.clone()];
    let at = lsmt.len() - 4096 + 40;
    lsmt[at..at + 8].copy_from_slice(&(1u64 << 60).to_le_bytes());
    files.push(lsmt);
    let prlimit = fixtures::require::tool("prlimit", "util-linux");
    for bytes in files {
        let path = dir.path().join("file");
        std::fs::write(&path, bytes).unwrap();
        let mut command = Command::new(&prlimit);
        // Address space, of which the program itself and its threads want some.
        command.arg("--as=402653184").arg(env!("CARGO_BIN_EXE_ublk-overlaybd"));
        let output = command.arg("check").arg(&path).output().unwrap();
        assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Every sample cut at many places: no crash of the program, and no output.
#[test]
fn cut_files_end_the_program_in_order() {
    let dir = tempfile::tempdir().unwrap();
    for sample in ["lsmt/l0.lsmt", "zfile/l0.lz4.4k.zfile", "tar/l0.lz4.4k.commit_t.tar"] {
        let bytes = std::fs::read(samples().join(sample)).unwrap();
        for part in 0..12 {
            let path = dir.path().join("cut");
            std::fs::write(&path, &bytes[..bytes.len() * part / 12]).unwrap();
            let out = dir.path().join("out");
            let output = run(&["export", &path.display().to_string(), &out.display().to_string()]);
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(3), "{sample}, {part}/12: {said}");
            assert!(said.contains("cut") && !out.exists(), "{said}");
        }
    }
}
