//! What devices need when nobody asks.

use super::{Devices, Live, lock};
use crate::daemon::protocol::Happened;
use crate::engine::Upkeep;
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// How often it looks.
const EVERY: Duration = Duration::from_millis(100);

impl Devices {
    /// Starts the one thread that frees garbage, makes durable what waited long, and ends quiescing that lasts too long.
    /// It ends with `devices`.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub fn keep_up(devices: &Arc<Self>) -> std::io::Result<()> {
        let devices = Arc::downgrade(devices);
        thread::Builder::new().name("upkeep".into()).spawn(move || run(&devices)).map(drop)
    }
}

fn run(devices: &Weak<Devices>) {
    let mut cares: HashMap<String, (Weak<Live>, Upkeep)> = HashMap::new();
    loop {
        thread::sleep(EVERY);
        let Some(devices) = devices.upgrade() else { return };
        let slots: Vec<_> = lock(&devices.slots).iter().map(|(name, slot)| (name.clone(), Arc::clone(slot))).collect();
        cares.retain(|_, (live, _)| live.strong_count() > 0);
        for (name, slot) in slots {
            let Some(live) = lock(&slot.now).live.clone() else { continue };
            let is_over = lock(&live.held_until).is_some_and(|until| until <= Instant::now());
            if is_over {
                *lock(&live.held_until) = None;
                live.device.resume();
                devices.events.tell(Happened::Resumed, Some(&name), Some("its time was over".to_owned()));
            }
            let Some(engine) = live.engine.clone() else { continue };
            let (of, care) = cares.entry(name).or_insert_with(|| (Arc::downgrade(&live), Upkeep::default()));
            if !std::ptr::eq(of.as_ptr(), Arc::as_ptr(&live)) {
                (*of, *care) = (Arc::downgrade(&live), Upkeep::default());
            }
            // Whoever removes the device shall not have to wait for this.
            drop(live);
            care.look(&engine);
        }
    }
}
