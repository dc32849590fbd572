//! The collector: finds what nothing needs, and removes it in two steps.

use super::claims::{other_collector, state};
use super::ground::{Act, Ground, HeldLease};
use super::list::{self, Phase, STATE, State};
use crate::blob_store::{Listed, Stat};
use crate::lease::{LeaseInfo, LeaseKind};
use crate::{Digest, Store, StoreError, host};
use serde::Serialize;
use std::collections::HashSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How often it is looked whether those have ended who are waited for.
const POLL: Duration = Duration::from_secs(1);

/// What to remove, and how long to wait for it.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Blobs younger than this stay, by the store's clock.
    pub grace: Duration,
    /// How long to wait for writers that were there before.
    pub wait: Duration,
    /// Most blobs that are condemned at once.
    pub most: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { grace: Duration::from_secs(2 * 86400), wait: Duration::from_secs(600), most: list::MOST }
    }
}

/// What the collector has to be told of what blobs mean.
pub trait Marks {
    /// All blobs that must stay: what the store's refs reach now, and what `leases` hold. It is called twice, and has to
    /// look at the refs each time.
    ///
    /// # Errors
    /// Whatever keeps it from knowing all: nothing is deleted then.
    fn reachable(&mut self, leases: &[LeaseInfo]) -> Result<HashSet<Digest>, Box<dyn std::error::Error + Send + Sync>>;
}

/// A blob that was removed, or would be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Removed {
    /// Its name.
    pub digest: Digest,
    /// Its length in bytes.
    pub size: u64,
}

/// What a collection found and did.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Collected {
    /// Blobs in the store.
    pub blobs: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Those that refs or leases reach.
    pub reachable: u64,
    /// Those that nothing reaches, but younger than the grace.
    pub young: u64,
    /// Those that were removed, or would be.
    pub removed: Vec<Removed>,
    /// Condemned blobs that writers, or refs of theirs, have kept.
    pub kept: u64,
    /// Writers that have to end before anything can be removed; the list stays for the next run.
    pub waits_for: Vec<LeaseInfo>,
}

impl Collected {
    /// Bytes of what was removed, or would be.
    #[must_use]
    pub fn removed_bytes(&self) -> u64 {
        self.removed.iter().map(|blob| blob.size).sum()
    }
}

/// Why nothing was collected, or not all.
#[derive(Debug, thiserror::Error)]
pub enum GcError {
    /// Only one may be at work.
    #[error("another gc is at work in this store{}", by(.0))]
    Busy(Option<Box<LeaseInfo>>),
    /// This one stood still for so long that another may have taken its place.
    #[error("the lease of this gc ended, since it stood still for too long; another run goes on where it was")]
    LeaseLost,
    /// What the refs reach is not known.
    #[error("nothing was removed, since it is not known what is needed: {0}")]
    Marks(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

fn by(lease: &Option<Box<LeaseInfo>>) -> String {
    lease.as_ref().map_or_else(String::new, |lease| format!(": process {} on {}", lease.pid, lease.host))
}

/// What [`collect`] would remove if nothing changed, and whom it would wait for. Writes nothing. Ages are by this
/// machine's clock.
///
/// # Errors
/// As [`collect`].
pub fn survey(store: &Store, options: &Options, marks: &mut dyn Marks) -> Result<Collected, GcError> {
    survey_ground(store, store.leases_seen()?, options, SystemTime::now(), marks)
}

/// Removes what nothing needs, and calls `each` for every blob that was removed.
///
/// # Errors
/// [`GcError`]. Whatever happened, nothing that is needed was removed, and the next run goes on.
pub fn collect(
    store: &Store,
    options: &Options,
    marks: &mut dyn Marks,
    each: &mut dyn FnMut(&Removed),
) -> Result<Collected, GcError> {
    collect_ground(store, options, marks, each)
}

fn survey_ground(
    ground: &dyn Ground,
    leases: Vec<LeaseInfo>,
    options: &Options,
    now: SystemTime,
    marks: &mut dyn Marks,
) -> Result<Collected, GcError> {
    let mut collected = Collected::default();
    let reachable = marks.reachable(&leases).map_err(GcError::Marks)?;
    let found = scan(ground, options.grace, now, &reachable, &mut collected)?;
    collected.removed = found.iter().map(removed).collect();
    collected.waits_for = leases.into_iter().filter(is_writer).collect();
    Ok(collected)
}

pub(super) fn collect_ground(
    ground: &dyn Ground,
    options: &Options,
    marks: &mut dyn Marks,
    each: &mut dyn FnMut(&Removed),
) -> Result<Collected, GcError> {
    let own = ground.take_lease(LeaseKind::Collector, "gc")?;
    if other_collector(ground, Some(&*own))? {
        let other = |lease: &LeaseInfo| lease.kind == LeaseKind::Collector && lease.id != own.id();
        return Err(GcError::Busy(ground.leases()?.into_iter().find(other).map(Box::new)));
    }
    let waited = Duration::ZERO;
    let mut collector = Collector { ground, options, own: &*own, collected: Collected::default(), waited, each };
    // A list that an earlier run left is finished first, then ours is made, and more where one is not enough.
    loop {
        let unfinished = collector.unfinished()?;
        let round = match unfinished {
            Some(round) => round,
            None => match collector.condemn(marks)? {
                Some(round) => round,
                None => break,
            },
        };
        if !collector.finish(round.state, &round.condemned, marks)? || round.is_all {
            break;
        }
    }
    Ok(collector.collected)
}

/// A list and how far it has come.
struct Round {
    state: State,
    condemned: Vec<Listed>,
    /// Whether nothing else was there to be condemned.
    is_all: bool,
}

struct Collector<'g> {
    ground: &'g dyn Ground,
    options: &'g Options,
    own: &'g dyn HeldLease,
    collected: Collected,
    waited: Duration,
    each: &'g mut dyn FnMut(&Removed),
}

fn removed(blob: &Listed) -> Removed {
    Removed { digest: blob.digest, size: blob.stat.size }
}

/// Whether `now` is what `condemned` was, and not put or renewed since. Lists may tell fractions of a second where the
/// object itself does not, and the time of a renewal where the object has that of its put (S3).
fn is_same(now: &Stat, condemned: &Stat) -> bool {
    let second = |stat: &Stat| Some(stat.modified?.duration_since(UNIX_EPOCH).ok()?.as_secs());
    now.size == condemned.size && second(now) <= second(condemned)
}

/// Whoever is neither a reader nor a collector may write.
fn is_writer(lease: &LeaseInfo) -> bool {
    !matches!(lease.kind, LeaseKind::Collector | LeaseKind::Reader)
}

/// Finds what may go, and counts.
fn scan(
    ground: &dyn Ground,
    grace: Duration,
    now: SystemTime,
    reachable: &HashSet<Digest>,
    collected: &mut Collected,
) -> Result<Vec<Listed>, StoreError> {
    let mut found = Vec::new();
    (collected.blobs, collected.bytes, collected.reachable, collected.young) = (0, 0, 0, 0);
    ground.each_blob(&mut |blob| {
        collected.blobs += 1;
        collected.bytes += blob.stat.size;
        // A store that keeps no times cannot tell what is old.
        let old = blob.stat.modified.is_some_and(|time| now.duration_since(time).is_ok_and(|age| age >= grace));
        if reachable.contains(&blob.digest) {
            collected.reachable += 1;
        } else if old {
            found.push(blob);
        } else {
            collected.young += 1;
        }
    })?;
    // The largest first: where there is room for a short list only, it should free the most.
    found.sort_unstable_by_key(|blob| (std::cmp::Reverse(blob.stat.size), blob.digest));
    Ok(found)
}

impl Collector<'_> {
    /// What an earlier run has left.
    fn unfinished(&self) -> Result<Option<Round>, GcError> {
        let Some(state) = state(self.ground)? else { return Ok(None) };
        tracing::info!("going on with what an earlier gc has left");
        let name = list::list_name(&state.generation);
        match self.ground.object(&name)?.map(|bytes| list::from_bytes(&bytes)) {
            Some(Ok(condemned)) => Ok(Some(Round { state, condemned, is_all: false })),
            // It was there before the state was, so it was damaged since. Without it nothing can be deleted.
            damaged => {
                tracing::warn!("{name} is damaged or missing, and is given up: {damaged:?}");
                self.holding(Act::Delete(STATE))?;
                Ok(None)
            }
        }
    }

    /// Makes a list of what may go, and makes it count.
    fn condemn(&mut self, marks: &mut dyn Marks) -> Result<Option<Round>, GcError> {
        self.tidy()?;
        let leases = self.ground.leases()?;
        // Our own lease has the store's time of just now.
        let own = leases.iter().find(|lease| lease.id == self.own.id()).ok_or(GcError::LeaseLost)?;
        let now = own.renewed;
        let reachable = marks.reachable(&leases).map_err(GcError::Marks)?;
        let mut condemned = scan(self.ground, self.options.grace, now, &reachable, &mut self.collected)?;
        let mut is_all = condemned.len() <= self.options.most;
        condemned.truncate(self.options.most);
        if condemned.is_empty() {
            return Ok(None);
        }
        let state = State::new(host::new_name("gc"));
        let name = list::list_name(&state.generation);
        // On a full disk, a few blobs make room for more.
        loop {
            match self.ground.put_object(&name, &list::to_bytes(&condemned)) {
                Err(StoreError::NoSpace { .. }) if condemned.len() > 1 => {
                    condemned.truncate(condemned.len() / 2);
                    is_all = false;
                }
                done => break done?,
            }
        }
        self.put_state(&state)?;
        Ok(Some(Round { state, condemned, is_all }))
    }

    /// Waits, marks again, deletes. False when writers are left that have to end first.
    fn finish(&mut self, mut state: State, condemned: &[Listed], marks: &mut dyn Marks) -> Result<bool, GcError> {
        if state.phase == Phase::Condemned && !self.await_writers(&mut state)? {
            return Ok(false);
        }
        // What those have named is seen now. Whoever came later has claimed what it names.
        let reachable = marks.reachable(&self.ground.leases()?).map_err(GcError::Marks)?;
        if state.phase == Phase::Condemned {
            state.phase = Phase::Sweep;
            self.put_state(&state)?;
        }
        let rescued: HashSet<String> = self.ground.objects(list::RESCUED)?.into_iter().collect();
        for blob in condemned {
            let digest = &blob.digest;
            if reachable.contains(digest) || rescued.contains(&list::rescued_name(&state.generation, digest)) {
                self.collected.kept += 1;
                continue;
            }
            match self.ground.stat_blob(digest)? {
                None => continue,
                // Another one than was condemned, or one that somebody said to need.
                Some(stat) if !is_same(&stat, &blob.stat) => {
                    self.collected.kept += 1;
                    continue;
                }
                Some(_) => {}
            }
            self.holding(Act::DeleteBlob(digest))?;
            let removed = removed(blob);
            (self.each)(&removed);
            self.collected.removed.push(removed);
        }
        self.holding(Act::Delete(STATE))?;
        self.tidy()?;
        Ok(true)
    }

    /// Waits until all have ended that were at work when the list began to count. False when that takes too long.
    fn await_writers(&mut self, state: &mut State) -> Result<bool, GcError> {
        loop {
            let mut writers = self.ground.leases()?;
            writers.retain(is_writer);
            if let Some(ids) = &state.waits_for {
                writers.retain(|lease| ids.contains(&lease.id));
            } else {
                state.waits_for = Some(writers.iter().map(|lease| lease.id.clone()).collect());
                self.put_state(state)?;
            }
            if writers.is_empty() {
                return Ok(true);
            }
            if self.waited >= self.options.wait {
                self.collected.waits_for = writers;
                return Ok(false);
            }
            let pause = POLL.min(self.options.wait.saturating_sub(self.waited));
            self.ground.pause(pause);
            self.waited += pause;
        }
    }

    fn put_state(&self, state: &State) -> Result<(), GcError> {
        self.holding(Act::Put(STATE, &state.to_json()))
    }

    /// Does what only we may do, if nobody else may have taken our place.
    fn holding(&self, act: Act<'_>) -> Result<(), GcError> {
        if self.ground.holding(self.own, act)? { Ok(()) } else { Err(GcError::LeaseLost) }
    }

    /// Removes what does not count: there is no state now.
    fn tidy(&self) -> Result<(), GcError> {
        for name in self.ground.objects(list::DIR)? {
            if name != STATE {
                self.ground.delete_object(&name)?;
            }
        }
        Ok(())
    }
}
