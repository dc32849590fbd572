//! One conversion's view of a dictionary.

use super::{Dedup, DictionaryError, Place, Snapshot, cluster_key};
use crate::blob::foreign::{Find, Found, Wanted};
use crate::compress;
use crate::entry::Warning;
use crate::erofs::format::{BLOCK_SIZE, SEGMENT_BLOCKS};
use crate::layer::{BlobRef, Existing};
use fs3_client::{Store, StoreError};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What the dictionary knew when an image's conversion began, and which of the blobs that it names are there.
///
/// A blob is looked for once; one that is not in the store, or not in its length, is not referred to.
#[derive(Debug)]
pub struct Session<'s> {
    snapshot: Arc<dyn Snapshot>,
    store: &'s Store,
    dedup: &'s Dedup,
    blobs: Mutex<HashMap<u32, Option<Existing>>>,
    /// By blob: chunks that are not what its table says.
    wrong: Mutex<BTreeMap<String, u64>>,
}

impl<'s> Session<'s> {
    /// Begins one with what `dedup`'s dictionary knows now.
    #[must_use]
    pub fn new(dedup: &'s Dedup, store: &'s Store) -> Self {
        let snapshot = dedup.dictionary.snapshot();
        Self { snapshot, store, dedup, blobs: Mutex::default(), wrong: Mutex::default() }
    }

    /// What it was begun with.
    #[must_use]
    pub fn dedup(&self) -> &'s Dedup {
        self.dedup
    }

    fn usable(&self, blob: u32) -> Result<Option<Existing>, DictionaryError> {
        let mut blobs: MutexGuard<'_, _> = self.blobs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = blobs.get(&blob) {
            return Ok(*known);
        }
        let existing = self.snapshot.blob(blob)?.filter(|b| b.table.is_some());
        // To ask a writer's store is to claim: what is there now is there when the layer is done. Its table too, without
        // which nobody would refer to it.
        let here = match &existing {
            Some(Existing { blob, table: Some(table) }) => self.is_whole(blob)? && self.is_whole(table)?,
            _ => false,
        };
        let usable = existing.filter(|_| here);
        blobs.insert(blob, usable);
        Ok(usable)
    }

    fn is_whole(&self, blob: &BlobRef) -> Result<bool, DictionaryError> {
        Ok(self.store.blob_size(&blob.digest)? == Some(blob.size))
    }

    /// Whether the chunk at `place` of `blob` is what is wanted.
    fn is_there(&self, blob: &Existing, place: &Place, wanted: Wanted<'_>) -> Result<bool, DictionaryError> {
        let block = u64::from(BLOCK_SIZE);
        let (at, len) = (u64::from(place.start) * block, u64::from(place.blocks) * block);
        let same = match self.store.read_range(&blob.blob.digest, at..at + len) {
            Ok(found) => match wanted {
                Wanted::Plain { bytes, .. } => {
                    found.starts_with(bytes) && found[bytes.len()..].iter().all(|byte| *byte == 0)
                }
                Wanted::Cluster { bytes, algorithm, .. } => {
                    let mut plain = vec![0; bytes.len()];
                    *blake3::hash(&found).as_bytes() == place.digest
                        && compress::decompress(algorithm, &found, &mut plain).is_ok()
                        && plain == bytes
                }
            },
            Err(StoreError::Corrupt { .. }) => false,
            Err(e) => return Err(e.into()),
        };
        if !same {
            let mut wrong = self.wrong.lock().unwrap_or_else(PoisonError::into_inner);
            *wrong.entry(blob.blob.digest.to_string()).or_default() += 1;
        }
        Ok(same)
    }

    /// Sees that a blob which a layer is about to refer to is still there, and makes its age start anew.
    ///
    /// # Errors
    /// [`DictionaryError::Gone`] when it is not; when the store fails.
    pub fn hold(&self, blob: &Existing) -> Result<(), DictionaryError> {
        for digest in std::iter::once(&blob.blob.digest).chain(blob.table.as_ref().map(|table| &table.digest)) {
            match self.store.renew(digest) {
                Ok(()) | Err(StoreError::Missing { .. }) => {}
                Err(e) => return Err(e.into()),
            }
        }
        let table = blob.table.map_or(Ok(true), |table| self.is_whole(&table))?;
        if table && self.is_whole(&blob.blob)? { Ok(()) } else { Err(DictionaryError::Gone { blob: blob.blob.digest }) }
    }

    /// What was found damaged on the way.
    #[must_use]
    pub fn warnings(&self) -> Vec<Warning> {
        let wrong = self.wrong.lock().unwrap_or_else(PoisonError::into_inner);
        let warning = |(blob, count): (&String, &u64)| {
            let message = format!(
                "blob {blob} is corrupt, or its chunk table is: {count} chunks that were looked for have other contents; they were stored again"
            );
            Warning::new(b"", message)
        };
        wrong.iter().map(warning).collect()
    }
}

impl Find for Session<'_> {
    fn find(&self, wanted: Wanted<'_>) -> Result<Option<Found>, DictionaryError> {
        let (key, bytes) = match wanted {
            Wanted::Plain { digest, bytes, .. } => (*digest, bytes),
            Wanted::Cluster { digest, bytes, algorithm } => {
                let Ok(len) = u32::try_from(bytes.len()) else { return Ok(None) };
                (cluster_key(algorithm, digest, len), bytes)
            }
        };
        let mut usable = |blob| Ok(self.usable(blob)?.is_some());
        let Some(place) = self.snapshot.find(&key, &mut usable)? else { return Ok(None) };
        let Some(blob) = self.usable(place.blob)? else { return Ok(None) };
        // An entry is not trusted further than it can be seen.
        let (start, blocks) = (u64::from(place.start), u64::from(place.blocks));
        let wanted_blocks = bytes.len().div_ceil(BLOCK_SIZE as usize) as u64;
        let segment = u64::from(SEGMENT_BLOCKS);
        let fits = match wanted {
            Wanted::Plain { across, .. } => {
                blocks == wanted_blocks && (across || start / segment == (start + blocks - 1) / segment)
            }
            Wanted::Cluster { .. } => blocks > 0 && blocks < wanted_blocks,
        };
        let inside = start + blocks <= (blob.blob.size / u64::from(BLOCK_SIZE)).min(u64::from(u32::MAX));
        if !fits || !inside || self.dedup.verify && !self.is_there(&blob, &place, wanted)? {
            return Ok(None);
        }
        Ok(Some(Found { blob, start: place.start, blocks: place.blocks, digest: place.digest }))
    }
}
