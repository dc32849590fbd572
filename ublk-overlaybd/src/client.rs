//! Calls to the daemon.

use crate::daemon::protocol::{
    DeviceInfo, DeviceList, DeviceSpec, Event, Failure, FailureDetail, Quiesce, Resize, Sealed, Status,
};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixStream;

/// Why a call did not do what it should.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is nobody.
    #[error("{socket}: no daemon answers there")]
    Unreachable {
        /// Where.
        socket: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// It did not answer within the deadline.
    #[error("{socket}: the daemon did not answer within {after:?}")]
    TimedOut {
        /// Where.
        socket: PathBuf,
        /// The deadline.
        after: Duration,
    },
    /// It said no.
    #[error("{}", .0.message)]
    Refused(FailureDetail),
    /// Its answer is not one of this version.
    #[error("{socket}: the answer is not understood: {why}")]
    Answer {
        /// Where.
        socket: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

/// Beyond the daemon's own deadline, by which it answers.
const DEADLINE: Duration = Duration::from_secs(60);

/// A daemon, by its socket. Each call is a connection of its own.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
}

impl Client {
    /// Of the daemon that listens at `socket`. Nothing is asked of it yet.
    #[must_use]
    pub fn new(socket: &Path) -> Self {
        Self { socket: socket.to_owned() }
    }

    fn unreachable(&self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> ClientError {
        ClientError::Unreachable { socket: self.socket.clone(), source: std::io::Error::other(source) }
    }

    async fn request(&self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, ClientError> {
        let stream = UnixStream::connect(&self.socket).await;
        let stream = stream.map_err(|source| ClientError::Unreachable { socket: self.socket.clone(), source })?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| self.unreachable(e))?;
        // It ends with the answer, or with whoever waits for it.
        tokio::spawn(connection);
        sender.send_request(request).await.map_err(|e| self.unreachable(e))
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<Response<Incoming>, ClientError> {
        let body = body.map(serde_json::to_vec).transpose().map_err(|e| self.answer(e.to_string()))?;
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "daemon")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body.unwrap_or_default())))
            .map_err(|e| self.answer(e.to_string()))?;
        let sent = tokio::time::timeout(DEADLINE, self.request(request)).await;
        let response = sent.map_err(|_| ClientError::TimedOut { socket: self.socket.clone(), after: DEADLINE })??;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let failure: Failure = self.json(response).await.map_err(|error| match error {
            ClientError::Answer { why, .. } => self.answer(format!("{status}: {why}")),
            other => other,
        })?;
        Err(ClientError::Refused(failure.error))
    }

    fn answer(&self, why: String) -> ClientError {
        ClientError::Answer { socket: self.socket.clone(), why }
    }

    async fn json<T: DeserializeOwned>(&self, response: Response<Incoming>) -> Result<T, ClientError> {
        let body = response.into_body().collect().await.map_err(|e| self.answer(e.to_string()))?.to_bytes();
        serde_json::from_slice(&body).map_err(|e| self.answer(e.to_string()))
    }

    async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, ClientError> {
        let response = self.send(method, path, body).await?;
        self.json(response).await
    }

    /// The daemon itself.
    ///
    /// # Errors
    /// See [`ClientError`]; as for all calls.
    pub async fn status(&self) -> Result<Status, ClientError> {
        self.call(Method::GET, "/v1/status", NOTHING).await
    }

    /// Whether it has taken over what there was.
    ///
    /// # Errors
    /// Nobody answers.
    pub async fn is_ready(&self) -> Result<bool, ClientError> {
        match self.send(Method::GET, "/healthz", NOTHING).await {
            Ok(response) => Ok(response.status() == StatusCode::OK),
            // Not JSON: devices are being taken over.
            Err(ClientError::Answer { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Makes a device, or gives the one that is there.
    ///
    /// # Errors
    /// As for all calls.
    pub async fn add(&self, name: &str, spec: &DeviceSpec) -> Result<DeviceInfo, ClientError> {
        self.call(Method::PUT, &device(name, ""), Some(spec)).await
    }

    /// All devices, by name.
    ///
    /// # Errors
    /// As for all calls.
    pub async fn list(&self) -> Result<Vec<DeviceInfo>, ClientError> {
        let list: DeviceList = self.call(Method::GET, "/v1/devices", NOTHING).await?;
        Ok(list.devices)
    }

    /// A device.
    ///
    /// # Errors
    /// As for all calls.
    pub async fn stat(&self, name: &str) -> Result<DeviceInfo, ClientError> {
        self.call(Method::GET, &device(name, ""), NOTHING).await
    }

    /// Removes a device; one that is in use only with `force`.
    ///
    /// # Errors
    /// As for all calls.
    pub async fn remove(&self, name: &str, force: bool) -> Result<(), ClientError> {
        let query = if force { "?force=true" } else { "" };
        self.send(Method::DELETE, &device(name, query), NOTHING).await.map(drop)
    }

    /// Seals its writable layer.
    ///
    /// # Errors
    /// As for all calls.
    pub async fn seal(&self, name: &str) -> Result<Sealed, ClientError> {
        self.call(Method::POST, &device(name, "/seal"), NOTHING).await
    }

    /// Makes it larger.
    ///
    /// # Errors
    /// As for all calls.
    pub async fn resize(&self, name: &str, size: u64) -> Result<DeviceInfo, ClientError> {
        self.call(Method::POST, &device(name, "/resize"), Some(&Resize { size })).await
    }

    /// Makes its files one moment's, and holds its requests for at most `hold`.
    ///
    /// # Errors
    /// As for all calls.
    pub async fn quiesce(&self, name: &str, hold: Duration) -> Result<DeviceInfo, ClientError> {
        let hold_ms = u64::try_from(hold.as_millis()).unwrap_or(u64::MAX);
        self.call(Method::POST, &device(name, "/quiesce"), Some(&Quiesce { hold_ms })).await
    }

    /// Lets it go on.
    ///
    /// # Errors
    /// As for all calls.
    pub async fn resume(&self, name: &str) -> Result<DeviceInfo, ClientError> {
        self.call(Method::POST, &device(name, "/resume"), NOTHING).await
    }

    /// Has the daemon become the program that is at its path now. It answers before it does.
    ///
    /// # Errors
    /// As for all calls.
    pub async fn upgrade(&self) -> Result<(), ClientError> {
        self.send(Method::POST, "/v1/upgrade", NOTHING).await.map(drop)
    }

    /// Calls `each` with the events after number `after`, and, with `follow`, with those to come, until it says `false` or
    /// the daemon ends.
    ///
    /// # Errors
    /// As for all calls.
    pub async fn events(
        &self,
        after: u64,
        follow: bool,
        mut each: impl FnMut(Event) -> bool,
    ) -> Result<(), ClientError> {
        let path = format!("/v1/events?after={after}&follow={follow}");
        let mut body = self.send(Method::GET, &path, NOTHING).await?.into_body();
        let mut waiting = Vec::new();
        while let Some(frame) = body.frame().await {
            let Ok(part) = frame.map_err(|error| self.answer(error.to_string()))?.into_data() else { continue };
            waiting.extend_from_slice(&part);
            while let Some(end) = waiting.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = waiting.drain(..=end).collect();
                let event =
                    serde_json::from_slice(&line).map_err(|error: serde_json::Error| self.answer(error.to_string()))?;
                if !each(event) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

/// No body.
const NOTHING: Option<&()> = None;

fn device(name: &str, rest: &str) -> String {
    // Names that are none are refused there, but they must not become other paths.
    let name: String = name
        .bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'_' | b'-' => char::from(byte).to_string(),
            other => format!("%{other:02X}"),
        })
        .collect();
    format!("/v1/devices/{name}{rest}")
}
