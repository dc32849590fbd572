use super::*;
use proptest::prelude::*;

/// Writes `files` (contents, and ranges that are not given) and returns (blob, contents, file data).
fn blob_of(sizes: ChunkSizes, files: &[Vec<u8>]) -> (Vec<u8>, Contents, Vec<Chunked>) {
    let mut writer = BlobWriter::new(sizes, None);
    let mut all = Vec::new();
    let mut bytes = Vec::new();
    for contents in files {
        writer.begin(contents.len() as u64);
        for (i, piece) in contents.chunks(10_007).enumerate() {
            writer.data(i as u64 * 10_007, piece).unwrap();
        }
        let FileData::Chunked(file) = writer.end().unwrap() else { panic!("not chunked") };
        all.push(file);
        while let Some(segment) = writer.segments().take() {
            bytes.extend_from_slice(&segment);
            writer.segments().recycle(segment);
        }
    }
    let (contents, mut segments) = writer.finish().unwrap();
    while let Some(segment) = segments.take() {
        bytes.extend_from_slice(&segment);
    }
    assert_eq!(bytes.len() as u64, u64::from(contents.blocks) * u64::from(BLOCK_SIZE));
    (bytes, contents, all)
}

fn read_back(blob: &[u8], contents: &Contents, file: &Chunked) -> Vec<u8> {
    let mut out = vec![0; usize::try_from(file.size).unwrap()];
    let chunk = 1usize << file.chunk_bits;
    let mut index = 0;
    for run in contents.runs.of(file) {
        for i in 0..run.chunks as usize {
            let start = (index + i) * chunk;
            let len = chunk.min(out.len() - start);
            if run.block != u32::MAX {
                let at = run.block as usize * 4096 + i * chunk;
                assert_eq!(at >> 20, (at + len - 1) >> 20, "a chunk crosses a segment");
                out[start..start + len].copy_from_slice(&blob[at..at + len]);
            }
        }
        index += run.chunks as usize;
    }
    assert_eq!(index as u64, file.chunks());
    out
}

fn contents() -> impl Strategy<Value = Vec<u8>> {
    // Few distinct byte values and lengths around the block and chunk sizes: duplicates and zero chunks occur.
    (prop_oneof![1..9000usize, 60_000..70_000usize, Just(4096), Just(65_536), Just(300_000)], 0..4u8).prop_map(
        |(len, seed)| {
            (0..len)
                .map(|i| if seed == 0 { 0 } else { seed.wrapping_mul(u8::try_from(i / 5000 % 256).unwrap() | 1) })
                .collect()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn files_read_back(files in proptest::collection::vec(contents(), 0..24), bits in 12..=18u8) {
        let (blob, contents, all) = blob_of(ChunkSizes { max_bits: bits }, &files);
        for (want, file) in files.iter().zip(&all) {
            prop_assert_eq!(&read_back(&blob, &contents, file), want);
        }
        let mut end = 0;
        for stored in &contents.stored {
            prop_assert!(stored.start >= end);
            end = stored.start + stored.blocks;
            let at = stored.start as usize * 4096;
            let bytes = &blob[at..at + stored.blocks as usize * 4096];
            prop_assert_eq!(*blake3::hash(bytes).as_bytes(), stored.digest);
        }
    }
}

#[test]
fn same_contents_are_stored_once_and_zeros_never() {
    let file: Vec<u8> = (0..200_000u32).map(|i| (i / 7 % 251) as u8).collect();
    let (blob, contents, all) = blob_of(ChunkSizes::default(), &[file.clone(), vec![0; 500_000], file.clone()]);
    assert_eq!(blob.len(), 200_000usize.next_multiple_of(4096));
    assert_eq!(contents.runs.of(&all[0]), contents.runs.of(&all[2]));
    assert_eq!(contents.deduplicated, 200_000);
    assert!(contents.runs.of(&all[1]).iter().all(|run| run.block == u32::MAX));
}

#[test]
fn t09_t15_holes_cost_one_chunk_or_few() {
    let mut writer = BlobWriter::new(ChunkSizes::default(), None);
    writer.begin(1 << 40);
    let FileData::Chunked(hole) = writer.end().unwrap() else { panic!() };
    assert_eq!(hole.chunks(), 1);
    writer.begin(5 << 30);
    writer.data((4 << 30) - 1, b"xy").unwrap();
    writer.data((5 << 30) - 1, b"z").unwrap();
    let FileData::Chunked(file) = writer.end().unwrap() else { panic!() };
    let (contents, _) = writer.finish().unwrap();
    assert_eq!(file.chunks(), (5 << 30) >> file.chunk_bits);
    let data: u32 = contents.runs.of(&file).iter().filter(|r| r.block != u32::MAX).map(|r| r.chunks).sum();
    assert_eq!((data, contents.blocks), (3, 3 << (file.chunk_bits - 12)));
}
