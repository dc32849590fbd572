//! Reads by an io_uring: one thread of the process, with registered buffers and files.
//!
//! The kernel reads into one of a few buffers that it knows already, from files that it knows where a read has several
//! parts ([`table`]); what arrived is copied out. Reads wait for a free buffer in a queue that is bounded, and a request in the kernel is never given up: its file and its buffer are the
//! ring's until it is done, whoever still waits for it.
#![allow(unsafe_code)]

mod table;

use bytes::{Bytes, BytesMut};
use futures::stream::{StreamExt as _, TryStreamExt as _};
use io_uring::{IoUring, opcode, types};
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;
use table::{Returned, Source, Table};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// Bytes of a buffer, and how many there are.
const BUFFER: usize = 1 << 20;
const BUFFERS: usize = 32;
/// Reads that wait or are on their way.
const QUEUE: usize = 1024;
/// Parts of one large read at a time.
const PARTS: usize = 8;
/// What an eventfd is given, in this machine's order of bytes.
#[expect(clippy::host_endian_bytes, reason = "the kernel of this machine reads it")]
const ONE: [u8; 8] = 1u64.to_ne_bytes();
/// What a wake-up is known by.
const WAKE: u64 = u64::MAX;

#[derive(Debug)]
struct Request {
    source: Arc<Source>,
    offset: u64,
    len: usize,
    reply: oneshot::Sender<io::Result<Bytes>>,
    _permit: OwnedSemaphorePermit,
}

/// The ring's front.
#[derive(Debug)]
pub(super) struct Reader {
    waiting: Arc<Mutex<VecDeque<Request>>>,
    wake: Arc<OwnedFd>,
    room: Arc<Semaphore>,
    returned: Arc<Returned>,
}

/// Wakes the thread by its eventfd.
fn wake(event: &OwnedFd) -> io::Result<()> {
    rustix::io::write(event, &ONE)?;
    Ok(())
}

/// The process's ring; `None` where the kernel gives none, which is said once.
pub(super) fn shared() -> Option<Arc<Reader>> {
    static RING: OnceLock<Option<Arc<Reader>>> = OnceLock::new();
    let start = || match Reader::start() {
        Ok(reader) => Some(Arc::new(reader)),
        Err(error) => {
            tracing::info!("no io_uring here, files are read by pread: {error}");
            None
        }
    };
    RING.get_or_init(start).clone()
}

impl Reader {
    fn start() -> io::Result<Self> {
        // SAFETY: the call takes no pointers, and what it returns is checked before it is owned.
        let wake = match unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) } {
            -1 => return Err(io::Error::last_os_error()),
            // SAFETY: a new descriptor that nobody else has.
            fd => Arc::new(unsafe { OwnedFd::from_raw_fd(fd) }),
        };
        let worker = Worker::new(Arc::clone(&wake))?;
        let (waiting, returned) = (Arc::clone(&worker.waiting), Arc::clone(&worker.returned));
        thread::Builder::new().name("local-ring".to_owned()).spawn(move || worker.run())?;
        Ok(Self { waiting, wake, room: Arc::new(Semaphore::new(QUEUE)), returned })
    }

    async fn part(&self, source: &Arc<Source>, offset: u64, len: usize) -> io::Result<Bytes> {
        let permit = Arc::clone(&self.room).acquire_owned().await.map_err(io::Error::other)?;
        let (reply, answer) = oneshot::channel();
        let request = Request { source: Arc::clone(source), offset, len, reply, _permit: permit };
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).push_back(request);
        wake(&self.wake)?;
        answer.await.map_err(io::Error::other)?
    }

    /// `len` bytes of a file, all of them.
    ///
    /// # Errors
    /// What the system says; `UnexpectedEof` when the file ends before.
    pub(super) async fn read(&self, file: &Arc<File>, start: u64, len: usize) -> io::Result<Bytes> {
        let source = Source::new(file, len > BUFFER, &self.returned);
        if len <= BUFFER {
            return self.part(&source, start, len).await;
        }
        let parts = (0..len.div_ceil(BUFFER)).map(|n| {
            let at = n * BUFFER;
            self.part(&source, start + at as u64, BUFFER.min(len - at))
        });
        let mut parts = futures::stream::iter(parts).buffered(PARTS);
        let mut all = BytesMut::with_capacity(len);
        while let Some(part) = parts.try_next().await? {
            all.extend_from_slice(&part);
        }
        Ok(all.freeze())
    }
}

struct Flying {
    request: Request,
    /// What arrived so far: the kernel may give less than was asked for.
    done: usize,
}

/// The thread's own.
struct Worker {
    // Before the buffers: when it goes, the kernel uses them no longer.
    ring: IoUring,
    buffers: Box<[u8]>,
    free: Vec<u16>,
    flying: HashMap<u64, Flying>,
    waiting: Arc<Mutex<VecDeque<Request>>>,
    wake: Arc<OwnedFd>,
    counter: Box<u64>,
    listening: bool,
    table: Table,
    returned: Arc<Returned>,
}

impl Worker {
    fn new(wake: Arc<OwnedFd>) -> io::Result<Self> {
        let entries = u32::try_from(BUFFERS * 2).unwrap_or(64);
        let ring = IoUring::new(entries)?;
        let mut buffers = vec![0; BUFFER * BUFFERS].into_boxed_slice();
        let vectors: Vec<libc::iovec> = buffers
            .chunks_exact_mut(BUFFER)
            .map(|buffer| libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() })
            .collect();
        // SAFETY: the buffers live as long as the ring, which is a field before them, and are never moved: their memory
        // is a box's.
        unsafe { ring.submitter().register_buffers(&vectors)? };
        let returned = Returned::new(Arc::clone(&wake));
        let table = Table::new(&ring.submitter(), Arc::clone(&returned));
        let free = (0..u16::try_from(BUFFERS).unwrap_or(u16::MAX)).collect();
        let (waiting, counter) = (Arc::default(), Box::new(0));
        let (flying, listening) = (HashMap::new(), false);
        Ok(Self { ring, buffers, free, flying, waiting, wake, counter, listening, table, returned })
    }

    fn run(mut self) {
        loop {
            self.take();
            if let Err(error) = self.ring.submit_and_wait(1)
                && !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
            {
                tracing::warn!("the io_uring of local reads fails: {error}");
                // What is in the kernel stays there with its memory: this thread is never left. The others are told.
                let waiting = std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
                let failed = || io::Error::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO));
                waiting.into_iter().for_each(|request| drop(request.reply.send(Err(failed()))));
                thread::sleep(Duration::from_millis(50));
                continue;
            }
            let done: Vec<(u64, i32)> = self.ring.completion().map(|cqe| (cqe.user_data(), cqe.result())).collect();
            for (token, result) in done {
                if token == WAKE {
                    self.listening = false;
                } else {
                    self.finish(token, result);
                }
            }
        }
    }

    /// Hands to the kernel what waits, as far as there are buffers.
    fn take(&mut self) {
        self.table.clear(&self.ring.submitter());
        if !self.listening {
            let counter: *mut u64 = &raw mut *self.counter;
            let read = opcode::Read::new(types::Fd(self.wake.as_raw_fd()), counter.cast(), 8).build().user_data(WAKE);
            // SAFETY: the counter is a box's, the descriptor is the worker's, and both live as long as the ring.
            self.listening = unsafe { self.ring.submission().push(&read) }.is_ok();
        }
        while let Some(buffer) = self.free.pop() {
            let next = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            let Some(request) = next else {
                self.free.push(buffer);
                return;
            };
            if request.reply.is_closed() {
                self.free.push(buffer);
                continue;
            }
            self.flying.insert(u64::from(buffer), Flying { request, done: 0 });
            self.submit(buffer);
        }
    }

    fn submit(&mut self, buffer: u16) {
        let Some(flying) = self.flying.get(&u64::from(buffer)) else { return };
        let at = usize::from(buffer) * BUFFER + flying.done;
        let left = flying.request.len - flying.done;
        let place = self.buffers[at..at + left].as_mut_ptr();
        let left = u32::try_from(left).unwrap_or(0);
        let offset = flying.request.offset + flying.done as u64;
        let read = match self.table.number(&self.ring.submitter(), &flying.request.source) {
            Some(number) => opcode::ReadFixed::new(types::Fixed(number), place, left, buffer),
            None => opcode::ReadFixed::new(types::Fd(flying.request.source.descriptor()), place, left, buffer),
        };
        let read = read.offset(offset).build().user_data(u64::from(buffer));
        // SAFETY: the place is inside of a registered buffer that no other request has, and the file is kept open by
        // `flying`, until the completion is taken.
        let pushed = unsafe { self.ring.submission().push(&read) };
        // There are twice as many entries as buffers.
        if pushed.is_err()
            && let Some(flying) = self.flying.remove(&u64::from(buffer))
        {
            self.free.push(buffer);
            let _ = flying.request.reply.send(Err(io::Error::from_raw_os_error(libc::EBUSY)));
        }
    }

    fn finish(&mut self, token: u64, result: i32) {
        let (Ok(buffer), Some(mut flying)) = (u16::try_from(token), self.flying.remove(&token)) else { return };
        let answer = match usize::try_from(result) {
            Err(_) if matches!(-result, libc::EINTR | libc::EAGAIN) => None,
            Err(_) => Some(Err(io::Error::from_raw_os_error(-result))),
            Ok(0) => Some(Err(io::ErrorKind::UnexpectedEof.into())),
            Ok(read) => {
                flying.done += read;
                let at = usize::from(buffer) * BUFFER;
                let whole = flying.done >= flying.request.len;
                whole.then(|| Ok(Bytes::copy_from_slice(&self.buffers[at..at + flying.request.len])))
            }
        };
        match answer {
            Some(answer) => {
                self.free.push(buffer);
                let _ = flying.request.reply.send(answer);
            }
            None => {
                self.flying.insert(token, flying);
                self.submit(buffer);
            }
        }
    }
}
