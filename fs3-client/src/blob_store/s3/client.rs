//! A bucket: how it is reached, and what its answers mean.

use crate::BlobError;
use async_trait::async_trait;
use bytes::Bytes;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};
use object_store::path::Path;
use object_store::{BackoffConfig, ClientConfigKey, ClientOptions, RetryConfig};
use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Longest answer that is read for what it says of an error.
const ANSWER_MAX: usize = 4 << 10;

/// A bucket and a prefix in it.
#[derive(Debug, Clone)]
pub struct S3Bucket {
    store: Arc<AmazonS3>,
    bucket: String,
    prefix: String,
}

impl S3Bucket {
    /// A bucket as the environment describes the way to it: `AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`,
    /// `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`, `AWS_ALLOW_HTTP`, and the rest of what `object_store`
    /// reads. Nothing is asked of the server yet.
    ///
    /// # Errors
    /// [`BlobError::Refused`] when the environment makes no sense.
    pub fn from_env(bucket: &str, prefix: &str) -> Result<Self, BlobError> {
        Self::build(AmazonS3Builder::from_env(), bucket, prefix)
    }

    /// The same with these settings in place of the environment; names as in the environment.
    ///
    /// # Errors
    /// [`BlobError::Refused`] when they make no sense.
    pub fn from_settings<'s>(
        settings: impl IntoIterator<Item = (&'s str, &'s str)>,
        bucket: &str,
        prefix: &str,
    ) -> Result<Self, BlobError> {
        let known = |builder: AmazonS3Builder, (name, value): (&str, &str)| match name
            .to_ascii_lowercase()
            .parse::<AmazonS3ConfigKey>()
        {
            Ok(key) => builder.with_config(key, value),
            Err(_) => builder,
        };
        Self::build(settings.into_iter().fold(AmazonS3Builder::new(), known), bucket, prefix)
    }

    fn build(builder: AmazonS3Builder, bucket: &str, prefix: &str) -> Result<Self, BlobError> {
        // The client is built without a provider of cryptography of its own; the first one in a process wins, and all
        // that we would install are this one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = |key: ClientConfigKey| AmazonS3ConfigKey::Client(key);
        let store = builder
            .with_bucket_name(bucket)
            // Retries and deadlines are the decorators'. This one only keeps a lost connection from staying for ever.
            .with_config(client(ClientConfigKey::Timeout), "10 minutes")
            .with_config(client(ClientConfigKey::ConnectTimeout), "10 seconds")
            .with_retry(RetryConfig {
                backoff: BackoffConfig::default(),
                max_retries: 0,
                retry_timeout: Duration::ZERO,
            })
            // Not every server has the request that deletes many.
            .with_disable_bulk_delete(true)
            .with_http_connector(Connector)
            .build();
        let prefix = prefix.trim_matches('/').to_owned();
        let place = format!("s3://{bucket}");
        match store {
            Ok(store) => Ok(Self { store: Arc::new(store), bucket: bucket.to_owned(), prefix }),
            Err(source) => {
                let source = Box::new(source);
                Err(BlobError::Refused { place, op: "use", what: "its settings".to_owned(), source })
            }
        }
    }

    /// `s3://bucket/prefix`.
    #[must_use]
    pub fn place(&self) -> String {
        let slash = if self.prefix.is_empty() { "" } else { "/" };
        format!("s3://{}{slash}{}", self.bucket, self.prefix)
    }

    pub(crate) fn store(&self) -> &AmazonS3 {
        &self.store
    }

    /// The key of an object of the store.
    pub(crate) fn key(&self, name: &str) -> Path {
        if self.prefix.is_empty() { Path::from(name) } else { Path::from(format!("{}/{name}", self.prefix)) }
    }

    /// The name below the prefix, of a key in it.
    pub(crate) fn name<'k>(&self, key: &'k Path) -> Option<&'k str> {
        let key = key.as_ref();
        if self.prefix.is_empty() { Some(key) } else { key.strip_prefix(&self.prefix)?.strip_prefix('/') }
    }

    /// An answer that breaks the rules; asking again may help.
    pub(crate) fn broken(&self, ask: Ask<'_>, how: String) -> BlobError {
        BlobError::Transient {
            place: self.place(),
            op: ask.op,
            what: ask.what.to_string(),
            retry_after: None,
            source: how.into(),
        }
    }

    /// Whose fault an error is.
    pub(crate) fn error(&self, error: object_store::Error, ask: Ask<'_>) -> BlobError {
        use object_store::Error as E;
        let (place, op, what) = (self.place(), ask.op, ask.what.to_string());
        if let Some(answer) = Answer::in_chain(&error) {
            let source: crate::blob_store::Cause = answer.to_string().into();
            return match answer.kind() {
                Kind::Again => BlobError::Transient { place, op, what, retry_after: answer.retry_after, source },
                Kind::Never => BlobError::Refused { place, op, what, source },
            };
        }
        match error {
            E::NotFound { .. } => BlobError::NotFound { what, place },
            E::PermissionDenied { .. }
            | E::Unauthenticated { .. }
            | E::NotSupported { .. }
            | E::NotImplemented { .. }
            | E::InvalidPath { .. }
            | E::UnknownConfigurationKey { .. } => BlobError::Refused { place, op, what, source: Box::new(error) },
            // A connection that broke, an answer that makes no sense: the next one may be better.
            _ => {
                let source = innermost(&error).into();
                BlobError::Transient { place, op, what, retry_after: None, source }
            }
        }
    }
}

/// What was asked, for errors.
#[derive(Clone, Copy)]
pub(crate) struct Ask<'a> {
    op: &'static str,
    what: &'a (dyn fmt::Display + Sync),
}

impl<'a> Ask<'a> {
    pub(crate) fn new(op: &'static str, what: &'a (dyn fmt::Display + Sync)) -> Self {
        Self { op, what }
    }
}

/// The last two causes in one line: the client's own levels repeat each other.
fn innermost(error: &(dyn Error + 'static)) -> String {
    let mut chain = vec![error.to_string()];
    let mut source = error.source();
    while let Some(cause) = source {
        chain.push(cause.to_string());
        source = cause.source();
    }
    let last = chain.pop().unwrap_or_default();
    match chain.pop() {
        Some(before) if !before.contains(&last) => format!("{before}: {last}"),
        _ => last,
    }
}

/// An answer that is no success, kept whole enough to judge it. The client would drop its headers.
#[derive(Debug)]
struct Answer {
    status: u16,
    retry_after: Option<Duration>,
    body: String,
}

#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Again,
    Never,
}

impl Answer {
    fn in_chain<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e Self> {
        let mut next = Some(error);
        while let Some(error) = next {
            if let Some(answer) = error.downcast_ref::<Self>() {
                return Some(answer);
            }
            next = error.source();
        }
        None
    }

    /// What stands in an element of the answer, which is XML.
    fn element(&self, name: &str) -> Option<&str> {
        let (_, rest) = self.body.split_once(&format!("<{name}>"))?;
        rest.split_once("</").map(|(value, _)| value)
    }

    fn kind(&self) -> Kind {
        // Codes of S3 that come with 400 although a second attempt helps: what arrived was not what was sent.
        let again = [
            "RequestTimeout",
            "XAmzContentSHA256Mismatch",
            "BadDigest",
            "IncompleteBody",
            "OperationAborted",
            "RequestTimeTooSkewed",
        ];
        match (self.status, self.element("Code")) {
            (501, _) => Kind::Never,
            (408 | 425 | 429 | 500.., _) => Kind::Again,
            (_, Some(code)) if again.contains(&code) => Kind::Again,
            _ => Kind::Never,
        }
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = match (self.status, self.element("Code")) {
            (_, Some("NoSuchBucket")) => Some("there is no such bucket"),
            (_, Some("InvalidAccessKeyId")) => Some("the access key is not known there"),
            (_, Some("SignatureDoesNotMatch")) => Some("the secret key is wrong"),
            (_, Some("AccessDenied")) | (403, None) => Some("access is denied"),
            (401, None) => Some("it wants credentials"),
            _ => None,
        };
        match (known, self.element("Code"), self.element("Message")) {
            (Some(known), ..) => f.write_str(known)?,
            (None, Some(code), Some(message)) => write!(f, "{code}: {message}")?,
            (None, Some(code), None) => f.write_str(code)?,
            (None, None, _) => return write!(f, "the server answered with status {}", self.status),
        }
        write!(f, " (status {})", self.status)
    }
}

impl Error for Answer {}

/// Whether the answer was that the range begins behind the end.
pub(super) fn beyond_the_end(error: &object_store::Error) -> bool {
    Answer::in_chain(error).is_some_and(|answer| answer.status == 416)
}

/// The length that such an answer tells, or 0.
pub(super) fn size_told(error: &object_store::Error) -> u64 {
    Answer::in_chain(error).and_then(|answer| answer.element("ActualObjectSize")?.parse().ok()).unwrap_or(0)
}

#[derive(Debug)]
struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Judging { client }))
    }
}

/// Turns answers that mean a failure into errors that keep what the answer said.
#[derive(Debug)]
struct Judging {
    client: HttpClient,
}

#[async_trait]
impl HttpService for Judging {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let response = self.client.execute(request).await?;
        let status = response.status().as_u16();
        let judged =
            matches!(status, 300..=303 | 305..=308 | 400 | 401 | 403 | 404 | 405 | 408 | 410 | 416 | 425 | 429 | 500..);
        if !judged {
            return Ok(response);
        }
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
        let retry_after = header("retry-after").and_then(|value| wait_of(value, SystemTime::now()));
        let (parts, body) = response.into_parts();
        // A body that breaks off says less, and the status is what counts.
        let bytes = body.bytes().await.unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes[..bytes.len().min(ANSWER_MAX)]).into_owned();
        let answer = Answer { status, retry_after, body: text };
        // The client knows what to make of an object that is not there; a bucket that is not there is another matter.
        if status == 404 && answer.element("Code") != Some("NoSuchBucket") {
            return Ok(HttpResponse::from_parts(parts, Bytes::from(answer.body).into()));
        }
        Err(HttpError::new(HttpErrorKind::Unknown, answer))
    }
}

/// The wait that `Retry-After` asks for (RFC 9110, 10.2.3): seconds, or a date, of which we read the one form that is
/// still written (`Sun, 06 Nov 1994 08:49:37 GMT`).
pub(crate) fn wait_of(value: &str, now: SystemTime) -> Option<Duration> {
    if let Ok(seconds) = value.trim().parse::<u64>() {
        return Some(Duration::from_secs(seconds));
    }
    let mut words = value.trim().strip_suffix(" GMT")?.split_once(", ")?.1.split(' ');
    let day: i64 = words.next()?.parse().ok()?;
    let months = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let month = i64::try_from(months.iter().position(|name| Some(*name) == words.clone().next())?).ok()? + 1;
    let year: i64 = words.nth(1)?.parse().ok()?;
    let time: Vec<i64> = words.next()?.split(':').map(|part| part.parse().ok()).collect::<Option<_>>()?;
    let [hour, minute, second] = time[..] else { return None };
    if !(1970..=9999).contains(&year) || !(1..=31).contains(&day) {
        return None;
    }
    // Days since 1970 of a date of the Gregorian calendar, with years that begin in March.
    let (y, m) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * y + y / 4 - y / 100 + y / 400 + (153 * m + 2) / 5 + day - 1 - 719_468;
    let at = days * 86_400 + hour * 3600 + minute * 60 + second;
    let at = UNIX_EPOCH + Duration::from_secs(u64::try_from(at).ok()?);
    Some(at.duration_since(now).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_in_both_forms() {
        let now = UNIX_EPOCH + Duration::from_secs(784_111_777 - 60);
        assert_eq!(wait_of("7", now), Some(Duration::from_secs(7)));
        assert_eq!(wait_of("Sun, 06 Nov 1994 08:49:37 GMT", now), Some(Duration::from_secs(60)));
        assert_eq!(wait_of("Sat, 06 Nov 1993 08:49:37 GMT", now), Some(Duration::ZERO));
        for bad in ["", "soon", "-1", "Sun, 06 Nov 1994", "Sun, xx Nov 1994 08:49:37 GMT", "Sun, 06 Nov 1994 08:49 GMT"]
        {
            assert_eq!(wait_of(bad, now), None, "{bad}");
        }
    }

    #[test]
    fn answers_are_judged_by_status_and_code() {
        let answer = |status, body: &str| Answer { status, retry_after: None, body: body.to_owned() };
        let xml = |code: &str| format!("<Error><Code>{code}</Code><Message>m</Message></Error>");
        for status in [429, 500, 503, 504] {
            assert_eq!(answer(status, "").kind(), Kind::Again);
        }
        assert_eq!(answer(400, &xml("XAmzContentSHA256Mismatch")).kind(), Kind::Again);
        for never in [answer(403, ""), answer(501, ""), answer(400, &xml("InvalidRequest")), answer(301, "")] {
            assert_eq!(never.kind(), Kind::Never, "{never}");
        }
        assert_eq!(answer(404, &xml("NoSuchBucket")).to_string(), "there is no such bucket (status 404)");
        assert_eq!(answer(400, &xml("Odd")).to_string(), "Odd: m (status 400)");
        assert_eq!(answer(500, "<Code>").to_string(), "the server answered with status 500");
    }
}
