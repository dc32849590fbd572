//! Blobs in an S3 bucket, `<prefix>/blobs/sha256/<hex>`.
//!
//! Large bodies go as multipart uploads: the parts are read in order, hashed, and sent several at a time; the upload is
//! completed only if the digest is right, so a blob appears whole or not at all. Payloads are signed with their SHA-256,
//! which a server compares with what arrives.

mod client;

pub use client::S3Bucket;

use super::retry::Policy;
use super::{BlobError, BlobStore, Body, Listed, Stat, ends_early, other_contents};
use crate::{Digest, Hasher};
use async_trait::async_trait;
use bytes::Bytes;
pub(crate) use client::Ask;
use futures::stream::{self, BoxStream, FuturesUnordered};
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::multipart::{MultipartStore as _, PartId};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore as _, ObjectStoreExt as _, PutPayload};
use std::ops::Range;

/// Bytes of a part. S3 takes parts from 5 MiB, and 10,000 of them.
const PART: u64 = 8 << 20;
/// Most parts of an upload.
const PARTS: u64 = 10_000;
/// Parts of one upload on their way at a time.
const PARALLEL: usize = 4;

/// The blobs of a bucket.
#[derive(Debug, Clone)]
pub struct S3Blobs {
    bucket: S3Bucket,
    /// For parts of an upload and pages of a list.
    parts: Policy,
}

impl S3Blobs {
    /// Those of `bucket`. `parts` is for what no decorator sees: a part of an upload, a page of a list.
    #[must_use]
    pub const fn new(bucket: S3Bucket, parts: Policy) -> Self {
        Self { bucket, parts }
    }

    fn key(&self, digest: &Digest) -> Path {
        self.bucket.key(&format!("blobs/sha256/{}", digest.hex()))
    }

    fn local(&self, digest: &Digest, source: std::io::Error) -> BlobError {
        BlobError::Local { place: self.bucket.place(), op: "read what becomes", what: digest.to_string(), source }
    }

    async fn put_whole(&self, digest: &Digest, body: &Body) -> Result<(), BlobError> {
        let bytes = body.read(0..body.len()).await.map_err(|e| self.local(digest, e))?;
        let found = Digest::of(&bytes);
        if found != *digest {
            return Err(other_contents(&self.bucket.place(), digest, &found));
        }
        let put = self.bucket.store().put(&self.key(digest), bytes.into()).await;
        put.map(drop).map_err(|e| self.bucket.error(e, Ask::new("store", digest)))
    }

    async fn put_in_parts(&self, digest: &Digest, body: &Body) -> Result<(), BlobError> {
        let key = self.key(digest);
        let begin = || async { self.bucket.store().create_multipart(&key).await };
        let ask = Ask::new("store", digest);
        let upload = self.parts.run(|_| async { begin().await.map_err(|e| self.bucket.error(e, ask)) }).await?;
        let sent = self.send_parts(digest, body, &key, &upload).await;
        let completed = match sent {
            Ok(parts) => self.complete(digest, body.len(), &key, &upload, parts).await,
            Err(error) => Err(error),
        };
        if completed.is_err() {
            // A courtesy: what remains costs room until the bucket's lifecycle rule takes it, and is no blob.
            let _ = self.bucket.store().abort_multipart(&key, &upload).await;
        }
        completed
    }

    async fn send_parts(
        &self,
        digest: &Digest,
        body: &Body,
        key: &Path,
        upload: &String,
    ) -> Result<Vec<PartId>, BlobError> {
        // Parts of one size, as some servers want, and few enough.
        let size = PART.max(body.len().div_ceil(PARTS).next_multiple_of(1 << 20));
        let mut hasher = Hasher::default();
        let mut sending = FuturesUnordered::new();
        let mut ids: Vec<Option<PartId>> = Vec::new();
        let mut at = 0;
        loop {
            while at < body.len() && sending.len() < PARALLEL {
                let range = at..(at + size).min(body.len());
                at = range.end;
                let bytes = body.read(range).await.map_err(|e| self.local(digest, e))?;
                hasher.update(&bytes);
                let index = ids.len();
                ids.push(None);
                sending.push(async move {
                    let send = |_| async {
                        let payload = PutPayload::from(bytes.clone());
                        let part = self.bucket.store().put_part(key, upload, index, payload).await;
                        part.map_err(|e| self.bucket.error(e, Ask::new("store a part of", digest)))
                    };
                    self.parts.run(send).await.map(|id| (index, id))
                });
            }
            match sending.try_next().await? {
                Some((index, id)) => ids[index] = Some(id),
                None => break,
            }
        }
        let found = hasher.finish();
        if found != *digest {
            return Err(other_contents(&self.bucket.place(), digest, &found));
        }
        Ok(ids.into_iter().flatten().collect())
    }

    /// Makes the parts a blob. When the answer is lost, or says that there is no such upload (any more), the blob itself
    /// tells whether it was done.
    async fn complete(
        &self,
        digest: &Digest,
        size: u64,
        key: &Path,
        upload: &String,
        parts: Vec<PartId>,
    ) -> Result<(), BlobError> {
        let attempt = |_| {
            let parts = parts.clone();
            async move {
                let completed = self.bucket.store().complete_multipart(key, upload, parts).await;
                let error = completed.err().map(|e| self.bucket.error(e, Ask::new("complete", digest)));
                match (error, self.stat(digest).await) {
                    (_, Ok(stat)) if stat.size == size => Ok(()),
                    (Some(error), _) | (None, Err(error)) => Err(error),
                    (None, Ok(stat)) => {
                        let how = format!("{size} bytes were sent, and it has {}", stat.size);
                        Err(BlobError::Corrupt { place: self.bucket.place(), what: digest.to_string(), how })
                    }
                }
            }
        };
        match self.parts.run(attempt).await {
            // The upload is gone, and no blob came of it: sending it again is what helps.
            Err(BlobError::NotFound { what, place }) => Err(BlobError::Transient {
                place,
                op: "complete",
                what,
                retry_after: None,
                source: "the upload is not there any more".into(),
            }),
            done => done,
        }
    }
}

#[async_trait]
impl BlobStore for S3Blobs {
    async fn stat(&self, digest: &Digest) -> Result<Stat, BlobError> {
        let head = self.bucket.store().head(&self.key(digest)).await;
        let meta = head.map_err(|e| self.bucket.error(e, Ask::new("look at", digest)))?;
        Ok(Stat { size: meta.size, modified: Some(meta.last_modified.into()) })
    }

    async fn read_range(&self, digest: &Digest, range: Range<u64>) -> Result<Bytes, BlobError> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let ask = Ask::new("read", digest);
        let options = GetOptions { range: Some(GetRange::Bounded(range.clone())), ..GetOptions::default() };
        // The client refuses an answer that is not the range: another status than 206, or another `Content-Range`.
        let got = match self.bucket.store().get_opts(&self.key(digest), options).await {
            Ok(got) => got,
            Err(error) if client::beyond_the_end(&error) => {
                return Err(ends_early(&self.bucket.place(), digest, &range, client::size_told(&error)));
            }
            Err(error) => return Err(self.bucket.error(error, ask)),
        };
        if got.range != range {
            return Err(ends_early(&self.bucket.place(), digest, &range, got.meta.size));
        }
        let want = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let mut bytes = Vec::with_capacity(want.min(64 << 20));
        let mut body = got.into_stream();
        while let Some(piece) = body.next().await {
            let piece = piece.map_err(|e| self.bucket.error(e, ask))?;
            if bytes.len() + piece.len() > want {
                return Err(self.bucket.broken(ask, format!("the answer has more than the {want} bytes asked for")));
            }
            bytes.extend_from_slice(&piece);
        }
        if bytes.len() < want {
            let what = format!("the answer has {} of the {want} bytes asked for", bytes.len());
            return Err(self.bucket.broken(ask, what));
        }
        Ok(bytes.into())
    }

    async fn put(&self, digest: &Digest, body: Body) -> Result<(), BlobError> {
        if body.len() <= PART { self.put_whole(digest, &body).await } else { self.put_in_parts(digest, &body).await }
    }

    async fn delete(&self, digest: &Digest) -> Result<(), BlobError> {
        match self.bucket.store().delete(&self.key(digest)).await {
            Err(object_store::Error::NotFound { .. }) => Ok(()),
            done => done.map_err(|e| self.bucket.error(e, Ask::new("delete", digest))),
        }
    }

    fn list(&self) -> BoxStream<'_, Result<Listed, BlobError>> {
        let listed = |meta: &ObjectMeta| {
            let digest = format!("sha256:{}", meta.location.filename()?).parse().ok()?;
            Some(Listed { digest, stat: Stat { size: meta.size, modified: Some(meta.last_modified.into()) } })
        };
        self.bucket
            .list("blobs/sha256", self.parts)
            .try_filter_map(move |meta| futures::future::ready(Ok(listed(&meta))))
            .boxed()
    }
}

impl S3Bucket {
    /// All objects below `below`. A page that fails is asked for again, from the last object that came.
    pub(crate) fn list(&self, below: &str, pages: Policy) -> BoxStream<'_, Result<ObjectMeta, BlobError>> {
        struct At<'b> {
            stream: Option<BoxStream<'b, object_store::Result<ObjectMeta>>>,
            last: Option<Path>,
            ended: bool,
        }
        let below = below.to_owned();
        let prefix = self.key(&below);
        let next = move |mut at: At<'static>| {
            let (prefix, below) = (prefix.clone(), below.clone());
            async move {
                if at.ended {
                    return None;
                }
                let cell = tokio::sync::Mutex::new(&mut at);
                let item = pages
                    .run(|_| async {
                        let mut at = cell.lock().await;
                        let last = at.last.clone();
                        let stream = at.stream.get_or_insert_with(|| match last {
                            Some(last) => self.store().list_with_offset(Some(&prefix), &last),
                            None => self.store().list(Some(&prefix)),
                        });
                        match stream.next().await {
                            Some(Ok(meta)) => {
                                at.last = Some(meta.location.clone());
                                Ok(Some(meta))
                            }
                            Some(Err(error)) => {
                                at.stream = None;
                                Err(self.error(error, Ask::new("list", &below)))
                            }
                            None => Ok(None),
                        }
                    })
                    .await;
                match item {
                    Ok(Some(meta)) => Some((Ok(meta), at)),
                    Ok(None) => None,
                    Err(error) => {
                        at.ended = true;
                        Some((Err(error), at))
                    }
                }
            }
        };
        stream::unfold(At { stream: None, last: None, ended: false }, next).boxed()
    }
}
