//! A server, a proxy before it, and stores that go through them.

use fixtures::faulty_proxy::FaultyProxy;
use fixtures::s3::S3Server;
use fs3_client::blob_store::deadline::Limits;
use fs3_client::blob_store::retry::Policy;
use fs3_client::blob_store::s3::S3Bucket;
use fs3_client::{Store, StoreLocation, StoreOptions};
use std::path::Path;
use std::time::Duration;

/// Retries without long waits.
pub(crate) const QUICK: Policy = Policy {
    attempts: 12,
    first_wait: Duration::from_millis(2),
    longest_wait: Duration::from_millis(50),
    total: Duration::from_secs(60),
};

/// A server, and a proxy that breaks nothing until it is told to.
pub(crate) struct Place {
    pub(crate) server: S3Server,
    pub(crate) proxy: FaultyProxy,
    pub(crate) local: tempfile::TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        let server = S3Server::start(&["bucket"]);
        let proxy = FaultyProxy::honest(server.address());
        Self { server, proxy, local: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn settings(&self) -> Vec<(&'static str, String)> {
        S3Server::environment(&self.proxy.url())
    }

    pub(crate) fn bucket(&self, prefix: &str) -> S3Bucket {
        let settings = self.settings();
        S3Bucket::from_settings(settings.iter().map(|(k, v)| (*k, v.as_str())), "bucket", prefix).unwrap()
    }

    pub(crate) fn location(&self) -> StoreLocation {
        "s3://bucket/team/store".parse().unwrap()
    }

    /// Options of another machine each time: `name` is its local directory.
    pub(crate) fn options(&self, name: &str) -> StoreOptions {
        StoreOptions {
            local_dir: Some(self.local.path().join(name)),
            retry: QUICK,
            limits: Limits { request: Duration::from_secs(20), rate: 64 << 10 },
            s3: Some(self.settings().into_iter().map(|(k, v)| (k.to_owned(), v)).collect()),
            ..StoreOptions::default()
        }
    }

    pub(crate) fn store(&self, name: &str) -> Store {
        Store::create_at(&self.location(), &self.options(name)).unwrap()
    }

    /// How many objects the bucket has below a prefix.
    pub(crate) fn objects(&self, below: &str) -> usize {
        fn count(dir: &Path) -> usize {
            let Ok(entries) = std::fs::read_dir(dir) else { return 0 };
            entries.map(|e| e.unwrap().path()).map(|p| if p.is_dir() { count(&p) } else { 1 }).sum()
        }
        count(&self.server.bucket("bucket").join(below))
    }
}
