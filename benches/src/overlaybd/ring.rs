//! Reads by io_uring, so many at a time.
#![allow(unsafe_code)]

use anyhow::{Context as _, Result, ensure};
use io_uring::{IoUring, opcode, types};
use std::os::fd::{AsRawFd as _, BorrowedFd};

/// Reads of blocks by one ring.
pub(super) struct Ring<G> {
    ring: IoUring,
    /// One block each, with what keeps its file's bytes where they are.
    slots: Vec<(Box<[u8]>, Option<G>)>,
    free: Vec<usize>,
}

impl<G> Ring<G> {
    /// For `depth` reads of `block` bytes at once.
    pub(super) fn new(depth: usize, block: usize) -> Result<Self> {
        let ring = IoUring::new(u32::try_from(depth)?).context("this machine has no io_uring")?;
        let slots = (0..depth).map(|_| (vec![0; block].into_boxed_slice(), None)).collect();
        Ok(Self { ring, slots, free: (0..depth).collect() })
    }

    /// A place for a read, after one has ended if all are taken.
    fn slot(&mut self) -> Result<usize> {
        while self.free.is_empty() {
            self.ring.submit_and_wait(1)?;
            self.reap()?;
        }
        self.free.pop().context("no slot")
    }

    /// Begins a read. `guard` is dropped when it has ended, and keeps the file open.
    pub(super) fn read(&mut self, file: impl Fn(&G) -> Option<(BorrowedFd<'_>, u64)>, guard: G) -> Result<()> {
        let slot = self.slot()?;
        let (descriptor, offset) = file(&guard).context("a place without a file")?;
        let descriptor = types::Fd(descriptor.as_raw_fd());
        let (buffer, held) = &mut self.slots[slot];
        let len = u32::try_from(buffer.len())?;
        let entry = opcode::Read::new(descriptor, buffer.as_mut_ptr(), len).offset(offset).build();
        let entry = entry.user_data(slot as u64);
        *held = Some(guard);
        // SAFETY: the buffer is on the heap and the guard keeps the file open; both stay until the completion is seen,
        // since the slot is free only then, and `Drop` waits for all.
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.ring.submit()?;
            self.reap()?;
        }
        Ok(())
    }

    fn reap(&mut self) -> Result<()> {
        for done in self.ring.completion() {
            let slot = usize::try_from(done.user_data())?;
            let (buffer, held) = &mut self.slots[slot];
            *held = None;
            self.free.push(slot);
            ensure!(usize::try_from(done.result()) == Ok(buffer.len()), "a read gave {}", done.result());
        }
        Ok(())
    }

    /// Waits for all that were begun.
    pub(super) fn finish(&mut self) -> Result<()> {
        while self.free.len() < self.slots.len() {
            self.ring.submit_and_wait(1)?;
            self.reap()?;
        }
        Ok(())
    }
}

impl<G> Drop for Ring<G> {
    fn drop(&mut self) {
        if self.finish().is_err() {
            // The kernel may still write there.
            std::mem::forget(std::mem::take(&mut self.slots));
        }
    }
}
