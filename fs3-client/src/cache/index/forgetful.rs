//! An index in memory that loses what was not durable, and fails on demand.

use super::{Change, Index, IndexError};
use crate::cache::format::{GroupKey, Record};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

#[derive(Debug, Clone, Default)]
struct Contents {
    records: BTreeMap<GroupKey, Record>,
    clean: bool,
}

impl Contents {
    fn change(&mut self, changes: &[Change]) {
        for (key, record) in changes {
            match record {
                Some(record) => self.records.insert(*key, record.clone()),
                None => self.records.remove(key),
            };
        }
    }
}

#[derive(Debug, Default)]
struct State {
    seen: Contents,
    durable: Contents,
    /// Not durable yet: any number of the first of them may outlive a crash.
    pending: Vec<Vec<Change>>,
}

/// The index.
#[derive(Debug, Default)]
pub(crate) struct Forgetful {
    state: Mutex<State>,
    /// Whether changes fail.
    pub(crate) broken: AtomicBool,
    /// Whether the power is out, as the disk has it: then all fails.
    pub(crate) power: Option<crate::testing::power_cut::Disk>,
}

impl Forgetful {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// As a new start finds it: with `kept` of `u64::MAX` parts of what was not durable.
    pub(crate) fn after_crash(&self, random: u64) -> Arc<Self> {
        let state = self.state();
        let mut durable = state.durable.clone();
        let keep = random % (state.pending.len() as u64 + 1);
        for changes in state.pending.iter().take(usize::try_from(keep).unwrap()) {
            durable.change(changes);
        }
        let state = State { seen: durable.clone(), durable, pending: Vec::new() };
        Arc::new(Self { state: Mutex::new(state), ..Self::default() })
    }

    /// The same, on another disk.
    pub(crate) fn on(self: Arc<Self>, power: &crate::testing::power_cut::Disk) -> Arc<Self> {
        let state = std::mem::take(&mut *self.state());
        Arc::new(Self { state: Mutex::new(state), broken: AtomicBool::new(false), power: Some(power.clone()) })
    }

    fn works(&self) -> Result<(), IndexError> {
        if self.broken.load(Ordering::Relaxed) {
            return Err(IndexError("it is broken on purpose".to_owned()));
        }
        if self.power.as_ref().is_some_and(|disk| !disk.has_power()) {
            return Err(IndexError("the power is out".to_owned()));
        }
        Ok(())
    }
}

impl Index for Forgetful {
    fn scan(&self, each: &mut dyn FnMut(GroupKey, Record)) -> Result<(), IndexError> {
        self.works()?;
        let records = self.state().seen.records.clone();
        records.into_iter().for_each(|(key, record)| each(key, record));
        Ok(())
    }

    fn get(&self, key: &GroupKey) -> Result<Option<Record>, IndexError> {
        self.works()?;
        Ok(self.state().seen.records.get(key).cloned())
    }

    fn apply(&self, changes: &[Change], durable: bool) -> Result<(), IndexError> {
        self.works()?;
        let mut state = self.state();
        state.seen.change(changes);
        state.pending.push(changes.to_vec());
        if durable {
            state.durable = state.seen.clone();
            state.pending.clear();
        }
        Ok(())
    }

    fn take_clean(&self) -> Result<bool, IndexError> {
        self.works()?;
        let mut state = self.state();
        let clean = std::mem::take(&mut state.seen.clean);
        state.durable = state.seen.clone();
        state.pending.clear();
        Ok(clean)
    }

    fn set_clean(&self) -> Result<(), IndexError> {
        self.works()?;
        let mut state = self.state();
        state.seen.clean = true;
        state.durable = state.seen.clone();
        state.pending.clear();
        Ok(())
    }
}
