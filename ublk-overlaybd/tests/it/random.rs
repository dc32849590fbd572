//! Random layers, against a plain model and a second implementation of the format, in both directions.

use crate::support::{image, read_all};
use fixtures::overlaybd::{Oddities, Write, ZStyle, committed, model, read_stack, sealed, tar, writable, zfile};
use proptest::prelude::*;
use std::path::Path;
use std::sync::Arc;
use ublk_overlaybd::format::zfile::Algorithm;
use ublk_overlaybd::layer::Layer;
use ublk_overlaybd::write::Silent;
use ublk_overlaybd::write::commit::{Compression, Wrapping, commit, merge};
use ublk_overlaybd::write::plan::Names;
use ublk_overlaybd::write::seal::seal_copy;

/// Sectors of the disks.
const SECTORS: u64 = 200;
const SIZE: u64 = SECTORS * 512;

fn one_write() -> impl Strategy<Value = Write> {
    (0..SECTORS - 1, 1..30u64, any::<u32>(), 0..10u8).prop_map(|(at, sectors, seed, kind)| {
        let sectors = sectors.min(SECTORS - at);
        if kind < 2 {
            return Write::Discard { at, sectors };
        }
        let mut state = seed | 1;
        let mut bytes = vec![0; usize::try_from(sectors).unwrap() * 512];
        for (number, chunk) in bytes.chunks_mut(4).enumerate() {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            // Some that compress, some that do not, some that are zero.
            let word = match kind {
                2 => 0,
                3..6 => seed.wrapping_add(u32::try_from(number / 64).unwrap()),
                _ => state,
            };
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        Write::Data { at, bytes }
    })
}

fn writes() -> impl Strategy<Value = Vec<Write>> {
    proptest::collection::vec(one_write(), 0..14)
}

fn oddities() -> impl Strategy<Value = Oddities> {
    (0..9u64, any::<u8>(), 0..4usize, any::<[bool; 3]>(), 0..16usize).prop_map(
        |(longest, tag, padding_every, [lower_case, garbage, hybrid], ragged)| Oddities {
            longest,
            tag,
            padding_every,
            lower_case,
            garbage,
            hybrid,
            ragged,
        },
    )
}

fn style() -> impl Strategy<Value = ZStyle> {
    (12..17u32, any::<[bool; 4]>()).prop_map(|(bits, [zstd, verify, header, old])| ZStyle {
        zstd,
        block: 1 << bits,
        verify,
        header,
        old: old && !header,
    })
}

/// A layer, and what it is wrapped in.
#[derive(Debug, Clone)]
struct Written {
    writes: Vec<Write>,
    odd: Oddities,
    sealed: bool,
    zfile: Option<ZStyle>,
    tar: Option<bool>,
}

fn layer() -> impl Strategy<Value = Written> {
    let wrapping = (proptest::option::of(style()), proptest::option::of(any::<bool>()));
    (writes(), oddities(), any::<bool>(), wrapping).prop_map(|(writes, odd, sealed, (zfile, tar))| Written {
        writes,
        odd,
        sealed,
        zfile,
        tar,
    })
}

impl Written {
    fn bytes(&self) -> Vec<u8> {
        let build = if self.sealed { sealed } else { committed };
        let mut bytes = build(SIZE, &self.writes, &self.odd);
        if let Some(style) = self.zfile {
            bytes = zfile(&bytes, style);
        }
        if let Some(pax) = self.tar {
            bytes = tar(&bytes, pax);
        }
        bytes
    }
}

fn wrapping() -> impl Strategy<Value = Wrapping> {
    let compression = proptest::option::of((any::<bool>(), 12..16u32)).prop_map(|compression| {
        compression.map(|(zstd, bits)| {
            Compression::new(if zstd { Algorithm::Zstd } else { Algorithm::Lz4 }, 1 << bits).unwrap()
        })
    });
    (compression, any::<bool>(), 1..5usize).prop_map(|(compression, tar, threads)| Wrapping {
        compression,
        tar,
        threads,
        replace: false,
    })
}

fn open(bytes: Vec<u8>) -> Layer {
    Layer::open(Arc::new(bytes), "a layer in memory").unwrap()
}

fn open_pair(dir: &Path, writes: &[Write], odd: &Oddities) -> Layer {
    let (data, index) = writable(SIZE, writes, odd);
    let paths = ["data", "index"].map(|name| dir.join(name));
    std::fs::write(&paths[0], data).unwrap();
    std::fs::write(&paths[1], index).unwrap();
    let layer = Layer::open_pair(&paths[0], Some(&paths[1])).unwrap();
    let replayed = layer.about().replayed.as_ref().unwrap();
    assert_eq!(replayed.entries, writes.len() as u64);
    assert_eq!(replayed.dropped.is_some(), odd.ragged > 0);
    layer
}

fn cases() -> ProptestConfig {
    let cases = std::env::var("DSEC_OVERLAYBD_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(96);
    ProptestConfig { cases, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn what_another_writes_is_read(layers in proptest::collection::vec(layer(), 0..6), upper in (writes(), oddities())) {
        let dir = tempfile::tempdir().unwrap();
        let mut all: Vec<Vec<Write>> = layers.iter().map(|layer| layer.writes.clone()).collect();
        let mut opened: Vec<Layer> = layers.iter().map(|layer| open(layer.bytes())).collect();
        opened.push(open_pair(dir.path(), &upper.0, &upper.1));
        all.push(upper.0);
        let expected = model(usize::try_from(SIZE).unwrap(), &all);
        prop_assert!(read_all(&image(opened)) == expected);
    }

    #[test]
    fn what_we_write_is_read_by_another(
        layers in proptest::collection::vec((writes(), oddities(), wrapping()), 1..5),
        merged in wrapping(),
        sealed_top in any::<bool>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let all: Vec<Vec<Write>> = layers.iter().map(|layer| layer.0.clone()).collect();
        let expected = model(usize::try_from(SIZE).unwrap(), &all);
        let mut files = Vec::new();
        let count = layers.len();
        for (number, (writes, odd, wrapping)) in layers.iter().enumerate() {
            let top = open_pair(dir.path(), writes, odd);
            let path = dir.path().join(format!("layer{number}"));
            if sealed_top && number + 1 == count {
                let bytes = seal_copy(&top, &path, false, 2, &Silent).unwrap();
                assert_eq!(bytes, path.metadata().unwrap().len());
            } else {
                let written = commit(&top, &Names::default(), &path, *wrapping, &Silent).unwrap();
                assert_eq!(written.bytes, path.metadata().unwrap().len());
            }
            files.push(path);
        }
        let mut bytes: Vec<Vec<u8>> = files.iter().map(|path| std::fs::read(path).unwrap()).collect();
        if sealed_top && layers.last().unwrap().1.lower_case {
            // Sealing keeps the header that was there, of which the other reader wants upper case.
            bytes.last_mut().unwrap()[56..130].make_ascii_uppercase();
        }
        prop_assert!(read_stack(&bytes) == Ok(expected.clone()), "{:?}", read_stack(&bytes).err());
        let image = image(files.iter().map(|path| Layer::open_file(path).unwrap()));
        prop_assert!(read_all(&image) == expected);

        let path = dir.path().join("merged");
        merge(&image, false, &Names::default(), &path, merged, &Silent).unwrap();
        let merged_bytes = std::fs::read(&path).unwrap();
        prop_assert!(read_stack(&[merged_bytes]) == Ok(expected));
    }

    /// Merging the upper layers changes nothing of what shows through them.
    #[test]
    fn merged_layers_still_hide_what_is_below(below in writes(), above in proptest::collection::vec(writes(), 1..4), how in wrapping()) {
        let dir = tempfile::tempdir().unwrap();
        let opened = above.iter().map(|writes| open(committed(SIZE, writes, &Oddities::default())));
        let path = dir.path().join("merged");
        merge(&image(opened), false, &Names::default(), &path, how, &Silent).unwrap();
        let bottom = committed(SIZE, &below, &Oddities::default());
        let mut all = vec![below];
        all.extend(above);
        let expected = model(usize::try_from(SIZE).unwrap(), &all);
        let stacked = image([open(bottom.clone()), Layer::open_file(&path).unwrap()]);
        prop_assert!(read_all(&stacked) == expected);
        prop_assert!(read_stack(&[bottom, std::fs::read(&path).unwrap()]) == Ok(expected));
    }
}

/// Eight tebibytes: sectors beyond 32 bits, in every form.
#[test]
fn large_disks_are_read_and_written_right() {
    const TIB: u64 = 1 << 40;
    let dir = tempfile::tempdir().unwrap();
    let mark = |n: u64| Write::Data { at: n * TIB / 512 + 7, bytes: vec![u8::try_from(n + 1).unwrap(); 4096] };
    let size = 8 * TIB;
    let lower: Vec<Write> = (0..8).map(mark).collect();
    let upper = vec![
        Write::Discard { at: 3 * TIB / 512 + 8, sectors: 2 },
        Write::Data { at: 8 * TIB / 512 - 1, bytes: vec![99; 512] },
    ];
    let (data, index) = writable(size, &upper, &Oddities::default());
    std::fs::write(dir.path().join("d"), data).unwrap();
    std::fs::write(dir.path().join("i"), index).unwrap();
    let top = Layer::open_pair(&dir.path().join("d"), Some(&dir.path().join("i"))).unwrap();
    let disk = image([open(committed(size, &lower, &Oddities::default())), top]);
    let check = |disk: &dyn ublk_overlaybd::backend::Source| {
        assert_eq!(disk.size(), size);
        let read = |at: u64, len: usize| {
            let mut buf = vec![1; len];
            disk.read_exact_at(&mut buf, at).unwrap();
            buf
        };
        for n in 0..8 {
            let mut expected = vec![0; 5 * 4096];
            expected[7 * 512..7 * 512 + 4096].fill(u8::try_from(n + 1).unwrap());
            if n == 3 {
                expected[8 * 512..10 * 512].fill(0);
            }
            assert!(read(n * TIB, 5 * 4096) == expected, "{n} TiB");
        }
        assert_eq!(read(size - 1024, 1024), [vec![0; 512], vec![99; 512]].concat());
    };
    check(&disk);
    let path = dir.path().join("merged");
    let compression = Some(Compression::new(Algorithm::Lz4, 4096).unwrap());
    let how = Wrapping { compression, tar: true, threads: 2, replace: false };
    merge(&disk, false, &Names::default(), &path, how, &Silent).unwrap();
    check(&image([Layer::open_file(&path).unwrap()]));
}
