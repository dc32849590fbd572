use super::*;
use crate::blob::order;
use crate::compress::{Codec, decompress};
use crate::entry::{Entry, EntryKind, Timestamp};
use crate::manifest::OverlayXattrs;
use crate::tree::build::{self, Builder, Placed};
use proptest::prelude::*;

const LZ4: Compress = Compress { codec: Codec::Lz4, cluster_bits: 16 };

/// Name, pieces (offset and bytes), size.
type File<'f> = (&'f str, &'f [(u64, Vec<u8>)], u64);

/// A tree of `files` (name, pieces at offsets, size) that were written in this order, its blob, and what is to be plain.
fn layer(files: &[File<'_>], compress: Compress) -> (Tree, Contents, Vec<u8>, HashSet<InodeId>) {
    let options = build::Options { whiteouts: true, overlay: OverlayXattrs::Trusted, max_inodes: 1000 };
    let mut builder = Builder::new(options);
    let mut writer = ClusterWriter::new(ChunkSizes::default(), compress);
    let mut blob = Vec::new();
    for (name, pieces, size) in files {
        let kind = EntryKind::Regular { size: *size, sparse: true };
        let path = name.as_bytes().to_vec();
        let mtime = Timestamp::default();
        let entry = Entry { path, kind, mode: 0o644, uid: 0, gid: 0, mtime, xattrs: vec![] };
        let Placed::File(inode) = builder.entry(entry).unwrap() else { panic!("no file") };
        writer.begin(*size);
        for (offset, piece) in *pieces {
            for (i, part) in piece.chunks(100_003).enumerate() {
                writer.data(offset + i as u64 * 100_003, part).unwrap();
            }
        }
        let data = writer.end().unwrap();
        builder.set_data(inode, data);
        while let Some(segment) = writer.segments().take() {
            blob.extend_from_slice(&segment);
            writer.segments().recycle(segment);
        }
    }
    let (mut contents, mut segments) = writer.finish().unwrap();
    while let Some(segment) = segments.take() {
        blob.extend_from_slice(&segment);
    }
    let (mut tree, _) = builder.finish();
    let plain = settle(&mut tree, &mut contents);
    assert_eq!(blob.len() as u64, u64::from(contents.blocks) * u64::from(BLOCK_SIZE));
    (tree, contents, blob, plain)
}

fn data_of(tree: &Tree, name: &str) -> FileData {
    let (_, id) = tree.names_of(crate::tree::ROOT).find(|(n, _)| *n == name.as_bytes()).unwrap();
    match &tree.inode(id).kind {
        Kind::Regular(data) => *data,
        other => panic!("{other:?}"),
    }
}

fn read(blob: &[u8], contents: &Contents, data: FileData) -> Vec<u8> {
    let blocks = |block: u32, blocks: u32| &blob[block as usize * 4096..][..blocks as usize * 4096];
    let mut out = Vec::new();
    match data {
        FileData::Compressed(file) => {
            for run in contents.runs.clusters_of(&file) {
                for _ in 0..run.repeat {
                    let mut plain = vec![0; run.len as usize];
                    if run.compressed {
                        assert!(run.blocks < run.len.div_ceil(4096));
                        decompress(file.algorithm, blocks(run.block, run.blocks), &mut plain).unwrap();
                    } else {
                        plain.copy_from_slice(&blocks(run.block, run.blocks)[..run.len as usize]);
                    }
                    out.append(&mut plain);
                }
            }
            assert_eq!(out.len() as u64, file.size);
        }
        FileData::Chunked(file) => {
            let chunk = 1u32 << (file.chunk_bits - 12);
            for run in contents.runs.of(&file) {
                for i in 0..run.chunks {
                    let left = file.size.div_ceil(4096) - out.len() as u64 / 4096;
                    let len = chunk.min(u32::try_from(left).unwrap());
                    if run.block == NULL_BLOCK {
                        out.resize(out.len() + len as usize * 4096, 0);
                    } else {
                        out.extend_from_slice(blocks(run.block + i * chunk, len));
                    }
                }
            }
            out.truncate(usize::try_from(file.size).unwrap());
        }
        other => panic!("{other:?}"),
    }
    out
}

fn text(len: usize, seed: u8) -> Vec<u8> {
    let at = |i: usize| u8::try_from(i / 3 % 5 + i / 1000 % 3).unwrap();
    (0..len).map(|i| b'a' + seed.wrapping_mul(7) % 20 + at(i)).collect()
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2) + 1;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..len).map(next).collect()
}

#[test]
fn the_last_cluster_takes_up_what_is_less_than_half_a_cluster() {
    let of = |size: u64| {
        let cut = Cut { size, bits: 16 };
        (0..cut.clusters()).map(|i| cut.len_of(i)).collect::<Vec<_>>()
    };
    assert_eq!(of(1), [1]);
    assert_eq!(of(65_536), [65_536]);
    assert_eq!(of(98_303), [98_303]);
    assert_eq!(of(98_304), [65_536, 32_768]);
    assert_eq!(of(163_839), [65_536, 98_303]);
    assert_eq!(of(196_608), [65_536; 3]);
    assert_eq!(Cut { size: 163_839, bits: 16 }.index_of(163_838), 1);
}

#[test]
fn kinds_of_files() {
    let text = text(300_000, 1);
    let noise = noise(300_000, 1);
    let mixed = [&text[..65_536], &noise[..65_536], &vec![0; 65_536], &text[..70_000]].concat();
    let holes = [(65_536 * 2, noise[..100].to_vec())];
    let files: [File<'_>; 6] = [
        ("a", &[(0, text.clone())], 300_000),
        ("b", &[(0, noise.clone())], 300_000),
        ("c", &[(0, mixed.clone())], mixed.len() as u64),
        ("d", &[(0, vec![0; 400_000])], 400_000),
        ("e", &[], 1 << 40),
        ("f", &holes, 200_000),
    ];
    let (tree, contents, blob, plain) = layer(&files, LZ4);
    assert!(plain.is_empty());
    assert!(order::is_canonical(&tree, &tree.order(), &contents));
    let of = |name: &str| data_of(&tree, name);
    assert!(matches!(of("a"), FileData::Compressed(_)) && matches!(of("c"), FileData::Compressed(_)));
    let FileData::Chunked(noisy) = of("b") else { panic!("noise is compressed") };
    // 300,000 bytes are four clusters and a half: the last one is two chunks.
    assert_eq!((noisy.chunk_bits, noisy.chunks(), contents.runs.of(&noisy).len()), (16, 5, 1));
    for hole in ["d", "e"] {
        let FileData::Chunked(file) = of(hole) else { panic!("a hole is compressed") };
        assert_eq!((file.chunks(), contents.runs.of(&file)[0].block), (1, NULL_BLOCK));
    }
    assert_eq!(read(&blob, &contents, of("a")), text);
    assert_eq!(read(&blob, &contents, of("b")), noise);
    assert_eq!(read(&blob, &contents, of("c")), mixed);
    assert_eq!(read(&blob, &contents, of("f"))[131_072..131_172], noise[..100]);
    // The first clusters of `a` and `b` are in `c` again.
    assert_eq!(contents.deduplicated, 131_072);
    for record in &contents.stored {
        let stored = &blob[record.start as usize * 4096..][..record.blocks as usize * 4096];
        assert_eq!(*blake3::hash(stored).as_bytes(), record.digest);
    }
    assert!(crate::chunk_table::to_bytes(&fs3_client::Digest::of(&blob), contents.blocks, &contents.stored).is_ok());
}

#[test]
fn order_of_writing_does_not_show() {
    let (a, b) = (text(500_000, 1), noise(200_000, 3));
    let c = [&b[..131_072], &a[..100_000]].concat();
    let sparse = [(1 << 20, noise(40_000, 5))];
    let (a, b, c) = ([(0, a)], [(0, b)], [(0, c)]);
    let files: [File<'_>; 5] =
        [("a", &a, 500_000), ("b", &b, 200_000), ("c", &c, 231_072), ("d", &sparse, 64 << 20), ("e", &a, 500_000)];
    for compress in [LZ4, Compress { codec: Codec::Zstd { level: 1 }, cluster_bits: 17 }] {
        let mut results: Vec<(Vec<u8>, Vec<Record>)> = Vec::new();
        for order in [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 3, 4, 1]] {
            let written: Vec<_> = order.iter().map(|i: &usize| files[*i]).collect();
            let (mut tree, contents, blob, plain) = layer(&written, compress);
            assert_eq!(plain.len(), 1, "the sparse file is plain");
            let (order, mut new) = (tree.order(), Vec::new());
            let contents = order::rewrite(&mut tree, &order, contents, &plain, &blob, |segment| {
                new.extend_from_slice(segment);
                Ok(())
            });
            let contents = contents.unwrap();
            assert!(order::is_canonical(&tree, &order, &contents));
            let FileData::Chunked(file) = data_of(&tree, "d") else { panic!("the sparse file is compressed") };
            let holes = contents.runs.of(&file).iter().filter(|run| run.block == NULL_BLOCK);
            assert!(holes.map(|run| run.chunks).sum::<u32>() >= 500);
            for (name, pieces, size) in &files {
                let mut want = vec![0; usize::try_from(*size).unwrap()];
                for (offset, piece) in *pieces {
                    want[usize::try_from(*offset).unwrap()..][..piece.len()].copy_from_slice(piece);
                }
                assert!(read(&new, &contents, data_of(&tree, name)) == want, "{name}");
            }
            results.push((new, contents.stored));
        }
        assert!(results.iter().all(|result| *result == results[0]));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn files_read_back(
        files in proptest::collection::vec(
            (prop_oneof![1..9000usize, 60_000..140_000usize, Just(65_536), Just(98_304), Just(262_144)], 0..6u8),
            1..12,
        ),
        zstd: bool,
    ) {
        let codec = if zstd { Codec::Zstd { level: 1 } } else { Codec::Lz4Hc { level: 3 } };
        let names: Vec<String> = (0..files.len()).map(|n| format!("{n:02}")).collect();
        let contents: Vec<Vec<(u64, Vec<u8>)>> = files.iter().map(|(len, kind)| {
            let mut bytes = match kind { 0 => vec![0; *len], 1 | 2 => noise(*len, (*kind).into()), _ => text(*len, *kind) };
            if kind % 2 == 1 {
                let middle = len / 2;
                bytes[middle..].fill(0);
            }
            vec![(0, bytes)]
        }).collect();
        let all: Vec<File<'_>> = names.iter().zip(&contents)
            .map(|(name, pieces)| (name.as_str(), pieces.as_slice(), pieces[0].1.len() as u64)).collect();
        let (tree, contents, blob, plain) = layer(&all, Compress { codec, cluster_bits: 16 });
        prop_assert!(plain.is_empty() && order::is_canonical(&tree, &tree.order(), &contents));
        for (name, pieces, _) in &all {
            prop_assert!(read(&blob, &contents, data_of(&tree, name)) == pieces[0].1, "{}", name);
        }
    }
}
