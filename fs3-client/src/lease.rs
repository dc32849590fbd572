//! Leases: who is writing to a store, so that nobody deletes what they rely on.
//!
//! A writer holds a lease for its whole run; whoever removes blobs reads the leases first. A lease is a small object
//! `leases/<id>` that says who holds it and for how long. It lasts from its last renewal, by the store's clock, and is
//! renewed three times in that time; [`SKEW`] is allowed for clocks that differ. In a directory on a local disk its file
//! is locked too, so that the lease of a writer of this boot ends with its process. What a reader needs outlives it (a
//! mount is the kernel's), so a reader's lease ends by time only.

use oci_spec::image::Descriptor;
use serde::{Deserialize, Serialize};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How long a lease lasts after its last renewal.
pub const LASTS: Duration = Duration::from_secs(15 * 60);
/// How long a reader's lease lasts after its last renewal: its mounts outlive its process, and perhaps a night.
pub const READER_LASTS: Duration = Duration::from_secs(24 * 3600);
/// How far the clocks of a store and of its readers may differ.
pub const SKEW: Duration = Duration::from_secs(5 * 60);
/// How long a lease lasts that cannot be read: a later version wrote it.
const UNREADABLE_LASTS: Duration = Duration::from_secs(24 * 3600);

/// The directory of leases.
pub(crate) const LEASES: &str = "leases";

/// What a lease's holder does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LeaseKind {
    /// It writes, and may rely on any blob: nothing that it could have found is deleted before it ends.
    #[default]
    Writer,
    /// It reads what the lease names, for as long as it likes; nobody waits for its end.
    Reader,
    /// It removes blobs: see [`crate::gc`].
    Collector,
}

/// What the object of a lease says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Body {
    pub(crate) version: u32,
    #[serde(default)]
    pub(crate) kind: LeaseKind,
    pub(crate) purpose: String,
    pub(crate) host: String,
    pub(crate) machine: String,
    pub(crate) boot: String,
    pub(crate) pid: u32,
    /// Seconds since 1970.
    pub(crate) started: u64,
    /// Seconds.
    pub(crate) lasts: u64,
    /// What a reader needs: manifests with all that they reach, or single blobs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) holds: Vec<Descriptor>,
}

impl Body {
    /// A lease of this process.
    pub(crate) fn new(purpose: &str, lasts: Duration) -> Self {
        let writer = crate::host::Writer::here();
        Self {
            version: 1,
            kind: LeaseKind::Writer,
            holds: Vec::new(),
            purpose: purpose.to_owned(),
            host: crate::host::name(),
            machine: writer.machine,
            boot: writer.boot,
            pid: writer.pid,
            started: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            lasts: lasts.as_secs(),
        }
    }

    pub(crate) fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("plain strings and numbers always serialise")
    }
}

/// A lease that lives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LeaseInfo {
    /// Its name below `leases/`.
    pub id: String,
    /// What the holder does. One that cannot be read is taken as a writer's.
    pub kind: LeaseKind,
    /// What it is held for: `convert`, `gc`; empty when it cannot be read.
    pub purpose: String,
    /// What a reader needs.
    pub holds: Vec<Descriptor>,
    /// The holder's machine, for people.
    pub host: String,
    /// The holder's machine and its boot, as names in `tmp/` have them.
    pub machine: String,
    /// The holder's boot.
    pub boot: String,
    /// The holder's process.
    pub pid: u32,
    /// When the holder took it, by the holder's clock.
    pub started: SystemTime,
    /// When it was last renewed, by the store's clock.
    pub renewed: SystemTime,
    /// When it ends if it is not renewed, [`SKEW`] included. A lease whose holder was seen to live does not end so.
    pub ends: SystemTime,
}

impl LeaseInfo {
    /// Of an object `bytes` named `id` that was put at `renewed`. What cannot be read is taken as a lease that lasts
    /// long.
    pub(crate) fn new(id: &str, bytes: &[u8], renewed: SystemTime) -> Self {
        match serde_json::from_slice::<Body>(bytes) {
            Ok(body) => Self {
                id: id.to_owned(),
                kind: body.kind,
                holds: body.holds,
                purpose: body.purpose,
                host: body.host,
                machine: body.machine,
                boot: body.boot,
                pid: body.pid,
                started: UNIX_EPOCH.checked_add(Duration::from_secs(body.started)).unwrap_or(renewed),
                renewed,
                // Nobody's lease lasts longer than one that cannot be read.
                ends: renewed + Duration::from_secs(body.lasts).min(UNREADABLE_LASTS) + SKEW,
            },
            Err(e) => {
                tracing::warn!("lease {id} cannot be read: {e}");
                Self {
                    id: id.to_owned(),
                    kind: LeaseKind::Writer,
                    holds: Vec::new(),
                    purpose: String::new(),
                    host: String::new(),
                    machine: String::new(),
                    boot: String::new(),
                    pid: 0,
                    started: renewed,
                    renewed,
                    ends: renewed + UNREADABLE_LASTS + SKEW,
                }
            }
        }
    }

    /// Whether it lasts still at `now`.
    pub(crate) fn lasts(&self, now: SystemTime) -> bool {
        now < self.ends
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_lasts_from_its_renewal() {
        let body = Body::new("convert", Duration::from_secs(60));
        let renewed = UNIX_EPOCH + Duration::from_secs(1_000_000);
        let lease = LeaseInfo::new("x", &body.to_json(), renewed);
        assert_eq!((lease.purpose.as_str(), lease.pid), ("convert", std::process::id()));
        assert!(lease.lasts(renewed + Duration::from_secs(60) + SKEW - Duration::from_secs(1)));
        assert!(!lease.lasts(renewed + Duration::from_secs(60) + SKEW));
    }

    #[test]
    fn what_cannot_be_read_lasts_long_and_nothing_overflows() {
        let now = SystemTime::now();
        assert!(LeaseInfo::new("x", b"{", now).lasts(now + Duration::from_secs(23 * 3600)));
        let endless = Body { started: u64::MAX, lasts: u64::MAX, ..Body::new("x", LASTS) };
        assert!(!LeaseInfo::new("x", &endless.to_json(), now).lasts(now + Duration::from_secs(25 * 3600)));
    }
}
