//! Workers: each a thread with a ring of its own, since rings have no locks.
//!
//! A worker puts what waits into its ring, as far as there are entries and room in the buffer, and answers what comes
//! back. The daemon completes what it took together as one, and there is no way to take a transfer back. So when one is
//! overdue, or its daemon has gone, nothing of ring and buffer is used again: bytes may still arrive in them. Both are
//! left behind, counted, and a new ring is made; when too much was left behind, the mount reads from then on.

use super::counts::Counts;
use super::files::BlobFile;
use super::library::{Done, Library, Ring};
use super::plan::Arena;
use super::queue::{Fault, Queue, Taken, Transfer};
use std::collections::HashMap;
use std::ffi::{CString, OsStr};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How long a wait for the ring is when nothing else would fit into it.
const FULL_TICK: Duration = Duration::from_millis(20);
/// Least and most time between two looks at the ring, while others may come: it grows with the time that the oldest is
/// on its way.
const SHORT_NAP: Duration = Duration::from_micros(50);
const LONG_NAP: Duration = Duration::from_millis(2);
/// A transfer that takes longer makes one look whether the daemon is there.
const PROBE_AFTER: Duration = Duration::from_secs(1);
/// A ring that was used less than this ago is taken to have its daemon still.
const TRUSTED: Duration = Duration::from_millis(100);
/// How long no ring is tried after one could not be made.
const PAUSE: Duration = Duration::from_secs(2);

/// What workers of one kind share.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) queue: Queue,
    pub(super) library: &'static Library,
    pub(super) mount: CString,
    pub(super) entries: i32,
    pub(super) buffer: usize,
    /// Bytes that neighbours may have together; 0 for none.
    pub(super) merged: u64,
    pub(super) deadline: Duration,
    pub(super) counts: Arc<Counts>,
    /// Until when there is no ring to be had.
    pub(super) paused: Mutex<Option<Instant>>,
}

impl Lane {
    /// Whether it is no use to wait for a ring now.
    pub(super) fn is_paused(&self) -> bool {
        let paused = *self.paused.lock().unwrap_or_else(PoisonError::into_inner);
        paused.is_some_and(|until| Instant::now() < until) || self.counts.is_quarantine_full()
    }

    /// The name of the semaphore that wakes the daemon: each daemon makes new ones.
    fn daemon(&self) -> Option<PathBuf> {
        let mount = Path::new(OsStr::from_bytes(self.mount.as_bytes()));
        std::fs::read_link(mount.join("3fs-virt/iovs/submit-ios")).ok()
    }

    /// No use to wait for a ring for a while; those who do are told.
    pub(super) fn pause(&self) {
        *self.paused.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now() + PAUSE);
        self.queue.fail_all(&Fault::NoRing);
    }
}

/// Starts a worker.
///
/// # Errors
/// When there can be no thread.
pub(super) fn start(lane: &Arc<Lane>, name: &str) -> std::io::Result<()> {
    let lane = Arc::clone(lane);
    thread::Builder::new().name(name.to_owned()).spawn(move || run(&lane)).map(drop)
}

struct Flying {
    transfer: Transfer,
    since: Instant,
}

/// A ring and what is on its way in it.
struct Active {
    ring: Ring,
    arena: Arena,
    entries: usize,
    flying: HashMap<u64, Flying>,
    next: u64,
    /// How many daemons were found gone, and rings left behind, when this one was made.
    made_after: (u64, u64),
    /// What tells its daemon from the next.
    daemon: Option<PathBuf>,
    used: Instant,
    probe: Option<Arc<Probe>>,
}

/// A question whether a file's daemon is there, asked by a thread of its own: it may never be answered.
#[derive(Debug, Default)]
struct Probe {
    answered: AtomicBool,
    alive: AtomicBool,
}

impl Probe {
    fn ask(file: Arc<BlobFile>) -> Option<Arc<Self>> {
        let probe = Arc::new(Self::default());
        let asked = Arc::clone(&probe);
        let ask = move || {
            let alive = file.registered.library().is_alive(file.registered.as_fd());
            asked.alive.store(alive, Ordering::Relaxed);
            asked.answered.store(true, Ordering::Release);
        };
        thread::Builder::new().name("usrbio-probe".to_owned()).spawn(ask).ok()?;
        Some(probe)
    }

    fn found_dead(&self) -> bool {
        self.answered.load(Ordering::Acquire) && !self.alive.load(Ordering::Relaxed)
    }
}

fn run(lane: &Lane) {
    let mut active: Option<Active> = None;
    loop {
        if active.as_ref().is_none_or(|active| active.flying.is_empty()) && !lane.queue.wait() {
            return;
        }
        let usable = |active: &Active| !active.flying.is_empty() || active.is_current(lane);
        let mut current = match active.take().filter(usable) {
            Some(current) => current,
            None => match Active::new(lane) {
                Some(made) => made,
                None => continue,
            },
        };
        match current.turn(lane) {
            Turn::Well => active = Some(current),
            Turn::Closed if current.flying.is_empty() => return,
            // The last ones are still answered.
            Turn::Closed => active = Some(current),
            Turn::Broken(fault) => current.leave_behind(lane, &fault),
        }
    }
}

enum Turn {
    Well,
    Closed,
    Broken(Fault),
}

impl Active {
    fn new(lane: &Lane) -> Option<Self> {
        if lane.is_paused() {
            lane.queue.fail_all(&Fault::NoRing);
            return None;
        }
        let made_after = (lane.counts.gone.get(), lane.counts.left());
        let daemon = lane.daemon();
        match lane.library.ring(&lane.mount, lane.entries, lane.buffer) {
            Ok(ring) => {
                lane.counts.rings.add(1);
                let (entries, arena) = (ring.entries(), Arena::new(lane.buffer));
                let (flying, used) = (HashMap::new(), Instant::now());
                Some(Self { ring, arena, entries, flying, next: 1, made_after, daemon, used, probe: None })
            }
            Err(error) => {
                tracing::warn!(
                    "no USRBIO ring on {}, the mount reads meanwhile: {error}",
                    lane.mount.to_string_lossy()
                );
                lane.counts.failed_rings.add(1);
                if error.raw_os_error() == Some(libc::ENOTCONN) {
                    lane.counts.gone.add(1);
                }
                lane.pause();
                None
            }
        }
    }

    /// Whether an idle ring still has its daemon, as far as can be known: one that lay idle while another was left
    /// behind is perhaps as dead, and after a while without use the daemon's name is looked at.
    fn is_current(&self, lane: &Lane) -> bool {
        self.made_after == (lane.counts.gone.get(), lane.counts.left())
            && (self.used.elapsed() < TRUSTED || self.daemon == lane.daemon())
    }

    fn turn(&mut self, lane: &Lane) -> Turn {
        self.used = Instant::now();
        let (mut queued, mut closed) = (false, false);
        while self.flying.len() < self.entries {
            match lane.queue.take(lane.merged, |len| self.arena.take(len)) {
                Taken::Transfer(transfer) => queued |= self.begin(lane, transfer),
                Taken::Nothing => break,
                Taken::Closed => {
                    closed = true;
                    break;
                }
            }
        }
        if queued && let Err(error) = self.ring.submit() {
            tracing::warn!("a USRBIO ring takes nothing: {error}");
            return Turn::Broken(Fault::Errno(error.raw_os_error().unwrap_or(libc::EIO)));
        }
        if !self.flying.is_empty() {
            let mut done = Vec::new();
            let full = self.flying.len() >= self.entries || !lane.queue.is_empty();
            let mut waited = if full { self.ring.wait(1, FULL_TICK, &mut done) } else { Ok(()) };
            if !full {
                waited = self.ring.wait(0, Duration::ZERO, &mut done);
                if waited.is_ok() && done.is_empty() {
                    let oldest = self.flying.values().map(|flying| flying.since.elapsed()).max().unwrap_or_default();
                    lane.queue.nap((oldest / 8).clamp(SHORT_NAP, LONG_NAP));
                    waited = self.ring.wait(0, Duration::ZERO, &mut done);
                }
            }
            if let Err(error) = waited {
                tracing::warn!("a USRBIO ring tells nothing: {error}");
                return Turn::Broken(Fault::Errno(error.raw_os_error().unwrap_or(libc::EIO)));
            }
            for one in done {
                if !self.finish(lane, one) {
                    tracing::warn!("a USRBIO ring tells of a transfer that is not on its way");
                    return Turn::Broken(Fault::Errno(libc::EIO));
                }
            }
            if let Some(fault) = self.overdue(lane) {
                return Turn::Broken(fault);
            }
        }
        if closed { Turn::Closed } else { Turn::Well }
    }

    /// Whether it is on its way.
    fn begin(&mut self, lane: &Lane, transfer: Transfer) -> bool {
        let token = self.next;
        self.next += 1;
        let prepared = self.ring.prepare(&transfer.file.registered, transfer.range.start, transfer.place, token);
        if let Err(error) = prepared {
            let (at, len) = transfer.place;
            self.arena.give_back(at, len);
            transfer.fail(&Fault::Errno(error.raw_os_error().unwrap_or(libc::EIO)));
            return false;
        }
        lane.counts.transfers.add(1);
        lane.counts.reads.add(transfer.wants.len() as u64);
        self.flying.insert(token, Flying { transfer, since: Instant::now() });
        true
    }

    /// Answers what is done; false when there is no such transfer.
    fn finish(&mut self, lane: &Lane, done: Done) -> bool {
        let Some(Flying { transfer, .. }) = self.flying.remove(&done.token) else { return false };
        let (at, len) = transfer.place;
        match usize::try_from(done.result) {
            Ok(count) if count <= len => {
                lane.counts.bytes.add(count as u64);
                for want in transfer.wants {
                    let skip = usize::try_from(want.range.start - transfer.range.start).unwrap_or(usize::MAX);
                    let wanted = usize::try_from(want.range.end - want.range.start).unwrap_or(usize::MAX);
                    // What is behind the wanted bytes may be the end of the file; what is in them may not.
                    let answer = if skip.checked_add(wanted).is_some_and(|end| end <= count) {
                        Ok(self.ring.copy(at + skip, wanted).into())
                    } else {
                        Err(Fault::Ended)
                    };
                    let _ = want.reply.send(answer);
                }
            }
            Ok(_) => transfer.fail(&Fault::Errno(libc::EIO)),
            Err(_) => {
                lane.counts.errors.add(1);
                let errno = done.result.checked_neg().and_then(|errno| i32::try_from(errno).ok());
                transfer.fail(&Fault::Errno(errno.unwrap_or(libc::EIO)));
            }
        }
        self.arena.give_back(at, len);
        true
    }

    /// Whether something takes too long, or its daemon is not there.
    fn overdue(&mut self, lane: &Lane) -> Option<Fault> {
        let oldest = self.flying.values().min_by_key(|flying| flying.since)?;
        let waited = oldest.since.elapsed();
        if self.made_after.0 != lane.counts.gone.get() {
            return Some(Fault::Gone);
        }
        if waited >= lane.deadline {
            return Some(Fault::TimedOut(lane.deadline));
        }
        match &self.probe {
            Some(probe) if probe.found_dead() => {
                lane.counts.gone.add(1);
                return Some(Fault::Gone);
            }
            Some(probe) if probe.answered.load(Ordering::Acquire) && waited < PROBE_AFTER => self.probe = None,
            Some(probe) if probe.answered.load(Ordering::Acquire) => {
                // It was there a while ago; perhaps it is not now.
                self.probe = Probe::ask(Arc::clone(&oldest.transfer.file));
            }
            None if waited >= PROBE_AFTER.min(lane.deadline / 2) => {
                self.probe = Probe::ask(Arc::clone(&oldest.transfer.file));
            }
            _ => {}
        }
        None
    }

    /// Gives all of it up: see the module's words.
    fn leave_behind(self, lane: &Lane, fault: &Fault) {
        let count = self.flying.len();
        for (_, flying) in self.flying {
            flying.transfer.fail(fault);
        }
        let bytes = self.ring.leak();
        lane.counts.leave_behind(bytes as u64);
        tracing::warn!("a USRBIO ring with {count} transfers on their way is left behind ({fault:?}), {bytes} bytes");
        if lane.counts.is_quarantine_full() {
            tracing::warn!("too many USRBIO rings were left behind: the mount reads from now on");
            lane.queue.fail_all(&Fault::NoRing);
        }
    }
}
