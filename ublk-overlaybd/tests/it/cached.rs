//! Layers in a store, read through the chunk cache.

use crate::fuse::{Served, wait_for};
use crate::support::{read_all, run, run_ok, samples, sha256};
use fixtures::registry::Registry;
use fs3_client::blob_store::memory::MemoryBlobs;
use fs3_client::cache::{CacheConfig, ChunkCache};
use fs3_client::testing::faulty::{Faulty, Rates};
use fs3_client::{BlobStore as _, Body, Digest, registry};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use ublk_overlaybd::backend::{Cached, CachedBlobs, Repositories, Source as _};
use ublk_overlaybd::engine::Device;
use ublk_overlaybd::format::trace::{Op, Record, Trace};
use ublk_overlaybd::image::spec::ImageSpec;
use ublk_overlaybd::image::{Image, lowers};
use ublk_overlaybd::index::Piece;
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
    let blobs = STACK.map(|path| std::fs::read(samples().join(path)).unwrap());
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
    let pieces: Vec<_> = pieces_of(&image).collect();
    let missing = pieces.iter().filter(|piece| !image.try_read_at(&mut buf, piece.start * 512).unwrap()).count();
    assert!(missing > 5, "{missing} of {} pieces", pieces.len());
    assert_eq!(sha256(&read_all(&image)), STACK_SHA256);
    assert!(pieces.iter().all(|piece| image.try_read_at(&mut buf, piece.start * 512).unwrap()));

    // Behind the cache's back.
    let cached = sources[0].blob().cached_bytes();
    let at = 20_000;
    let file = data_file(dir.path(), &blobs[0], at);
    File::options().write(true).open(&file).unwrap().write_all_at(&[0xEE; 64], at as u64).unwrap();
    assert_eq!(sha256(&read_all(&image)), STACK_SHA256);
    assert_eq!(sources[0].blob().cached_bytes(), cached);
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
    // Whoever reads the disk gets EIO, and the rest of it goes on being read.
    let device = Device::over(&image, None).unwrap();
    let sectors = pieces_of(&image).flat_map(|piece| piece.start..piece.end());
    let results: Vec<_> = sectors.map(|sector| device.read(&mut [0; 512], sector * 512)).collect();
    assert!(results.iter().filter(|result| result.is_ok()).count() > 500);
    let errors: Vec<_> = results.iter().filter_map(|result| result.as_ref().err()).collect();
    assert!(!errors.is_empty() && errors.iter().all(|error| error.errno() == libc::EIO), "{errors:?}");
}

fn pieces_of(image: &Image) -> impl Iterator<Item = Piece> {
    image.stack().lookup(0..image.sectors()).filter(|piece| piece.kind.is_some())
}

/// Headers, tables and indexes have to be right before a layer is open at all: they are fetched anew as well.
#[test]
fn a_damaged_copy_of_a_header_or_an_index_is_fetched_again() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for path in ["zfile/l0.lz4.4k.zfile", "lsmt/l0.lsmt"] {
        let store = Arc::new(MemoryBlobs::default());
        let blob = std::fs::read(samples().join(path)).unwrap();
        let digest = Digest::of(&blob);
        runtime.block_on(store.put(&digest, Body::Bytes(blob.clone().into()))).unwrap();
        let cache = dir.path().join(digest.hex());
        let config = CacheConfig { chunk: 4096, read_ahead: 0, keep_free: 0, ..CacheConfig::new(&cache, 1 << 30) };
        let repositories = Arc::new(Repositories::new(registry::Options::default(), Some(store.clone())).unwrap());
        let blobs = CachedBlobs::new(ChunkCache::open(config, repositories.clone()).unwrap(), repositories);
        let json = format!(r#"{{"lowers": [{{"digest": "{digest}", "size": {}}}]}}"#, blob.len());
        let spec = ImageSpec::parse(json.as_bytes(), "a configuration", dir.path()).unwrap();
        let expected = read_all(&Image::new(lowers(&spec, "c", Some(&blobs)).unwrap()).unwrap());
        for at in [30, blob.len() - 4096 + 30] {
            let file = data_file(&cache, &blob, at);
            File::options().write(true).open(file).unwrap().write_all_at(&[0xEE; 40], at as u64).unwrap();
            let image = Image::new(lowers(&spec, "c", Some(&blobs)).unwrap()).unwrap();
            assert!(read_all(&image) == expected, "{path}: damaged at {at}");
        }
        // Where the store has no better it ends.
        let wrong = [&[0xEE; 30][..], &blob[30..]].concat();
        let digest = Digest::of(&wrong);
        runtime.block_on(store.put(&digest, Body::Bytes(wrong.into()))).unwrap();
        let json = format!(r#"{{"lowers": [{{"digest": "{digest}", "size": {}}}]}}"#, blob.len());
        let spec = ImageSpec::parse(json.as_bytes(), "a configuration", dir.path()).unwrap();
        assert!(lowers(&spec, "c", Some(&blobs)).unwrap_err().is_corrupt(), "{path}");
    }
}

/// Many who want the same at once cause one request for it.
#[test]
fn misses_of_many_are_one_request() {
    let blob = std::fs::read(samples().join("zfile/l0.lz4.4k.zfile")).unwrap();
    let digest = Digest::of(&blob);
    let memory = MemoryBlobs::default();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(memory.put(&digest, Body::Bytes(blob.clone().into()))).unwrap();
    let slow = Rates { stalled: 1000, stall: Duration::from_millis(20), ..Rates::default() };
    let store = Arc::new(Faulty::new(memory, slow, 1));
    let dir = tempfile::tempdir().unwrap();
    let config = CacheConfig {
        chunk: 4096,
        max_request: 4096,
        read_ahead: 0,
        keep_free: 0,
        ..CacheConfig::new(dir.path(), 1 << 30)
    };
    let cache = ChunkCache::open(config, store.clone()).unwrap();
    let source = Cached::new(cache.blob(digest, blob.len() as u64, None).unwrap());
    let image = Image::new(vec![Arc::new(Layer::open(Arc::new(source), "slow").unwrap())]).unwrap();
    let device = Device::over(&image, None).unwrap();
    let expected = Image::new(vec![Arc::new(Layer::open(Arc::new(blob.clone()), "in memory").unwrap())]).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..32 {
            scope.spawn(|| {
                for piece in pieces_of(&image) {
                    let (mut found, mut bytes) = ([0; 512], [0; 512]);
                    device.read(&mut found, piece.start * 512).unwrap();
                    expected.read_exact_at(&mut bytes, piece.start * 512).unwrap();
                    assert_eq!(found, bytes);
                }
            });
        }
    });
    // A request for each chunk at most, the header's and the index's among them: every one was slow, so all are counted.
    assert!(store.faults() <= blob.len().div_ceil(4096) as u64, "{} requests", store.faults());
}

/// A store whose answers are wrong, short, late or none: what is read is right, or an error, and never a wait without end.
#[test]
fn whatever_a_store_does_a_read_is_right_or_an_error() {
    let blob = std::fs::read(samples().join("zfile/l0.lz4.4k.zfile")).unwrap();
    let digest = Digest::of(&blob);
    let expected = Image::new(vec![Arc::new(Layer::open(Arc::new(blob.clone()), "in memory").unwrap())]).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let (mut right, mut refused, mut faults) = (0, 0, 0);
    for (seed, wrong) in [(1, 100), (2, 300), (3, 900), (4, 1000)] {
        let memory = MemoryBlobs::default();
        runtime.block_on(memory.put(&digest, Body::Bytes(blob.clone().into()))).unwrap();
        let rates = Rates { wrong, transient: (1000 - wrong) / 4, short: (1000 - wrong) / 8, ..Rates::default() };
        let store = Arc::new(Faulty::new(memory, rates, seed));
        let dir = tempfile::tempdir().unwrap();
        let mut config = CacheConfig {
            chunk: 4096,
            max_request: 4096,
            read_ahead: 0,
            keep_free: 0,
            ..CacheConfig::new(dir.path(), 1 << 30)
        };
        config.retry.first_wait = Duration::from_millis(1);
        config.retry.longest_wait = Duration::from_millis(2);
        let cache = ChunkCache::open(config, store.clone()).unwrap();
        let source = Arc::new(Cached::new(cache.blob(digest, blob.len() as u64, None).unwrap()));
        // Header and jump table are checked as well; what fails there is asked for again by whoever opens it again.
        let layer = (0..200).find_map(|_| match Layer::open(source.clone(), "faulty") {
            Ok(layer) => Some(layer),
            Err(_) => {
                source.drop_cached(0..blob.len() as u64);
                None
            }
        });
        let Some(layer) = layer else {
            assert!(wrong >= 900, "{wrong} in a thousand are wrong, and it never opened");
            refused += 1;
            continue;
        };
        let image = Image::new(vec![Arc::new(layer)]).unwrap();
        // Of what is mapped: the rest asks nobody.
        for piece in pieces_of(&image) {
            let mut found = vec![0xEE; 4096];
            let offset = (piece.start * 512).min(image.size() - 4096);
            match image.read_exact_at(&mut found, offset) {
                Ok(()) => {
                    let mut bytes = vec![0; 4096];
                    expected.read_exact_at(&mut bytes, offset).unwrap();
                    assert!(found == bytes, "seed {seed}: wrong bytes at {offset}");
                    right += 1;
                }
                Err(error) => {
                    assert!(error.is_corrupt() || error.to_string().contains("unavailable"), "{error}");
                    refused += 1;
                }
            }
        }
        faults += store.faults();
    }
    assert!(right > 20 && faults > 20, "{right} right, {refused} refused, {faults} faults");
}

/// A registry with layers, and the configuration that says so.
pub(crate) struct Remote {
    pub(crate) registry: Registry,
    pub(crate) dir: tempfile::TempDir,
}

impl Remote {
    pub(crate) fn new(paths: &[&str]) -> Self {
        let (registry, dir) = (Registry::start(), fixtures::mounts::scratch());
        let client = registry::Client::new(registry::Options { plain_http: true, ..Default::default() }).unwrap();
        let image: registry::ImageRef = registry.name("team/disk:1").parse().unwrap();
        let target = registry::RegistryStore::new(client.target(image.place()).unwrap());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let lowers = paths.iter().map(|path| {
            let blob = std::fs::read(samples().join(path)).unwrap();
            let digest = Digest::of(&blob);
            runtime.block_on(target.put(&digest, Body::Bytes(blob.clone().into()))).unwrap();
            serde_json::json!({ "digest": digest.to_string(), "size": blob.len(), "dir": dir.path().join(digest.hex()) })
        });
        let lowers: Vec<_> = lowers.collect();
        let this = Self { registry, dir };
        this.write(&serde_json::json!({ "repoBlobUrl": this.url(), "lowers": lowers }));
        this
    }

    fn url(&self) -> String {
        format!("http://{}/v2/team/disk/blobs", self.registry.address())
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    pub(crate) fn write(&self, document: &serde_json::Value) {
        std::fs::write(self.path("config.v1.json"), document.to_string()).unwrap();
    }

    pub(crate) fn read(&self) -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(self.path("config.v1.json")).unwrap()).unwrap()
    }
}

const STACK: [&str; 2] = ["zfile/l0.lz4.4k.zfile", "zfile/l1.trailer_only.lz4.4k.zfile"];
const STACK_SHA256: &str = "50ac770311c205eacba24d15763cd31dfff42ec6ae617eb6abdfd4c9f81b2a55";

#[test]
fn a_configuration_is_read_from_a_registry_and_then_without_it() {
    let remote = Remote::new(&STACK);
    let (config, cache) = (remote.path("config.v1.json"), remote.path("cache"));
    let export = |out: &str| run(&["export", "--config", &config, "--cache", &cache, &remote.path(out)]);
    let output = export("first");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(sha256(&std::fs::read(remote.path("first")).unwrap()), STACK_SHA256);
    // Without a cache nobody is asked, and the key that would have to be another is named.
    let refused = run(&["export", "--config", &config, &remote.path("second")]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("lowers[0].dir"));

    // A size must come from the configuration.
    let good = remote.read();
    let mut wrong = good.clone();
    wrong["lowers"][1]["size"] = 0.into();
    remote.write(&wrong);
    let refused = export("second");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && said.contains("lowers[1].size"), "{said}");
    // And an address that is none is said before anything is asked.
    let mut wrong = good.clone();
    wrong["repoBlobUrl"] = "ftp://127.0.0.1/v2/x/blobs".into();
    remote.write(&wrong);
    let said = String::from_utf8_lossy(&export("second").stderr).into_owned();
    assert!(said.contains("ftp://127.0.0.1"), "{said}");
    remote.write(&good);

    // What was fetched is there when the registry is not.
    let Remote { registry, dir } = remote;
    drop(registry);
    let path = |name: &str| dir.path().join(name).display().to_string();
    run_ok(&["export", "--config", &config, "--cache", &cache, &path("third")]);
    assert_eq!(sha256(&std::fs::read(path("third")).unwrap()), STACK_SHA256);
}

/// The rest of what a configuration asks of a server: to be told how it went, a trace to read ahead, layers fetched in the
/// background; and a writable layer over layers of a registry.
#[test]
fn privileged_a_configuration_is_served() {
    if !fixtures::require::root() {
        return;
    }
    fixtures::mounts::in_private_namespace(|| {
        let remote = Remote::new(&STACK);
        let (config, disk) = (remote.path("config.v1.json"), remote.dir.path().join("disk"));
        let trace = Trace::Records(vec![Record { op: Op::Read, layer: 0, count: 8192, offset: 4096 }]).encode();
        std::fs::create_dir(remote.path("accel")).unwrap();
        std::fs::write(remote.path("accel/trace"), trace).unwrap();
        run_ok(&["create", &remote.path("data"), &remote.path("index"), "--size", "0"]);
        let mut document = remote.read();
        document["lowers"].as_array_mut().unwrap().push(serde_json::json!({ "dir": remote.path("accel") }));
        document["accelerationLayer"] = true.into();
        document["upper"] = serde_json::json!({ "data": remote.path("data"), "index": remote.path("index") });
        document["resultFile"] = remote.path("result").into();
        document["download"] = serde_json::json!({ "enable": true, "delay": 0, "delayExtra": 0, "maxMBps": 1000 });
        remote.write(&document);
        let args = [config.as_str(), "--cache", &remote.path("cache")];
        let served = Served::start(&args, &disk);
        assert_eq!(std::fs::read_to_string(remote.path("result")).unwrap(), "success");
        // All of it comes by itself; then the registry goes.
        let total: u64 = remote.read()["lowers"].as_array().unwrap().iter().filter_map(|l| l["size"].as_u64()).sum();
        wait_for(Duration::from_secs(60), || (allocated(&remote.dir.path().join("cache")) >= total).then_some(()));
        std::thread::sleep(Duration::from_millis(300));
        let Remote { registry, dir } = remote;
        drop(registry);
        let file = File::options().read(true).write(true).open(&disk).unwrap();
        let mut bytes = std::fs::read(&disk).unwrap();
        assert_eq!(sha256(&bytes), STACK_SHA256);
        file.write_all_at(b"written", 12_345).unwrap();
        bytes[12_345..][..7].copy_from_slice(b"written");
        assert!(std::fs::read(&disk).unwrap() == bytes);
        drop(file);
        served.stop();

        // What cannot be opened is told there as well.
        std::fs::remove_file(dir.path().join("index")).unwrap();
        let refused = run(&["fuse", &config, "--cache", &dir.path().join("cache").display().to_string(), "/nowhere"]);
        assert_eq!(refused.status.code(), Some(1));
        let told = std::fs::read_to_string(dir.path().join("result")).unwrap();
        assert!(told.starts_with("failed:") && told.contains("index"), "{told}");
        // Traces are not recorded.
        document["recordTracePath"] = "/trace".into();
        std::fs::write(&config, document.to_string()).unwrap();
        let refused = run(&["fuse", &config, "/nowhere"]);
        assert!(String::from_utf8_lossy(&refused.stderr).contains("recordTracePath"));
    });
}

/// Bytes that the files below a directory take.
fn allocated(dir: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(dir) else { return 0 };
    let size = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(found) if found.is_dir() => allocated(&entry.path()),
        Ok(found) => std::os::unix::fs::MetadataExt::blocks(&found) * 512,
        Err(_) => 0,
    };
    entries.flatten().map(size).sum()
}
