//! Small objects in an S3 bucket, below the same prefix as the blobs. A version is the object's `ETag`, and conditions
//! are `If-None-Match: *` and `If-Match`.

use super::{Condition, ListedName, NameStore, Named, OBJECT_MAX, PutOutcome, Version, check_name, too_long};
use crate::BlobError;
use crate::blob_store::retry::Policy;
use crate::blob_store::s3::{Ask, S3Bucket};
use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::{Error, ObjectMeta, ObjectStore as _, ObjectStoreExt as _, PutMode, PutOptions, UpdateVersion};

/// The small objects of a bucket.
#[derive(Debug, Clone)]
pub struct S3Names {
    bucket: S3Bucket,
    /// For pages of a list.
    pages: Policy,
}

impl S3Names {
    /// Those of `bucket`. `pages` is for what no decorator sees: a page of a list.
    #[must_use]
    pub const fn new(bucket: S3Bucket, pages: Policy) -> Self {
        Self { bucket, pages }
    }

    fn version(&self, tag: Option<String>, name: &str) -> Result<Version, BlobError> {
        tag.map(Version).ok_or_else(|| BlobError::Refused {
            place: self.bucket.place(),
            op: "read",
            what: name.to_owned(),
            source: "the server tells no ETag, which a store needs to replace refs safely".into(),
        })
    }
}

#[async_trait]
impl NameStore for S3Names {
    async fn get(&self, name: &str) -> Result<Option<Named>, BlobError> {
        check_name(name)?;
        let ask = Ask::new("read", &name);
        let got = match self.bucket.store().get(&self.bucket.key(name)).await {
            Ok(got) => got,
            Err(Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(self.bucket.error(error, ask)),
        };
        let (size, version) = (got.meta.size, self.version(got.meta.e_tag.clone(), name)?);
        let mut bytes = Vec::new();
        let mut body = got.into_stream();
        while let Some(piece) = body.next().await {
            bytes.extend_from_slice(&piece.map_err(|e| self.bucket.error(e, ask))?);
            if bytes.len() as u64 > OBJECT_MAX {
                return Err(too_long(&self.bucket.place(), name));
            }
        }
        if bytes.len() as u64 != size {
            let how = format!("the answer has {} bytes, and said that it has {size}", bytes.len());
            return Err(self.bucket.broken(ask, how));
        }
        Ok(Some(Named { bytes: bytes.into(), version }))
    }

    async fn put(&self, name: &str, bytes: Bytes, condition: &Condition) -> Result<PutOutcome, BlobError> {
        check_name(name)?;
        if bytes.len() as u64 > OBJECT_MAX {
            return Err(too_long(&self.bucket.place(), name));
        }
        let mode = match condition {
            Condition::Always => PutMode::Overwrite,
            Condition::Absent => PutMode::Create,
            Condition::Unchanged(Version(tag)) => {
                PutMode::Update(UpdateVersion { e_tag: Some(tag.clone()), version: None })
            }
        };
        let conditional = mode != PutMode::Overwrite;
        let options = PutOptions { mode, ..PutOptions::default() };
        match self.bucket.store().put_opts(&self.bucket.key(name), bytes.into(), options).await {
            Ok(put) => Ok(PutOutcome::Done(self.version(put.e_tag, name)?)),
            // 412, or 409 when another conditional put was under way: theirs was first.
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) if conditional => Ok(PutOutcome::Conflict),
            Err(error) => Err(self.bucket.error(error, Ask::new("store", &name))),
        }
    }

    async fn delete(&self, name: &str) -> Result<(), BlobError> {
        check_name(name)?;
        match self.bucket.store().delete(&self.bucket.key(name)).await {
            Err(Error::NotFound { .. }) => Ok(()),
            done => done.map_err(|e| self.bucket.error(e, Ask::new("delete", &name))),
        }
    }

    fn list(&self, below: &str) -> BoxStream<'_, Result<ListedName, BlobError>> {
        let listed = |meta: &ObjectMeta| {
            let name = self.bucket.name(&meta.location)?;
            // Blobs are listed as such.
            let small = !name.starts_with("blobs/") && check_name(name).is_ok();
            small.then(|| ListedName { name: name.to_owned(), size: meta.size, modified: meta.last_modified.into() })
        };
        let all = self.bucket.list(below, self.pages);
        all.try_filter_map(move |meta| futures::future::ready(Ok(listed(&meta)))).boxed()
    }
}
