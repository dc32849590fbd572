//! The control socket: HTTP/1.1, and JSON but for metrics and events.

use super::devices::{Devices, OperationError};
use super::disk::sentence;
use super::metrics;
use super::protocol::{
    DeviceInfo, DeviceList, DeviceSpec, Event, Failure, FailureCode, FailureDetail, Quiesce, Resize, Sealed, Status,
};
use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post, put};
use serde::de::DeserializeOwned;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;

/// What handlers have.
#[derive(Clone, Debug)]
pub struct Control {
    /// The devices.
    pub devices: Arc<Devices>,
    /// Whether what a daemon left has been taken over.
    pub ready: Arc<AtomicBool>,
    /// Told when an upgrade is asked for.
    pub upgrade: mpsc::Sender<()>,
    /// For each operation; it goes on behind that.
    pub deadline: Duration,
}

/// Makes an answer of a failure.
impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = match self.error.code {
            FailureCode::Invalid => StatusCode::BAD_REQUEST,
            FailureCode::NotFound => StatusCode::NOT_FOUND,
            FailureCode::Conflict => StatusCode::CONFLICT,
            FailureCode::Corrupt => StatusCode::UNPROCESSABLE_ENTITY,
            FailureCode::Unsupported => StatusCode::NOT_IMPLEMENTED,
            FailureCode::TimedOut => StatusCode::GATEWAY_TIMEOUT,
            FailureCode::Failed => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (status, Json(self)).into_response()
    }
}

fn failure(code: FailureCode, message: impl Into<String>, hint: Option<&str>) -> Failure {
    Failure { error: FailureDetail { code, message: message.into(), hint: hint.map(str::to_owned) } }
}

impl From<OperationError> for Failure {
    fn from(error: OperationError) -> Self {
        failure(error.code(), sentence(&error), error.hint())
    }
}

type Answer<T> = Result<Json<T>, Failure>;

impl Control {
    /// Does it on a thread that may wait, and answers within the deadline.
    async fn operate<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Devices) -> Result<T, OperationError> + Send + 'static,
    ) -> Answer<T> {
        let devices = Arc::clone(&self.devices);
        let running = tokio::task::spawn_blocking(move || work(&devices));
        match tokio::time::timeout(self.deadline, running).await {
            Ok(Ok(done)) => Ok(Json(done?)),
            Ok(Err(panicked)) => Err(failure(FailureCode::Failed, format!("a bug: {panicked}"), None)),
            Err(_) => {
                let message = format!("it did not end within {:?}", self.deadline);
                Err(failure(FailureCode::TimedOut, message, Some("it goes on: ask again, for the same thing")))
            }
        }
    }
}

fn parse<T: DeserializeOwned>(body: &Bytes) -> Result<T, Failure> {
    serde_json::from_slice(body).map_err(|error| failure(FailureCode::Invalid, format!("the body: {error}"), None))
}

/// A path of the API, and its methods.
struct Route {
    path: &'static str,
    methods: MethodRouter<Control>,
}

fn routes() -> Vec<Route> {
    let route = |path, methods| Route { path, methods };
    vec![
        route("/healthz", get(health)),
        route("/metrics", get(metrics_text)),
        route("/v1/status", get(status)),
        route("/v1/openapi.json", get(openapi)),
        route("/v1/events", get(events)),
        route("/v1/upgrade", post(upgrade)),
        route("/v1/devices", get(list)),
        route("/v1/devices/{name}", put(add).get(stat).delete(remove)),
        route("/v1/devices/{name}/seal", post(seal)),
        route("/v1/devices/{name}/resize", post(resize)),
        route("/v1/devices/{name}/quiesce", post(quiesce)),
        route("/v1/devices/{name}/resume", post(resume)),
    ]
}

/// The whole API.
pub fn router(control: Control) -> axum::Router {
    let routes = routes().into_iter();
    let router = routes.fold(axum::Router::new(), |router, Route { path, methods }| {
        router.route(
            path,
            methods.fallback(|| async { failure(FailureCode::Invalid, "this path has no such method", None) }),
        )
    });
    let unknown = || async { failure(FailureCode::NotFound, "there is no such path", Some("see /v1/openapi.json")) };
    router.fallback(unknown).with_state(control)
}

#[utoipa::path(get, path = "/healthz", responses(
    (status = 200, description = "It serves, and has taken over what there was"),
    (status = 503, description = "Not yet")))]
async fn health(State(control): State<Control>) -> Response {
    if control.ready.load(Ordering::Acquire) {
        (StatusCode::OK, "ready\n").into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "devices are being taken over\n").into_response()
    }
}

#[utoipa::path(get, path = "/metrics", responses((status = 200, description = "Prometheus' text format", content_type = "text/plain")))]
async fn metrics_text(State(control): State<Control>) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4")];
    (kind, metrics::text(&control.devices)).into_response()
}

#[utoipa::path(get, path = "/v1/status", responses((status = 200, body = Status)))]
async fn status(State(control): State<Control>) -> Json<Status> {
    let recovered = control.devices.recovered();
    Json(Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        resizes: control.devices.resizes(),
        devices: control.devices.list().len(),
        recovered: recovered.recovered,
        lost: recovered.lost,
    })
}

#[utoipa::path(get, path = "/v1/openapi.json", responses((status = 200, description = "This document")))]
async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], document()).into_response()
}

#[derive(serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct After {
    /// Only events with higher numbers.
    #[serde(default)]
    after: u64,
    /// Whether to go on with what happens from now on; otherwise it ends with what has happened.
    #[serde(default)]
    follow: bool,
}

#[utoipa::path(get, path = "/v1/events", params(After), responses(
    (status = 200, body = Event, description = "A line of JSON each", content_type = "application/x-ndjson"),
    (status = 400, body = Failure)))]
async fn events(
    State(control): State<Control>,
    query: Result<Query<After>, axum::extract::rejection::QueryRejection>,
) -> Response {
    let Query(After { after, follow }) = match query {
        Ok(query) => query,
        Err(error) => return failure(FailureCode::Invalid, error.body_text(), None).into_response(),
    };
    let (kept, rest) = control.devices.events.after(after);
    let line = |event: &Event| {
        let mut line = serde_json::to_vec(event).unwrap_or_default();
        line.push(b'\n');
        Ok::<_, std::convert::Infallible>(Bytes::from(line))
    };
    let kept: Vec<_> = kept.iter().map(line).collect();
    let kept = futures::stream::iter(kept);
    let kind = [(header::CONTENT_TYPE, "application/x-ndjson")];
    if !follow {
        return (kind, Body::from_stream(kept)).into_response();
    }
    let rest = futures::stream::unfold(rest, move |mut rest| async move {
        loop {
            match rest.recv().await {
                Ok(event) => return Some((line(&event), rest)),
                // What it missed shows in the numbers.
                Err(tokio::sync::broadcast::error::RecvError::Lagged(_)) => {}
                Err(tokio::sync::broadcast::error::RecvError::Closed) => return None,
            }
        }
    });
    (kind, Body::from_stream(futures::StreamExt::chain(kept, rest))).into_response()
}

#[utoipa::path(post, path = "/v1/upgrade", responses(
    (status = 202, description = "The daemon becomes the program that is at its path now, and takes its devices over")))]
async fn upgrade(State(control): State<Control>) -> StatusCode {
    // If one is asked for already, that will do.
    let _ = control.upgrade.try_send(());
    StatusCode::ACCEPTED
}

#[utoipa::path(get, path = "/v1/devices", responses((status = 200, body = DeviceList)))]
async fn list(State(control): State<Control>) -> Answer<DeviceList> {
    control.operate(|devices| Ok(DeviceList { devices: devices.list() })).await
}

#[utoipa::path(put, path = "/v1/devices/{name}", params(("name" = String, Path)), request_body = DeviceSpec, responses(
    (status = 200, body = DeviceInfo, description = "It is there"),
    (status = 400, body = Failure), (status = 409, body = Failure, description = "The name has another disk, or somebody else has the writable layer"),
    (status = 422, body = Failure, description = "A layer is corrupt"), (status = 500, body = Failure), (status = 501, body = Failure), (status = 504, body = Failure)))]
async fn add(State(control): State<Control>, Path(name): Path<String>, body: Bytes) -> Answer<DeviceInfo> {
    let spec: DeviceSpec = parse(&body)?;
    control.operate(move |devices| devices.add(&name, &spec)).await
}

#[utoipa::path(get, path = "/v1/devices/{name}", params(("name" = String, Path)), responses(
    (status = 200, body = DeviceInfo), (status = 404, body = Failure)))]
async fn stat(State(control): State<Control>, Path(name): Path<String>) -> Answer<DeviceInfo> {
    control.operate(move |devices| devices.stat(&name)).await
}

#[derive(serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Force {
    /// Even if it is mounted: who uses it gets errors.
    #[serde(default)]
    force: bool,
}

#[utoipa::path(delete, path = "/v1/devices/{name}", params(("name" = String, Path), Force), responses(
    (status = 204, description = "It is gone"), (status = 404, body = Failure),
    (status = 409, body = Failure, description = "It is in use"), (status = 500, body = Failure), (status = 504, body = Failure)))]
async fn remove(
    State(control): State<Control>,
    Path(name): Path<String>,
    query: Result<Query<Force>, axum::extract::rejection::QueryRejection>,
) -> Result<StatusCode, Failure> {
    let Query(Force { force }) = query.map_err(|error| failure(FailureCode::Invalid, error.body_text(), None))?;
    control.operate(move |devices| devices.remove(&name, force)).await.map(|_| StatusCode::NO_CONTENT)
}

#[utoipa::path(post, path = "/v1/devices/{name}/seal", params(("name" = String, Path)), responses(
    (status = 200, body = Sealed), (status = 404, body = Failure), (status = 409, body = Failure),
    (status = 500, body = Failure), (status = 501, body = Failure, description = "It has no chain"), (status = 504, body = Failure)))]
async fn seal(State(control): State<Control>, Path(name): Path<String>) -> Answer<Sealed> {
    control.operate(move |devices| devices.seal(&name)).await
}

#[utoipa::path(post, path = "/v1/devices/{name}/resize", params(("name" = String, Path)), request_body = Resize, responses(
    (status = 200, body = DeviceInfo), (status = 400, body = Failure), (status = 404, body = Failure),
    (status = 409, body = Failure), (status = 500, body = Failure), (status = 501, body = Failure), (status = 504, body = Failure)))]
async fn resize(State(control): State<Control>, Path(name): Path<String>, body: Bytes) -> Answer<DeviceInfo> {
    let Resize { size } = parse(&body)?;
    control.operate(move |devices| devices.resize(&name, size)).await
}

#[utoipa::path(post, path = "/v1/devices/{name}/quiesce", params(("name" = String, Path)), request_body = Quiesce, responses(
    (status = 200, body = DeviceInfo, description = "What was answered is durable, and requests are held"),
    (status = 400, body = Failure), (status = 404, body = Failure), (status = 409, body = Failure), (status = 500, body = Failure), (status = 504, body = Failure)))]
async fn quiesce(State(control): State<Control>, Path(name): Path<String>, body: Bytes) -> Answer<DeviceInfo> {
    let Quiesce { hold_ms } = parse(&body)?;
    control.operate(move |devices| devices.quiesce(&name, Duration::from_millis(hold_ms))).await
}

#[utoipa::path(post, path = "/v1/devices/{name}/resume", params(("name" = String, Path)), responses(
    (status = 200, body = DeviceInfo), (status = 404, body = Failure), (status = 409, body = Failure)))]
async fn resume(State(control): State<Control>, Path(name): Path<String>) -> Answer<DeviceInfo> {
    control.operate(move |devices| devices.resume(&name)).await
}

#[derive(utoipa::OpenApi)]
#[openapi(
    info(title = "ublk-overlaybd", description = "Disks as /dev/ublkbN. Served on a Unix socket."),
    paths(
        health,
        metrics_text,
        status,
        openapi,
        events,
        upgrade,
        list,
        add,
        stat,
        remove,
        seal,
        resize,
        quiesce,
        resume
    ),
    components(schemas(Failure))
)]
struct Api;

/// The description of the API, as indented JSON.
#[must_use]
pub fn document() -> String {
    use utoipa::OpenApi as _;
    let mut text = Api::openapi().to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// `UPDATE=1` writes it.
    #[test]
    fn the_document_is_the_code() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/ublk-overlaybd.openapi.json");
        if std::env::var_os("UPDATE").is_some() {
            std::fs::write(&path, document()).unwrap();
        }
        let kept = std::fs::read_to_string(&path).unwrap();
        assert!(kept == document(), "docs/ublk-overlaybd.openapi.json is old: run this test with UPDATE=1");
    }

    /// Every path that is served is described, and the other way round.
    #[test]
    fn every_route_is_described() {
        let described: serde_json::Value = serde_json::from_str(&document()).unwrap();
        let described: BTreeSet<_> = described["paths"].as_object().unwrap().keys().cloned().collect();
        let served: BTreeSet<_> = routes().iter().map(|route| route.path.to_owned()).collect();
        assert_eq!(served, described);
    }
}
