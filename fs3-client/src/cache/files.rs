//! Which data files are open: a bounded number, those that were used last. Who reads from one keeps it open for as long.

use super::blob::Blob;
use super::shared::Shared;
use crate::Medium;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A data file that is open.
#[derive(Debug)]
pub(crate) struct Opened(pub(crate) Arc<dyn Medium>);

/// The open files, oldest first.
#[derive(Debug, Default)]
pub(crate) struct OpenFiles {
    open: Mutex<VecDeque<Weak<Blob>>>,
}

impl OpenFiles {
    /// Opens a blob's file, and closes another when there are too many. Who reads from that one still holds it.
    pub(crate) fn open(&self, blob: &Arc<Blob>, shared: &Shared) -> io::Result<Arc<Opened>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        // Only who has the lock above opens or closes.
        if let Some(file) = blob.file.load_full() {
            return Ok(file);
        }
        let file = Arc::new(Opened(shared.disk.open(&blob.key)?));
        blob.file.store(Some(Arc::clone(&file)));
        open.push_back(Arc::downgrade(blob));
        // Two rounds: in the first all may have been used.
        for _ in 0..2 * open.len() {
            if open.len() <= shared.config.open_files {
                break;
            }
            let Some(oldest) = open.pop_front() else { break };
            let Some(other) = oldest.upgrade() else { continue };
            if other.recent.swap(false, Ordering::Relaxed) {
                open.push_back(oldest);
            } else {
                other.file.store(None);
            }
        }
        shared.metrics.open_files.set(open.len() as u64);
        Ok(file)
    }

    /// Closes a blob's file.
    pub(crate) fn close(&self, blob: &Blob, shared: &Shared) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|other| !std::ptr::eq(other.as_ptr(), blob));
        blob.file.store(None);
        shared.metrics.open_files.set(open.len() as u64);
    }
}
