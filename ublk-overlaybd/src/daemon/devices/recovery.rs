//! Taking over what a daemon left.

use super::{Devices, Now, Slot, lock};
use crate::daemon::disk::{OpenError, sentence};
use crate::daemon::identity::Identity;
use crate::daemon::protocol::{Happened, State};
use crate::daemon::table::{Record, Stage, TableError};
use crate::ublk::device::{self, Start};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Devices that are taken over at a time.
const AT_ONCE: usize = 16;
/// Between two attempts to open a disk that cannot be opened yet.
const AGAIN: Duration = Duration::from_millis(50);

/// What became of devices that a daemon left.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Serve again.
    pub recovered: usize,
    /// Were removed.
    pub lost: usize,
}

/// Devices that a daemon left, and the kernel's.
pub struct Found {
    slots: Vec<Arc<Slot>>,
    marks: HashMap<u64, u32>,
}

impl std::fmt::Debug for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Found").field("marks", &self.marks).finish_non_exhaustive()
    }
}

impl Devices {
    /// What [`recover`](Self::recover) did.
    #[must_use]
    pub fn recovered(&self) -> Recovered {
        *lock(&self.recovered)
    }

    /// Takes the names of `records`, and removes devices of this table that have no record. Before the first operation.
    pub fn survey(&self, records: Vec<Record>, damaged: &[TableError]) -> Found {
        for error in damaged {
            // Its device is counted below, if there is one.
            let why = format!("a record is lost, and its device is removed: {}", sentence(error));
            self.events.tell(Happened::Lost, None, Some(why));
        }
        let marks = self.marks();
        let slots: Vec<_> = records.into_iter().map(|record| self.enter(record)).collect();
        let known: Vec<u64> = slots.iter().map(|slot| lock(&slot.now).record.mark).collect();
        for (mark, number) in &marks {
            if self.table.is_mine(*mark) && !known.contains(mark) {
                self.lost(None, format!("/dev/ublkb{number} has no record, and is removed"));
                self.remove_number(*number);
            }
        }
        Found { slots, marks }
    }

    /// Takes over what was found, and removes what cannot be. Operations on these devices wait meanwhile.
    pub fn recover(&self, found: Found) {
        let Found { slots, marks } = found;
        let next = Mutex::new(slots.iter());
        thread::scope(|scope| {
            for _ in 0..AT_ONCE.min(slots.len()) {
                scope.spawn(|| {
                    loop {
                        let Some(slot) = lock(&next).next() else { return };
                        self.take_over(slot, &marks);
                    }
                });
            }
        });
    }

    /// Its name is taken from here on, and operations on it wait.
    fn enter(&self, record: Record) -> Arc<Slot> {
        let state = if record.stage == Stage::Removing { State::Removing } else { State::Recovering };
        let name = record.name.clone();
        let slot = Arc::new(Slot { operation: Mutex::new(()), now: Mutex::new(Now { record, state, live: None }) });
        lock(&self.slots).insert(name, Arc::clone(&slot));
        slot
    }

    /// Marks of all devices that the kernel has, and their numbers.
    fn marks(&self) -> HashMap<u64, u32> {
        let present = device::present().unwrap_or_else(|error| {
            tracing::error!("devices cannot be listed: {error}");
            Vec::new()
        });
        let mut marks = HashMap::new();
        for number in present {
            match device::mark(number, self.defaults.operation) {
                Ok(Some(mark)) => drop(marks.insert(mark, number)),
                Ok(None) => {}
                Err(error) => tracing::error!("{}", sentence(&error)),
            }
        }
        marks
    }

    fn take_over(&self, slot: &Slot, marks: &HashMap<u64, u32>) {
        let _operation = lock(&slot.operation);
        let record = lock(&slot.now).record.clone();
        let name = record.name.clone();
        let number = marks.get(&record.mark).copied();
        let why = match (record.stage, number) {
            (Stage::Live, Some(number)) => match self.again(slot, record, number) {
                Ok(()) => {
                    lock(&self.recovered).recovered += 1;
                    self.events.tell(Happened::Recovered, Some(&name), Some(format!("/dev/ublkb{number}")));
                    return;
                }
                Err(why) => why,
            },
            (Stage::Live, None) if record.boot != self.boot => {
                "the machine was started anew: its files are as they were left, and it can be added again".to_owned()
            }
            (Stage::Live, None) => "the kernel has no such device any more".to_owned(),
            (Stage::Adding, _) => "it was being added, and nobody was told of it".to_owned(),
            (Stage::Removing, _) => {
                self.gone(&name, number);
                self.events.tell(Happened::Removed, Some(&name), None);
                return;
            }
        };
        self.gone(&name, number);
        self.lost(Some(&name), why);
    }

    fn gone(&self, name: &str, number: Option<u32>) {
        if let Some(number) = number {
            self.remove_number(number);
        }
        if let Err(error) = self.table.remove(name) {
            tracing::error!("{}", sentence(&error));
        }
        lock(&self.slots).remove(name);
    }

    fn remove_number(&self, number: u32) {
        if let Err(error) = device::remove(number, self.defaults.operation) {
            tracing::error!("{}", sentence(&error));
        }
    }

    fn lost(&self, name: Option<&str>, why: String) {
        lock(&self.recovered).lost += 1;
        self.events.tell(Happened::Lost, name, Some(why));
    }

    /// Opens the disk again and serves the device. What may pass is tried again within the deadline: requests wait
    /// meanwhile.
    fn again(&self, slot: &Slot, mut record: Record, number: u32) -> Result<(), String> {
        let until = Instant::now() + self.defaults.operation;
        let open = loop {
            let now = Identity::of(&record.spec.disk).map_err(|error| error.to_string());
            let open = now.map(|now| match record.identity.as_ref().map(|before| before.difference(&now)) {
                Some(None) => self.opener.open(&record.spec.disk, false),
                Some(Some(file)) => Err(OpenError::Asked(format!("{} is another file now", file.display()))),
                None => Err(OpenError::Asked("what it is made of is not known".to_owned())),
            });
            match open {
                Ok(Ok(open)) => break open,
                Ok(Err(error)) if error.is_asked() || error.is_corrupt() => return Err(sentence(&error)),
                Ok(Err(error)) if Instant::now() >= until => return Err(sentence(&error)),
                Err(error) if Instant::now() >= until => return Err(error),
                Ok(Err(_)) | Err(_) => thread::sleep(AGAIN),
            }
        };
        let start = Start::Recover { number, mark: record.mark };
        let device = self.service.start(start, record.shape, Arc::clone(&open.disk));
        let device = device.map_err(|error| sentence(&error))?;
        if record.number != Some(number) {
            record.number = Some(number);
            self.table.put(&record).map_err(|error| sentence(&error))?;
        }
        self.live(slot, record, device, open);
        Ok(())
    }
}
