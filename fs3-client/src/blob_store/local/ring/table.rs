//! Files that the ring knows by a number: those of reads in several parts, so that the kernel looks each up once.

use io_uring::Submitter;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Files that are known at a time; others are read by their descriptors.
const FILES: usize = 64;
/// A number that none has.
const NONE: u32 = u32::MAX;
/// A place of the table that is empty (io_uring_register(2)).
const EMPTY: RawFd = -1;

/// Numbers that nobody uses any more, and how to tell the ring's thread.
#[derive(Debug)]
pub(super) struct Returned {
    numbers: Mutex<Vec<u32>>,
    wake: Arc<OwnedFd>,
}

impl Returned {
    pub(super) fn new(wake: Arc<OwnedFd>) -> Arc<Self> {
        Arc::new(Self { numbers: Mutex::default(), wake })
    }

    fn take(&self) -> Vec<u32> {
        std::mem::take(&mut *self.numbers.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The file of one read. When it is dropped, its number can be another file's.
#[derive(Debug)]
pub(super) struct Source {
    file: Arc<File>,
    /// Whether a number is worth its cost.
    several: bool,
    number: AtomicU32,
    returned: Arc<Returned>,
}

impl Source {
    pub(super) fn new(file: &Arc<File>, several: bool, returned: &Arc<Returned>) -> Arc<Self> {
        let (file, returned) = (Arc::clone(file), Arc::clone(returned));
        Arc::new(Self { file, several, number: AtomicU32::new(NONE), returned })
    }

    pub(super) fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        let number = *self.number.get_mut();
        if number != NONE {
            self.returned.numbers.lock().unwrap_or_else(PoisonError::into_inner).push(number);
            let _ = super::wake(&self.returned.wake);
        }
    }
}

/// The table, of which only the ring's thread knows.
#[derive(Debug)]
pub(super) struct Table {
    free: Vec<u32>,
    returned: Arc<Returned>,
}

impl Table {
    /// An empty one, registered with the ring; without places where the kernel has none.
    pub(super) fn new(ring: &Submitter<'_>, returned: Arc<Returned>) -> Self {
        let free = match ring.register_files(&[EMPTY; FILES]) {
            Ok(()) => (0..u32::try_from(FILES).unwrap_or(0)).collect(),
            Err(error) => {
                tracing::debug!("the io_uring registers no files: {error}");
                Vec::new()
            }
        };
        Self { free, returned }
    }

    /// The number of a file, which it gets now if it should have one and there is one.
    pub(super) fn number(&mut self, ring: &Submitter<'_>, source: &Source) -> Option<u32> {
        let known = source.number.load(Ordering::Relaxed);
        if known != NONE || !source.several {
            return (known != NONE).then_some(known);
        }
        let number = self.free.pop()?;
        if let Err(error) = place(ring, number, source.descriptor()) {
            tracing::debug!("the io_uring takes no file: {error}");
            self.free.push(number);
            return None;
        }
        source.number.store(number, Ordering::Relaxed);
        Some(number)
    }

    /// Takes back what nobody uses any more: a file that the table had would stay open, deleted or not.
    pub(super) fn clear(&mut self, ring: &Submitter<'_>) {
        for number in self.returned.take() {
            // One that cannot be emptied is given to the next file all the same, which replaces this one.
            if let Err(error) = place(ring, number, EMPTY) {
                tracing::debug!("the io_uring keeps a file: {error}");
            }
            self.free.push(number);
        }
    }
}

fn place(ring: &Submitter<'_>, number: u32, descriptor: RawFd) -> io::Result<()> {
    match ring.register_files_update(number, &[descriptor])? {
        1 => Ok(()),
        _ => Err(io::Error::other("not done")),
    }
}
