//! Blobs to a repository, in one request each, hashed on the way.

use super::repository::Repository;
use super::session::{Action, Task};
use crate::{BlobError, Body, Digest, Hasher};
use bytes::Bytes;
use futures::Stream;
use futures::stream;
use reqwest::header::{CONTENT_LENGTH, CONTENT_TYPE, LOCATION};
use reqwest::{StatusCode, Url};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Bytes read at a time.
const PIECE: u64 = 1 << 20;
/// A registry that has all bytes may need so many times longer to answer: it copies them to their place first.
const AFTER: u32 = 5;

/// What became of a blob that was to be put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// It was there.
    Already,
    /// It is there now.
    Now,
}

/// What is told of bytes on their way: how many more.
pub(super) type OnBytes = Arc<dyn Fn(u64) + Send + Sync>;

/// How far an upload is.
struct Watch {
    sent: AtomicU64,
    /// The bytes are not what their digest says.
    corrupt: AtomicBool,
    on_bytes: OnBytes,
}

impl Repository {
    /// Makes `body` the blob `digest`, unless it is there. `on_bytes` is told of bytes as they leave; those of an
    /// attempt that failed were told, too.
    ///
    /// # Errors
    /// [`BlobError::Corrupt`] when `body` has another digest: the registry has not got its last piece then.
    pub async fn put_blob(&self, digest: &Digest, body: &Body, on_bytes: OnBytes) -> Result<Sent, BlobError> {
        match self.size_for(Action::Push, digest).await? {
            Some(size) if size == body.len() => return Ok(Sent::Already),
            Some(size) => {
                let what = digest.to_string();
                let how = format!("it has {size} bytes there, {} here", body.len());
                return Err(self.session.corrupt(Task { op: "write", what: &what }, how));
            }
            None => {}
        }
        self.upload(digest, body, on_bytes).await?;
        Ok(Sent::Now)
    }

    async fn upload(&self, digest: &Digest, body: &Body, on_bytes: OnBytes) -> Result<(), BlobError> {
        let what = digest.to_string();
        let task = Task { op: "write", what: &what };
        let session = &self.session;
        let corrupt = || session.corrupt(task, "what was to be sent has another digest");
        if body.is_empty() && Digest::of(b"") != *digest {
            return Err(corrupt());
        }
        let begin = session.send(Action::Push, task, |http, base| {
            http.post(format!("{base}/blobs/uploads/")).header(CONTENT_LENGTH, 0)
        });
        let begun = begin.await?;
        if begun.status() != StatusCode::ACCEPTED {
            return Err(session.failed(begun, task).await);
        }
        let location = begun.headers().get(LOCATION).and_then(|value| value.to_str().ok());
        let location = location.and_then(|text| begun.url().join(text).ok());
        let mut location = location.ok_or_else(|| session.refused(task, "it does not say where to send it"))?;
        let downgraded = |from: &Url, to: &Url| from.scheme() == "https" && to.scheme() != "https";
        if !matches!(location.scheme(), "http" | "https") || downgraded(begun.url(), &location) {
            return Err(session.refused(task, "it wants it sent without TLS"));
        }
        location.query_pairs_mut().append_pair("digest", &what);

        let watch = Arc::new(Watch { sent: AtomicU64::new(0), corrupt: AtomicBool::new(false), on_bytes });
        let pieces = pieces(body.clone(), *digest, Arc::clone(&watch));
        let put = session.send_to(&location, task, |request| {
            request
                .header(CONTENT_TYPE, "application/octet-stream")
                .header(CONTENT_LENGTH, body.len())
                .body(reqwest::Body::wrap_stream(pieces))
        });
        let answer = tokio::select! {
            answer = put => answer,
            () = stalled(&watch, body.len(), session.timeout) => Err(session.late(task)),
        };
        if watch.corrupt.load(Ordering::Relaxed) {
            return Err(corrupt());
        }
        let answer = answer?;
        match answer.status() {
            status if status.is_success() => Ok(()),
            // The token's time was over before the blob's: the next attempt asks for another.
            StatusCode::UNAUTHORIZED => {
                session.forget(Action::Push).await;
                Err(session.transient(task, None, "it does not accept our token any more"))
            }
            // The upload was forgotten, or its bytes were damaged on the way.
            StatusCode::NOT_FOUND | StatusCode::BAD_REQUEST | StatusCode::RANGE_NOT_SATISFIABLE => {
                Err(session.transient(task, None, session.failed(answer, task).await.to_string()))
            }
            _ => Err(session.failed(answer, task).await),
        }
    }
}

/// Comes to its end when nothing was sent for too long.
async fn stalled(watch: &Watch, len: u64, timeout: Duration) {
    let mut last = 0;
    loop {
        tokio::time::sleep(if last == len { timeout * AFTER } else { timeout }).await;
        let sent = watch.sent.load(Ordering::Relaxed);
        if sent == last {
            return;
        }
        last = sent;
    }
}

/// The body in pieces, the last of which comes only if the digest is right.
fn pieces(body: Body, digest: Digest, watch: Arc<Watch>) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    stream::try_unfold((0, Hasher::default()), move |(at, mut hasher)| {
        let (body, watch) = (body.clone(), Arc::clone(&watch));
        async move {
            if at >= body.len() {
                return Ok(None);
            }
            let len = PIECE.min(body.len() - at);
            let last = at + len == body.len();
            let work = move || {
                let piece = read(&body, at, len)?;
                hasher.update(&piece);
                Ok((piece, hasher))
            };
            let done: io::Result<_> = tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?;
            let (piece, hasher) = done?;
            if last && hasher.clone().finish() != digest {
                watch.corrupt.store(true, Ordering::Relaxed);
                return Err(io::Error::other("the digest is another"));
            }
            watch.sent.fetch_add(len, Ordering::Relaxed);
            (watch.on_bytes)(len);
            Ok(Some((piece, (at + len, hasher))))
        }
    })
}

fn read(body: &Body, at: u64, len: u64) -> io::Result<Bytes> {
    // Both are at most the body's length, and a body in memory has one that fits.
    let (from, size) =
        (usize::try_from(at).map_err(io::Error::other)?, usize::try_from(len).map_err(io::Error::other)?);
    match body {
        Body::Bytes(bytes) => Ok(bytes.slice(from..from + size)),
        Body::File { file, .. } => {
            let mut piece = vec![0; size];
            file.read_exact_at(&mut piece, at)?;
            Ok(piece.into())
        }
    }
}
