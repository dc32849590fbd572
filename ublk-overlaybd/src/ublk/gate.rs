//! A door in front of a device: closed, it holds requests until it is opened, and it tells when nobody is inside.

use super::offload::Wake;
use futures::channel::oneshot;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Set while the door is closed; the other bits count who is inside.
const CLOSED: u64 = 1 << 63;

/// Who is held: how to let it go, and how to wake it.
type Held = Vec<(oneshot::Sender<()>, Arc<dyn Wake>)>;

/// See the [module](self).
#[derive(Default)]
pub(super) struct Gate {
    word: AtomicU64,
    held: Mutex<Held>,
    left: Condvar,
}

impl Gate {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Goes in; or gives what to wait for before the next attempt. `queue` is woken then.
    pub(super) fn enter(&self, queue: &Arc<dyn Wake>) -> Result<(), oneshot::Receiver<()>> {
        if self.word.fetch_add(1, Ordering::AcqRel) & CLOSED == 0 {
            return Ok(());
        }
        self.leave();
        let (go, wait) = oneshot::channel();
        let mut held = self.held();
        if self.word.load(Ordering::Acquire) & CLOSED == 0 {
            // Opened meanwhile, by somebody who did not see us.
            let _ = go.send(());
            queue.wake();
        } else {
            held.push((go, Arc::clone(queue)));
        }
        Err(wait)
    }

    /// Goes out.
    pub(super) fn leave(&self) {
        if self.word.fetch_sub(1, Ordering::AcqRel) == CLOSED | 1 {
            drop(self.held());
            self.left.notify_all();
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.word.load(Ordering::Acquire) & CLOSED != 0
    }

    /// Closes it, and waits until nobody is inside; whether that was within `longest`. It stays closed in any case.
    pub(super) fn close(&self, longest: Duration) -> bool {
        let until = Instant::now() + longest;
        self.word.fetch_or(CLOSED, Ordering::AcqRel);
        let mut held = self.held();
        while self.word.load(Ordering::Acquire) & !CLOSED != 0 {
            let rest = until.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return false;
            }
            held = self.left.wait_timeout(held, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Opens it, and lets in who was held.
    pub(super) fn open(&self) {
        let mut held = self.held();
        self.word.fetch_and(!CLOSED, Ordering::AcqRel);
        for (go, queue) in held.drain(..) {
            let _ = go.send(());
            queue.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_closed_gate_holds_who_comes_and_waits_for_who_is_inside() {
        let gate = Gate::default();
        let woken = Arc::new(Woken::default());
        let wake: Arc<dyn Wake> = woken.clone();
        gate.enter(&wake).unwrap();
        assert!(!gate.close(Duration::from_millis(20)), "somebody is inside");
        let mut held = gate.enter(&wake).unwrap_err();
        assert!(held.try_recv().unwrap().is_none() && gate.is_closed());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                gate.leave();
            });
            assert!(gate.close(Duration::from_secs(60)));
        });
        gate.open();
        assert_eq!(held.try_recv().unwrap(), Some(()));
        assert_eq!(woken.0.load(Ordering::SeqCst), 1);
        gate.enter(&wake).unwrap();
        gate.leave();
        assert!(gate.close(Duration::ZERO));
    }

    /// Many come and go while it is closed and opened: nobody is inside while it is closed, and nobody stays out.
    #[test]
    fn nobody_is_forgotten() {
        let gate = Gate::default();
        let inside = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let wake: Arc<dyn Wake> = Arc::new(Woken::default());
                    for _ in 0..2_000 {
                        while let Err(wait) = gate.enter(&wake) {
                            smol::block_on(wait).unwrap();
                        }
                        inside.fetch_add(1, Ordering::SeqCst);
                        inside.fetch_sub(1, Ordering::SeqCst);
                        gate.leave();
                    }
                });
            }
            for _ in 0..200 {
                assert!(gate.close(Duration::from_secs(60)));
                assert_eq!(inside.load(Ordering::SeqCst), 0);
                gate.open();
            }
        });
    }
}
