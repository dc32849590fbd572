//! Hits: reads from a blob's file on the local disk.
//!
//! Threads of their own read with one system call. Tasks take what is in memory with one as well, and wait for the disk
//! by the ring, so that no thread of a runtime stands still.

use super::blob::Blob;
use super::geometry::{GROUP, bit, bits, by_group, group_of};
use super::group::Group;
use super::shared::Shared;
use crate::Medium;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Bytes that a task waits for at a time: the kernel reads on meanwhile.
const SLICE: usize = 1 << 20;

/// Being inside a group.
struct Inside<'g>(&'g Group);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Blob {
    /// Fills `buffer` from the file, if all of it is there: it lies in `chunks`. Waits for nothing but the disk.
    pub(crate) fn read_here(
        self: &Arc<Self>,
        shared: &Shared,
        chunks: &Range<u32>,
        offset: u64,
        buffer: &mut [u8],
    ) -> bool {
        let end = offset + buffer.len() as u64;
        let (mut rest, mut at) = (buffer, offset);
        for piece in by_group(chunks.clone()) {
            let Some(seen) = self.look(shared, &piece) else { return false };
            let upto = self.geometry.bytes_of(&piece).end.min(end);
            let (now, later) = rest.split_at_mut(usize::try_from(upto - at).unwrap_or(usize::MAX));
            let read = self.with_file(shared, |file| file.read_at(now, at)).flatten();
            if !self.came(shared, &piece, seen, &read, now.len()) {
                return false;
            }
            (rest, at) = (later, upto);
        }
        true
    }

    /// The same, for tasks.
    pub(crate) async fn read_here_as_task(
        self: &Arc<Self>,
        shared: &Arc<Shared>,
        chunks: &Range<u32>,
        offset: u64,
        buffer: &mut [u8],
    ) -> bool {
        let end = offset + buffer.len() as u64;
        let (mut rest, mut at) = (buffer, offset);
        for piece in by_group(chunks.clone()) {
            if !self.believe_as_task(shared, &piece).await {
                return false;
            }
            let Some(seen) = self.look(shared, &piece) else { return false };
            let upto = self.geometry.bytes_of(&piece).end.min(end);
            let (now, later) = rest.split_at_mut(usize::try_from(upto - at).unwrap_or(usize::MAX));
            let read = self.read_as_task(shared, at, now).await;
            if !self.came(shared, &piece, seen, &read, now.len()) {
                return false;
            }
            (rest, at) = (later, upto);
        }
        true
    }

    /// Whether all that was to be read was read, and counts.
    fn came(
        self: &Arc<Self>,
        shared: &Shared,
        piece: &Range<u32>,
        seen: u32,
        read: &io::Result<usize>,
        wanted: usize,
    ) -> bool {
        if !self.group(group_of(piece.start)).is_same(seen) {
            return false;
        }
        let came = matches!(read, Ok(n) if *n == wanted);
        if !came {
            // Fewer bytes than were written, or none: somebody else was at the file, or the disk fails.
            tracing::warn!("chunks {piece:?} of {} are not in the cache any more: {read:?}", self.key.digest);
            shared.metrics.corrupt_local.add(u64::from(piece.end - piece.start));
            self.drop_chunks(shared, piece.clone());
        }
        came
    }

    async fn read_as_task(self: &Arc<Self>, shared: &Arc<Shared>, at: u64, into: &mut [u8]) -> io::Result<usize> {
        // Without a look at the disk, and most often all that there is to it.
        let mut done = match self.with_file(shared, |file| file.read_now(into, at)).flatten() {
            Ok(all) if all == into.len() => return Ok(all),
            Ok(some) => some,
            Err(error) if has_to_wait(&error) => 0,
            Err(error) => return Err(error),
        };
        let file = self.open(shared)?;
        while done < into.len() {
            let end = into.len().min(done + SLICE);
            let slice = &mut into[done..end];
            let at = at + done as u64;
            let (bytes, read) = wait_for(shared, &file, at, slice.len()).await?;
            slice[..read].copy_from_slice(&bytes[..read]);
            done += read;
            if read == 0 {
                break;
            }
            if let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
                match file.read_now(rest, at + read as u64) {
                    Ok(more) => done += more,
                    Err(error) if has_to_wait(&error) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(done)
    }

    /// [`Blob::believe`], where there is something to it, on a thread that may block. Whether nothing is wrong.
    async fn believe_as_task(self: &Arc<Self>, shared: &Arc<Shared>, piece: &Range<u32>) -> bool {
        let group = self.group(group_of(piece.start));
        if group.suspect() & bits(piece) == 0 {
            return true;
        }
        let (shared, blob, piece) = (Arc::clone(shared), Arc::clone(self), piece.clone());
        let runtime = shared.runtime.clone();
        let believe = move || {
            let group = blob.group(group_of(piece.start));
            if !group.enter() {
                return false;
            }
            let _inside = Inside(group);
            blob.believe(&shared, &piece)
        };
        // Who goes away leaves it to go on: it is in the group by itself.
        runtime.spawn_blocking(believe).await.unwrap_or(false)
    }

    /// Compares the CRCs of the suspects among `chunks`, which are in one group that the caller is inside. Those that do
    /// not match are dropped.
    pub(crate) fn believe(self: &Arc<Self>, shared: &Shared, chunks: &Range<u32>) -> bool {
        let group = group_of(chunks.start);
        let record = match shared.index.get(&self.key.group(group)) {
            Ok(record) => record.unwrap_or_default(),
            Err(error) => {
                shared.index_failed(&error);
                return false;
            }
        };
        let mut all = true;
        for chunk in chunks.clone().filter(|chunk| self.group(group).suspect() & bit(*chunk) != 0) {
            let range = self.geometry.bytes(chunk);
            let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap_or(0)];
            let read = self.open(shared).and_then(|file| file.read_at(&mut bytes, range.start));
            let right =
                matches!(read, Ok(n) if n == bytes.len()) && record.crc(chunk % GROUP) == Some(crc32c::crc32c(&bytes));
            if right {
                self.group(group).believed(bit(chunk));
            } else {
                tracing::warn!("chunk {chunk} of {} was damaged while the cache was down", self.key.digest);
                shared.metrics.corrupt_local.add(1);
                self.drop_chunks(shared, chunk..chunk + 1);
                all = false;
            }
        }
        all
    }
}

fn has_to_wait(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Unsupported | io::ErrorKind::Interrupted)
}

/// Reads by the ring, or where there is none, on a thread that may block.
async fn wait_for(shared: &Arc<Shared>, file: &Arc<dyn Medium>, at: u64, len: usize) -> io::Result<(Vec<u8>, usize)> {
    let mut buffer = vec![0; len];
    if let Some(ring) = shared.ring.as_ref().filter(|ring| file.descriptor().is_some() && ring.works()) {
        return ring.read(file, at, buffer).await;
    }
    let file = Arc::clone(file);
    let read = shared.runtime.spawn_blocking(move || file.read_at(&mut buffer, at).map(|read| (buffer, read)));
    read.await.map_err(io::Error::other)?
}
