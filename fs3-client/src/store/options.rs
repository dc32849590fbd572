//! What a store that is no plain directory needs besides its place.

use crate::blob_store::deadline::Limits;
use crate::blob_store::retry::Policy;
use crate::blob_store::usrbio::UsrbioOptions;
use crate::lease;
use std::env;
use std::path::PathBuf;
use std::time::Duration;
use tokio::runtime::Handle;

/// How a store is reached. A plain directory needs none of it.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// The local directory for files that are being written and for copies of what was read; by default
    /// `$XDG_CACHE_HOME/dsec/stores/<hash of the place>`. Any number of processes may share one.
    pub local_dir: Option<PathBuf>,
    /// Bytes that local copies may take before the oldest are removed.
    pub local_limit: u64,
    /// The runtime for requests; without one the store makes its own.
    pub runtime: Option<Handle>,
    /// How failed requests are tried again.
    pub retry: Policy,
    /// How long a request may take.
    pub limits: Limits,
    /// How long a lease lasts after its last renewal.
    pub lease_lasts: Duration,
    /// How a store on 3FS is read, where it can be through USRBIO.
    pub usrbio: UsrbioOptions,
    /// Whether the blobs of a store on 3FS get the flag of files that nobody may change, once they are published.
    pub immutable: bool,
    /// Settings of S3 in place of the environment's, by the environment's names.
    pub s3: Option<Vec<(String, String)>>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            local_dir: None,
            local_limit: 10 << 30,
            runtime: None,
            retry: Policy::default(),
            limits: Limits::default(),
            lease_lasts: lease::LASTS,
            usrbio: UsrbioOptions::default(),
            immutable: false,
            s3: None,
        }
    }
}

impl StoreOptions {
    /// The defaults, and `DSEC_STORE_CACHE` as the directory above the local directories of all stores.
    #[must_use]
    pub fn from_env(place: &str) -> Self {
        let dir = env::var_os("DSEC_STORE_CACHE").filter(|dir| !dir.is_empty());
        Self { local_dir: dir.map(|dir| PathBuf::from(dir).join(name_of(place))), ..Self::default() }
    }

    /// The local directory of the store at `place`; `None` where the environment names no home.
    pub(super) fn local_dir_of(&self, place: &str) -> Option<PathBuf> {
        let absolute = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        self.local_dir.clone().or_else(|| {
            let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
            Some(cache.join("dsec/stores").join(name_of(place)))
        })
    }
}

/// The name of a place's directory.
fn name_of(place: &str) -> String {
    crate::Digest::of(place.as_bytes()).hex()[..16].to_owned()
}
