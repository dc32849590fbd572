//! A layer's bytes on their way to their hashes, and its data blob's to the disk.

use super::LayerError;
use crate::blob::Segments;
use crate::hash::Hashers;
use fs3_client::{Digest, Staged, Store};
use std::io::Write as _;

/// Where a blob's bytes go as soon as they will not change any more.
pub(super) struct BlobOut<'s> {
    store: &'s Store,
    pub(super) staged: Option<Staged>,
    /// Of the stored bytes, the plain tar and the data blob.
    pub(super) hash: Hashers<3>,
    /// Bytes written, and how many of them the disk was told of.
    written: u64,
    begun: u64,
}

/// Bytes between one request to the disk and the next.
const WRITEBACK: u64 = 8 << 20;
/// Bytes that are worth a write of their own.
const ENOUGH: usize = 256 << 10;

impl<'s> BlobOut<'s> {
    pub(super) fn new(store: &'s Store) -> Self {
        Self { store, staged: None, hash: Hashers::default(), written: 0, begun: 0 }
    }

    /// Hashes stored bytes that nothing else is done with.
    pub(super) fn hash_stored(&mut self, stored: &[u8]) {
        self.hash.update([&[stored], &[], &[]]);
    }

    /// Digest and length of the stored bytes so far.
    pub(super) fn stored(&self) -> (Digest, u64) {
        (self.hash.clone().finish()[0], self.hash.lens()[0])
    }

    /// Hashes `stored` and `plain` bytes together with what is new in `segments`, and writes that while it is still in
    /// the core's cache. Without stored or plain bytes it waits until there is enough to be worth a system call.
    pub(super) fn drain(&mut self, stored: &[u8], plain: &[u8], segments: &mut Segments) -> Result<(), LayerError> {
        let fresh = segments.fresh();
        if stored.is_empty() && plain.is_empty() && fresh.iter().map(|p| p.len()).sum::<usize>() < ENOUGH {
            return Ok(());
        }
        self.hash.update([&[stored], &[plain], &fresh]);
        self.write(&fresh)?;
        segments.mark_seen();
        while let Some(segment) = segments.take() {
            segments.recycle(segment);
        }
        Ok(())
    }

    /// Hashes and writes all that is new in `segments`.
    pub(super) fn finish(&mut self, segments: &Segments) -> Result<(), LayerError> {
        let fresh = segments.fresh();
        self.hash.update([&[], &[], &fresh]);
        self.write(&fresh)
    }

    fn write(&mut self, pieces: &[&[u8]]) -> Result<(), LayerError> {
        for piece in pieces {
            let staged = match &self.staged {
                Some(staged) => staged,
                None => self.staged.insert(self.store.stage("data")?),
            };
            let mut file: &std::fs::File = staged;
            file.write_all(piece).map_err(LayerError::Scratch)?;
            self.written += piece.len() as u64;
            // The disk works while the rest of the layer is inflated, so that there is little left to sync at its end.
            if self.written - self.begun >= WRITEBACK {
                staged.begin_writeback(self.begun, self.written - self.begun);
                self.begun = self.written;
            }
        }
        Ok(())
    }
}
