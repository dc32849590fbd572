//! What is in the files and not in the index yet, and the other way round.

use super::blob::Blob;
use super::geometry::group_of;
use crate::Medium;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A chunk that was written: its CRC32C, and whether a table of digests vouched for it.
pub(crate) type Fresh = (u32, bool);

/// The chunks of one blob.
#[derive(Debug)]
pub(crate) struct Unflushed {
    pub(crate) blob: Arc<Blob>,
    /// Kept open until it is synced, so that no error of its writes gets lost.
    pub(crate) file: Option<Arc<dyn Medium>>,
    /// Written, and to go into the index once the file is synced.
    pub(crate) fresh: BTreeMap<u32, Fresh>,
    /// To go out of the index.
    pub(crate) dropped: BTreeSet<u32>,
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    blobs: HashMap<u32, Unflushed>,
    /// Nothing is taken any more: the cache is being closed.
    closing: bool,
}

impl Ledger {
    fn of(&mut self, blob: &Arc<Blob>) -> &mut Unflushed {
        self.blobs.entry(blob.id).or_insert_with(|| Unflushed {
            blob: Arc::clone(blob),
            file: None,
            fresh: BTreeMap::new(),
            dropped: BTreeSet::new(),
        })
    }

    /// Notes chunks that were written to `file`. Refused when the cache is being closed, or a sync of the file failed
    /// since `generation`: then nothing is known of what was written.
    #[must_use]
    pub(crate) fn add(
        &mut self,
        blob: &Arc<Blob>,
        file: &Arc<dyn Medium>,
        generation: u32,
        chunks: &[(u32, Fresh)],
    ) -> bool {
        if self.closing || blob.sync_failures.load(Ordering::Acquire) != generation {
            return false;
        }
        let unflushed = self.of(blob);
        unflushed.file = Some(Arc::clone(file));
        for (chunk, fresh) in chunks {
            unflushed.dropped.remove(chunk);
            unflushed.fresh.insert(*chunk, *fresh);
        }
        true
    }

    /// Notes that chunks are not to be believed any more. Whether that is too late for the last flush.
    pub(crate) fn drop_chunks(&mut self, blob: &Arc<Blob>, chunks: impl Iterator<Item = u32>) -> bool {
        let unflushed = self.of(blob);
        for chunk in chunks {
            unflushed.fresh.remove(&chunk);
            unflushed.dropped.insert(chunk);
        }
        self.closing
    }

    /// Forgets a group, whose record goes out of the index as a whole.
    pub(crate) fn forget_group(&mut self, blob: &Blob, group: u32) {
        if let Some(unflushed) = self.blobs.get_mut(&blob.id) {
            unflushed.fresh.retain(|chunk, _| group_of(*chunk) != group);
            unflushed.dropped.retain(|chunk| group_of(*chunk) != group);
        }
    }

    /// A sync of the blob's file failed: what was written and not synced is not to be believed. Gives those chunks.
    pub(crate) fn distrust(&mut self, blob: &Arc<Blob>, taken: BTreeMap<u32, Fresh>) -> Vec<u32> {
        blob.sync_failures.fetch_add(1, Ordering::AcqRel);
        let unflushed = self.of(blob);
        let mut chunks = taken;
        chunks.append(&mut unflushed.fresh);
        unflushed.dropped.extend(chunks.keys());
        chunks.into_keys().collect()
    }

    /// Takes all there is.
    pub(crate) fn take(&mut self) -> Vec<Unflushed> {
        std::mem::take(&mut self.blobs).into_values().collect()
    }

    /// Puts back what could not be made durable, unless something newer is known.
    pub(crate) fn put_back(&mut self, taken: Unflushed) {
        let unflushed = self.of(&taken.blob);
        unflushed.file = unflushed.file.take().or(taken.file);
        for (chunk, fresh) in taken.fresh {
            if !unflushed.dropped.contains(&chunk) {
                unflushed.fresh.entry(chunk).or_insert(fresh);
            }
        }
        for chunk in taken.dropped {
            if !unflushed.fresh.contains_key(&chunk) {
                unflushed.dropped.insert(chunk);
            }
        }
    }

    /// Whether there is nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.blobs.values().all(|unflushed| unflushed.fresh.is_empty() && unflushed.dropped.is_empty())
    }

    /// From here on nothing is taken.
    pub(crate) fn close(&mut self) {
        self.closing = true;
    }
}
