//! What is said on the control socket, version 1: JSON over HTTP.
//!
//! These types are the whole protocol; `docs/ublk-overlaybd.openapi.json` is made of them, and a test holds it to them.

use crate::ublk::device::Shape;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;

/// Where a layer's bytes are, or those of a disk: in a file, or by digest and size in the daemon's store.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LayerSource {
    /// The file: an absolute path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub file: Option<PathBuf>,
    /// `sha256:…` of the bytes. A file with others is refused; without a file, it is fetched as it is read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// How many bytes they are: needed without a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
}

/// Which disk. One of `layers`, `config` and `raw`, or none of them for a disk that is a writable layer alone; and at most
/// one of `chain` and `upper`, without which it is read-only.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskSpec {
    /// OverlayBD layers, the bottom one first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerSource>,
    /// overlaybd's `config.v1.json`, which names layers and perhaps a writable one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub config: Option<PathBuf>,
    /// Bytes that are the disk as they are, read-only: an EROFS image, say. The end is filled up with zeros to a sector.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub raw: Option<LayerSource>,
    /// A chain: the file that names what was sealed and what is written to. It is made where it does not exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub chain: Option<PathBuf>,
    /// A writable layer: its two files, which exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upper: Option<UpperFiles>,
    /// Bytes of the disk, where `chain` is made; otherwise that of the layer below.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Leave out the writable layer that `config` names.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// Most bytes that the writable layer may take. Then writes fail with `ENOSPC`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<u64>,
    /// Bytes of the file system that the writable layer leaves alone; 64 MiB where nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserve: Option<u64>,
}

/// The files of a writable layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UpperFiles {
    /// Its data.
    #[schema(value_type = String)]
    pub data: PathBuf,
    /// Its index.
    #[schema(value_type = String)]
    pub index: PathBuf,
}

/// What a device is to be: the body of `PUT /v1/devices/{name}`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceSpec {
    /// Which disk.
    pub disk: DiskSpec,
    /// The form of the device; the daemon's own where nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shape: Option<Shape>,
}

/// Where a device is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// It is being made.
    Adding,
    /// It is being taken over from a daemon that died.
    Recovering,
    /// It serves.
    Live,
    /// It holds requests until `resume`, or until its time is over.
    Quiesced,
    /// It is being removed.
    Removing,
}

/// A device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceInfo {
    /// Its name.
    pub name: String,
    /// Where it is in its life.
    pub state: State,
    /// The kernel's number.
    pub number: Option<u32>,
    /// Its block device.
    #[schema(value_type = Option<String>)]
    pub path: Option<PathBuf>,
    /// Bytes of the disk.
    pub size: Option<u64>,
    /// Whether writing is refused.
    pub read_only: Option<bool>,
    /// Lower layers, those among them that were sealed on this device.
    pub layers: Option<usize>,
    /// What it is made of, as it was asked for.
    pub spec: DeviceSpec,
    /// What it has done since this daemon serves it.
    pub requests: Option<Requests>,
    /// Its writable layer.
    pub upper: Option<UpperInfo>,
}

/// Requests of a device since this daemon serves it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Requests {
    /// Answered.
    pub answered: u64,
    /// Of those, by another thread than the queue's.
    pub offloaded: u64,
    /// Of those, with an error.
    pub failed: u64,
    /// Of those, because they took too long.
    pub timed_out: u64,
}

/// A writable layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UpperInfo {
    /// Mappings in memory.
    pub mappings: u64,
    /// Entries of the index.
    pub slots: u64,
    /// Entries that wait for a flush.
    pub pending: u64,
    /// Bytes of data that were written.
    pub log: u64,
    /// Bytes of those that take space.
    pub allocated: u64,
}

/// All devices.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceList {
    /// By name.
    pub devices: Vec<DeviceInfo>,
}

/// The body of `POST /v1/devices/{name}/resize`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Resize {
    /// Bytes of the disk, more than before.
    pub size: u64,
}

/// The body of `POST /v1/devices/{name}/quiesce`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Quiesce {
    /// Milliseconds after which requests are served again in any case; at most half of the deadline of requests.
    pub hold_ms: u64,
}

/// What a seal did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Sealed {
    /// The file of the layer that was sealed.
    #[schema(value_type = String)]
    pub layer: PathBuf,
    /// All sealed layers of the chain, the bottom one first.
    #[schema(value_type = Vec<String>)]
    pub layers: Vec<PathBuf>,
}

/// The daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// Its version.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// The kernel's release.
    pub kernel: String,
    /// Whether devices can grow on this kernel.
    pub resizes: bool,
    /// How many devices there are.
    pub devices: usize,
    /// Those that were taken over when it started.
    pub recovered: usize,
    /// Those that could not be, and were removed.
    pub lost: usize,
}

/// What happened, a line each of `GET /v1/events`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Counts up from 1 since the daemon started.
    pub number: u64,
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// What.
    pub what: Happened,
    /// To which device; none where it is the daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The sentence for people, where there is more to say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

/// Kinds of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Happened {
    /// The daemon answers, and has taken over what there was.
    Ready,
    /// A device serves.
    Added,
    /// A device serves again.
    Recovered,
    /// A device could not be taken over, and was removed.
    Lost,
    /// Its writable layer was sealed.
    Sealed,
    /// Its disk has another size.
    Resized,
    /// It holds requests.
    Quiesced,
    /// It serves again.
    Resumed,
    /// It is gone.
    Removed,
    /// The daemon ends, and leaves its devices to the next one.
    Ending,
}

/// Every answer that is none of the above.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Failure {
    /// What went wrong.
    pub error: FailureDetail,
}

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FailureDetail {
    /// For programs.
    pub code: FailureCode,
    /// For people: a sentence.
    pub message: String,
    /// What may help.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// Kinds of failures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FailureCode {
    /// The request is wrong (400).
    Invalid,
    /// There is no such device, or no such path (404).
    NotFound,
    /// The name has another disk, or the device is in another state (409).
    Conflict,
    /// A layer's bytes are wrong (422).
    Corrupt,
    /// This kernel or device cannot do it (501).
    Unsupported,
    /// It did not end in time (504).
    TimedOut,
    /// The kernel, a file or a disk failed (500).
    Failed,
}
