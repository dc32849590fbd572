//! Images and blobs in container registries (the OCI distribution specification, version 1.1).
//!
//! A [`Client`] knows the credentials, mirrors and certificates of this machine. It turns an [`ImageRef`] into the
//! [`Repository`]s to ask for it: those of mirrors, then its own. A repository reads and writes manifests and blobs, one
//! attempt a call; [`BlobReader`] streams one blob from several of them, across broken connections. [`RegistryStore`] is
//! one repository as a [`crate::BlobStore`].
//!
//! `oci-client` gives the grammar of references and of error documents. Its requests are not used: they read manifests
//! of any size into memory, panic on a token that fits in no header, and do not tell of `Retry-After`, `Content-Range`
//! or why there is no token. Here nothing that a server sends is believed or kept without a bound, credentials go to
//! their own host only, and every failure says whose fault it is.

mod auth_file;
mod challenge;
mod content_range;
mod credentials;
mod http;
mod mirrors;
mod read;
mod reference;
mod repository;
mod session;
mod store;
mod upload;

pub use http::{Client, Options};
pub use mirrors::{MirrorRule, MirrorRuleError};
pub use read::{BlobReader, Remote};
pub use reference::{ImageRef, Place, ReferenceError, Which};
pub use repository::{MANIFEST_LIMIT, RawManifest, Repository};
pub use store::RegistryStore;
pub use upload::Sent;

use crate::BlobError;
use std::path::{Path, PathBuf};

/// Why a registry cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// A file on this machine that says how is not usable: the user's to mend.
    #[error("{}: {what}", path.display())]
    Setup {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A credential helper failed.
    #[error("docker-credential-{helper}, asked for {server}: {why}")]
    Helper {
        /// Its name.
        helper: String,
        /// What it was asked about.
        server: String,
        /// What happened.
        why: String,
    },
    /// `registries.conf` forbids it.
    #[error("{place} is blocked by the entry `{prefix}` of registries.conf")]
    Blocked {
        /// What was asked for.
        place: String,
        /// The entry.
        prefix: String,
    },
    /// TLS cannot be set up at all.
    #[error("cannot set up HTTPS: {0}")]
    Tls(String),
    /// The registry did not do it, or could not be reached.
    #[error(transparent)]
    Blob(#[from] BlobError),
}

impl RegistryError {
    fn setup(path: &Path, what: impl Into<String>) -> Self {
        Self::Setup { path: path.to_owned(), what: what.into() }
    }

    /// Whether bytes are not what they should be.
    #[must_use]
    pub fn is_corrupt(&self) -> bool {
        matches!(self, Self::Blob(BlobError::Corrupt { .. }))
    }
}
