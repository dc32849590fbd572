//! A lease that this process holds, and the thread that renews it.

use super::{Place, Store};
use crate::StoreError;
use crate::host;
use crate::lease::{Body, LASTS, LEASES, LeaseInfo, LeaseKind, READER_LASTS};
use crate::names::{Condition, PutOutcome, Version};
use crate::store_dir::HeldFile;
use oci_spec::image::Descriptor;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

/// A lease on a store. It is renewed in the background until it is dropped, which ends it.
///
/// Whoever holds it asks [`Lease::check`] before the step that makes others rely on what was written (a ref, most of
/// all): a lease that could not be renewed in time may have been taken for that of a dead process.
#[derive(Debug)]
pub struct Lease {
    shared: Arc<Shared>,
    heart: Option<JoinHandle<()>>,
    id: String,
}

#[derive(Debug)]
struct Shared {
    store: Store,
    state: Mutex<State>,
    changed: Condvar,
    lasts: Duration,
}

#[derive(Debug)]
struct State {
    hold: Hold,
    /// When it was last renewed, by two clocks: the first stands still while the machine sleeps, the second may be set.
    renewed: (Instant, SystemTime),
    lost: Option<String>,
    ended: bool,
    /// It stays in the store.
    left: bool,
}

/// What stands for the lease in the store.
#[derive(Debug)]
enum Hold {
    File(HeldFile),
    Object { name: String, body: Vec<u8>, version: Version },
}

impl Lease {
    /// Takes a lease; `holds` is what a reader needs.
    pub(crate) fn of_kind(
        store: &Store,
        kind: LeaseKind,
        purpose: &str,
        holds: Vec<Descriptor>,
    ) -> Result<Self, StoreError> {
        let lasts = match (kind, &store.place) {
            (LeaseKind::Reader, _) => READER_LASTS,
            (_, Place::Dir(_)) => LASTS,
            (_, Place::Remote(remote)) => remote.lease_lasts,
        };
        let body = Body { kind, holds, ..Body::new(purpose, lasts) };
        let renewed = (Instant::now(), SystemTime::now());
        let hold = match store.local_dir() {
            Some(dir) => Hold::File(dir.hold_lease(&body)?),
            None => {
                let (name, body) = (format!("{LEASES}/{}", host::new_name("lease")), body.to_json());
                match store.put_object(&name, &body, &Condition::Absent)? {
                    PutOutcome::Done(version) => Hold::Object { name, body, version },
                    PutOutcome::Conflict => return Err(lost(store, "another lease has its name")),
                }
            }
        };
        let id = match &hold {
            Hold::File(file) => file.name(),
            Hold::Object { name, .. } => name.trim_start_matches(LEASES).trim_start_matches('/').to_owned(),
        };
        let state = State { hold, renewed, lost: None, ended: false, left: false };
        // Without the writer, whose lease this may be.
        let store = Store { writing: None, ..store.clone() };
        let shared = Arc::new(Shared { store, state: Mutex::new(state), changed: Condvar::new(), lasts });
        let beating = Arc::clone(&shared);
        let heart = thread::Builder::new().name("lease".to_owned()).spawn(move || beating.beat());
        let heart = heart.map_err(|e| StoreError::io("start a thread for", shared.store.scratch().as_path(), e))?;
        Ok(Self { shared, heart: Some(heart), id })
    }

    /// Its name below `leases/`.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Lets the lease last without this process, until its time is over: for what a later process goes on with, which
    /// takes a lease of its own and then ends this one by its [`Lease::id`] ([`Store::end_lease`]). A writer's lease
    /// ends with its process all the same.
    pub fn leave(self) {
        self.shared.state().left = true;
    }

    /// Whether the lease has been held without a gap until now.
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`].
    pub fn check(&self) -> Result<(), StoreError> {
        let state = self.shared.state();
        match &state.lost {
            Some(why) => Err(lost(&self.shared.store, why)),
            None if state.elapsed() >= self.shared.lasts => Err(lost(&self.shared.store, "it was not renewed in time")),
            None => Ok(()),
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.shared.state().ended = true;
        self.shared.changed.notify_all();
        if let Some(heart) = self.heart.take() {
            let _ = heart.join();
        }
        let mut state = self.shared.state();
        if state.left {
            if let Hold::File(file) = &mut state.hold {
                file.leave();
            }
            return;
        }
        // A file is removed with its handle.
        if let Hold::Object { name, .. } = &state.hold
            && let Err(e) = self.shared.store.delete_object(name)
        {
            tracing::warn!("cannot end the lease {name}: {e}");
        }
    }
}

impl State {
    fn elapsed(&self) -> Duration {
        let by_clock = SystemTime::now().duration_since(self.renewed.1).unwrap_or_default();
        self.renewed.0.elapsed().max(by_clock)
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Renews until the lease is ended or lost.
    fn beat(&self) {
        // A renewal that failed is tried sooner.
        let (normal, soon) = (self.lasts / 3, self.lasts / 20);
        let mut wait = normal;
        loop {
            let mut state = self.state();
            let began = Instant::now();
            while !state.ended && began.elapsed() < wait {
                let left = wait.saturating_sub(began.elapsed());
                state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            }
            if state.ended {
                return;
            }
            if state.elapsed() >= self.lasts {
                state.lost = Some("it was not renewed in time".to_owned());
                return;
            }
            drop(state);
            wait = match self.renew() {
                Ok(()) => normal,
                Err(Renewal::Failed(why)) => {
                    tracing::warn!("the lease on {} could not be renewed yet: {why}", self.store.location());
                    soon
                }
                Err(Renewal::Gone) => {
                    self.state().lost = Some("somebody ended it".to_owned());
                    return;
                }
            };
        }
    }

    fn renew(&self) -> Result<(), Renewal> {
        let now = (Instant::now(), SystemTime::now());
        let object = match &self.state().hold {
            Hold::File(file) => match file.renew() {
                Ok(()) => None,
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Err(Renewal::Gone),
                Err(e) => return Err(Renewal::Failed(e.to_string())),
            },
            Hold::Object { name, body, version } => Some((name.clone(), body.clone(), version.clone())),
        };
        let renewed = match object {
            None => None,
            // Without the lock: it may take as long as a request may.
            Some((name, body, version)) => match self.store.put_object(&name, &body, &Condition::Unchanged(version)) {
                Ok(PutOutcome::Done(version)) => Some(version),
                Ok(PutOutcome::Conflict) => return Err(Renewal::Gone),
                Err(e) => return Err(Renewal::Failed(e.to_string())),
            },
        };
        let mut state = self.state();
        state.renewed = now;
        if let (Hold::Object { version, .. }, Some(new)) = (&mut state.hold, renewed) {
            *version = new;
        }
        Ok(())
    }
}

enum Renewal {
    Failed(String),
    Gone,
}

pub(super) fn lost(store: &Store, why: &str) -> StoreError {
    StoreError::LeaseLost { store: store.location().to_string(), why: why.to_owned() }
}

/// The leases of a store that is no directory, by their times alone; those that ended are removed if `tidy`.
pub(super) fn leases_of(store: &Store, tidy: bool) -> Result<Vec<LeaseInfo>, StoreError> {
    let mut living = Vec::new();
    for listed in store.list_objects(LEASES)? {
        let Some(named) = store.object(&listed.name)? else { continue };
        let id = listed.name.rsplit('/').next().unwrap_or_default();
        let lease = LeaseInfo::new(id, &named.bytes, listed.modified);
        if lease.lasts(SystemTime::now()) {
            living.push(lease);
        } else if tidy {
            store.delete_object(&listed.name)?;
        }
    }
    Ok(living)
}
