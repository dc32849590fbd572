//! One hardware queue: its thread, its ring, and a task for each tag.

use super::buffer::Buffer;
use super::disk::Disk;
use super::gate::Gate;
use super::offload::{Answer, Offload, Wake};
use super::request::{Descriptor, Request, refusal};
use futures::channel::oneshot;
use io_uring::{opcode, types};
use libublk::io::{BufDesc, UblkDev, UblkQueue};
use libublk::uring_async::ublk_submit_sqe_async;
use libublk::{UblkError, UblkUringData};
use rustix::event::{EventfdFlags, PollFlags, eventfd};
use rustix::io::Errno;
use std::cell::Cell;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

/// Seconds without a request after which a queue gives its buffers' memory back.
const IDLE_SECONDS: u64 = 5;

/// One more, in the kernel's order of bytes.
#[allow(clippy::host_endian_bytes)] // An eventfd is the one place where that is asked for.
const NATIVE_ONE: [u8; 8] = 1u64.to_ne_bytes();

/// Threads for what waits, and where the waiting is for.
#[derive(Clone)]
pub(super) struct Threads {
    /// Reads: of what is not local, for a backend.
    pub(super) reads: Arc<Offload>,
    /// Everything else waits for the local disk alone, and not behind reads of a backend that hangs.
    pub(super) writes: Arc<Offload>,
}

/// Counters of a device, for its status.
#[derive(Debug, Default)]
pub struct Counters {
    /// Requests answered.
    pub requests: std::sync::atomic::AtomicU64,
    /// Of those, by another thread than the queue's.
    pub offloaded: std::sync::atomic::AtomicU64,
    /// Of those, with an error.
    pub errors: std::sync::atomic::AtomicU64,
    /// Of those, because they took too long.
    pub timeouts: std::sync::atomic::AtomicU64,
}

/// Written when an answer is there: the ring reads it.
struct EventFd(OwnedFd);

impl Wake for EventFd {
    fn wake(&self) {
        // It fails only when the counter is full, and then the queue is awake.
        let _ = rustix::io::write(&self.0, &NATIVE_ONE);
    }
}

struct Context<'q> {
    queue: &'q UblkQueue<'q>,
    disk: Arc<dyn Disk>,
    threads: Threads,
    counters: Arc<Counters>,
    gate: Arc<Gate>,
    event: Arc<EventFd>,
    wake: Arc<dyn Wake>,
    buffer: usize,
    /// Tags whose tasks have not ended.
    live: Cell<u32>,
}

/// Serves a queue until its device is stopped. Runs on a thread of its own.
///
/// # Errors
/// When the queue cannot be set up.
pub(super) fn serve(
    number: u16,
    device: &UblkDev,
    disk: Arc<dyn Disk>,
    threads: Threads,
    counters: Arc<Counters>,
    gate: Arc<Gate>,
) -> Result<(), UblkError> {
    let queue = UblkQueue::new(number, device)?;
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(std::io::Error::from)?;
    let event = Arc::new(EventFd(event));
    let wake: Arc<dyn Wake> = event.clone();
    let buffer = device.dev_info.max_io_buf_bytes as usize;
    let live = Cell::new(queue.nr_tags());
    let context = Rc::new(Context { queue: &queue, disk, threads, counters, gate, event, wake, buffer, live });
    let executor = smol::LocalExecutor::new();
    let mut tasks: Vec<_> = queue.tags().map(|tag| executor.spawn(context.clone().tag(tag))).collect();
    tasks.push(executor.spawn(context.clone().answers()));
    let run = || while executor.try_tick() {};
    let done = || context.live.get() == 0;
    smol::block_on(libublk::wait_and_handle_io_events(&queue, Some(IDLE_SECONDS), run, done))
}

impl Context<'_> {
    /// The life of one tag: fetch a request, serve it, and give its answer together with the wish for the next.
    async fn tag(self: Rc<Self>, tag: u16) {
        let ended = self.requests(tag).await;
        if let Err(error) = ended
            && !matches!(error, UblkError::QueueIsDown)
        {
            tracing::error!("queue {}, tag {tag}: {error}", self.queue.get_qid());
        }
        self.live.set(self.live.get() - 1);
        if self.live.get() == 0 {
            // The last one ends the read of the eventfd.
            self.wake.wake();
        }
    }

    async fn requests(&self, tag: u16) -> Result<(), UblkError> {
        let mut buffer = Buffer::new(self.buffer);
        self.queue.submit_io_prep_cmd(tag, BufDesc::Slice(buffer.bytes()), 0, Some(buffer.inner())).await?;
        loop {
            let found = self.queue.get_iod(tag);
            let descriptor =
                Descriptor { op_flags: found.op_flags, sectors: found.nr_sectors, start: found.start_sector };
            while let Err(held) = self.gate.enter(&self.wake) {
                let _ = held.await;
            }
            let answer = self.request(tag, descriptor, &mut buffer).await;
            self.gate.leave();
            self.queue.submit_io_commit_cmd(tag, BufDesc::Slice(buffer.bytes()), answer).await?;
        }
    }

    /// Serves a request; what comes back is for the kernel.
    async fn request(&self, tag: u16, descriptor: Descriptor, buffer: &mut Buffer) -> i32 {
        use std::sync::atomic::Ordering::Relaxed;
        self.counters.requests.fetch_add(1, Relaxed);
        let result = match Request::of(descriptor, self.disk.size(), self.buffer) {
            Ok(request) => self.serve(tag, request, buffer).await.map(|()| request.answer()),
            Err(errno) => Err(errno),
        };
        result.unwrap_or_else(|errno| {
            self.counters.errors.fetch_add(1, Relaxed);
            refusal(errno)
        })
    }

    async fn serve(&self, tag: u16, request: Request, buffer: &mut Buffer) -> Result<(), Errno> {
        use std::sync::atomic::Ordering::Relaxed;
        if let Some(done) = self.disk.attempt(&mut request.with(buffer.bytes_mut())) {
            return done;
        }
        self.counters.offloaded.fetch_add(1, Relaxed);
        let threads = if request.is_read() { &self.threads.reads } else { &self.threads.writes };
        // The buffer goes along; nothing takes its place yet, since an untouched buffer costs no memory.
        let gone = std::mem::replace(buffer, Buffer::new(self.buffer));
        match wait(threads.serve(&self.disk, request, gone, &self.wake)).await {
            Some(Answer::Done(result, back)) => {
                *buffer = back;
                result
            }
            Some(Answer::TimedOut) | None => {
                self.counters.timeouts.fetch_add(1, Relaxed);
                // The thread that is still at work keeps the old buffer, and the queue must forget it.
                self.queue.unregister_io_buf(tag);
                #[allow(deprecated)] // There is no other way to replace a buffer.
                self.queue.register_io_buf(tag, buffer.inner());
                Err(Errno::IO)
            }
        }
    }

    /// Waits for the eventfd again and again: each time, the executor runs whoever was answered. It is polled and not read
    /// by the ring, so that no memory of a task that is gone is ever written.
    async fn answers(self: Rc<Self>) {
        while self.live.get() > 0 {
            let events = u32::from(PollFlags::IN.bits());
            let poll = opcode::PollAdd::new(types::Fd(self.event.0.as_raw_fd()), events).build();
            if let Err(error) = ublk_submit_sqe_async(poll, UblkUringData::Target as u64).await {
                tracing::error!("polling the eventfd of queue {}: {error}", self.queue.get_qid());
                return;
            }
            let _ = rustix::io::read(&self.event.0, &mut [0u8; 8]);
        }
    }
}

async fn wait(answer: oneshot::Receiver<Answer>) -> Option<Answer> {
    answer.await.ok()
}
