//! The writer's side: which blobs may be about to go, and how they are kept.

use super::ground::{Act, Ground, HeldLease};
use super::list::{self, Phase, STATE, State};
use crate::lease::LeaseKind;
use crate::{Digest, StoreError};
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// How often a sweep is looked at that has to end first.
const POLL: Duration = Duration::from_millis(200);
/// How often, in such looks, it is asked whether its collector lives.
const ASK: u32 = 10;
/// How often a list may be missing that the state names.
const MISSING: u32 = 25;
/// How long a sweep may take.
const PATIENCE: Duration = Duration::from_secs(2 * 3600);

/// What a writer has to know of the collector that was at work when it began. One that begins later waits for it.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    generation: String,
    condemned: HashSet<Digest>,
    rescued: Mutex<HashSet<Digest>>,
    /// The list is gone, so that nothing is condemned any more.
    over: AtomicBool,
}

impl Claims {
    /// Reads the list that counts now. The writer's lease must be there before.
    ///
    /// # Errors
    /// [`StoreError::Collector`] when there is one that cannot be read, or what the store says.
    pub(crate) fn read(ground: &dyn Ground) -> Result<Self, StoreError> {
        let mut looks = 0;
        loop {
            let Some(state) = state(ground)? else { return Ok(Self { over: true.into(), ..Self::default() }) };
            let name = list::list_name(&state.generation);
            let Some(bytes) = ground.object(&name)? else {
                // It has ended since the state was read, or somebody deleted what is not theirs.
                if looks == MISSING {
                    return Err(StoreError::Collector { name, what: "it is missing; `gc` puts that right".to_owned() });
                }
                looks += 1;
                ground.pause(POLL);
                continue;
            };
            let condemned = list::from_bytes(&bytes).map_err(|what| StoreError::Collector { name, what })?;
            let condemned = condemned.iter().map(|blob| blob.digest).collect();
            return Ok(Self { generation: state.generation, condemned, ..Self::default() });
        }
    }

    /// Makes sure that those of `digests` which are in the store now, or will be, stay until the writer's lease ends.
    /// Called before one looks for them.
    ///
    /// # Errors
    /// What the store says; [`StoreError::Collector`] when a sweep does not end.
    pub(crate) fn claim(&self, ground: &dyn Ground, digests: &[Digest]) -> Result<(), StoreError> {
        if self.over.load(Ordering::Acquire) {
            return Ok(());
        }
        let rescued = || self.rescued.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted: Vec<Digest> = {
            let rescued = rescued();
            digests.iter().filter(|d| self.condemned.contains(d) && !rescued.contains(d)).copied().collect()
        };
        if wanted.is_empty() {
            return Ok(());
        }
        for digest in &wanted {
            ground.put_object(&list::rescued_name(&self.generation, digest), b"")?;
        }
        // The order is what counts: the collector says that it sweeps, and then looks for what we have just put.
        match self.phase(ground)? {
            Some(Phase::Condemned) => rescued().extend(wanted),
            Some(Phase::Sweep) => self.await_end(ground)?,
            None => self.over.store(true, Ordering::Release),
        }
        Ok(())
    }

    /// The phase of the list that was read; `None` when it does not count any more.
    fn phase(&self, ground: &dyn Ground) -> Result<Option<Phase>, StoreError> {
        Ok(state(ground)?.filter(|state| state.generation == self.generation).map(|state| state.phase))
    }

    fn await_end(&self, ground: &dyn Ground) -> Result<(), StoreError> {
        tracing::info!("blobs are being deleted from the store: waiting");
        let mut looks = 0;
        while self.phase(ground)?.is_some() {
            if looks % ASK == 0 && end_if_dead(ground, &self.generation)? {
                break;
            }
            if POLL * looks > PATIENCE {
                let what = format!("it has been deleting for {} h", PATIENCE.as_secs() / 3600);
                return Err(StoreError::Collector { name: STATE.to_owned(), what });
            }
            ground.pause(POLL);
            looks += 1;
        }
        self.over.store(true, Ordering::Release);
        Ok(())
    }
}

/// Ends the list `generation` if no collector is there to do it; tells whether it is ended.
fn end_if_dead(ground: &dyn Ground, generation: &str) -> Result<bool, StoreError> {
    if other_collector(ground, None)? {
        return Ok(false);
    }
    let own = ground.take_lease(LeaseKind::Collector, "end a dead collector's work")?;
    if other_collector(ground, Some(&*own))? {
        return Ok(false);
    }
    // What it has deleted is gone, what it has not is left for the next one.
    if state(ground)?.is_some_and(|state| state.generation == generation) {
        return ground.holding(&*own, Act::Delete(STATE));
    }
    Ok(true)
}

/// Whether a collector lives that does not have the lease `own`.
pub(super) fn other_collector(ground: &dyn Ground, own: Option<&dyn HeldLease>) -> Result<bool, StoreError> {
    let leases = ground.leases()?;
    Ok(leases.iter().any(|lease| lease.kind == LeaseKind::Collector && own.is_none_or(|own| own.id() != lease.id)))
}

/// What `gc/state` says, if there is one.
pub(super) fn state(ground: &dyn Ground) -> Result<Option<State>, StoreError> {
    let Some(bytes) = ground.object(STATE)? else { return Ok(None) };
    let state = State::from_json(&bytes);
    state.map(Some).map_err(|what| StoreError::Collector { name: STATE.to_owned(), what })
}
