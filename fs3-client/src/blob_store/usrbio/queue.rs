//! Reads that wait for a worker, and how neighbours become one transfer.

use super::files::BlobFile;
use super::plan::{aligned, together};
use bytes::Bytes;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;

/// Why a read was not done.
#[derive(Debug, Clone)]
pub(super) enum Fault {
    /// The file ended.
    Ended,
    /// The daemon's errno.
    Errno(i32),
    /// Nothing came.
    TimedOut(Duration),
    /// The daemon has gone, or another has come.
    Gone,
    /// There is no ring: the mount has to do it.
    NoRing,
}

/// A read that somebody waits for.
#[derive(Debug)]
pub(super) struct Want {
    pub(super) file: Arc<BlobFile>,
    pub(super) range: Range<u64>,
    pub(super) reply: oneshot::Sender<Result<Bytes, Fault>>,
}

/// A transfer, and the reads that it is for.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) file: Arc<BlobFile>,
    /// Whole units.
    pub(super) range: Range<u64>,
    /// Where in the ring's buffer, and how many bytes.
    pub(super) place: (usize, usize),
    pub(super) wants: Vec<Want>,
}

impl Transfer {
    /// Tells all who wait that it came to nothing.
    pub(super) fn fail(self, fault: &Fault) {
        for want in self.wants {
            // Who waits no longer needs no answer.
            let _ = want.reply.send(Err(fault.clone()));
        }
    }
}

/// What a worker gets.
#[derive(Debug)]
pub(super) enum Taken {
    /// A transfer.
    Transfer(Transfer),
    /// Nothing waits, or nothing that fits now.
    Nothing,
    /// Nothing will come any more.
    Closed,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Want>,
    closed: bool,
}

/// Reads that wait for the workers of a lane.
#[derive(Debug, Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    wake: Condvar,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn push(&self, want: Want) {
        let mut state = self.state();
        if state.closed {
            let _ = want.reply.send(Err(Fault::NoRing));
            return;
        }
        state.waiting.push_back(want);
        self.wake.notify_one();
    }

    /// No more reads; those that wait are answered.
    pub(super) fn close(&self) {
        self.state().closed = true;
        self.wake.notify_all();
        self.fail_all(&Fault::NoRing);
    }

    /// Tells all who wait that it came to nothing.
    pub(super) fn fail_all(&self, fault: &Fault) {
        let waiting = std::mem::take(&mut self.state().waiting);
        for want in waiting {
            let _ = want.reply.send(Err(fault.clone()));
        }
    }

    /// Waits until there is something to take; false when nothing will come any more.
    pub(super) fn wait(&self) -> bool {
        let mut state = self.state();
        while state.waiting.is_empty() && !state.closed {
            state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.closed
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.state().waiting.is_empty()
    }

    /// Waits a little, or until there is something to take.
    pub(super) fn nap(&self, most: Duration) {
        let state = self.state();
        if state.waiting.is_empty() && !state.closed {
            drop(self.wake.wait_timeout(state, most).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// The next transfer, if `place` has room for its bytes. Neighbours of the first that waits come with it as far as
    /// they are `merged` bytes together; 0 for none.
    pub(super) fn take(&self, merged: u64, mut place: impl FnMut(usize) -> Option<usize>) -> Taken {
        let mut state = self.state();
        if state.closed {
            return Taken::Closed;
        }
        // Those who gave up meanwhile.
        while state.waiting.front().is_some_and(|want| want.reply.is_closed()) {
            state.waiting.pop_front();
        }
        let Some(first) = state.waiting.front() else { return Taken::Nothing };
        let file = Arc::clone(&first.file);
        let mut range = aligned(&first.range);
        let mut with = vec![0];
        // Each neighbour may have others.
        let mut found = merged > 0;
        while found {
            found = false;
            for (at, want) in state.waiting.iter().enumerate().skip(1) {
                let both = together(&range, &aligned(&want.range), merged);
                if let Some(both) = both.filter(|_| Arc::ptr_eq(&want.file, &file) && !with.contains(&at)) {
                    range = both;
                    with.push(at);
                    found = true;
                }
            }
        }
        let Some(len) = usize::try_from(range.end - range.start).ok() else { return Taken::Nothing };
        let Some(at) = place(len) else { return Taken::Nothing };
        with.sort_unstable();
        let mut wants = Vec::with_capacity(with.len());
        for at in with.into_iter().rev() {
            wants.extend(state.waiting.remove(at));
        }
        Taken::Transfer(Transfer { file, range, place: (at, len), wants })
    }
}
