//! A dictionary in memory, made from the chunk tables of a store's images. It needs nothing but the store, so any number
//! of writers may use one store, each with its own.
//!
//! Each chunk costs 16 bytes of the index and half a byte to find it by, and 24 are reckoned, since two parts of the
//! index exist twice while they become one. What does not fit the budget is left out: blobs are taken in by the number
//! of layers that refer to them.

use super::index::{Entry, Sorted};
use super::{Dictionary, DictionaryError, Place, Snapshot, Stored, key_of, open_table};
use crate::chunk_table::{ChunkTable, Record};
use crate::entry::Warning;
use crate::layer::Existing;
use fs3_client::{Digest, Store, StoreError};
use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of memory that are reckoned for a chunk.
pub const CHUNK_COST: u64 = 24;
/// Chunk tables kept open.
const OPEN_TABLES: usize = 128;
/// Places of one chunk that are looked at.
const CANDIDATES: usize = 16;

/// An index of the chunks of a store's blobs.
#[derive(Debug)]
pub struct Tables {
    state: Mutex<State>,
    open: Arc<OpenTables>,
    /// Most chunks.
    room: u64,
}

#[derive(Debug, Default)]
struct State {
    /// From the oldest to the newest, none of them less than twice as long as the next.
    parts: Vec<Arc<Sorted>>,
    blobs: Arc<Vec<Existing>>,
    known: HashSet<Digest>,
    chunks: u64,
}

/// What [`Tables::new`] did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Loaded {
    /// Blobs taken in.
    pub blobs: u64,
    /// Their chunks.
    pub chunks: u64,
    /// Blobs that did not fit the budget.
    pub left_out: u64,
}

impl Tables {
    /// Reads the chunk tables of `stored` in its order, as many as `memory` bytes have room for. One that cannot be
    /// used is left out with a warning.
    ///
    /// # Errors
    /// When the store fails; a table that is missing or damaged is no failure.
    pub fn new(store: &Store, stored: &Stored, memory: u64) -> Result<(Self, Loaded, Vec<Warning>), DictionaryError> {
        let room = (memory / CHUNK_COST).min(u64::from(u32::MAX) - 1);
        let mut state = State::default();
        let (mut entries, mut loaded, mut warnings) = (Vec::new(), Loaded::default(), Vec::new());
        for blob in &stored.blobs {
            match read(blob, store, state.next_blob(), room - state.chunks) {
                Ok(Read::Entries(mut read)) => {
                    state.chunks += read.len() as u64;
                    entries.append(&mut read);
                    state.note(blob);
                }
                Ok(Read::NoRoom) => loaded.left_out += 1,
                Ok(Read::NoTable) => {}
                Err(DictionaryError::Store(e @ (StoreError::Missing { .. } | StoreError::Corrupt { .. }))) => {
                    warnings.push(left_out(blob, &e));
                }
                Err(e @ DictionaryError::Table { .. }) => {
                    warnings.push(left_out(blob, &e));
                }
                Err(e) => return Err(e),
            }
        }
        (loaded.blobs, loaded.chunks) = (state.blobs.len() as u64, state.chunks);
        state.parts.push(Arc::new(Sorted::new(entries)));
        let open = Arc::new(OpenTables { store: store.clone(), files: Mutex::default() });
        Ok((Self { state: Mutex::new(state), open, room }, loaded, warnings))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn left_out(blob: &Existing, why: &dyn std::fmt::Display) -> Warning {
    let message = format!("nothing is deduplicated against blob {}: {why}", blob.blob.digest);
    Warning::new(b"", message)
}

enum Read {
    Entries(Vec<Entry>),
    NoRoom,
    NoTable,
}

fn read(blob: &Existing, store: &Store, number: u32, room: u64) -> Result<Read, DictionaryError> {
    let Some(table) = blob.table else { return Ok(Read::NoTable) };
    // By its length, before it is read: no record is longer.
    if table.size.saturating_sub(64) / 80 > room {
        return Ok(Read::NoRoom);
    }
    let Some(opened) = open_table(blob, store)? else { return Ok(Read::NoTable) };
    if opened.len() > room {
        return Ok(Read::NoRoom);
    }
    let mut entries = Vec::new();
    for (index, record) in (0u32..).zip(opened.records()) {
        let record = record.map_err(|e| DictionaryError::records(blob, &e))?;
        entries.push(Entry::new(&key_of(&record), number, index));
    }
    Ok(Read::Entries(entries))
}

impl State {
    /// The number that the next blob gets.
    fn next_blob(&self) -> u32 {
        u32::try_from(self.blobs.len()).expect("fewer blobs than chunks")
    }

    fn note(&mut self, blob: &Existing) {
        self.known.insert(blob.blob.digest);
        Arc::make_mut(&mut self.blobs).push(*blob);
    }

    fn push(&mut self, mut part: Sorted) {
        while let Some(last) = self.parts.last().filter(|last| last.len() < part.len() * 2) {
            part = last.merge(&part);
            self.parts.pop();
        }
        self.parts.push(Arc::new(part));
    }
}

impl Dictionary for Tables {
    fn snapshot(&self) -> Arc<dyn Snapshot> {
        let state = self.state();
        Arc::new(View { parts: state.parts.clone(), blobs: Arc::clone(&state.blobs), open: Arc::clone(&self.open) })
    }

    fn add(&self, blob: &Existing, store: &Store) -> Result<(), DictionaryError> {
        let mut state = self.state();
        if state.known.contains(&blob.blob.digest) {
            return Ok(());
        }
        if let Read::Entries(entries) = read(blob, store, state.next_blob(), self.room - state.chunks)? {
            state.note(blob);
            state.chunks += entries.len() as u64;
            state.push(Sorted::new(entries));
        }
        Ok(())
    }
}

/// The index at one moment.
#[derive(Debug)]
struct View {
    parts: Vec<Arc<Sorted>>,
    blobs: Arc<Vec<Existing>>,
    open: Arc<OpenTables>,
}

impl Snapshot for View {
    fn find(
        &self,
        key: &[u8; 32],
        usable: &mut dyn FnMut(u32) -> Result<bool, DictionaryError>,
    ) -> Result<Option<Place>, DictionaryError> {
        // Older parts have blobs with lower numbers.
        let candidates = self.parts.iter().flat_map(|part| part.candidates(key));
        for entry in candidates.take(CANDIDATES) {
            if !usable(entry.blob)? {
                continue;
            }
            let Some(table) = self.open.get(entry.blob, &self.blobs)? else { continue };
            let record = table.get(u64::from(entry.record)).ok().flatten();
            if let Some(Record { digest, start, blocks, .. }) = record.filter(|record| key_of(record) == *key) {
                return Ok(Some(Place { blob: entry.blob, start, blocks, digest }));
            }
        }
        Ok(None)
    }

    fn blob(&self, blob: u32) -> Result<Option<Existing>, DictionaryError> {
        Ok(self.blobs.get(blob as usize).copied())
    }
}

/// Chunk tables that are being looked into.
#[derive(Debug)]
struct OpenTables {
    store: Store,
    files: Mutex<Files>,
}

#[derive(Debug, Default)]
struct Files {
    open: HashMap<u32, Arc<ChunkTable<File>>>,
    /// The oldest first.
    order: VecDeque<u32>,
}

impl OpenTables {
    /// `None` when it is not there any more.
    fn get(&self, blob: u32, blobs: &[Existing]) -> Result<Option<Arc<ChunkTable<File>>>, DictionaryError> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let Files { open, order } = &mut *files;
        if let Some(table) = open.get(&blob) {
            return Ok(Some(Arc::clone(table)));
        }
        let Some(table) = blobs.get(blob as usize).and_then(|b| b.table) else { return Ok(None) };
        // Its digest was checked when it was taken in.
        let file = match self.store.open_blob(&table.digest, table.size) {
            Ok(file) => file,
            Err(StoreError::Missing { .. } | StoreError::Corrupt { .. }) => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        let Ok(table) = ChunkTable::open(file) else { return Ok(None) };
        let table = Arc::new(table);
        if open.len() >= OPEN_TABLES
            && let Some(oldest) = order.pop_front()
        {
            open.remove(&oldest);
        }
        order.push_back(blob);
        open.insert(blob, Arc::clone(&table));
        Ok(Some(table))
    }
}
