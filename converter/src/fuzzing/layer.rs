//! A whole conversion of any bytes as a tar.

use crate::chunk_table::ChunkTable;
use crate::compress::{Codec, Compress};
use crate::convert::{Request, convert};
use crate::erofs::read::check::{DeviceInfo, check};
use crate::erofs::read::{Data, Image};
use crate::layer::{Options, Record};
use crate::progress::Silent;
use crate::read_at::ReadAt;
use crate::source::{Platform, SourceRef, TarInput};
use fs3_client::Store;
use std::fs::File;
use std::path::Path;

/// Blocks of file data that are read at most.
const READ_LIMIT: u64 = 1024;

/// Converts `data`, a tar in any compression, into a store in memory.
///
/// Invariant: no panic; a refusal leaves nothing in the store, not even a temporary file; what is accepted is an image
/// in which our strict checker finds nothing, whose data can be read, and which a second run makes again byte for byte; and all that again when it is compressed.
///
/// # Panics
/// When the invariant is broken: that is the finding. Also when no store can be made.
pub fn layer(data: &[u8]) {
    let memory = Path::new("/dev/shm");
    let base = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    let dir = tempfile::Builder::new().prefix("dsec-fuzz-").tempdir_in(base).expect("a directory in memory");
    let source = dir.path().join("layer");
    std::fs::write(&source, data).expect("memory for the layer");
    let first = run(&source, &dir.path().join("first"), None);
    let second = run(&source, &dir.path().join("second"), None);
    assert_eq!(first, second, "two runs differ");
    let compress = Some(Compress { codec: Codec::Lz4, cluster_bits: 16 });
    let first = first.map(|record| record.counts);
    let compressed = run(&source, &dir.path().join("third"), compress);
    assert_eq!(compressed, run(&source, &dir.path().join("fourth"), compress), "two compressed runs differ");
    match (&first, &compressed) {
        (Ok(plain), Ok(Record { counts, .. })) => assert_eq!(plain.file_bytes, counts.file_bytes, "compressed bytes"),
        (Err(plain), Err(compressed)) => assert_eq!(plain, compressed, "refused for another reason when compressed"),
        _ => panic!("compression decides whether a layer is refused: {first:?}, {compressed:?}"),
    }
}

/// The layer's record, or why it was refused.
fn run(source: &Path, store: &Path, compress: Option<Compress>) -> Result<Record, String> {
    let store = Store::create(store).expect("a store in memory");
    let request = Request {
        source: SourceRef::Tar(TarInput::File(source.to_owned())),
        platform: Platform::host(),
        options: Options { max_plain: 16 << 20, max_inodes: 10_000, compress, ..Options::default() },
        jobs: 1,
        registry: Default::default(),
        dedup: None,
    };
    let outcome = convert(&request, &store, &Silent);
    assert_eq!(names(&store.scratch()), 0, "a temporary file is left");
    let converted = match outcome {
        Ok(converted) => converted,
        Err(e) => {
            assert_eq!(
                names(&store.local_dir().unwrap().root().join("blobs/sha256")),
                0,
                "a refused layer left a blob"
            );
            return Err(e.to_string());
        }
    };
    let record = &converted.layers[0].record;
    sound(&store, record);
    Ok(record.clone())
}

fn names(dir: &Path) -> usize {
    std::fs::read_dir(dir).map_or(0, Iterator::count)
}

/// Checks the image's structure, its counts, and that its data is where it says.
fn sound(store: &Store, record: &Record) {
    let metadata = store.open_blob(&record.metadata.digest, record.metadata.size).expect("the metadata image");
    let image = Image::open(metadata).expect("our own image opens");
    let data: Vec<File> =
        record.data.iter().map(|blob| store.open_blob(&blob.digest, blob.size).expect("a data blob")).collect();
    let lengths: Vec<DeviceInfo> = record
        .existing()
        .map(|existing| {
            let blocks = existing.blob.size / u64::from(image.superblock().block_size());
            let table = existing.table.map(|table| store.open_blob(&table.digest, table.size).expect("a chunk table"));
            let packed = table.is_some_and(|table| ChunkTable::open(table).expect("our own table").has_inputs());
            DeviceInfo { blocks, packed }
        })
        .collect();
    assert_eq!(image.devices().len(), lengths.len());
    assert_eq!(check(&image, &lengths), [], "our own image is sound");
    let devices: Vec<&dyn ReadAt> = data.iter().map(|file| file as &dyn ReadAt).collect();
    let mut blocks = READ_LIMIT;
    let mut inodes = 0;
    let mut buffer = [0; 4096];
    let mut walk = image.walk();
    while let Some(visit) = walk.next() {
        let visit = visit.expect("a checked name");
        inodes += u64::from(visit.first);
        for extent in image.extents(visit.inode) {
            let extent = extent.expect("a checked extent");
            if blocks > 0 && !matches!(extent.data, Data::Hole | Data::Inline { .. }) {
                blocks -= 1;
                let len = usize::try_from(extent.len.min(4096)).unwrap_or(4096);
                let at = extent.end() - len as u64;
                let read =
                    image.read_file_at(visit.inode, &devices, at, &mut buffer[..len]).expect("the data is there");
                assert_eq!(read, len, "a whole extent");
            }
        }
    }
    assert_eq!(inodes, record.counts.inodes);
}

#[cfg(test)]
mod tests {
    use fixtures::arbitrary::{Limits, stacks, trees};
    use fixtures::tar::Format;
    use proptest::prelude::*;

    /// What happens to a sound archive: (where, as a fraction; what).
    fn damage() -> impl Strategy<Value = Vec<(prop::sample::Index, u8, u8)>> {
        prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), any::<u8>()), 0..8)
    }

    /// Changes bytes, mostly of headers, whose checksum is then made right again: else little but the checksum is tested.
    fn mutate(tar: &mut Vec<u8>, damage: &[(prop::sample::Index, u8, u8)]) {
        for (at, how, byte) in damage {
            if tar.is_empty() {
                return;
            }
            let at = at.index(tar.len());
            let block = at / 512 * 512;
            match how % 8 {
                0 => tar[at] = *byte,
                1 => tar.truncate(at),
                2 => {
                    tar.drain(block..(block + 512).min(tar.len()));
                }
                3 => {
                    let copy = tar[block..(block + 512).min(tar.len())].to_vec();
                    tar.splice(block..block, copy);
                }
                _ => {
                    let header = &mut tar[block..];
                    if header.len() >= 512 && header[257..262] == *b"ustar" {
                        // A digit or letter keeps most fields well-formed.
                        header[at % 512] = if how % 2 == 0 { *byte } else { b'0' + byte % 10 };
                        header[148..156].fill(b' ');
                        let sum: u32 = header[..512].iter().map(|b| u32::from(*b)).sum();
                        header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
                    }
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_bytes(data in prop::collection::vec(any::<u8>(), 0..2000)) {
            super::layer(&data);
        }

        #[test]
        fn damaged_trees(model in trees(Limits::small()), damage in damage()) {
            let mut tar = model.to_layer().to_tar(Format::Pax);
            mutate(&mut tar, &damage);
            super::layer(&tar);
        }

        /// Whiteouts, and the layers' tars joined as if they were one.
        #[test]
        fn damaged_layers(layers in stacks(Limits::small(), 3), damage in damage()) {
            let mut tar: Vec<u8> = layers.iter().flat_map(|layer| {
                let mut tar = layer.to_tar(Format::Pax);
                tar.truncate(tar.len() - 1024);
                tar
            }).collect();
            mutate(&mut tar, &damage);
            super::layer(&tar);
        }
    }
}
