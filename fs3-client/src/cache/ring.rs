//! Reads that have to wait for the disk, by an io_uring: the reader's task waits, and no thread of its runtime does.
//!
//! Whoever reads submits, under a lock; a thread of the ring's own takes what is done. A read that was submitted is never
//! given up: its file and its buffer are the ring's until the kernel is done with them, whoever still waits.
#![allow(unsafe_code)]

use crate::Medium;
use io_uring::{IoUring, opcode, squeue, types};
use std::collections::HashMap;
use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, oneshot};

/// Reads in the kernel at once. The others wait for their turn.
const DEPTH: u32 = 256;
/// What ends the thread is known by.
const END: u64 = u64::MAX;

/// What was read: the buffer, and how many of its bytes.
type Answer = io::Result<(Vec<u8>, usize)>;

#[derive(Debug)]
struct Read {
    file: Arc<dyn Medium>,
    buffer: Vec<u8>,
    /// Bytes that arrived: the kernel may give fewer than were asked for.
    done: usize,
    offset: u64,
    reply: Option<oneshot::Sender<Answer>>,
}

/// Whoever has the lock on it may touch the submission queue.
#[derive(Debug, Default)]
struct Submitted {
    reads: HashMap<u64, Read>,
    next: u64,
    ending: bool,
}

/// The ring, as its thread and its front share it.
struct Inner {
    ring: IoUring,
    submitted: Mutex<Submitted>,
    /// The kernel refused what it may not refuse: nothing is submitted any more.
    broken: AtomicBool,
}

/// The front. When it is dropped, the thread ends after the last read.
pub(crate) struct Ring {
    inner: Arc<Inner>,
    turns: Semaphore,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").finish_non_exhaustive()
    }
}

impl Ring {
    /// A ring, and its thread.
    ///
    /// # Errors
    /// Where the kernel has none, or keeps it from this process, as containers often do.
    pub(crate) fn new() -> io::Result<Self> {
        let inner =
            Arc::new(Inner { ring: IoUring::new(DEPTH)?, submitted: Mutex::default(), broken: AtomicBool::new(false) });
        let thread = std::thread::Builder::new().name("dsec-cache-ring".to_owned());
        let taking = Arc::clone(&inner);
        thread.spawn(move || taking.run())?;
        Ok(Self { inner, turns: Semaphore::new(DEPTH as usize) })
    }

    /// Whether it takes reads.
    pub(crate) fn works(&self) -> bool {
        !self.inner.broken.load(Ordering::Relaxed)
    }

    /// Fills `buffer` from `offset` of `file`, which has a descriptor. Gives it back with the number of bytes, fewer only
    /// at the end of the file. May be dropped at any time.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) async fn read(&self, file: &Arc<dyn Medium>, offset: u64, buffer: Vec<u8>) -> Answer {
        let _turn = self.turns.acquire().await.map_err(io::Error::other)?;
        let (reply, answer) = oneshot::channel();
        let read = Read { file: Arc::clone(file), buffer, done: 0, offset, reply: Some(reply) };
        self.inner.begin(read)?;
        answer.await.map_err(io::Error::other)?
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        let mut submitted = self.inner.submitted();
        submitted.ending = true;
        // Without it the thread would wait for a read that never comes. It is left behind where the ring is broken.
        self.inner.submit(&mut submitted, &opcode::Nop::new().build().user_data(END));
    }
}

impl Inner {
    fn submitted(&self) -> MutexGuard<'_, Submitted> {
        self.submitted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    fn begin(&self, read: Read) -> io::Result<()> {
        let mut submitted = self.submitted();
        if self.is_broken() {
            return Err(io::Error::other("the io_uring is broken"));
        }
        let number = submitted.next;
        submitted.next += 1;
        self.go_on(&mut submitted, number, read);
        Ok(())
    }

    /// Asks the kernel for what is missing of a read.
    fn go_on(&self, submitted: &mut Submitted, number: u64, mut read: Read) {
        let Some(descriptor) = read.file.descriptor() else {
            answer(&mut read, Some(io::ErrorKind::Unsupported.into()));
            return;
        };
        let fd = types::Fd(descriptor.as_raw_fd());
        let rest = &mut read.buffer[read.done..];
        let len = u32::try_from(rest.len()).unwrap_or(u32::MAX);
        let entry = opcode::Read::new(fd, rest.as_mut_ptr(), len).offset(read.offset + read.done as u64);
        let entry = entry.build().user_data(number);
        // The table keeps the buffer, which is on the heap and is not touched, and the file with its descriptor, until
        // the kernel is done.
        submitted.reads.insert(number, read);
        self.submit(submitted, &entry);
    }

    /// Hands an entry to the kernel, whose memory stays valid for as long as it is in the table.
    fn submit(&self, submitted: &mut Submitted, entry: &squeue::Entry) {
        let pushed = {
            // SAFETY: this is the only place that touches the submission queue, and the caller has the lock.
            let mut queue = unsafe { self.ring.submission_shared() };
            // SAFETY: an entry that has pointers has those of a read in the table, which stays there until its completion
            // was taken (see `go_on` and `take`); a broken ring's are never taken out.
            unsafe { queue.push(entry) }.is_ok()
        };
        let outcome = if pushed { self.enter() } else { Err(io::ErrorKind::WouldBlock.into()) };
        if let Err(error) = outcome {
            tracing::warn!("the io_uring of the chunk cache fails, and threads read in its place: {error}");
            self.broken.store(true, Ordering::Relaxed);
            // Their memory stays where the kernel may still write to it.
            for read in submitted.reads.values_mut() {
                answer(read, Some(io::Error::other("the io_uring is broken")));
            }
        }
    }

    fn enter(&self) -> io::Result<()> {
        // The queue is as long as there are turns, so that the kernel is short of memory at worst, and for a moment.
        for _ in 0..1000 {
            match self.ring.submit() {
                Ok(_) => return Ok(()),
                Err(error) if is_passing(&error) => std::thread::yield_now(),
                Err(error) => return Err(error),
            }
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// The thread: takes what is done.
    fn run(&self) {
        loop {
            // SAFETY: no argument is given, and the flags ask for a completion to be waited for.
            let waited = unsafe { self.ring.submitter().enter::<()>(0, 1, GETEVENTS, None) };
            if let Err(error) = waited
                && !is_passing(&error)
            {
                // What is in the kernel's hands stays with this thread, which is never left then.
                tracing::warn!("the io_uring of the chunk cache fails: {error}");
                std::thread::sleep(Duration::from_millis(100));
            }
            // SAFETY: this thread is the only one that touches the completion queue.
            let done: Vec<(u64, i32)> =
                unsafe { self.ring.completion_shared() }.map(|entry| (entry.user_data(), entry.result())).collect();
            let mut submitted = self.submitted();
            for (number, result) in done {
                self.take(&mut submitted, number, result);
            }
            if submitted.ending && submitted.reads.is_empty() {
                return;
            }
        }
    }

    fn take(&self, submitted: &mut Submitted, number: u64, result: i32) {
        let Some(mut read) = submitted.reads.remove(&number) else { return };
        match usize::try_from(result) {
            Ok(0) => answer(&mut read, None),
            Ok(some) => {
                read.done += some;
                if read.done < read.buffer.len() && !self.is_broken() {
                    self.go_on(submitted, number, read);
                } else {
                    answer(&mut read, None);
                }
            }
            Err(_) if is_passing(&io::Error::from_raw_os_error(-result)) && !self.is_broken() => {
                self.go_on(submitted, number, read);
            }
            Err(_) => answer(&mut read, Some(io::Error::from_raw_os_error(-result))),
        }
    }
}

const GETEVENTS: u32 = 1;

fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

/// Tells who waits, once; nobody has to.
fn answer(read: &mut Read, error: Option<io::Error>) {
    let Some(reply) = read.reply.take() else { return };
    let answer = match error {
        Some(error) => Err(error),
        None => Ok((std::mem::take(&mut read.buffer), read.done)),
    };
    let _ = reply.send(answer);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Write as _;

    fn file(bytes: &[u8]) -> Arc<dyn Medium> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        Arc::new(file)
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn many_reads_at_once_each_get_their_bytes() {
        let bytes: Vec<u8> = (0..1u32 << 16).flat_map(u32::to_le_bytes).collect();
        let (ring, file) = (Arc::new(Ring::new().unwrap()), file(&bytes));
        let mut readers = tokio::task::JoinSet::new();
        for n in 0..2000usize {
            let (ring, file) = (Arc::clone(&ring), Arc::clone(&file));
            let start = n * 7919 % (bytes.len() - 5000);
            let wanted = bytes[start..start + 4999].to_vec();
            readers.spawn(async move {
                let (got, len) = ring.read(&file, start as u64, vec![0; 4999]).await.unwrap();
                assert!(len == 4999 && got == wanted);
            });
        }
        readers.join_all().await;
        // At the end, and beyond it.
        let (got, len) = ring.read(&file, bytes.len() as u64 - 3, vec![7; 10]).await.unwrap();
        assert_eq!((&got[..3], len), (&bytes[bytes.len() - 3..], 3));
        assert_eq!(ring.read(&file, 1 << 40, vec![7; 10]).await.unwrap().1, 0);
    }

    #[tokio::test]
    async fn a_failure_is_the_readers_own_and_who_goes_away_harms_nobody() {
        let ring = Ring::new().unwrap();
        let directory: Arc<dyn Medium> = Arc::new(File::open("/").unwrap());
        let error = ring.read(&directory, 0, vec![0; 10]).await.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EISDIR));
        let file = file(&[3; 1 << 20]);
        for _ in 0..500 {
            let read = ring.read(&file, 0, vec![0; 1 << 20]);
            let _ = futures::FutureExt::now_or_never(read);
        }
        let (got, len) = ring.read(&file, 5, vec![0; 100]).await.unwrap();
        assert_eq!((got.as_slice(), len), ([3; 100].as_slice(), 100));
        let ends = Arc::downgrade(&ring.inner);
        drop(ring);
        while ends.strong_count() > 0 {
            std::thread::yield_now();
        }
    }
}
