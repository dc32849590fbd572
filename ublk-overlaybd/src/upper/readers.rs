//! Who may still be reading data that was just overwritten.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Counts readers in two turns, so that one can wait for those that came before without stopping those that come.
#[derive(Debug, Default)]
pub(crate) struct Readers {
    turn: AtomicUsize,
    active: [AtomicUsize; 2],
}

/// A reader, until it is dropped.
#[derive(Debug)]
pub(crate) struct Reading<'a>(&'a AtomicUsize);

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// A reader that is not bound to the layer's borrow, until it is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    readers: Arc<Readers>,
    turn: usize,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.readers.active[self.turn].fetch_sub(1, Ordering::Release);
    }
}

impl Readers {
    /// As [`enter`](Self::enter).
    pub(super) fn hold(self: &Arc<Self>) -> Held {
        let turn = self.turn.load(Ordering::Relaxed) % 2;
        self.active[turn].fetch_add(1, Ordering::Acquire);
        Held { readers: Arc::clone(self), turn }
    }

    /// A reader comes. It must hold the map's lock, shared at least, so that no turn ends meanwhile.
    pub(super) fn enter(&self) -> Reading<'_> {
        let active = &self.active[self.turn.load(Ordering::Relaxed) % 2];
        active.fetch_add(1, Ordering::Acquire);
        Reading(active)
    }

    /// Ends a turn, with the map's lock held exclusively; [`wait`](Self::wait) then waits for its readers. One at a time.
    pub(super) fn end_turn(&self) -> usize {
        self.turn.fetch_add(1, Ordering::Relaxed)
    }

    /// Waits for the readers of an ended turn.
    pub(super) fn wait(&self, turn: usize) {
        while self.active[turn % 2].load(Ordering::Acquire) > 0 {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}
