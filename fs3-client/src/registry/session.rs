//! Requests to one repository: which scheme, who we are, and what an answer means.

use super::auth_file::Credentials;
use super::challenge::{Challenge, Token};
use super::http::{Options, causes};
use super::reference::{Place, printable};
use crate::BlobError;
use base64::Engine as _;
use bytes::Bytes;
use oci_client::errors::OciEnvelope;
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use reqwest::{RequestBuilder, Response, StatusCode, Url};
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::{Mutex, OnceCell};

/// Most bytes of an error's text or a token server's answer.
const SMALL_BODY: usize = 256 << 10;
/// A token is renewed so long before its end, for the request to arrive in time.
const MARGIN: Duration = Duration::from_secs(5);

/// What a request needs permission for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Pull,
    Push,
    Delete,
}

impl Action {
    const fn scope(self) -> &'static str {
        match self {
            Self::Pull => "pull",
            Self::Push => "pull,push",
            Self::Delete => "pull,push,delete",
        }
    }
}

/// What a request is for, for messages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Task<'t> {
    /// As a verb.
    pub(super) op: &'static str,
    /// A digest, or the name of something else.
    pub(super) what: &'t str,
}

/// One repository of one registry.
pub(super) struct Session {
    http: reqwest::Client,
    place: Place,
    credentials: Option<Credentials>,
    /// HTTP without TLS will do if there is no TLS.
    lax: bool,
    plain: bool,
    pub(super) timeout: Duration,
    base: OnceCell<Url>,
    /// By [`Action`].
    access: [Mutex<Option<Access>>; 3],
}

/// What the last challenge was met with.
#[derive(Clone, PartialEq)]
struct Access {
    header: HeaderValue,
    until: Option<Instant>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Session({}, {:?})", self.place, self.credentials)
    }
}

impl Session {
    pub(super) fn new(
        http: reqwest::Client,
        place: Place,
        credentials: Option<Credentials>,
        insecure: bool,
        options: &Options,
    ) -> Self {
        let lax = insecure || place.is_loopback();
        let (plain, timeout) = (options.plain_http, options.timeout);
        Self { http, place, credentials, lax, plain, timeout, base: OnceCell::new(), access: Default::default() }
    }

    pub(super) const fn place(&self) -> &Place {
        &self.place
    }

    /// Sends what `build` makes of the client and the repository's address (`…/v2/REPOSITORY`), with whatever the
    /// registry wants to know of us. An answer of any status is a success.
    pub(super) async fn send(
        &self,
        action: Action,
        task: Task<'_>,
        build: impl Fn(&reqwest::Client, &str) -> RequestBuilder,
    ) -> Result<Response, BlobError> {
        let base = self.base(task).await?;
        let used = self.access(action).await;
        let response = self.send_with(build(&self.http, base.as_str()), used.as_ref(), task).await?;
        // Somebody else's 401, behind a redirect, is not a question to us.
        if response.status() != StatusCode::UNAUTHORIZED || !self.is_ours(base, response.url()) {
            return Ok(response);
        }
        let Some(access) = self.meet(action, used, response.headers(), base, task).await? else { return Ok(response) };
        self.send_with(build(&self.http, base.as_str()), Some(&access), task).await
    }

    /// Sends an upload to where the registry said that it should go.
    pub(super) async fn send_to(
        &self,
        url: &Url,
        task: Task<'_>,
        build: impl FnOnce(RequestBuilder) -> RequestBuilder,
    ) -> Result<Response, BlobError> {
        let base = self.base(task).await?;
        // Not to another host: an address may be signed, and our credentials are not for it.
        let access = if self.is_ours(base, url) { self.access(Action::Push).await } else { None };
        let mut request = build(self.http.put(url.clone()));
        if let Some(access) = access {
            request = request.header(AUTHORIZATION, access.header);
        }
        request.send().await.map_err(|e| self.transport(task, &e))
    }

    /// Forgets what a challenge was met with: it is not accepted any more.
    pub(super) async fn forget(&self, action: Action) {
        *self.access[action as usize].lock().await = None;
    }

    async fn send_with(
        &self,
        mut request: RequestBuilder,
        access: Option<&Access>,
        task: Task<'_>,
    ) -> Result<Response, BlobError> {
        if let Some(access) = access {
            request = request.header(AUTHORIZATION, access.header.clone());
        }
        match tokio::time::timeout(self.timeout, request.send()).await {
            Ok(sent) => sent.map_err(|e| self.transport(task, &e)),
            Err(_) => Err(self.late(task)),
        }
    }

    async fn access(&self, action: Action) -> Option<Access> {
        let access = self.access[action as usize].lock().await;
        access.clone().filter(|access| access.until.is_none_or(|until| Instant::now() < until))
    }

    /// Meets the challenge of an answer to a request with `used`; `None` when there is none that we can meet.
    async fn meet(
        &self,
        action: Action,
        used: Option<Access>,
        headers: &HeaderMap,
        base: &Url,
        task: Task<'_>,
    ) -> Result<Option<Access>, BlobError> {
        let challenges = headers.get_all(WWW_AUTHENTICATE).iter().filter_map(|value| value.to_str().ok());
        let Some(challenge) = Challenge::choose(challenges) else { return Ok(None) };
        let mut access = self.access[action as usize].lock().await;
        // Another request may have met it meanwhile.
        if access.is_some() && *access != used {
            return Ok(access.clone());
        }
        let found = match (challenge, &self.credentials) {
            (Challenge::Basic, Some(Credentials::Password { user, password })) => {
                let text = base64::engine::general_purpose::STANDARD.encode(format!("{user}:{password}"));
                Access { header: self.header(task, &format!("Basic {text}"))?, until: None }
            }
            (Challenge::Bearer { .. }, Some(Credentials::Token(token))) => {
                Access { header: self.header(task, &format!("Bearer {token}"))?, until: None }
            }
            (Challenge::Bearer { realm, service }, credentials) => {
                let Token { token, life } =
                    self.token(action, &realm, service.as_deref(), credentials.as_ref(), base, task).await?;
                let until = Instant::now() + life.saturating_sub(MARGIN).max(life / 2);
                Access { header: self.header(task, &format!("Bearer {token}"))?, until: Some(until) }
            }
            (Challenge::Basic, _) => return Ok(None),
        };
        // The same again would be refused again.
        if used.as_ref().is_some_and(|used| used.header == found.header) {
            return Ok(None);
        }
        *access = Some(found.clone());
        Ok(Some(found))
    }

    fn header(&self, task: Task<'_>, text: &str) -> Result<HeaderValue, BlobError> {
        let value = HeaderValue::from_str(text);
        let mut value =
            value.map_err(|_| self.refused(task, "the credentials for it have characters that cannot be sent"))?;
        value.set_sensitive(true);
        Ok(value)
    }

    async fn token(
        &self,
        action: Action,
        realm: &str,
        service: Option<&str>,
        credentials: Option<&Credentials>,
        base: &Url,
        task: Task<'_>,
    ) -> Result<Token, BlobError> {
        let mut url = Url::parse(realm).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
        let url = url.as_mut().ok_or_else(|| {
            self.refused(task, format!("it names a token server that is no address: `{}`", printable(realm, 200)))
        })?;
        if base.scheme() == "https" && url.scheme() == "http" {
            return Err(self.refused(task, format!("it names a token server without TLS: `{}`", printable(realm, 200))));
        }
        let scope = format!("repository:{}:{}", self.place.repository(), action.scope());
        let mut query = vec![("scope", scope.as_str())];
        query.extend(service.map(|service| ("service", service)));
        let request = match credentials {
            Some(Credentials::Identity(token)) => {
                query.extend([("grant_type", "refresh_token"), ("refresh_token", token), ("client_id", "dsec")]);
                let mut form = url.clone();
                form.query_pairs_mut().clear().extend_pairs(query);
                let form = form.query().unwrap_or_default().to_owned();
                self.http.post(url.clone()).header(CONTENT_TYPE, "application/x-www-form-urlencoded").body(form)
            }
            Some(Credentials::Password { user, password }) => {
                url.query_pairs_mut().extend_pairs(query).append_pair("account", user);
                self.http.get(url.clone()).basic_auth(user, Some(password))
            }
            Some(Credentials::Token(_)) | None => {
                url.query_pairs_mut().extend_pairs(query);
                self.http.get(url.clone())
            }
        };
        let host = url.host_str().unwrap_or_default().to_owned();
        let mut response = self.send_with(request, None, task).await?;
        match response.status() {
            StatusCode::OK => {}
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                let who = self.who();
                return Err(self.refused(task, format!("its token server {host} gives no token to {who}")));
            }
            status => {
                let mut error = self.failed(response, task).await;
                if let BlobError::Transient { source, .. } | BlobError::Refused { source, .. } = &mut error {
                    *source = format!("its token server {host} answers {status}").into();
                }
                return Err(error);
            }
        }
        let body = self.body(&mut response, SMALL_BODY, task).await?;
        Token::parse(&body).map_err(|why| self.refused(task, format!("the answer of its token server {host} {why}")))
    }

    /// Who we are to the registry.
    fn who(&self) -> String {
        match &self.credentials {
            Some(Credentials::Password { user, .. }) => format!("user `{}`", printable(user, 100)),
            Some(Credentials::Identity(_) | Credentials::Token(_)) => "the token in the file of credentials".to_owned(),
            None => "somebody without credentials".to_owned(),
        }
    }

    /// The repository's address, its scheme found out where that depends on the server.
    async fn base(&self, task: Task<'_>) -> Result<&Url, BlobError> {
        self.base
            .get_or_try_init(|| async {
                let scheme = if self.plain || (self.lax && !self.speaks_tls().await) { "http" } else { "https" };
                let text = format!("{scheme}://{}/v2/{}", self.place.api_host(), self.place.repository());
                Url::parse(&text)
                    .map_err(|e| self.refused(task, format!("`{}` is no address: {e}", printable(&text, 200))))
            })
            .await
    }

    async fn speaks_tls(&self) -> bool {
        let request = self.http.get(format!("https://{}/v2/", self.place.api_host())).send();
        match tokio::time::timeout(self.timeout.min(Duration::from_secs(5)), request).await {
            Ok(Ok(_)) => true,
            // It does, but not as we want it: that is for the user to hear.
            Ok(Err(e)) => is_certificate(&e),
            Err(_) => false,
        }
    }

    fn is_ours(&self, base: &Url, url: &Url) -> bool {
        (base.scheme(), base.host_str(), base.port_or_known_default())
            == (url.scheme(), url.host_str(), url.port_or_known_default())
    }

    /// At most `limit` bytes of a body.
    pub(super) async fn body(
        &self,
        response: &mut Response,
        limit: usize,
        task: Task<'_>,
    ) -> Result<Vec<u8>, BlobError> {
        let mut body = Vec::new();
        while let Some(bytes) = self.chunk(response, task).await? {
            if body.len() + bytes.len() > limit {
                let how = format!("it has more than the {limit} bytes that are read");
                return Err(self.corrupt(task, how));
            }
            body.extend_from_slice(&bytes);
        }
        Ok(body)
    }

    /// The next bytes of a body; `None` at its end.
    pub(super) async fn chunk(&self, response: &mut Response, task: Task<'_>) -> Result<Option<Bytes>, BlobError> {
        match tokio::time::timeout(self.timeout, response.chunk()).await {
            Ok(read) => read.map_err(|e| self.transport(task, &e)),
            Err(_) => Err(self.late(task)),
        }
    }

    /// What an answer that is no success means.
    pub(super) async fn failed(&self, mut response: Response, task: Task<'_>) -> BlobError {
        let status = response.status();
        let retry_after = response.headers().get(RETRY_AFTER).and_then(|value| wait(value.to_str().ok()?));
        let host = response.url().host_str().unwrap_or_default().to_owned();
        let body = self.body(&mut response, SMALL_BODY, task).await.unwrap_or_default();
        let mut said = said(&body);
        if host != self.place.api_host().split(':').next().unwrap_or_default() {
            said += &format!(" (from {})", printable(&host, 100));
        }
        match status {
            StatusCode::NOT_FOUND => BlobError::NotFound { what: task.what.to_owned(), place: self.place.to_string() },
            StatusCode::REQUEST_TIMEOUT
            | StatusCode::TOO_MANY_REQUESTS
            | StatusCode::INTERNAL_SERVER_ERROR
            | StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT => self.transient(task, retry_after, format!("it answers {status}{said}")),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                self.refused(task, format!("it answers {status} to {}{said}", self.who()))
            }
            _ => self.refused(task, format!("it answers {status}{said}")),
        }
    }

    pub(super) fn corrupt(&self, task: Task<'_>, how: impl Into<String>) -> BlobError {
        BlobError::Corrupt { place: self.place.to_string(), what: task.what.to_owned(), how: how.into() }
    }

    pub(super) fn refused(&self, task: Task<'_>, why: impl Into<String>) -> BlobError {
        let (place, what) = (self.place.to_string(), task.what.to_owned());
        BlobError::Refused { place, op: task.op, what, source: why.into().into() }
    }

    pub(super) fn transient(&self, task: Task<'_>, retry_after: Option<Duration>, why: impl Into<String>) -> BlobError {
        let (place, what) = (self.place.to_string(), task.what.to_owned());
        BlobError::Transient { place, op: task.op, what, retry_after, source: why.into().into() }
    }

    pub(super) fn late(&self, task: Task<'_>) -> BlobError {
        let (place, what) = (self.place.to_string(), task.what.to_owned());
        BlobError::TimedOut { place, op: task.op, what, after: self.timeout }
    }

    fn transport(&self, task: Task<'_>, error: &reqwest::Error) -> BlobError {
        let why = causes(error);
        if error.is_redirect() || error.is_builder() || is_certificate(error) {
            self.refused(task, why)
        } else {
            self.transient(task, None, why)
        }
    }
}

/// Whether a connection failed because of the server's certificate.
fn is_certificate(error: &reqwest::Error) -> bool {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        // What an I/O error wraps is not its source.
        let inner = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        let tls = inner.and_then(|inner| inner.downcast_ref::<rustls::Error>()).or_else(|| error.downcast_ref());
        if matches!(tls, Some(rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented)) {
            return true;
        }
        next = inner.map(|inner| inner as &(dyn std::error::Error + 'static)).or_else(|| error.source());
    }
    false
}

/// The registry's own words on a failure, to follow ours.
fn said(body: &[u8]) -> String {
    let Ok(envelope) = serde_json::from_slice::<OciEnvelope>(body) else { return String::new() };
    let texts: Vec<String> =
        envelope.errors.iter().map(|e| printable(&e.message, 200)).filter(|e| !e.is_empty()).take(3).collect();
    if texts.is_empty() { String::new() } else { format!(": {}", texts.join("; ")) }
}

/// The value of `Retry-After`: seconds, or a date.
fn wait(value: &str) -> Option<Duration> {
    let value = value.trim();
    if let Ok(seconds) = value.parse::<u32>() {
        return Some(Duration::from_secs(seconds.into()));
    }
    let date = httpdate::parse_http_date(value).ok()?;
    Some(date.duration_since(SystemTime::now()).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn waits() {
        assert_eq!(wait(" 7 "), Some(Duration::from_secs(7)));
        assert_eq!(wait("Wed, 21 Oct 2015 07:28:00 GMT"), Some(Duration::ZERO));
        assert!(wait("Wed, 21 Oct 2099 07:28:00 GMT").unwrap() > Duration::from_secs(1000));
        assert_eq!(wait("-1"), None);
        assert_eq!(wait("soon"), None);
    }

    #[test]
    fn words_of_a_registry() {
        let body = br#"{"errors":[{"code":"DENIED","message":"no\nway","detail":[]},{"code":"X"}]}"#;
        assert_eq!(said(body), ": no\u{fffd}way");
        for nothing in [&b"<html>"[..], b"{}", br#"{"errors":[]}"#] {
            assert_eq!(said(nothing), "");
        }
    }

    proptest! {
        #[test]
        fn any_answer(bytes in prop::collection::vec(any::<u8>(), 0..200), text in ".{0,40}") {
            let _ = said(&bytes);
            let _ = wait(&text);
        }
    }
}
