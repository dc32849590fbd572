//! Where layers are fetched from that are in no local file.

use super::output::parse_size;
use anyhow::Context as _;
use fs3_client::blob_store::local::LocalBlobs;
use fs3_client::blob_store::retry::Policy;
use fs3_client::blob_store::s3::{S3Blobs, S3Bucket};
use fs3_client::{BlobStore, CacheConfig, ChunkCache, Rules, StoreDir, StoreLocation};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use ublk_overlaybd::backend::{Blobs, CachedBlobs, Repositories};

/// A cache, and what it asks.
#[derive(Debug, clap::Args)]
pub(super) struct BlobArgs {
    /// Fetch layers that are in no local file, and keep what was fetched in this directory, of which one process at a time
    /// may make use
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// Most bytes that are kept there
    #[arg(long, value_parser = parse_size, value_name = "SIZE", default_value = "16GiB", requires = "cache")]
    cache_size: u64,
    /// Ask this store for what `repoBlobUrl` does not have: a path, 3fs:PATH or s3://BUCKET/PREFIX
    #[arg(long, value_name = "STORE", requires = "cache")]
    store: Option<StoreLocation>,
}

impl BlobArgs {
    /// What was asked for, open.
    pub(super) fn open(&self) -> anyhow::Result<Option<Box<dyn Blobs>>> {
        let Some(dir) = &self.cache else { return Ok(None) };
        Ok(Some(open(dir, self.cache_size, self.store.as_ref())?))
    }
}

fn open(dir: &Path, size: u64, store: Option<&StoreLocation>) -> anyhow::Result<Box<dyn Blobs>> {
    let store = store.map(open_store).transpose()?;
    let repositories = Arc::new(Repositories::new(fs3_client::registry::Options::default(), store)?);
    let cache = ChunkCache::open(CacheConfig::new(dir, size), Arc::clone(&repositories) as Arc<dyn BlobStore>)?;
    Ok(Box::new(CachedBlobs::new(cache, repositories)))
}

/// Of the daemon.
#[cfg(feature = "ublk")]
pub(super) fn of(config: &ublk_overlaybd::daemon::config::Config) -> anyhow::Result<Option<Box<dyn Blobs>>> {
    config.cache.as_ref().map(|(dir, size)| open(dir, *size, config.store.as_ref())).transpose()
}

fn open_store(location: &StoreLocation) -> anyhow::Result<Arc<dyn BlobStore>> {
    let open = || -> anyhow::Result<Arc<dyn BlobStore>> {
        Ok(match location {
            StoreLocation::Dir(path) => Arc::new(LocalBlobs::new(StoreDir::open(path)?)),
            StoreLocation::Fs3(path) => Arc::new(LocalBlobs::new(StoreDir::open(path)?.with_rules(Rules::Fs3))),
            // The cache tries again.
            StoreLocation::S3 { bucket, prefix } => {
                Arc::new(S3Blobs::new(S3Bucket::from_env(bucket, prefix)?, Policy::once()))
            }
        })
    };
    open().with_context(|| format!("{location}: cannot open the store"))
}
