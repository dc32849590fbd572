//! Makes durable what was fetched. The order is the whole of it: bytes, sync, then the index.
//!
//! One thread at a time changes the index or evicts ([`Shared::keep`]): so nothing that is being made durable is evicted
//! at the same time.

use super::blob::Blob;
use super::format::Record;
use super::geometry::{GROUP, bit, group_of};
use super::index::Change;
use super::ledger::Unflushed;
use super::shared::Shared;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

impl Shared {
    /// Makes durable what was fetched so far. Whether all of it is.
    pub(crate) fn flush(&self) -> bool {
        let began = Instant::now();
        self.flushing();
        let mut taken = self.ledger().take();
        if taken.is_empty() {
            return true;
        }
        for unflushed in &mut taken {
            self.sync(unflushed);
        }
        let flushed = self.record(&taken);
        if flushed {
            self.metrics.flush_seconds.note(began.elapsed());
            self.queue(&taken);
        } else {
            let mut ledger = self.ledger();
            taken.into_iter().for_each(|unflushed| ledger.put_back(unflushed));
        }
        flushed
    }

    /// Syncs a file. If that fails, nothing that was written to it since the last time is believed.
    fn sync(&self, unflushed: &mut Unflushed) {
        let Some(file) = unflushed.file.as_ref().filter(|_| !unflushed.fresh.is_empty()) else { return };
        let Err(error) = file.sync() else { return };
        let blob = Arc::clone(&unflushed.blob);
        tracing::warn!("the cached part of {} cannot be synced: {error}", blob.key.digest);
        self.metrics.write_errors.add(1);
        let distrusted = self.ledger().distrust(&blob, std::mem::take(&mut unflushed.fresh));
        for chunk in distrusted {
            blob.drop_chunks(self, chunk..chunk + 1);
        }
    }

    /// Brings the index up to date.
    fn record(&self, taken: &[Unflushed]) -> bool {
        let outcome = self.changes(taken).and_then(|changes| {
            // What is out of the index must stay out, since its place may be written again.
            let durable = taken.iter().any(|unflushed| !unflushed.dropped.is_empty());
            if changes.is_empty() { Ok(()) } else { self.index.apply(&changes, durable) }
        });
        outcome.inspect_err(|error| self.index_failed(error)).is_ok()
    }

    pub(crate) fn index_failed(&self, error: &super::index::IndexError) {
        self.metrics.index_errors.add(1);
        tracing::warn!("the cache's index fails: {error}");
    }

    fn changes(&self, taken: &[Unflushed]) -> Result<Vec<Change>, super::index::IndexError> {
        let mut changes = Vec::new();
        for Unflushed { blob, fresh, dropped, .. } in taken {
            let groups: BTreeSet<u32> = fresh.keys().chain(dropped).map(|chunk| group_of(*chunk)).collect();
            for group in groups {
                let key = blob.key.group(group);
                let before = self.index.get(&key)?;
                let mut record = before.clone().unwrap_or_default();
                let ours = group * GROUP..(group + 1).saturating_mul(GROUP);
                dropped.range(ours.clone()).for_each(|chunk| record.remove(chunk % GROUP));
                for (chunk, (crc, checked)) in fresh.range(ours) {
                    record.insert(chunk % GROUP, *crc, *checked);
                }
                if before.as_ref() != Some(&record) {
                    let gone = record == Record::default();
                    changes.push((key, (!gone).then_some(record)));
                }
            }
        }
        Ok(changes)
    }

    /// Groups that have durable chunks now can be evicted.
    fn queue(&self, taken: &[Unflushed]) {
        let mut policy = self.policy();
        for Unflushed { blob, fresh, .. } in taken {
            let groups: BTreeSet<u32> = fresh.keys().map(|chunk| group_of(*chunk)).collect();
            for group in groups {
                if policy.insert((blob.id, group)) {
                    blob.group(group).cold(self.epoch());
                }
            }
        }
    }

    /// Takes back a group's chunks from the index, later, since it could not be done now.
    pub(crate) fn remove_later(&self, blob: &Arc<Blob>, group: u32, present: u64) {
        let chunks = blob.geometry.chunks_in(group).filter(|chunk| present & bit(*chunk) != 0);
        let _ = self.ledger().drop_chunks(blob, chunks);
    }

    /// A last flush, after which nothing changes any more. Whether the next start may believe what is there.
    pub(crate) fn end(&self) -> bool {
        self.keep(Self::end_keeping)
    }

    /// What nobody has read since a crash is still in doubt at the next start. Whether the index knows.
    fn record_doubts(&self) -> bool {
        if !self.doubts {
            return true;
        }
        let registry = self.registry();
        let mut changes = Vec::new();
        let outcome = self.index.scan(&mut |key, mut record| {
            let group = registry.by_key.get(&key.blob).and_then(|blob| blob.groups.get(key.group as usize));
            let suspect = group.map_or(0, super::group::Group::suspect) & record.present;
            if suspect != record.suspect {
                record.suspect = suspect;
                changes.push((key, Some(record)));
            }
        });
        let outcome = outcome.and_then(|()| self.index.apply(&changes, false));
        outcome.inspect_err(|error| self.index_failed(error)).is_ok()
    }

    fn end_keeping(&self) -> bool {
        self.ledger().close();
        let flushed = self.flush() && self.ledger().is_empty();
        let ended = flushed
            && self.record_doubts()
            && self.index.set_clean().inspect_err(|error| self.index_failed(error)).is_ok();
        if ended && !self.ledger().is_empty() {
            // A reader dropped something meanwhile.
            let _ = self.index.take_clean().inspect_err(|error| self.index_failed(error));
            return false;
        }
        ended
    }
}

/// The keeper's life: until the cache is closed.
pub(crate) fn run(shared: &Shared) {
    let mut rounds = 0u32;
    while !shared.is_closed() {
        shared.wait(shared.config.flush_every);
        if shared.is_closed() {
            break;
        }
        rounds = rounds.wrapping_add(1);
        shared.keep(|shared| {
            shared.flush();
            shared.relieve();
            if rounds.is_multiple_of(32) {
                shared.forget_unused();
            }
        });
        shared.gauges();
    }
}
