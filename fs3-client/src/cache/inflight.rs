//! Single flight: what is being fetched, and who waits for it.
//!
//! A chunk that is missing has one [`Flight`], however many want it. Those who want it *join*; who is first is given a
//! [`Ticket`] and starts a job. Jobs *take* runs of neighbouring chunks that nobody has taken yet, whoever joined for
//! them, so misses that wait for their turn become larger requests. A job that dies, by a panic or with its runtime,
//! drops its ticket and its [`Landing`], which tell all who wait: nobody waits for what nobody fetches.

use super::sync::atomic::{AtomicU64, Ordering};
use super::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::collections::BTreeMap;
use std::ops::Range;
use std::task::{Poll, Waker};

/// The chunks of one blob that are being fetched, each with the outcome `T` to come.
#[derive(Debug)]
pub(crate) struct Flights<T> {
    table: Mutex<BTreeMap<u32, Entry<T>>>,
    tickets: AtomicU64,
}

#[derive(Debug)]
struct Entry<T> {
    flight: Arc<Flight<T>>,
    /// A job has taken it.
    started: bool,
    /// Somebody waits for it, not only a prefetch.
    demanded: bool,
    /// Whose task it is until it has started.
    ticket: u64,
}

/// One chunk on its way.
#[derive(Debug)]
pub(crate) struct Flight<T> {
    state: Mutex<State<T>>,
}

#[derive(Debug)]
enum State<T> {
    Flying(Vec<Waker>),
    Landed(T),
}

impl<T: Clone> Flight<T> {
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn land(&self, outcome: T) {
        let before = std::mem::replace(&mut *self.state(), State::Landed(outcome));
        if let State::Flying(wakers) = before {
            wakers.into_iter().for_each(Waker::wake);
        }
    }

    /// Waits for the outcome. May be dropped at any time.
    pub(crate) async fn landed(&self) -> T {
        std::future::poll_fn(|context| match &mut *self.state() {
            State::Landed(outcome) => Poll::Ready(outcome.clone()),
            State::Flying(wakers) => {
                if !wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                    wakers.push(context.waker().clone());
                }
                Poll::Pending
            }
        })
        .await
    }
}

/// What came of joining.
#[derive(Debug)]
pub(crate) struct Joined<T> {
    /// Chunks that are on their way now.
    pub(crate) flights: Vec<(u32, Arc<Flight<T>>)>,
    /// Jobs to start: the pieces to fetch, none across a multiple of the largest request.
    pub(crate) begin: Vec<Range<u32>>,
    /// Of those jobs.
    pub(crate) ticket: u64,
}

impl<T: Clone> Flights<T> {
    pub(crate) fn new() -> Self {
        Self { table: Mutex::new(BTreeMap::new()), tickets: AtomicU64::new(0) }
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<u32, Entry<T>>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many are on their way.
    pub(crate) fn len(&self) -> usize {
        self.table().len()
    }

    /// Joins the flights of those of `chunks` that are not `present`. `most` chunks are the largest request. Without
    /// `demand` chunks that are on their way already are not joined.
    pub(crate) fn join(&self, chunks: Range<u32>, most: u32, demand: bool, present: impl Fn(u32) -> bool) -> Joined<T> {
        let ticket = self.tickets.fetch_add(1, Ordering::Relaxed);
        let mut joined = Joined { flights: Vec::new(), begin: Vec::<Range<u32>>::new(), ticket };
        let mut table = self.table();
        for chunk in chunks {
            // Under the lock: a chunk leaves the table only after it is there.
            if present(chunk) {
                continue;
            }
            let mut begin = false;
            let entry = table.entry(chunk).or_insert_with(|| {
                begin = true;
                let flight = Arc::new(Flight { state: Mutex::new(State::Flying(Vec::new())) });
                Entry { flight, started: false, demanded: demand, ticket }
            });
            if demand && !entry.demanded {
                // A prefetch that has not begun is not waited for.
                entry.demanded = true;
                if !entry.started {
                    entry.ticket = ticket;
                    begin = true;
                }
            }
            if demand || begin {
                joined.flights.push((chunk, Arc::clone(&entry.flight)));
            }
            if begin {
                match joined.begin.last_mut() {
                    Some(last) if last.end == chunk && !chunk.is_multiple_of(most) => last.end += 1,
                    _ => joined.begin.push(chunk..chunk + 1),
                }
            }
        }
        joined
    }

    /// Takes the first of `piece` that has not started, with its neighbours that have not, in one request's window.
    pub(crate) fn take(self: &Arc<Self>, piece: &Range<u32>, most: u32, lost: &T) -> Option<Landing<T>> {
        let mut table = self.table();
        let first = table.range(piece.clone()).find(|(_, entry)| !entry.started).map(|(chunk, _)| *chunk)?;
        let window = first / most * most..(first / most + 1).saturating_mul(most);
        let waits = |chunk: &u32| table.get(chunk).is_some_and(|entry| !entry.started);
        let start = (window.start..first).rev().take_while(&waits).last().unwrap_or(first);
        let end = (first..window.end).take_while(&waits).last().unwrap_or(first) + 1;
        for (_, entry) in table.range_mut(start..end) {
            entry.started = true;
        }
        Some(Landing { flights: Arc::clone(self), left: start..end, run: start..end, lost: lost.clone() })
    }

    fn land(&self, chunk: u32, outcome: T) {
        let entry = self.table().remove(&chunk);
        if let Some(entry) = entry {
            entry.flight.land(outcome);
        }
    }
}

/// The duty to see to it that the chunks of a piece are taken.
#[derive(Debug)]
pub(crate) struct Ticket<T: Clone> {
    pub(crate) flights: Arc<Flights<T>>,
    pub(crate) piece: Range<u32>,
    pub(crate) number: u64,
    /// What those are told who wait when it is dropped before that.
    pub(crate) lost: T,
}

impl<T: Clone> Drop for Ticket<T> {
    fn drop(&mut self) {
        let mut table = self.flights.table();
        let ours = |entry: &Entry<T>| !entry.started && entry.ticket == self.number;
        let left: Vec<u32> =
            table.range(self.piece.clone()).filter(|(_, e)| ours(e)).map(|(chunk, _)| *chunk).collect();
        let left: Vec<_> = left.iter().filter_map(|chunk| table.remove(chunk)).collect();
        drop(table);
        for entry in left {
            entry.flight.land(self.lost.clone());
        }
    }
}

/// The duty to land a run of chunks.
#[derive(Debug)]
pub(crate) struct Landing<T: Clone> {
    flights: Arc<Flights<T>>,
    run: Range<u32>,
    left: Range<u32>,
    lost: T,
}

impl<T: Clone> Landing<T> {
    /// The chunks.
    pub(crate) fn run(&self) -> Range<u32> {
        self.run.clone()
    }

    /// Lands the next chunk. When there is something in the file to be found, it is found there already.
    pub(crate) fn land_next(&mut self, outcome: T) {
        if let Some(chunk) = self.left.next() {
            self.flights.land(chunk, outcome);
        }
    }
}

impl<T: Clone> Drop for Landing<T> {
    fn drop(&mut self) {
        while !self.left.is_empty() {
            let lost = self.lost.clone();
            self.land_next(lost);
        }
    }
}
