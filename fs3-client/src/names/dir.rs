//! Small objects as files of a store's directory.

use super::{Condition, ListedName, NameStore, Named, PutOutcome};
use crate::blob_store::local::system_error;
use crate::{BlobError, StoreDir, StoreError};
use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::BoxStream;

/// Small objects of a [`StoreDir`]; the calls run on threads that may block.
#[derive(Debug, Clone)]
pub struct DirNames {
    dir: StoreDir,
}

impl DirNames {
    /// Those of `dir`.
    #[must_use]
    pub const fn new(dir: StoreDir) -> Self {
        Self { dir }
    }

    async fn run<T: Send + 'static>(
        &self,
        op: &'static str,
        name: &str,
        call: impl FnOnce(&StoreDir, &str) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, BlobError> {
        let (dir, owned) = (self.dir.clone(), name.to_owned());
        let place = dir.root().display().to_string();
        match tokio::task::spawn_blocking(move || call(&dir, &owned)).await {
            Ok(done) => done.map_err(|error| match error.into_blob_error(&place, op, name) {
                BlobError::Local { place, op, what, source } => {
                    system_error(&place, self.dir.rules(), op, &what, source)
                }
                other => other,
            }),
            Err(e) => Err(BlobError::Local { place, op, what: name.to_owned(), source: std::io::Error::other(e) }),
        }
    }
}

#[async_trait]
impl NameStore for DirNames {
    async fn get(&self, name: &str) -> Result<Option<Named>, BlobError> {
        self.run("read", name, |dir, name| dir.object(name)).await
    }

    async fn put(&self, name: &str, bytes: Bytes, condition: &Condition) -> Result<PutOutcome, BlobError> {
        let condition = condition.clone();
        self.run("store", name, move |dir, name| dir.put_object(name, &bytes, &condition)).await
    }

    async fn delete(&self, name: &str) -> Result<(), BlobError> {
        self.run("delete", name, |dir, name| dir.delete_object(name)).await
    }

    fn list(&self, below: &str) -> BoxStream<'_, Result<ListedName, BlobError>> {
        let below = below.to_owned();
        let all = async move { self.run("list", &below, |dir, below| dir.list_objects(below)).await };
        let items = |all: Result<Vec<ListedName>, BlobError>| match all {
            Ok(all) => futures::stream::iter(all.into_iter().map(Ok)).boxed(),
            Err(error) => futures::stream::once(async { Err(error) }).boxed(),
        };
        futures::stream::once(all).flat_map(items).boxed()
    }
}
