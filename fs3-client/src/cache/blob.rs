//! A blob as the cache knows it: which chunks are there, which are on their way, and its file.

use super::digests::ChunkDigests;
use super::error::CacheError;
use super::files::Opened;
use super::format::BlobKey;
use super::geometry::{Geometry, bit, bits, by_group, group_of};
use super::group::Group;
use super::inflight::Flights;
use super::readahead::Streams;
use super::shared::Shared;
use crate::Medium;
use arc_swap::ArcSwapOption;
use bytes::Bytes;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// What a fetch gives for a chunk.
#[derive(Debug, Clone)]
pub(crate) struct Fetched {
    /// All of the chunk.
    pub(crate) bytes: Bytes,
    /// Whether a table of digests vouches for it.
    pub(crate) checked: bool,
}

/// The outcome of a flight.
pub(crate) type Landed = Result<Fetched, CacheError>;

/// A blob.
#[derive(Debug)]
pub(crate) struct Blob {
    /// Its number in this process.
    pub(crate) id: u32,
    pub(crate) key: BlobKey,
    pub(crate) geometry: Geometry,
    pub(crate) groups: Box<[Group]>,
    pub(crate) flights: Arc<Flights<Landed>>,
    pub(crate) streams: Mutex<Streams>,
    /// How many hold it.
    pub(crate) handles: AtomicU32,
    /// How often a sync of its file failed.
    pub(crate) sync_failures: AtomicU32,
    /// Its file was used since it was last looked at.
    pub(crate) recent: AtomicBool,
    pub(crate) file: ArcSwapOption<Opened>,
    digests: RwLock<Option<Arc<dyn ChunkDigests>>>,
}

impl Blob {
    pub(crate) fn new(id: u32, key: BlobKey, chunk: u64) -> Self {
        let geometry = Geometry { chunk, size: key.size };
        Self {
            id,
            key,
            geometry,
            groups: (0..geometry.groups()).map(|_| Group::default()).collect(),
            flights: Arc::new(Flights::new()),
            streams: Mutex::default(),
            handles: AtomicU32::new(0),
            sync_failures: AtomicU32::new(0),
            recent: AtomicBool::new(false),
            file: ArcSwapOption::empty(),
            digests: RwLock::default(),
        }
    }

    pub(crate) fn group(&self, group: u32) -> &Group {
        &self.groups[group as usize]
    }

    pub(crate) fn digests(&self) -> Option<Arc<dyn ChunkDigests>> {
        self.digests.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes a table, the first that it is given. Whether it did.
    pub(crate) fn set_digests(&self, digests: Arc<dyn ChunkDigests>) -> bool {
        let mut held = self.digests.write().unwrap_or_else(PoisonError::into_inner);
        let first = held.is_none();
        if first {
            *held = Some(digests);
        }
        first
    }

    /// Whether a chunk is in the file.
    pub(crate) fn has(&self, chunk: u32) -> bool {
        self.group(group_of(chunk)).present() & bit(chunk) != 0
    }

    /// Whether any chunk is.
    pub(crate) fn has_any(&self) -> bool {
        self.groups.iter().any(|group| group.present() != 0)
    }

    /// Bytes of the chunks that are.
    pub(crate) fn present_bytes(&self) -> u64 {
        (0..self.geometry.groups()).map(|group| self.geometry.weight(group, self.group(group).present())).sum()
    }

    /// Enters the groups of `chunks` if these are all there and believed. Who is given them leaves them.
    pub(crate) fn enter(self: &Arc<Self>, shared: &Shared, chunks: &Range<u32>) -> bool {
        let mut entered = chunks.start..chunks.start;
        for piece in by_group(chunks.clone()) {
            if !self.enter_group(shared, &piece) {
                self.leave(&entered);
                return false;
            }
            entered.end = piece.end;
        }
        true
    }

    /// The same for chunks that are in one group.
    pub(crate) fn enter_group(self: &Arc<Self>, shared: &Shared, piece: &Range<u32>) -> bool {
        let group = self.group(group_of(piece.start));
        if !group.enter() {
            return false;
        }
        let wanted = bits(piece);
        let there = group.present() & wanted == wanted;
        if there && (group.suspect() & wanted == 0 || self.believe(shared, piece)) {
            group.touch(shared.epoch());
            return true;
        }
        group.leave();
        false
    }

    /// Looks at chunks of one group, if they are all there and believed: what to compare after the read.
    #[inline]
    pub(crate) fn look(self: &Arc<Self>, shared: &Shared, piece: &Range<u32>) -> Option<u32> {
        let group = self.group(group_of(piece.start));
        let seen = group.look()?;
        let wanted = bits(piece);
        if group.present() & wanted != wanted {
            return None;
        }
        if group.suspect() & wanted != 0 {
            if !self.enter_group(shared, piece) {
                return None;
            }
            group.leave();
        }
        group.touch(shared.epoch());
        Some(seen)
    }

    /// Leaves the groups of `chunks`.
    pub(crate) fn leave(&self, chunks: &Range<u32>) {
        by_group(chunks.clone()).for_each(|piece| self.group(group_of(piece.start)).leave());
    }

    /// Takes chunks for wrong: they are not read any more. The index learns of it with the next flush.
    pub(crate) fn drop_chunks(self: &Arc<Self>, shared: &Shared, chunks: Range<u32>) -> u32 {
        let mut count = 0;
        for piece in by_group(chunks) {
            let group = group_of(piece.start);
            // Under one lock, as they are added.
            let mut ledger = shared.ledger();
            let gone = self.group(group).drop_bits(bits(&piece));
            if gone != 0 {
                count += gone.count_ones();
                let late = ledger.drop_chunks(self, piece.filter(|chunk| gone & bit(*chunk) != 0));
                drop(ledger);
                shared.less(self.geometry.weight(group, gone));
                if late {
                    // The index will not learn of it: nothing of it is believed unseen at the next start.
                    let _ = shared.index.take_clean().inspect_err(|error| shared.index_failed(error));
                }
            }
        }
        count
    }

    /// The file, which is opened if it is not open.
    pub(crate) fn open(self: &Arc<Self>, shared: &Shared) -> io::Result<Arc<dyn Medium>> {
        self.with_file(shared, Arc::clone)
    }

    /// Does something with the file, which is opened if it is not open, and is not closed meanwhile.
    pub(crate) fn with_file<T>(
        self: &Arc<Self>,
        shared: &Shared,
        work: impl FnOnce(&Arc<dyn Medium>) -> T,
    ) -> io::Result<T> {
        if !self.recent.load(Ordering::Relaxed) {
            self.recent.store(true, Ordering::Relaxed);
        }
        // No lock that all readers of the blob would share.
        if let Some(file) = &*self.file.load() {
            return Ok(work(&file.0));
        }
        Ok(work(&shared.files.open(self, shared)?.0))
    }
}
