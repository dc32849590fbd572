//! Which data files are open: a bounded number, those that were used last. Who reads from one keeps it open for as long.

use super::blob::Blob;
use super::shared::Shared;
use crate::Medium;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The open files, oldest first.
#[derive(Debug, Default)]
pub(crate) struct OpenFiles {
    open: Mutex<VecDeque<Weak<Blob>>>,
}

impl OpenFiles {
    /// Opens a blob's file, and closes another when there are too many. Who reads from that one still holds it.
    pub(crate) fn open(&self, blob: &Arc<Blob>, shared: &Shared) -> io::Result<Arc<dyn Medium>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let mut slot = blob.file.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = &*slot {
            return Ok(Arc::clone(file));
        }
        let file = shared.disk.open(&blob.key)?;
        *slot = Some(Arc::clone(&file));
        drop(slot);
        open.push_back(Arc::downgrade(blob));
        // Two rounds: in the first all may have been used.
        for _ in 0..2 * open.len() {
            if open.len() <= shared.config.open_files {
                break;
            }
            let Some(oldest) = open.pop_front() else { break };
            let Some(other) = oldest.upgrade() else { continue };
            let used = other.recent.swap(false, Ordering::Relaxed);
            match other.file.try_write() {
                Ok(mut file) if !used => *file = None,
                // It is in use, or is being read from at this moment.
                _ => open.push_back(oldest),
            }
        }
        shared.metrics.open_files.set(open.len() as u64);
        Ok(file)
    }

    /// Closes a blob's file.
    pub(crate) fn close(&self, blob: &Blob, shared: &Shared) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|other| !std::ptr::eq(other.as_ptr(), blob));
        *blob.file.write().unwrap_or_else(PoisonError::into_inner) = None;
        shared.metrics.open_files.set(open.len() as u64);
    }
}
