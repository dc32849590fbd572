//! Manifests and blobs of one repository, one attempt a call.

use super::content_range::ContentRange;
use super::reference::{Place, Which};
use super::session::{Action, Session, Task};
use crate::{BlobError, Digest};
use bytes::Bytes;
use reqwest::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, HeaderMap, RANGE};
use reqwest::{Response, StatusCode};
use std::ops::Range;
use std::sync::Arc;

/// Most bytes of a manifest or index; what registries accept (distribution-spec, "Pushing Manifests").
pub const MANIFEST_LIMIT: usize = 4 << 20;

/// What we understand. Docker's schema 1 is not in it; old registries send that all the same.
const MANIFEST_TYPES: &str = "application/vnd.oci.image.manifest.v1+json, \
    application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.v2+json, \
    application/vnd.docker.distribution.manifest.list.v2+json";

/// One repository of one registry. Cheap to clone; clones share what the registry said of who we are.
#[derive(Debug, Clone)]
pub struct Repository {
    pub(super) session: Arc<Session>,
}

/// A manifest or index as the registry sent it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawManifest {
    /// All of it.
    pub bytes: Vec<u8>,
    /// Its type by the header, lower case and without parameters; empty if there was none.
    pub media_type: String,
    /// Digest of `bytes`.
    pub digest: Digest,
}

impl Repository {
    pub(super) fn new(session: Session) -> Self {
        Self { session: Arc::new(session) }
    }

    /// Which one it is.
    #[must_use]
    pub fn place(&self) -> &Place {
        self.session.place()
    }

    /// Reads a manifest or index, its digest checked where one was asked for or is named in the answer.
    ///
    /// # Errors
    /// [`BlobError`].
    pub async fn manifest(&self, which: &Which) -> Result<RawManifest, BlobError> {
        let what = format!("manifest {which}");
        let task = Task { op: "read", what: &what };
        let mut response = self
            .session
            .send(Action::Pull, task, |http, base| {
                http.get(format!("{base}/manifests/{which}")).header(ACCEPT, MANIFEST_TYPES)
            })
            .await?;
        if response.status() != StatusCode::OK {
            return Err(self.session.failed(response, task).await);
        }
        let media_type = header(response.headers(), CONTENT_TYPE.as_str()).unwrap_or_default();
        let media_type = media_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        let named = named_digest(response.headers());
        let bytes = self.session.body(&mut response, MANIFEST_LIMIT, task).await?;
        let digest = Digest::of(&bytes);
        let expected = if let Which::Digest(digest) = which { Some(*digest) } else { named };
        if let Some(expected) = expected.filter(|expected| *expected != digest) {
            return Err(self.session.corrupt(task, format!("its digest is {digest}, not {expected}")));
        }
        Ok(RawManifest { bytes, media_type, digest })
    }

    /// The digest that a tag stands for; `None` when there is no such manifest, or the registry does not say.
    ///
    /// # Errors
    /// [`BlobError`], other than [`BlobError::NotFound`].
    pub async fn manifest_digest(&self, which: &Which) -> Result<Option<Digest>, BlobError> {
        let what = format!("manifest {which}");
        let task = Task { op: "look for", what: &what };
        let request = self.session.send(Action::Push, task, |http, base| {
            http.head(format!("{base}/manifests/{which}")).header(ACCEPT, MANIFEST_TYPES)
        });
        let response = request.await?;
        match response.status() {
            StatusCode::OK => Ok(named_digest(response.headers())),
            StatusCode::NOT_FOUND => Ok(None),
            _ => Err(self.session.failed(response, task).await),
        }
    }

    /// Writes a manifest under a tag, or under its digest.
    ///
    /// # Errors
    /// [`BlobError`].
    pub async fn put_manifest(&self, which: &Which, media_type: &str, bytes: Bytes) -> Result<(), BlobError> {
        let what = format!("manifest {which}");
        let task = Task { op: "write", what: &what };
        let expected = Digest::of(&bytes);
        let request = self.session.send(Action::Push, task, |http, base| {
            http.put(format!("{base}/manifests/{which}")).header(CONTENT_TYPE, media_type).body(bytes.clone())
        });
        let response = request.await?;
        if !response.status().is_success() {
            return Err(self.session.failed(response, task).await);
        }
        match named_digest(response.headers()) {
            Some(found) if found != expected => {
                Err(self.session.corrupt(task, format!("the registry took it as {found}, it is {expected}")))
            }
            _ => Ok(()),
        }
    }

    /// Length of a blob; `None` when there is none.
    ///
    /// # Errors
    /// [`BlobError`], other than [`BlobError::NotFound`].
    pub async fn blob_size(&self, digest: &Digest) -> Result<Option<u64>, BlobError> {
        self.size_for(Action::Pull, digest).await
    }

    pub(super) async fn size_for(&self, action: Action, digest: &Digest) -> Result<Option<u64>, BlobError> {
        let what = digest.to_string();
        let task = Task { op: "look for", what: &what };
        let response =
            self.session.send(action, task, |http, base| http.head(format!("{base}/blobs/{digest}"))).await?;
        match response.status() {
            StatusCode::OK => {
                let size = header(response.headers(), CONTENT_LENGTH.as_str()).and_then(|text| text.parse().ok());
                size.map(Some).ok_or_else(|| self.session.refused(task, "it does not say how long that is"))
            }
            StatusCode::NOT_FOUND => Ok(None),
            _ => Err(self.session.failed(response, task).await),
        }
    }

    /// Opens bytes `range` of a blob, which is `size` bytes long as far as is known.
    pub(super) async fn open(
        &self,
        digest: &Digest,
        range: Range<u64>,
        size: Option<u64>,
    ) -> Result<RangeBody, BlobError> {
        let what = digest.to_string();
        let task = Task { op: "read", what: &what };
        let session = &self.session;
        let whole = range.start == 0 && size == Some(range.end);
        let request = session.send(Action::Pull, task, |http, base| {
            // A layer must come as it is stored, not compressed once more on the way.
            let request = http.get(format!("{base}/blobs/{digest}")).header(ACCEPT_ENCODING, "identity");
            if whole { request } else { request.header(RANGE, format!("bytes={}-{}", range.start, range.end - 1)) }
        });
        let response = request.await?;
        let length = header(response.headers(), CONTENT_LENGTH.as_str()).and_then(|text| text.parse::<u64>().ok());
        let wrong_size = |found: u64| {
            let expected = size.map_or_else(|| format!("at least {}", range.end), |size| size.to_string());
            session.corrupt(task, format!("it has {found} bytes where {expected} are expected"))
        };
        let wrong = |total: u64| total < range.end || size.is_some_and(|size| total != size);
        let (skip, must_end) = match response.status() {
            StatusCode::OK => {
                if let Some(total) = length.filter(|total| wrong(*total)) {
                    return Err(wrong_size(total));
                }
                (range.start, size == Some(range.end))
            }
            StatusCode::PARTIAL_CONTENT => {
                let text = header(response.headers(), CONTENT_RANGE.as_str()).unwrap_or_default();
                let got = ContentRange::parse(&text);
                let got = got.filter(|got| !whole && got.start == range.start && got.end <= range.end);
                let got = got.ok_or_else(|| {
                    let (start, end) = (range.start, range.end - 1);
                    session.refused(
                        task,
                        format!(
                            "asked for bytes {start} to {end}, it sends `{}`",
                            super::reference::printable(&text, 100)
                        ),
                    )
                })?;
                if let Some(total) = got.total.filter(|total| wrong(*total)) {
                    return Err(wrong_size(total));
                }
                (0, false)
            }
            // The only range that can be refused so is one behind the end.
            StatusCode::RANGE_NOT_SATISFIABLE => {
                return Err(session.corrupt(task, format!("it ends before byte {}", range.end)));
            }
            _ => return Err(session.failed(response, task).await),
        };
        let ignored = response.status() == StatusCode::OK && !whole;
        let left = range.end - range.start;
        Ok(RangeBody { session: Arc::clone(session), response, what, skip, left, must_end, ignored })
    }

    /// Removes a blob.
    pub(super) async fn delete(&self, digest: &Digest) -> Result<(), BlobError> {
        let what = digest.to_string();
        let task = Task { op: "delete", what: &what };
        let request =
            self.session.send(Action::Delete, task, |http, base| http.delete(format!("{base}/blobs/{digest}")));
        let response = request.await?;
        match response.status() {
            StatusCode::NOT_FOUND => Ok(()),
            StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED => {
                Err(BlobError::Unsupported { place: self.place().to_string(), op: "delete a blob" })
            }
            status if status.is_success() => Ok(()),
            _ => Err(self.session.failed(response, task).await),
        }
    }
}

/// A range of a blob on its way.
#[derive(Debug)]
pub(super) struct RangeBody {
    session: Arc<Session>,
    response: Response,
    what: String,
    /// Bytes before the range that come all the same.
    skip: u64,
    /// Bytes of the range that are to come.
    left: u64,
    /// Whether nothing may follow the range.
    must_end: bool,
    /// Whether the server sends the whole, though a part was asked for.
    pub(super) ignored: bool,
}

impl RangeBody {
    /// The next bytes of the range; `None` behind its last.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, BlobError> {
        let task = Task { op: "read", what: &self.what };
        loop {
            if self.left == 0 && !self.must_end {
                return Ok(None);
            }
            let Some(mut bytes) = self.session.chunk(&mut self.response, task).await? else {
                if self.left == 0 {
                    return Ok(None);
                }
                return Err(self.session.transient(task, None, format!("it ends with {} bytes to come", self.left)));
            };
            let skip = usize::try_from(self.skip).unwrap_or(usize::MAX).min(bytes.len());
            let _ = bytes.split_to(skip);
            self.skip -= skip as u64;
            if bytes.len() as u64 > self.left {
                if self.must_end {
                    return Err(self.session.corrupt(task, "it has more bytes than expected"));
                }
                bytes.truncate(usize::try_from(self.left).unwrap_or(usize::MAX));
            }
            self.left -= bytes.len() as u64;
            if !bytes.is_empty() {
                return Ok(Some(bytes));
            }
        }
    }
}

fn header(headers: &HeaderMap, name: &str) -> Option<String> {
    Some(headers.get(name)?.to_str().ok()?.to_owned())
}

/// The digest that the registry says something has, where it is one of ours.
fn named_digest(headers: &HeaderMap) -> Option<Digest> {
    header(headers, "docker-content-digest")?.trim().parse().ok()
}
