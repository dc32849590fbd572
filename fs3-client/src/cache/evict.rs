//! Makes room. The order again: out of the index, durably, then the hole.
//!
//! A group is locked while that happens, so nobody is inside, and who comes meanwhile goes to the store. Groups are taken
//! in batches, since each batch costs one durable write.

use super::blob::Blob;
use super::geometry::GROUP;
use super::index::Change;
use super::policy::{Heat, Key};
use super::shared::{Registry, Shared};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Groups that go by one durable write.
const BATCH: usize = 64;

struct HeatOf<'r>(&'r Registry);

impl HeatOf<'_> {
    fn group<T>(&self, key: Key, work: impl FnOnce(&super::group::Group) -> T) -> Option<T> {
        self.0.by_id.get(&key.0).map(|blob| work(blob.group(key.1)))
    }
}

impl Heat for HeatOf<'_> {
    fn heat(&self, key: Key) -> u32 {
        self.group(key, super::group::Group::heat).unwrap_or(0)
    }
    fn cool(&self, key: Key) {
        self.group(key, super::group::Group::cool);
    }
}

/// A group that is locked and on its way out.
struct Leaving {
    blob: Arc<Blob>,
    group: u32,
    present: u64,
}

impl Shared {
    /// Evicts until there is as much room as there should be, or nothing is left that may go.
    pub(crate) fn relieve(&self) {
        let mut left = self.to_free();
        let low = self.used().saturating_sub(left);
        // Each group has its turn once: those that are in use or pinned are put back.
        let mut turns = self.policy().len();
        while left > 0 && turns > 0 {
            let leaving = self.choose(left, &mut turns);
            if leaving.is_empty() || !self.evict(leaving) {
                break;
            }
            left = self.used().saturating_sub(low);
        }
    }

    /// How many bytes have to go.
    fn to_free(&self) -> u64 {
        let used = self.used();
        let for_capacity =
            if used > self.config.high_water() { used.saturating_sub(self.config.low_water()) } else { 0 };
        let wanted = self.config.room_wanted();
        let free = self.disk.room().map_or(u64::MAX, |room| room.free);
        // Twice of it, so that this does not begin again at once.
        let for_disk = if free < wanted { wanted.saturating_mul(2).saturating_sub(free) } else { 0 };
        for_capacity.max(for_disk.min(used))
    }

    /// Takes groups whose turn it is, and locks them.
    fn choose(&self, bytes: u64, turns: &mut usize) -> Vec<Leaving> {
        let registry = self.registry();
        let mut policy = self.policy();
        let (mut leaving, mut put_off, mut freed) = (Vec::new(), Vec::new(), 0);
        while leaving.len() < BATCH && freed < bytes && *turns > 0 {
            *turns -= 1;
            let Some(key) = policy.victim(&HeatOf(&registry)) else { break };
            let Some(blob) = registry.by_id.get(&key.0) else { continue };
            let group = blob.group(key.1);
            if group.is_pinned() || !group.lock() {
                self.metrics.evictions_put_off.add(1);
                put_off.push(key);
                continue;
            }
            let present = group.empty();
            freed += blob.geometry.weight(key.1, present);
            leaving.push(Leaving { blob: Arc::clone(blob), group: key.1, present });
        }
        put_off.into_iter().for_each(|key| policy.recall(key));
        leaving
    }

    /// Evicts groups that are locked and empty. Whether the index did its part.
    fn evict(&self, leaving: Vec<Leaving>) -> bool {
        for Leaving { blob, group, present } in &leaving {
            self.ledger().forget_group(blob, *group);
            self.less(blob.geometry.weight(*group, *present));
        }
        let changes: Vec<Change> = leaving.iter().map(|l| (l.blob.key.group(l.group), None)).collect();
        let outcome = self.index.apply(&changes, true);
        for Leaving { blob, group, present } in &leaving {
            match &outcome {
                Ok(()) => self.punch(blob, *group, *present),
                // What the index may still have is not punched: it would be believed, and read as zeros.
                Err(_) => self.remove_later(blob, *group, *present),
            }
            blob.group(*group).unlock();
        }
        if let Err(error) = &outcome {
            self.index_failed(error);
            return false;
        }
        let mut blobs: Vec<Arc<Blob>> = leaving.into_iter().map(|leaving| leaving.blob).collect();
        blobs.dedup_by_key(|blob| blob.id);
        blobs.iter().for_each(|blob| self.forget(blob));
        true
    }

    /// Frees a locked group's part of the file.
    fn punch(&self, blob: &Arc<Blob>, group: u32, present: u64) {
        let range = blob.geometry.bytes_of(&blob.geometry.chunks_in(group));
        self.metrics.evicted_groups.add(1);
        self.metrics.evicted_bytes.add(blob.geometry.weight(group, present));
        if let Err(error) = blob.open(self).and_then(|file| file.punch(range)) {
            // Where there are no holes, room comes back when the whole file goes.
            self.metrics.write_errors.add(1);
            tracing::warn!("cannot free a part of {} in the cache: {error}", blob.key.digest);
        }
    }

    /// Removes the file of a blob of which nothing is left, and nobody holds.
    fn forget(&self, blob: &Arc<Blob>) {
        let mut registry = self.registry_mut();
        if blob.handles.load(Ordering::Acquire) > 0 || blob.has_any() || blob.flights.len() > 0 {
            return;
        }
        // Locked for good: who is late writes nothing into a file that is gone.
        let locked = blob.groups.iter().take_while(|group| group.lock()).count();
        if locked < blob.groups.len() || blob.has_any() {
            blob.groups.iter().take(locked).for_each(super::group::Group::unlock);
            return;
        }
        registry.by_key.remove(&blob.key);
        registry.by_id.remove(&blob.id);
        drop(registry);
        self.files.close(blob, self);
        if let Err(error) = self.disk.remove(&blob.key) {
            self.metrics.write_errors.add(1);
            tracing::warn!("cannot remove the file of {} from the cache: {error}", blob.key.digest);
        }
    }

    /// Forgets blobs that nobody holds any more and of which nothing is there.
    pub(crate) fn forget_unused(&self) {
        let unused = |blob: &&Arc<Blob>| blob.handles.load(Ordering::Acquire) == 0 && !blob.has_any();
        let unused: Vec<Arc<Blob>> = self.registry().by_key.values().filter(unused).cloned().collect();
        unused.iter().for_each(|blob| self.forget(blob));
    }

    /// At the start: removes files of which the index has nothing, and after a crash frees what was being written or
    /// evicted.
    pub(crate) fn clear_away(&self, clean: bool) {
        let files = match self.disk.list() {
            Ok(files) => files,
            Err(error) => {
                tracing::warn!("cannot list the files of the cache in {}: {error}", self.dir.display());
                return;
            }
        };
        for (key, allocated) in files {
            let blob = self.registry().by_key.get(&key).cloned();
            let outcome = match blob {
                None => self.disk.remove(&key),
                Some(blob) if !clean && allocated > blob.present_bytes() => self.punch_gaps(&blob),
                Some(_) => Ok(()),
            };
            if let Err(error) = outcome {
                self.metrics.write_errors.add(1);
                tracing::warn!("cannot clear away what is left of {} in the cache: {error}", key.digest);
            }
        }
    }

    /// Frees what is between the chunks that are there. Nobody reads yet.
    fn punch_gaps(&self, blob: &Arc<Blob>) -> std::io::Result<()> {
        let file = blob.open(self)?;
        let mut gap = 0..0;
        for group in 0..blob.geometry.groups() {
            let present = blob.group(group).present();
            for chunk in blob.geometry.chunks_in(group) {
                if present & (1 << (chunk % GROUP)) != 0 {
                    if !gap.is_empty() {
                        file.punch(blob.geometry.bytes_of(&gap))?;
                    }
                    gap = chunk + 1..chunk + 1;
                } else {
                    gap.end = chunk + 1;
                }
            }
        }
        if gap.is_empty() { Ok(()) } else { file.punch(blob.geometry.bytes_of(&gap)) }
    }
}
