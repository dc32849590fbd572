//! Single flight and eviction under all schedules that shuttle picks: the same sources, over its locks and atomics.

mod sync {
    pub(crate) use shuttle::sync::{Arc, Mutex, MutexGuard};
    pub(crate) use std::sync::PoisonError;

    pub(crate) mod atomic {
        pub(crate) use shuttle::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
    }
}

#[allow(clippy::duplicate_mod, reason = "over other locks and atomics")]
#[allow(dead_code, reason = "the hot path has more than is raced for here")]
#[path = "../group.rs"]
mod group;
#[allow(clippy::duplicate_mod, reason = "over other locks and atomics")]
#[allow(dead_code, reason = "the table has more than is raced for here")]
#[path = "../inflight.rs"]
mod inflight;

use group::Group;
use inflight::{Flights, Ticket};
use shuttle::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use shuttle::thread;
use std::ops::Range;
use sync::Arc;

const MOST: u32 = 4;

/// Runs it under schedules picked at random, and under those that few changes of the running thread make.
/// `DSEC_CACHE_SCHEDULES=1000000` is the long mode.
fn check(body: impl Fn() + Send + Sync + Clone + 'static) {
    let schedules = super::model::number("DSEC_CACHE_SCHEDULES").unwrap_or(2000);
    let schedules = usize::try_from(schedules).unwrap();
    shuttle::check_random(body.clone(), schedules);
    shuttle::check_pct(body, schedules / 2, 3);
}

type Outcome = Result<u64, &'static str>;

/// What a job does: takes what there is of a piece, reads it, says that it is there, lands it.
fn job(flights: &Arc<Flights<Outcome>>, piece: Range<u32>, ticket: u64, there: &AtomicU64, reads: &[AtomicU32; 8]) {
    let ticket = Ticket { flights: Arc::clone(flights), piece, number: ticket, lost: Err("lost") };
    while let Some(mut landing) = flights.take(&ticket.piece, MOST, &Err("lost")) {
        for chunk in landing.run() {
            reads[chunk as usize].fetch_add(1, Ordering::SeqCst);
            there.fetch_or(1 << chunk, Ordering::SeqCst);
            landing.land_next(Ok(u64::from(chunk)));
        }
    }
}

/// A reader: joins, starts the jobs that it is given on threads of their own, waits.
fn reader(
    flights: &Arc<Flights<Outcome>>,
    chunks: Range<u32>,
    there: &Arc<AtomicU64>,
    reads: &Arc<[AtomicU32; 8]>,
) -> Vec<(u32, Outcome)> {
    let present = |chunk: u32| there.load(Ordering::SeqCst) & 1 << chunk != 0;
    let joined = flights.join(chunks, MOST, true, present);
    for piece in joined.begin {
        let (flights, there, reads) = (Arc::clone(flights), Arc::clone(there), Arc::clone(reads));
        thread::spawn(move || job(&flights, piece, joined.ticket, &there, &reads));
    }
    let wait = |(chunk, flight): (u32, Arc<inflight::Flight<Outcome>>)| {
        (chunk, shuttle::future::block_on(async move { flight.landed().await }))
    };
    joined.flights.into_iter().map(wait).collect()
}

fn reads() -> Arc<[AtomicU32; 8]> {
    Arc::new(std::array::from_fn(|_| AtomicU32::new(0)))
}

#[test]
fn each_chunk_is_fetched_once_and_all_who_wait_are_told() {
    check(|| {
        let (flights, there, reads) = (Arc::new(Flights::new()), Arc::new(AtomicU64::new(0)), reads());
        let readers: Vec<_> = [0..3, 2..6, 0..8]
            .into_iter()
            .map(|chunks: Range<u32>| {
                let (flights, there, reads) = (Arc::clone(&flights), Arc::clone(&there), Arc::clone(&reads));
                thread::spawn(move || {
                    for (chunk, outcome) in reader(&flights, chunks.clone(), &there, &reads) {
                        assert_eq!(outcome, Ok(u64::from(chunk)));
                    }
                    chunks.for_each(|chunk| assert!(there.load(Ordering::SeqCst) & 1 << chunk != 0));
                })
            })
            .collect();
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        assert!(reads.iter().all(|count| count.load(Ordering::SeqCst) == 1), "{reads:?}");
        assert_eq!(flights.len(), 0);
    });
}

#[test]
fn a_job_that_dies_leaves_nobody_waiting() {
    check(|| {
        let flights: Arc<Flights<Outcome>> = Arc::new(Flights::new());
        let dying: Vec<_> = (0..2)
            .map(|_| {
                let flights = Arc::clone(&flights);
                thread::spawn(move || {
                    let joined = flights.join(0..6, MOST, true, |_| false);
                    for (n, piece) in joined.begin.into_iter().enumerate() {
                        let flights = Arc::clone(&flights);
                        thread::spawn(move || {
                            let (number, lost) = (joined.ticket, Err("lost"));
                            let ticket = Ticket { flights: Arc::clone(&flights), piece, number, lost };
                            // One dies before it takes anything, and one in the middle of what it has taken.
                            if n == 0 {
                                return;
                            }
                            if let Some(mut landing) = flights.take(&ticket.piece, MOST, &Err("lost")) {
                                landing.land_next(Ok(7));
                            }
                        });
                    }
                    let wait = |(_, flight): (u32, Arc<inflight::Flight<Outcome>>)| {
                        shuttle::future::block_on(async move { flight.landed().await })
                    };
                    joined.flights.into_iter().map(wait).filter(Result::is_err).count()
                })
            })
            .collect();
        let lost: usize = dying.into_iter().map(|reader| reader.join().unwrap()).sum();
        assert!(lost >= 5, "{lost}");
        assert_eq!(flights.len(), 0);
    });
}

#[test]
fn a_prefetch_that_gives_up_takes_no_reader_with_it() {
    check(|| {
        let (flights, there, reads) = (Arc::new(Flights::new()), Arc::new(AtomicU64::new(0)), reads());
        let ahead = flights.join(0..8, MOST, false, |_| false);
        let giving_up = {
            let flights = Arc::clone(&flights);
            thread::spawn(move || {
                for piece in ahead.begin {
                    let (number, lost) = (ahead.ticket, Err("given up"));
                    drop(Ticket { flights: Arc::clone(&flights), piece, number, lost });
                }
            })
        };
        // Who comes before it gave up takes over; who comes after begins anew.
        for (chunk, outcome) in reader(&flights, 1..5, &there, &reads) {
            assert_eq!(outcome, Ok(u64::from(chunk)));
        }
        giving_up.join().unwrap();
        // What the reader's jobs have taken beside it lands too.
        while flights.len() > 0 {
            thread::yield_now();
        }
    });
}

/// Bytes of a file: 0 is a hole. Readers and fillers against an eviction, as the cache has them.
#[test]
fn nobody_reads_a_hole() {
    check(|| {
        let (group, file) = (Arc::new(Group::default()), Arc::new(AtomicU32::new(0)));
        let fill = |group: &Group, file: &AtomicU32| {
            if group.enter() {
                file.store(9, Ordering::SeqCst);
                group.filled(1, true);
                group.leave();
            }
        };
        fill(&group, &file);
        let readers: Vec<_> = (0..2)
            .map(|_| {
                let (group, file) = (Arc::clone(&group), Arc::clone(&file));
                thread::spawn(move || {
                    for _ in 0..2 {
                        if group.enter() {
                            if group.present() & 1 != 0 {
                                assert_eq!(file.load(Ordering::SeqCst), 9, "a hole was read");
                            }
                            group.leave();
                        }
                        if let Some(seen) = group.look()
                            && group.present() & 1 != 0
                        {
                            let read = file.load(Ordering::SeqCst);
                            assert!(!group.is_same(seen) || read == 9, "a hole was read, and counts");
                        }
                    }
                })
            })
            .collect();
        let filler = {
            let (group, file) = (Arc::clone(&group), Arc::clone(&file));
            thread::spawn(move || fill(&group, &file))
        };
        for _ in 0..2 {
            if group.lock() {
                group.empty();
                file.store(0, Ordering::SeqCst);
                group.unlock();
            }
        }
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        filler.join().unwrap();
        // In the end as well: there, or not.
        assert!(group.present() == 0 || file.load(Ordering::SeqCst) == 9);
        assert!(group.lock(), "somebody did not leave");
    });
}

/// What the ledger and the index have of one chunk, as the keeper and those who fill and drop change them: in the end
/// nothing is durable that is not to be read, and nothing has a hole under it.
#[test]
fn what_is_durable_is_there() {
    #[derive(Debug, Default)]
    struct Ledger {
        fresh: bool,
        dropped: bool,
    }
    check(|| {
        let (group, ledger) = (Arc::new(Group::default()), Arc::new(sync::Mutex::new(Ledger::default())));
        let file = Arc::new(AtomicU32::new(0));
        let index = Arc::new(AtomicU32::new(0));
        // The keeper: what it flushes and evicts is never at the same time.
        let flush = |ledger: &sync::Mutex<Ledger>, index: &AtomicU32| {
            let taken = std::mem::take(&mut *ledger.lock().unwrap());
            if taken.fresh {
                index.store(1, Ordering::SeqCst);
            } else if taken.dropped {
                index.store(0, Ordering::SeqCst);
            }
        };
        let fillers: Vec<_> = (0..2)
            .map(|_| {
                let (group, ledger, file) = (Arc::clone(&group), Arc::clone(&ledger), Arc::clone(&file));
                thread::spawn(move || {
                    if group.enter() {
                        file.store(9, Ordering::SeqCst);
                        {
                            let mut ledger = ledger.lock().unwrap();
                            *ledger = Ledger { fresh: true, dropped: false };
                            group.filled(1, true);
                        }
                        group.leave();
                    }
                })
            })
            .collect();
        let dropper = {
            let (group, ledger) = (Arc::clone(&group), Arc::clone(&ledger));
            thread::spawn(move || {
                let mut ledger = ledger.lock().unwrap();
                if group.drop_bits(1) != 0 {
                    *ledger = Ledger { fresh: false, dropped: true };
                }
            })
        };
        flush(&ledger, &index);
        if group.lock() {
            group.empty();
            *ledger.lock().unwrap() = Ledger::default();
            index.store(0, Ordering::SeqCst);
            file.store(0, Ordering::SeqCst);
            group.unlock();
        }
        flush(&ledger, &index);
        fillers.into_iter().for_each(|filler| filler.join().unwrap());
        dropper.join().unwrap();
        flush(&ledger, &index);
        assert_eq!(u64::from(index.load(Ordering::SeqCst)), group.present(), "the index and the bits differ");
        assert!(group.present() == 0 || file.load(Ordering::SeqCst) == 9, "a hole is believed");
    });
}
