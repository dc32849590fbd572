use super::*;
use crate::chunk_table::{self, Record};
use crate::convert::{Request, convert};
use crate::erofs::remap::{NewDevice, remap};
use crate::progress::Silent;
use crate::source::Platform;
use fs3_client::Store;
use std::fs;
use std::path::Path;

/// A store with one image of one layer: an inline file, and a data blob of more than a megabyte.
fn converted(work: &Path) -> (Store, manifest::Image) {
    let source = work.join("source");
    fs::create_dir_all(source.join("dir")).unwrap();
    fs::write(source.join("small"), b"beside its inode").unwrap();
    for n in 0..3u32 {
        let bytes: Vec<u8> = (0..150_000u32).flat_map(|i| i.wrapping_mul(2_654_435_761 + n).to_le_bytes()).collect();
        fs::write(source.join(format!("dir/large{n}")), bytes).unwrap();
    }
    let store = Store::create(&work.join("store")).unwrap();
    let request = Request {
        source: format!("dir:{}", source.display()).parse().unwrap(),
        platform: Platform::host(),
        options: crate::layer::Options::default(),
        jobs: 1,
        registry: Default::default(),
        dedup: None,
    };
    let image = convert(&request, &store, &Silent).unwrap().image;
    (store, image)
}

fn run(store: &Store, image: &manifest::Image, deep: bool) -> Report {
    let (mut total, mut read) = (0, 0);
    let report = verify(store, image, deep, &mut |event| match event {
        Progress::Total(bytes) => total = bytes,
        Progress::Read(bytes) => read += bytes,
    });
    if report.is_sound() && !deep {
        assert_eq!(read, total, "the progress ends at its total");
    }
    report
}

fn whats(report: &Report) -> Vec<String> {
    report.problems.iter().map(|p| format!("{}: {}", p.path, p.what)).collect()
}

fn path_of(store: &Store, blob: &Descriptor) -> std::path::PathBuf {
    store.local_dir().unwrap().blob_path(&digest_of(blob).unwrap())
}

/// Writes `bytes` over a blob, whatever its permissions.
fn overwrite(store: &Store, blob: &Descriptor, bytes: &[u8]) {
    let path = path_of(store, blob);
    fs::remove_file(&path).unwrap();
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_fresh_image_is_sound() {
    let work = tempfile::tempdir().unwrap();
    let (store, image) = converted(work.path());
    for deep in [false, true] {
        let report = run(&store, &image, deep);
        assert_eq!(report.problems, []);
        assert_eq!((report.layers, report.blobs), (1, 4), "config, metadata, data, chunk table");
        assert_eq!((report.inodes, report.names), (6, 5));
        assert!(report.chunks > 3 && report.bytes > 1_800_000, "{report:?}");
    }
}

#[test]
fn each_blob_is_missed_and_each_flipped_bit_found() {
    let work = tempfile::tempdir().unwrap();
    let (store, image) = converted(work.path());
    let blobs: Vec<Descriptor> = descriptors(&image).map(|(_, blob)| blob.clone()).collect();
    for blob in &blobs {
        let good = fs::read(path_of(&store, blob)).unwrap();
        let mut bad = good.clone();
        let at = bad.len() / 2;
        bad[at] ^= 0x10;
        overwrite(&store, blob, &bad);
        let report = run(&store, &image, false);
        let about: Vec<&Problem> = report.problems.iter().filter(|p| p.blob == blob.digest().to_string()).collect();
        assert!(about[0].what.starts_with("the blob is corrupt: its contents have sha256:"), "{report:?}");

        overwrite(&store, blob, &good[..good.len() - 1]);
        let report = run(&store, &image, false);
        assert!(report.problems.iter().any(|p| p.what.contains("bytes where")), "{report:?}");

        fs::remove_file(path_of(&store, blob)).unwrap();
        let report = run(&store, &image, false);
        assert!(report.problems.iter().any(|p| p.what.contains("is not in the store")), "{report:?}");
        fs::write(path_of(&store, blob), &good).unwrap();
    }
    assert_eq!(run(&store, &image, true).problems, []);
}

#[test]
fn a_deep_run_says_which_chunk_is_bad() {
    let work = tempfile::tempdir().unwrap();
    let (store, image) = converted(work.path());
    let blob = &image.layers[0].data[0];
    let mut bytes = fs::read(path_of(&store, blob)).unwrap();
    bytes[70 * 4096] ^= 1;
    overwrite(&store, blob, &bytes);
    let report = run(&store, &image, true);
    let [whole, chunk] = report.problems.as_slice() else { panic!("{report:?}") };
    assert!(whole.what.starts_with("the blob is corrupt"));
    let numbers: Vec<u64> = chunk.what.split(' ').filter_map(|word| word.parse().ok()).collect();
    assert!(numbers[0] <= 70 && 70 <= numbers[1], "{}", chunk.what);
    assert!(chunk.what.ends_with("does not match the chunk table"), "{}", chunk.what);
}

/// Puts other bytes in the place of a blob of the layer, with the right digest: what a broken writer would publish.
fn replaced(store: &Store, bytes: &[u8], old: &Descriptor) -> Descriptor {
    let published = store.publish_bytes(bytes).unwrap();
    manifest::descriptor(old.media_type().as_ref(), published.digest, published.size, &[])
}

#[test]
fn tables_that_do_not_fit_are_named() {
    let work = tempfile::tempdir().unwrap();
    let (store, image) = converted(work.path());
    let layer = &image.layers[0];
    let table = layer.chunk_tables.first().unwrap();
    let blob = digest_of(&layer.data[0]).unwrap();
    let blocks = u32::try_from(layer.data[0].size() / 4096).unwrap();
    let with = |bytes: &[u8], deep| {
        let mut image = image.clone();
        image.layers[0].chunk_tables = vec![replaced(&store, bytes, table)];
        whats(&run(&store, &image, deep)).join("\n")
    };
    let of = |digest: &Digest, blocks, records: &[Record]| chunk_table::to_bytes(digest, blocks, records).unwrap();
    assert_eq!(with(b"DSECCHK?", false), ": not a chunk table: it does not start with DSECCHK1");
    let other = Digest::of(b"other");
    assert!(with(&of(&other, blocks, &[]), false).contains("which the layer does not have"));
    assert!(with(&of(&blob, blocks + 1, &[]), false).contains("blocks, its blob has"));
    assert_eq!(with(&of(&blob, blocks, &[]), false), "");
    assert!(with(&of(&blob, blocks, &[]), true).contains("chunks of files are not in a chunk table, the first is"));
    let wrong = [Record { digest: [0; 32], start: 3, blocks: 2, input: None }];
    assert!(
        with(&of(&blob, blocks, &wrong), true).contains("the chunk of blocks 3 to 4 does not match the chunk table")
    );

    let mut without = image.clone();
    without.layers[0].chunk_tables.clear();
    assert_eq!(whats(&run(&store, &without, false)), [": no chunk table is about this blob"]);
}

#[test]
fn references_that_do_not_fit_are_named() {
    let work = tempfile::tempdir().unwrap();
    let (store, image) = converted(work.path());
    let layer = &image.layers[0];
    let metadata = fs::read(path_of(&store, &layer.metadata)).unwrap();
    let blocks = u32::try_from(layer.data[0].size() / 4096).unwrap();
    let with = |devices: &[NewDevice]| {
        let mut bytes = Vec::new();
        remap(metadata.as_slice(), devices, |device, block, _| Ok((device, block)), &mut bytes).unwrap();
        let mut image = image.clone();
        image.layers[0].metadata = replaced(&store, &bytes, &layer.metadata);
        whats(&run(&store, &image, false)).join("\n")
    };
    let hex = digest_of(&layer.data[0]).unwrap().hex().into_bytes();
    let device = |tag: &[u8], blocks| NewDevice { tag: tag.to_vec(), blocks };
    assert_eq!(with(&[device(&hex, blocks)]), "");
    assert!(with(&[device(b"another", blocks)]).contains("device 1 is tagged `another`, but its blob is sha256:"));
    assert!(with(&[device(&hex, blocks + 1)]).contains(&format!("says {} blocks, it has {blocks}", blocks + 1)));
    assert!(with(&vec![device(&hex, blocks); 2]).contains("the device table has 2 devices, 1 are given"));

    let mut other = image.clone();
    other.layers[0].metadata = replaced(&store, &[0; 8192], &layer.metadata);
    assert!(whats(&run(&store, &other, false)).join("").contains("not an EROFS image"));
}
