//! What `/metrics` says, in the text format of Prometheus.

use super::devices::Devices;
use super::protocol::{DeviceInfo, State};
use std::fmt::Write as _;

/// A figure of a device; none where it has no such thing.
type Figure = fn(&DeviceInfo) -> Option<u64>;

/// Name, kind, meaning, and where it is from.
const FIGURES: [(&str, &str, &str, Figure); 9] = [
    ("requests_total", "counter", "Requests answered.", |d| d.requests.map(|r| r.answered)),
    ("requests_offloaded_total", "counter", "Requests that had to wait for a disk or a backend.", |d| {
        d.requests.map(|r| r.offloaded)
    }),
    ("requests_failed_total", "counter", "Requests answered with an error.", |d| d.requests.map(|r| r.failed)),
    ("requests_timed_out_total", "counter", "Requests that had no answer within their deadline.", |d| {
        d.requests.map(|r| r.timed_out)
    }),
    ("size_bytes", "gauge", "Size of the disk.", |d| d.size),
    ("layers", "gauge", "Read-only layers.", |d| d.layers.map(|n| n as u64)),
    ("upper_allocated_bytes", "gauge", "Space that the writable layer takes.", |d| d.upper.map(|u| u.allocated)),
    ("upper_mappings", "gauge", "Mappings of the writable layer, in memory.", |d| d.upper.map(|u| u.mappings)),
    ("upper_pending_entries", "gauge", "Entries of the writable layer that wait for a flush.", |d| {
        d.upper.map(|u| u.pending)
    }),
];

/// The names have no characters that would have to be escaped.
pub(super) fn text(devices: &Devices) -> String {
    let list = devices.list();
    let mut out = String::new();
    for (name, kind, help, figure) in FIGURES {
        let name = format!("ublk_overlaybd_device_{name}");
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for device in &list {
            if let Some(value) = figure(device) {
                let _ = writeln!(out, "{name}{{device=\"{}\"}} {value}", device.name);
            }
        }
    }
    let _ = writeln!(out, "# HELP ublk_overlaybd_devices Devices by state.\n# TYPE ublk_overlaybd_devices gauge");
    let states = [
        (State::Adding, "adding"),
        (State::Recovering, "recovering"),
        (State::Live, "live"),
        (State::Quiesced, "quiesced"),
        (State::Removing, "removing"),
    ];
    for (state, label) in states {
        let count = list.iter().filter(|device| device.state == state).count();
        let _ = writeln!(out, "ublk_overlaybd_devices{{state=\"{label}\"}} {count}");
    }
    let recovered = devices.recovered();
    for (name, help, value) in [
        ("recovered_total", "Devices taken over when the daemon started.", recovered.recovered),
        ("lost_total", "Devices that could not be taken over.", recovered.lost),
    ] {
        let name = format!("ublk_overlaybd_{name}");
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter\n{name} {value}");
    }
    out
}
