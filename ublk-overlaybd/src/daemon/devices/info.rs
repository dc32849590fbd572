//! A device as its status shows it.

use super::Now;
use crate::daemon::disk::upper_info;
use crate::daemon::protocol::{DeviceInfo, Requests, State};
use std::sync::atomic::Ordering::Relaxed;

pub(super) fn of(now: &Now) -> DeviceInfo {
    let live = now.live.as_ref();
    let engine = live.and_then(|live| live.engine.as_ref());
    let state = match (now.state, live) {
        (State::Live, Some(live)) if live.device.is_quiesced() => State::Quiesced,
        (state, _) => state,
    };
    DeviceInfo {
        name: now.record.name.clone(),
        state,
        number: live.map(|live| live.device.id()).or(now.record.number),
        path: live.map(|live| live.device.path()),
        size: live.map(|live| live.disk.size()),
        read_only: live.map(|live| live.disk.is_read_only()),
        layers: engine.map(|engine| engine.lower_layers()),
        spec: now.record.spec.clone(),
        requests: live.map(|live| {
            let counters = live.device.counters();
            Requests {
                answered: counters.requests.load(Relaxed),
                offloaded: counters.offloaded.load(Relaxed),
                failed: counters.errors.load(Relaxed),
                timed_out: counters.timeouts.load(Relaxed),
            }
        }),
        upper: engine.and_then(|engine| upper_info(engine)),
    }
}
