//! Threads for what would make a queue wait.
//!
//! A queue's thread never waits for a disk: it hands such a request over, and takes the answer when its ring says that
//! there is one. An answer comes within the deadline in any case: what takes longer is answered with an error, and its
//! buffer stays with the thread that is still at work on it.

use super::buffer::Buffer;
use super::disk::Disk;
use super::request::Request;
use futures::channel::oneshot;
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// A thread with nothing to do ends after this time.
const IDLE: Duration = Duration::from_secs(10);
/// Stack of a thread: it reads, checks and decompresses.
const STACK: usize = 512 << 10;

/// Told when an answer is ready, from another thread.
pub(super) trait Wake: Send + Sync {
    fn wake(&self);
}

/// What became of a request.
#[derive(Debug)]
pub(super) enum Answer {
    /// It was done, and here is its buffer.
    Done(Result<(), Errno>, Buffer),
    /// It was not done in time. The buffer is lost.
    TimedOut,
}

/// One request on its way.
struct Job {
    disk: Arc<dyn Disk>,
    request: Request,
    buffer: Buffer,
    reply: Arc<Reply>,
}

/// Where its answer goes: whoever takes the sender first answers.
struct Reply {
    sender: Mutex<Option<oneshot::Sender<Answer>>>,
    queue: Arc<dyn Wake>,
}

impl Reply {
    fn give(&self, answer: Answer) {
        if let Some(sender) = lock(&self.sender).take() {
            // The queue may be gone, and then nobody waits.
            let _ = sender.send(answer);
            self.queue.wake();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Threads that serve requests of any disks.
pub(super) struct Offload {
    shared: Arc<Shared>,
}

struct Shared {
    most: usize,
    /// Threads that one disk can have, so that one whose backend hangs leaves some to the others.
    share: usize,
    deadline: Duration,
    state: Mutex<State>,
    work: Condvar,
    /// For the thread that watches deadlines.
    earlier: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Jobs under way, by their disk.
    running: HashMap<usize, usize>,
    threads: usize,
    idle: usize,
    /// By the time they are due; the number makes them different.
    due: BTreeMap<(Instant, u64), Weak<Reply>>,
    next: u64,
    watched: bool,
    closed: bool,
}

impl Offload {
    /// At most `most` threads, which are started when they are needed; each request has `deadline`.
    pub(super) fn new(most: usize, deadline: Duration) -> Self {
        let shared = Shared {
            most: most.max(1),
            share: (most / 4).max(1),
            deadline,
            state: Mutex::default(),
            work: Condvar::new(),
            earlier: Condvar::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Serves a request on another thread; `queue` is woken when the answer is there.
    pub(super) fn serve(
        &self,
        disk: &Arc<dyn Disk>,
        request: Request,
        buffer: Buffer,
        queue: &Arc<dyn Wake>,
    ) -> oneshot::Receiver<Answer> {
        let (sender, receiver) = oneshot::channel();
        let reply = Arc::new(Reply { sender: Mutex::new(Some(sender)), queue: Arc::clone(queue) });
        let due = Instant::now() + self.shared.deadline;
        let mut state = lock(&self.shared.state);
        let number = state.next;
        state.next += 1;
        state.due.insert((due, number), Arc::downgrade(&reply));
        state.jobs.push_back(Job { disk: Arc::clone(disk), request, buffer, reply });
        if !state.watched {
            state.watched = true;
            let shared = Arc::clone(&self.shared);
            start("deadlines", move || shared.watch());
        }
        if state.idle == 0 && state.threads < self.shared.most {
            state.threads += 1;
            let shared = Arc::clone(&self.shared);
            if !start("offload", move || shared.work()) {
                state.threads -= 1;
            }
        } else {
            self.shared.work.notify_one();
        }
        drop(state);
        // All deadlines are as long, so a new one is never the earliest, unless it is the only one.
        self.shared.earlier.notify_one();
        receiver
    }
}

impl Drop for Offload {
    fn drop(&mut self) {
        lock(&self.shared.state).closed = true;
        self.shared.work.notify_all();
        self.shared.earlier.notify_all();
    }
}

/// What tells disks apart.
fn address(disk: &Arc<dyn Disk>) -> usize {
    Arc::as_ptr(disk).cast::<()>().addr()
}

/// Without threads there is nothing to be done but to say so, and to let the deadline answer.
fn start(name: &str, work: impl FnOnce() + Send + 'static) -> bool {
    let started = thread::Builder::new().name(name.to_owned()).stack_size(STACK).spawn(work);
    if let Err(error) = &started {
        tracing::error!("cannot start a thread: {error}");
    }
    started.is_ok()
}

impl Shared {
    fn work(&self) {
        while let Some(job) = self.next() {
            let Job { disk, request, mut buffer, reply } = job;
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                disk.perform(&mut request.with(buffer.bytes_mut()))
            }));
            let done = done.unwrap_or_else(|_| {
                tracing::error!("a request panicked: {request:?}");
                Err(Errno::IO)
            });
            reply.give(Answer::Done(done, buffer));
            self.done(address(&disk));
        }
    }

    /// One job less of a disk: there may be one that waited for that.
    fn done(&self, disk: usize) {
        let mut state = lock(&self.state);
        if let Some(running) = state.running.get_mut(&disk) {
            *running -= 1;
            if *running == 0 {
                state.running.remove(&disk);
            }
        }
        if !state.jobs.is_empty() {
            self.work.notify_one();
        }
    }

    /// The next job, or none when there was nothing to do for long.
    fn next(&self) -> Option<Job> {
        let mut state = lock(&self.state);
        loop {
            if let Some(job) = self.take(&mut state) {
                return Some(job);
            }
            if state.closed {
                state.threads -= 1;
                return None;
            }
            state.idle += 1;
            let (woken, waited) = self.work.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if waited.timed_out() && !state.jobs.iter().any(|job| self.may_run(&state, job)) {
                state.threads -= 1;
                return None;
            }
        }
    }

    /// The first job whose disk has not its share of the threads already. Nobody waits for what was answered while it
    /// stood in the queue.
    fn take(&self, state: &mut State) -> Option<Job> {
        state.jobs.retain(|job| lock(&job.reply.sender).is_some());
        let place = state.jobs.iter().position(|job| self.may_run(state, job))?;
        let job = state.jobs.remove(place)?;
        *state.running.entry(address(&job.disk)).or_default() += 1;
        Some(job)
    }

    fn may_run(&self, state: &State, job: &Job) -> bool {
        state.running.get(&address(&job.disk)).is_none_or(|running| *running < self.share)
    }

    /// Answers what is not answered when it is due.
    fn watch(&self) {
        let mut state = lock(&self.state);
        loop {
            let now = Instant::now();
            while let Some(entry) = state.due.first_entry() {
                // What is done needs no watching.
                let reply = entry.get().upgrade().filter(|reply| lock(&reply.sender).is_some());
                match reply {
                    Some(reply) if entry.key().0 <= now => {
                        entry.remove();
                        reply.give(Answer::TimedOut);
                    }
                    Some(_) => break,
                    None => drop(entry.remove()),
                }
            }
            if state.closed {
                return;
            }
            let next = state.due.first_key_value().map(|((due, _), _)| *due);
            state = match next {
                Some(due) => {
                    let wait = due.saturating_duration_since(now);
                    self.earlier.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.earlier.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::disk::Operation;
    use super::*;
    use smol::block_on;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    #[derive(Debug, Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Reads give their offset; a read at 0 hangs until it is let go.
    #[derive(Debug)]
    struct Slow(Mutex<mpsc::Receiver<()>>);

    impl Disk for Slow {
        fn size(&self) -> u64 {
            1 << 20
        }

        fn is_read_only(&self) -> bool {
            false
        }

        fn attempt(&self, _: &mut Operation<'_>) -> Option<Result<(), Errno>> {
            None
        }

        fn perform(&self, operation: &mut Operation<'_>) -> Result<(), Errno> {
            match operation {
                Operation::Read { at: 0, .. } => {
                    let _ = lock(&self.0).recv();
                }
                Operation::Read { at, into } => into.fill(u8::try_from(*at / 512).unwrap()),
                Operation::Flush => panic!("on purpose"),
                _ => return Err(Errno::NOSPC),
            }
            Ok(())
        }
    }

    struct Bench {
        offload: Offload,
        disk: Arc<dyn Disk>,
        woken: Arc<Woken>,
        go: mpsc::Sender<()>,
    }

    impl Bench {
        fn new(most: usize, deadline: Duration) -> Self {
            let (go, wait) = mpsc::channel();
            let disk: Arc<dyn Disk> = Arc::new(Slow(Mutex::new(wait)));
            Self { offload: Offload::new(most, deadline), disk, woken: Arc::default(), go }
        }

        fn ask(&self, request: Request) -> oneshot::Receiver<Answer> {
            let queue: Arc<dyn Wake> = self.woken.clone();
            self.offload.serve(&self.disk, request, Buffer::new(4096), &queue)
        }
    }

    #[test]
    fn answers_come_with_their_buffers_and_wake_the_queue_once_each() {
        let bench = Bench::new(3, Duration::from_secs(60));
        let asked: Vec<_> = (1..200).map(|n| bench.ask(Request::Read { at: (n % 100 + 1) * 512, len: 512 })).collect();
        for (n, answer) in (1..200u64).zip(asked) {
            let Answer::Done(Ok(()), buffer) = block_on(answer).unwrap() else { panic!("{n}") };
            assert_eq!(u64::from(buffer.bytes()[511]), n % 100 + 1);
        }
        assert_eq!(bench.woken.0.load(Ordering::SeqCst), 199);
        assert!(lock(&bench.offload.shared.state).threads <= 3);
        let refused = bench.ask(Request::Write { at: 0, len: 512, durable: false });
        assert!(matches!(block_on(refused), Ok(Answer::Done(Err(Errno::NOSPC), _))));
    }

    #[test]
    fn what_hangs_is_answered_when_it_is_due_and_blocks_no_other() {
        let bench = Bench::new(8, Duration::from_millis(300));
        let hangs = bench.ask(Request::Read { at: 0, len: 512 });
        let other = bench.ask(Request::Read { at: 512, len: 512 });
        assert!(matches!(block_on(other), Ok(Answer::Done(Ok(()), _))));
        assert!(matches!(block_on(hangs), Ok(Answer::TimedOut)));
        // All threads hang: what waits for one is answered too, and never begun afterwards.
        let hang: Vec<_> = (0..3).map(|_| bench.ask(Request::Read { at: 0, len: 512 })).collect();
        for answer in hang {
            assert!(matches!(block_on(answer), Ok(Answer::TimedOut)));
        }
        for _ in 0..4 {
            bench.go.send(()).unwrap();
        }
        let again = bench.ask(Request::Read { at: 1024, len: 512 });
        assert!(matches!(block_on(again), Ok(Answer::Done(Ok(()), _))));
    }

    #[test]
    fn a_disk_that_hangs_leaves_threads_to_others() {
        let bench = Bench::new(8, Duration::from_secs(60));
        let other = Bench::new(1, Duration::from_secs(60));
        let hang: Vec<_> = (0..20).map(|_| bench.ask(Request::Read { at: 0, len: 512 })).collect();
        let queue: Arc<dyn Wake> = bench.woken.clone();
        for n in 1..50 {
            let request = Request::Read { at: n * 512, len: 512 };
            let answer = bench.offload.serve(&other.disk, request, Buffer::new(4096), &queue);
            assert!(matches!(block_on(answer), Ok(Answer::Done(Ok(()), _))));
        }
        assert_eq!(lock(&bench.offload.shared.state).running.values().sum::<usize>(), 2, "its share of eight");
        for _ in 0..20 {
            bench.go.send(()).unwrap();
        }
        for answer in hang {
            assert!(matches!(block_on(answer), Ok(Answer::Done(Ok(()), _))));
        }
    }

    #[test]
    fn a_panic_is_an_error_of_its_request() {
        let bench = Bench::new(1, Duration::from_secs(60));
        assert!(matches!(block_on(bench.ask(Request::Flush)), Ok(Answer::Done(Err(Errno::IO), _))));
        assert!(matches!(block_on(bench.ask(Request::Read { at: 512, len: 1 })), Ok(Answer::Done(Ok(()), _))));
    }
}
