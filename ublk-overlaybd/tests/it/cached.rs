//! Layers in a store, read through the chunk cache.

use crate::support::{read_all, samples, sha256};
use fs3_client::blob_store::memory::MemoryBlobs;
use fs3_client::cache::{CacheConfig, ChunkCache};
use fs3_client::{BlobStore as _, Body, Digest};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use ublk_overlaybd::backend::{Cached, Source as _};
use ublk_overlaybd::image::Image;
use ublk_overlaybd::layer::Layer;

/// The cache's file that has these bytes of the blob at this place.
fn data_file(dir: &Path, blob: &[u8], at: usize) -> PathBuf {
    let mut left = vec![dir.to_owned()];
    while let Some(path) = left.pop() {
        for entry in std::fs::read_dir(path).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                left.push(path);
                continue;
            }
            let mut bytes = [0; 64];
            let file = File::open(&path).unwrap();
            if file.read_exact_at(&mut bytes, at as u64).is_ok() && bytes == blob[at..at + 64] {
                return path;
            }
        }
    }
    panic!("the blob is not in the cache's directory");
}

#[test]
fn a_damaged_copy_is_fetched_again() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(MemoryBlobs::default());
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let paths = ["zfile/l0.lz4.4k.zfile", "zfile/l1.trailer_only.lz4.4k.zfile"];
    let blobs = paths.map(|path| std::fs::read(samples().join(path)).unwrap());
    for blob in &blobs {
        runtime.block_on(store.put(&Digest::of(blob), Body::Bytes(blob.clone().into()))).unwrap();
    }
    let config = CacheConfig {
        chunk: 4096,
        max_request: 16384,
        read_ahead: 0,
        keep_free: 0,
        ..CacheConfig::new(dir.path(), 1 << 30)
    };
    let cache = ChunkCache::open(config, store.clone()).unwrap();
    let sources = blobs
        .each_ref()
        .map(|blob| Arc::new(Cached::new(cache.blob(Digest::of(blob), blob.len() as u64, None).unwrap())));
    let layers = sources.each_ref().map(|source| {
        let source: Arc<Cached> = Arc::clone(source);
        Arc::new(Layer::open(source, "a cached layer").unwrap())
    });
    let image = Image::new(layers.to_vec()).unwrap();
    // Nothing but headers, indexes and jump tables has been fetched.
    let mut buf = vec![0; 4096];
    assert!(!image.try_read_at(&mut buf, 0).unwrap());
    let expected = "50ac770311c205eacba24d15763cd31dfff42ec6ae617eb6abdfd4c9f81b2a55";
    assert_eq!(sha256(&read_all(&image)), expected);
    assert!(image.try_read_at(&mut buf, 0).unwrap());

    // Behind the cache's back.
    let at = 20_000;
    let file = data_file(dir.path(), &blobs[0], at);
    File::options().write(true).open(&file).unwrap().write_all_at(&[0xEE; 64], at as u64).unwrap();
    assert_eq!(sha256(&read_all(&image)), expected);
    assert_eq!(sources[0].blob().cached_bytes(), blobs[0].len() as u64);
    let mut right = [0; 64];
    File::open(&file).unwrap().read_exact_at(&mut right, at as u64).unwrap();
    assert_eq!(right, blobs[0][at..at + 64]);

    // And where the store itself has it wrong, that is said.
    let mut wrong = blobs[0].clone();
    wrong[at] ^= 1;
    let digest = Digest::of(&wrong);
    runtime.block_on(store.put(&digest, Body::Bytes(wrong.clone().into()))).unwrap();
    let source = Cached::new(cache.blob(digest, wrong.len() as u64, None).unwrap());
    let image = Image::new(vec![Arc::new(Layer::open(Arc::new(source), "wrong in the store").unwrap())]).unwrap();
    let error = image.read_exact_at(&mut vec![0; 4 << 20], 0).unwrap_err();
    assert!(error.is_corrupt() && error.to_string().contains("wrong in the store"), "{error}");
}
