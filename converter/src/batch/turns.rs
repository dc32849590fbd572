//! Layers at a time, over all images of a batch: the machine is the same for one image and for ten.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often who waits for a turn looks whether it should still wait.
const LOOK: Duration = Duration::from_millis(100);

/// Turns that all images share.
#[derive(Debug)]
pub(super) struct Turns {
    free: Mutex<usize>,
    changed: Condvar,
}

/// One image's part in them.
#[derive(Debug)]
pub(super) struct Share {
    turns: Arc<Turns>,
    /// How many it has; `None` when they were taken from it.
    held: Mutex<Option<usize>>,
}

/// The right to work on a layer, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn(Arc<Share>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Turns {
    pub(super) fn new(count: usize) -> Arc<Self> {
        Arc::new(Self { free: Mutex::new(count), changed: Condvar::new() })
    }

    fn give_back(&self, count: usize) {
        *lock(&self.free) += count;
        self.changed.notify_all();
    }
}

impl Share {
    pub(super) fn new(turns: &Arc<Turns>) -> Arc<Self> {
        Arc::new(Self { turns: Arc::clone(turns), held: Mutex::new(Some(0)) })
    }

    /// Waits for a turn; `None` when `enough` says that it should not wait any more.
    pub(super) fn take(self: &Arc<Self>, enough: impl Fn() -> bool) -> Option<Turn> {
        let mut free = lock(&self.turns.free);
        loop {
            if enough() {
                return None;
            }
            if *free > 0 {
                let mut held = lock(&self.held);
                *held.as_mut()? += 1;
                *free -= 1;
                drop(held);
                return Some(Turn(Arc::clone(self)));
            }
            free = self.turns.changed.wait_timeout(free, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Gives to others what this image has, since it hangs.
    pub(super) fn give_up(&self) {
        let held = lock(&self.held).take();
        self.turns.give_back(held.unwrap_or(0));
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let had = lock(&self.0.held).as_mut().map(|held| *held -= 1).is_some();
        if had {
            self.0.turns.give_back(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_come_back_once() {
        let turns = Turns::new(2);
        let (one, other) = (Share::new(&turns), Share::new(&turns));
        let (a, b) = (one.take(|| false).unwrap(), one.take(|| false).unwrap());
        let looks = Mutex::new(0);
        let waited = other.take(|| {
            *lock(&looks) += 1;
            *lock(&looks) > 2
        });
        assert!(waited.is_none());
        drop(a);
        let c = other.take(|| false).unwrap();
        one.give_up();
        drop(b);
        assert_eq!(*lock(&turns.free), 1, "what was taken from it does not come back twice");
        assert!(one.take(|| false).is_none());
        drop(c);
        assert_eq!(*lock(&turns.free), 2);
    }
}
