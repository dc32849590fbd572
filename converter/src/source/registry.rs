//! Images in a registry. Manifests and configs are read at once; layers are streamed when they are converted.

use super::documents::{self, Descriptor, Document, Kind};
use super::find::{Blobs, Root};
use super::{LayerOrigin, SourceError};
use fs3_client::Digest;
use fs3_client::registry::{
    Client, ImageRef, MANIFEST_LIMIT, Options, RawManifest, RegistryError, Remote, Repository, Which,
};
use std::cell::RefCell;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::runtime::Runtime;

/// Threads for connections. They only move bytes and undo TLS; a layer's own threads do the work.
const THREADS: usize = 2;

/// Starts what connections run on.
///
/// # Errors
/// What the system says.
pub(crate) fn runtime() -> std::io::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).thread_name("registry").enable_all().build()
}

/// The places that hold an image, the first of which has its manifest.
pub(super) struct Registry {
    runtime: Arc<Runtime>,
    repositories: Arc<[Repository]>,
    options: Options,
    /// As the user named it.
    place: PathBuf,
    /// The manifest or index that the user named.
    top: RawManifest,
    /// The config that was read last: once to know its platform, once to have it.
    config: RefCell<Option<(Digest, Vec<u8>)>>,
}

impl Registry {
    /// Finds the manifest or index of `image`, in its mirrors or its registry.
    pub(super) fn find(image: &ImageRef, options: &Options) -> Result<(Self, Root), SourceError> {
        let place = PathBuf::from(format!("docker://{image}"));
        let runtime = runtime().map_err(|e| SourceError::io(&place, e))?;
        let client = Client::new(options.clone())?;
        let mut repositories = client.sources(image)?;
        let top = loop {
            let found = runtime.block_on(options.retry.run(|_| repositories[0].manifest(image.which())));
            match found {
                Ok(top) => break top,
                Err(e) if repositories.len() > 1 => {
                    tracing::warn!("{e}; {} is next", repositories[1].place());
                    repositories.remove(0);
                }
                Err(e) => return Err(RegistryError::from(e).into()),
            }
        };
        let media_type = documents::media_type(&top.media_type, &top.bytes);
        if !matches!(Kind::of(&media_type), Kind::Index | Kind::Manifest)
            && let Err(e) = Document::parse(&top.bytes, &media_type)
        {
            return Err(SourceError::Unusable { what: format!("manifest {image}"), why: e.to_string() });
        }
        let descriptor = Descriptor::new(media_type, top.digest.to_string(), top.bytes.len() as u64);
        let root = Root { descriptor, label: image.to_string() };
        let (runtime, repositories) = (Arc::new(runtime), repositories.into());
        Ok((Self { runtime, repositories, options: options.clone(), place, top, config: RefCell::default() }, root))
    }

    fn remote(&self, digest: Digest, size: u64) -> Remote {
        Remote::new(Arc::clone(&self.runtime), Arc::clone(&self.repositories), digest, size, &self.options)
    }

    /// A manifest or index by its digest.
    fn manifest(&self, digest: Digest) -> Result<Vec<u8>, SourceError> {
        if digest == self.top.digest {
            return Ok(self.top.bytes.clone());
        }
        let mut last = None;
        for repository in &*self.repositories {
            let which = Which::Digest(digest);
            match self.runtime.block_on(self.options.retry.run(|_| repository.manifest(&which))) {
                Ok(found) => return Ok(found.bytes),
                Err(e) => last = Some(e),
            }
        }
        Err(RegistryError::from(last.expect("there is a repository, and it failed")).into())
    }
}

impl Blobs for Registry {
    fn place(&self) -> &Path {
        &self.place
    }

    fn read(&self, what: &str, descriptor: &Descriptor, limit: u64) -> Result<Vec<u8>, SourceError> {
        let digest = digest(what, descriptor)?;
        let size = descriptor.size;
        let is_manifest = matches!(Kind::of(&descriptor.media_type), Kind::Index | Kind::Manifest);
        let limit = if is_manifest { limit.min(MANIFEST_LIMIT as u64) } else { limit };
        if size > limit {
            return Err(SourceError::TooLarge { what: what.to_owned(), size, limit });
        }
        let known = self.config.borrow().as_ref().filter(|(known, _)| *known == digest).map(|(_, bytes)| bytes.clone());
        let bytes = if is_manifest {
            self.manifest(digest)?
        } else if let Some(bytes) = known {
            bytes
        } else {
            let mut bytes = Vec::new();
            self.remote(digest, size).open().read_to_end(&mut bytes).map_err(|e| failed(&self.place, e))?;
            bytes
        };
        if bytes.len() as u64 != size {
            return Err(SourceError::Size { what: what.to_owned(), expected: size, found: bytes.len() as u64 });
        }
        let found = Digest::of(&bytes);
        if found != digest {
            return Err(SourceError::Digest { what: what.to_owned(), found });
        }
        if !is_manifest {
            *self.config.borrow_mut() = Some((digest, bytes.clone()));
        }
        Ok(bytes)
    }

    fn origin(&self, what: &str, descriptor: &Descriptor) -> Result<(Digest, LayerOrigin), SourceError> {
        let digest = digest(what, descriptor)?;
        Ok((digest, LayerOrigin::Remote(self.remote(digest, descriptor.size))))
    }

    fn has_foreign(&self, descriptor: &Descriptor) -> Result<bool, SourceError> {
        let digest = digest("foreign layer", descriptor)?;
        for repository in &*self.repositories {
            let size = self.runtime.block_on(self.options.retry.run(|_| repository.blob_size(&digest)));
            if size.map_err(RegistryError::from)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

fn digest(what: &str, descriptor: &Descriptor) -> Result<Digest, SourceError> {
    descriptor.digest.parse().map_err(|source| SourceError::BadDigest { what: what.to_owned(), source })
}

/// What a reader of a blob failed with, as it was.
fn failed(place: &Path, error: std::io::Error) -> SourceError {
    match error.downcast::<fs3_client::BlobError>() {
        Ok(error) => RegistryError::from(error).into(),
        Err(error) => SourceError::io(place, error),
    }
}
