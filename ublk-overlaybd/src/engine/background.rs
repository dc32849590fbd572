//! What a disk does when nobody asks: it frees garbage, and makes durable what has waited long.

use super::Device;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often it looks.
const EVERY: Duration = Duration::from_millis(250);
/// How long a write may wait for a flush that nobody asks for.
const LONGEST: Duration = Duration::from_secs(5);

/// What is known of a disk between one look and the next.
#[derive(Debug)]
pub struct Upkeep {
    flushed: Instant,
}

impl Default for Upkeep {
    fn default() -> Self {
        Self { flushed: Instant::now() }
    }
}

impl Upkeep {
    /// Frees the garbage of `device`, and makes durable what has waited long. For whoever has a thread for many disks.
    pub fn look(&mut self, device: &Device) {
        let Some(stat) = device.stat() else { return };
        if stat.pending == 0 {
            self.flushed = Instant::now();
        } else if self.flushed.elapsed() >= LONGEST {
            if let Err(error) = device.flush() {
                tracing::warn!(%error, "cannot flush in the background");
            }
            self.flushed = Instant::now();
        }
        if let Err(error) = device.reclaim() {
            tracing::warn!(%error, "cannot free what was overwritten");
        }
    }
}

/// The thread that looks after a disk, until it is dropped. One request to the file system at a time, and no memory but the
/// list of what is to be freed, which the disk bounds.
#[derive(Debug)]
pub struct Background {
    stop: Option<Sender<()>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Background {
    /// Looks after `device`.
    #[must_use]
    pub fn of(device: Arc<Device>) -> Self {
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || {
            let mut upkeep = Upkeep::default();
            while stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                upkeep.look(&device);
            }
        });
        Self { stop: Some(stop), thread: Mutex::new(Some(thread)) }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop = None;
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}
