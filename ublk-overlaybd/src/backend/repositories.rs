//! Blobs of any number of repositories and of a store, each from where it is said to be: one place for a chunk cache to
//! ask.

use async_trait::async_trait;
use bytes::Bytes;
use fs3_client::registry::{Client, ImageRef, Options, RegistryError, RegistryStore};
use fs3_client::{BlobError, BlobStore, Body, Digest, Listed, Stat};
use futures::stream::{self, BoxStream, StreamExt as _};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What Docker Hub's API is called, and what everybody calls it.
const DOCKER_HUB: [&str; 2] = ["registry-1.docker.io", "docker.io"];

/// Why a repository cannot be asked.
#[derive(Debug, thiserror::Error)]
pub enum RepositoryError {
    /// It is no address of a repository's blobs.
    #[error("`{url}` is not https://HOST/v2/REPOSITORY/blobs: {why}")]
    Url {
        /// What was given.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// What this machine says of registries cannot be used.
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

/// A repository and its mirrors, in the order in which they are asked.
type Mirrors = Arc<[RegistryStore]>;

#[derive(Debug, Default)]
struct Known {
    by_url: HashMap<String, Mirrors>,
    by_blob: HashMap<Digest, Vec<Mirrors>>,
}

/// Repositories of registries, and a store: blobs are read from the repositories that [`add`](Self::add) named for them, and
/// else from the store.
#[derive(Debug)]
pub struct Repositories {
    https: Client,
    http: Client,
    store: Option<Arc<dyn BlobStore>>,
    known: Mutex<Known>,
}

impl Repositories {
    /// Talks to registries as `options` say, and to `store` about blobs that no repository was named for.
    ///
    /// # Errors
    /// What this machine says of registries cannot be used.
    pub fn new(options: Options, store: Option<Arc<dyn BlobStore>>) -> Result<Self, RepositoryError> {
        let http = Client::new(Options { plain_http: true, ..options.clone() })?;
        Ok(Self { https: Client::new(options)?, http, store, known: Mutex::default() })
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that blob `digest` is in the repository whose blobs are at `url`, the `repoBlobUrl` of a configuration. Asks
    /// nobody; it may run a helper for credentials.
    ///
    /// # Errors
    /// The address is none, or what this machine says of that registry cannot be used.
    pub fn add(&self, url: &str, digest: &Digest) -> Result<(), RepositoryError> {
        let found = self.known().by_url.get(url).map(Arc::clone);
        let mirrors = match found {
            Some(mirrors) => mirrors,
            None => {
                let (image, plain) = parse(url, digest)?;
                let client = if plain { &self.http } else { &self.https };
                let mirrors: Mirrors = client.sources(&image)?.into_iter().map(RegistryStore::new).collect();
                Arc::clone(self.known().by_url.entry(url.to_owned()).or_insert(mirrors))
            }
        };
        let mut known = self.known();
        let places = known.by_blob.entry(*digest).or_default();
        if !places.iter().any(|place| Arc::ptr_eq(place, &mirrors)) {
            places.push(mirrors);
        }
        Ok(())
    }

    /// All that may have a blob, in the order in which they are asked.
    fn places(&self, digest: &Digest) -> Vec<Arc<dyn BlobStore>> {
        let known = self.known();
        let repositories = known.by_blob.get(digest).into_iter().flatten().flat_map(|mirrors| mirrors.iter());
        let repositories = repositories.map(|store| Arc::new(store.clone()) as Arc<dyn BlobStore>);
        repositories.chain(self.store.clone()).collect()
    }

    fn nowhere(digest: &Digest) -> BlobError {
        BlobError::NotFound { what: digest.to_string(), place: "any repository or store that was named".to_owned() }
    }

    fn unsupported(op: &'static str) -> BlobError {
        BlobError::Unsupported { place: "a list of repositories to read from".to_owned(), op }
    }
}

/// The repository whose blobs are at `url`, and whether it is asked without TLS.
fn parse(url: &str, digest: &Digest) -> Result<(ImageRef, bool), RepositoryError> {
    let wrong = |why: &str| RepositoryError::Url { url: url.chars().take(300).collect(), why: why.to_owned() };
    let (plain, rest) = match (url.strip_prefix("https://"), url.strip_prefix("http://")) {
        (Some(rest), _) => (false, rest),
        (None, Some(rest)) => (true, rest),
        _ => return Err(wrong("it begins with neither https:// nor http://")),
    };
    let (host, path) = rest.split_once("/v2/").ok_or_else(|| wrong("there is no /v2/ behind the host"))?;
    let path = path.trim_end_matches('/');
    let repository = path.strip_suffix("/blobs").ok_or_else(|| wrong("it does not end in /blobs"))?;
    let mut host = if host == DOCKER_HUB[0] { DOCKER_HUB[1].to_owned() } else { host.to_owned() };
    if !host.contains(['.', ':']) && host != "localhost" {
        // What has neither would be taken for a name on Docker Hub.
        host += if plain { ":80" } else { ":443" };
    }
    let image: ImageRef =
        format!("{host}/{repository}@{digest}").parse().map_err(|error| wrong(&format!("{error}")))?;
    if image.place().host() != host {
        return Err(wrong("the host is none"));
    }
    Ok((image, plain))
}

#[async_trait]
impl BlobStore for Repositories {
    async fn stat(&self, digest: &Digest) -> Result<Stat, BlobError> {
        let mut last = Self::nowhere(digest);
        for place in self.places(digest) {
            match place.stat(digest).await {
                Ok(stat) => return Ok(stat),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn read_range(&self, digest: &Digest, range: Range<u64>) -> Result<Bytes, BlobError> {
        let mut last = Self::nowhere(digest);
        for place in self.places(digest) {
            match place.read_range(digest, range.clone()).await {
                Ok(bytes) => return Ok(bytes),
                // One that may have it tomorrow says more than one that never will.
                Err(error) if last.is_transient() && !error.is_transient() => {}
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn put(&self, _digest: &Digest, _body: Body) -> Result<(), BlobError> {
        Err(Self::unsupported("take blobs"))
    }

    async fn delete(&self, _digest: &Digest) -> Result<(), BlobError> {
        Err(Self::unsupported("remove blobs"))
    }

    fn list(&self) -> BoxStream<'_, Result<Listed, BlobError>> {
        stream::once(async { Err(Self::unsupported("list blobs")) }).boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let digest = Digest::of(b"x");
        for (url, place, plain) in [
            ("https://registry.example/v2/a/b/blobs", "registry.example/a/b", false),
            ("http://127.0.0.1:5000/v2/a/blobs/", "127.0.0.1:5000/a", true),
            ("https://registry-1.docker.io/v2/library/redis/blobs", "docker.io/library/redis", false),
            ("http://localhost/v2/x/y/blobs", "localhost/x/y", true),
            ("https://registry/v2/x/y/blobs", "registry:443/x/y", false),
        ] {
            let (image, found) = parse(url, &digest).unwrap();
            assert_eq!((image.place().to_string(), found), (place.to_owned(), plain), "{url}");
        }
        for (url, why) in [
            ("ftp://a.example/v2/b/blobs", "https://"),
            ("https://a.example/b/blobs", "/v2/"),
            ("https://a.example/v2/b", "/blobs"),
            ("https://a.example/v2/UPPER/blobs", "UPPER"),
            ("https:///v2/b/blobs", "is not"),
            ("https://user@a.example/v2/b/blobs", "is not"),
        ] {
            let error = parse(url, &digest).unwrap_err().to_string();
            assert!(error.contains(why), "{url}: {error}");
        }
    }
}
