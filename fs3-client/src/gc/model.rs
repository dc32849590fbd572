//! The protocol against a store in memory, with every order of events and a crash at any of them.
//!
//! Actors (writers, readers, collectors, somebody who removes refs) run the real code, each on its own thread, but only
//! one at a time: before each event it waits for its turn, and a random schedule gives the turns. A crash is an event
//! that does not happen, and none after it. After each event all that must never be is looked for.

use super::claims::Claims;
use super::collect::{GcError, Marks, Options, collect_ground};
use super::ground::{Act, Ground, HeldLease};
use crate::blob_store::{Listed, Stat};
use crate::lease::{Body, LeaseInfo, LeaseKind};
use crate::{Digest, StoreError};
use oci_spec::image::{Descriptor, MediaType};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::str::FromStr as _;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, UNIX_EPOCH};

/// Blobs that images are made of; few, so that they are shared.
const BLOBS: u8 = 4;
/// Images there can be.
const IMAGES: u8 = 6;
/// Names of images.
const REFS: u8 = 2;

/// The blobs of an image; the last is its manifest.
fn image(number: u8) -> Vec<Digest> {
    let number = number % IMAGES;
    let parts = (0..BLOBS).filter(|blob| (u32::from(number) * 7 + 3) >> blob & 1 == 1 || blob % IMAGES == number);
    parts.map(|blob| Digest::of(&[blob])).chain([Digest::of(&[100 + number])]).collect()
}

/// What the protocol does not do in a test of this test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// Writers have no lease that the collector sees.
    NoLeases,
    /// Writers do not look for a list.
    NoClaims,
    /// The collector does not look at what was rescued.
    NoRescue,
    /// Nobody waits for the end of a sweep.
    NoSweep,
    /// The lease ends before the ref is written.
    EarlyEnd,
    /// A lease that somebody ended counts as held.
    NoLook,
}

#[derive(Debug)]
struct Lease {
    info: LeaseInfo,
    alive: bool,
}

#[derive(Debug, Default)]
struct State {
    blobs: BTreeMap<Digest, u64>,
    objects: BTreeMap<String, Vec<u8>>,
    refs: BTreeMap<u8, u8>,
    leases: BTreeMap<String, Lease>,
    clock: u64,
    /// Whose turn it is.
    turn: Option<usize>,
    parked: BTreeSet<usize>,
    /// Readers' leases whose holders have begun to read.
    relied: BTreeSet<String>,
    stopped: bool,
    /// Nobody waits for turns.
    free: bool,
    crashed: BTreeSet<usize>,
    /// Leases of the living that the next look at the leases takes for dead ones.
    expiring: bool,
    finished: u64,
    events: Vec<String>,
    wrong: Option<String>,
}

impl State {
    fn look(&mut self) {
        let missing = |number: u8| image(number).into_iter().find(|blob| !self.blobs.contains_key(blob));
        let dangling = self.refs.iter().find_map(|(name, number)| Some((*name, *number, missing(*number)?)));
        if let Some((name, number, blob)) = dangling {
            self.wrong.get_or_insert(format!("ref {name} is image {number}, whose {blob} is gone"));
        }
        let held = self.leases.iter().filter(|(id, _)| self.relied.contains(*id)).map(|(_, lease)| lease);
        for digest in held.flat_map(|lease| &lease.info.holds) {
            let number = (0..IMAGES).find(|n| image(*n).last().unwrap().to_string() == digest.digest().to_string());
            if let Some(blob) = missing(number.unwrap()) {
                self.wrong.get_or_insert(format!("a reader holds {number:?}, whose {blob} is gone"));
            }
        }
    }
}

struct World {
    state: Mutex<State>,
    changed: Condvar,
    flaw: Flaw,
}

/// The store as one actor sees it.
#[derive(Clone)]
struct View {
    world: Arc<World>,
    actor: usize,
}

fn crash() -> StoreError {
    StoreError::io("go on", "crashed".as_ref(), std::io::ErrorKind::Interrupted.into())
}

impl View {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.world.state.lock().unwrap()
    }

    /// One event, when it is our turn.
    fn event<T>(&self, what: impl FnOnce() -> String, act: impl FnOnce(&mut State) -> T) -> Result<T, StoreError> {
        let mut state = self.lock();
        state.parked.insert(self.actor);
        self.world.changed.notify_all();
        while !state.free && state.turn != Some(self.actor) && !state.crashed.contains(&self.actor) {
            state = self.world.changed.wait(state).unwrap();
        }
        state.parked.remove(&self.actor);
        if state.crashed.contains(&self.actor) {
            return Err(crash());
        }
        let actor = self.actor;
        state.events.push(format!("{actor}: {}", what()));
        let done = act(&mut state);
        state.look();
        state.turn = None;
        self.world.changed.notify_all();
        Ok(done)
    }

    fn take(&self, kind: LeaseKind, holds: Vec<Descriptor>) -> Result<Held, StoreError> {
        let id = self.event(
            || format!("takes a lease ({kind:?})"),
            |state| {
                state.clock += 1;
                let id = format!("{}-{}", self.actor, state.clock);
                let body = Body { kind, holds, ..Body::new("model", Duration::from_secs(60)) };
                let renewed = UNIX_EPOCH + Duration::from_secs(state.clock);
                let info = LeaseInfo::new(&id, &body.to_json(), renewed);
                state.leases.insert(id.clone(), Lease { info, alive: true });
                id
            },
        )?;
        Ok(Held { view: self.clone(), id })
    }
}

struct Held {
    view: View,
    id: String,
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.id)
    }
}

impl HeldLease for Held {
    fn id(&self) -> &str {
        &self.id
    }

    fn is_held(&self) -> bool {
        self.view.lock().leases.contains_key(&self.id)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let id = self.id.clone();
        let _ = self.view.event(|| format!("ends {id}"), |state| state.leases.remove(&id));
        // Of the dead it stays, until somebody looks at the leases.
        if let Some(lease) = self.view.lock().leases.get_mut(&self.id) {
            lease.alive = false;
        }
    }
}

impl Ground for View {
    fn object(&self, name: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let found = self.event(|| format!("reads {name}"), |state| state.objects.get(name).cloned())?;
        let of_writer = self.actor < WRITERS && name == super::list::STATE;
        match self.world.flaw {
            Flaw::NoClaims if of_writer => Ok(None),
            Flaw::NoSweep if of_writer => {
                Ok(found.map(|bytes| String::from_utf8(bytes).unwrap().replace("sweep", "condemned").into_bytes()))
            }
            _ => Ok(found),
        }
    }

    fn put_object(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        self.event(
            || format!("puts {name} {}", String::from_utf8_lossy(&bytes[..bytes.len().min(120)])),
            |state| {
                state.objects.insert(name.to_owned(), bytes.to_vec());
            },
        )
    }

    fn delete_object(&self, name: &str) -> Result<(), StoreError> {
        self.event(|| format!("deletes {name}"), |state| drop(state.objects.remove(name)))
    }

    fn objects(&self, below: &str) -> Result<Vec<String>, StoreError> {
        let below = format!("{below}/");
        let found = self.event(
            || format!("lists {below}"),
            |state| state.objects.keys().filter(|name| name.starts_with(&below)).cloned().collect::<Vec<_>>(),
        )?;
        let blind = self.world.flaw == Flaw::NoRescue && below.contains("rescued");
        Ok(if blind { Vec::new() } else { found })
    }

    fn take_lease(&self, kind: LeaseKind, _: &str) -> Result<Box<dyn HeldLease>, StoreError> {
        Ok(Box::new(self.take(kind, Vec::new())?))
    }

    fn leases(&self) -> Result<Vec<LeaseInfo>, StoreError> {
        let flaw = self.world.flaw;
        self.event(
            || "reads the leases".to_owned(),
            |state| {
                let mine = format!("{}-", self.actor);
                let expiring = std::mem::take(&mut state.expiring);
                if expiring {
                    state.events.push("(what lives is taken for dead)".to_owned());
                }
                // Readers' leases last longer than anybody stands still.
                state.leases.retain(|id, lease| {
                    let lost = expiring && !id.starts_with(&mine) && lease.info.kind != LeaseKind::Reader;
                    lease.alive && !lost
                });
                let seen = state.leases.values().map(|lease| lease.info.clone());
                seen.filter(|lease| flaw != Flaw::NoLeases || lease.kind != LeaseKind::Writer).collect()
            },
        )
    }

    fn each_blob(&self, each: &mut dyn FnMut(Listed)) -> Result<(), StoreError> {
        let all = self.event(|| "lists the blobs".to_owned(), |state| state.blobs.clone())?;
        for (digest, time) in all {
            each(Listed { digest, stat: stat(time) });
        }
        Ok(())
    }

    fn stat_blob(&self, digest: &Digest) -> Result<Option<Stat>, StoreError> {
        self.event(|| format!("looks for {}", &digest.hex()[..6]), |state| state.blobs.get(digest).copied().map(stat))
    }

    fn holding(&self, lease: &dyn HeldLease, act: Act<'_>) -> Result<bool, StoreError> {
        let blind = self.world.flaw == Flaw::NoLook;
        self.event(
            || format!("if it has {lease:?}: {act:?}"),
            |state| {
                let held = blind || state.leases.contains_key(lease.id());
                match act {
                    _ if !held => {}
                    Act::Put(name, bytes) => drop(state.objects.insert(name.to_owned(), bytes.to_vec())),
                    Act::Delete(name) => drop(state.objects.remove(name)),
                    Act::DeleteBlob(digest) => drop(state.blobs.remove(digest)),
                }
                held
            },
        )
    }

    fn pause(&self, _: Duration) {
        let _ = self.event(|| "waits".to_owned(), |state| state.clock += 1);
    }
}

fn stat(time: u64) -> Stat {
    // Always the same, so that a collector never knows an old blob by its time: what it does must be right without.
    Stat { size: 1, modified: Some(UNIX_EPOCH + Duration::from_secs(time.min(1))) }
}

struct Refs<'v>(&'v View);

impl Marks for Refs<'_> {
    fn reachable(&mut self, leases: &[LeaseInfo]) -> Result<HashSet<Digest>, Box<dyn std::error::Error + Send + Sync>> {
        let names = self.0.event(|| "lists the refs".to_owned(), |s| s.refs.keys().copied().collect::<Vec<_>>())?;
        let mut found = HashSet::new();
        for name in names {
            let number = self.0.event(|| format!("reads ref {name}"), |state| state.refs.get(&name).copied())?;
            found.extend(number.into_iter().flat_map(image));
        }
        let held = leases.iter().flat_map(|lease| &lease.holds).map(|d| d.digest().to_string());
        for manifest in held {
            let is_it = |number: &u8| image(*number).last().unwrap().to_string() == manifest;
            found.extend(image((0..IMAGES).find(is_it).unwrap()));
        }
        Ok(found)
    }
}

fn collector(view: &View) -> Result<(), StoreError> {
    let options = Options { grace: Duration::ZERO, wait: Duration::from_secs(20), most: 3 };
    match collect_ground(view, &options, &mut Refs(view), &mut |_| ()) {
        Ok(_) | Err(GcError::Busy(_) | GcError::LeaseLost | GcError::Marks(_)) => Ok(()),
        Err(GcError::Store(e)) => Err(e),
    }
}

fn write(view: &View, name: u8, number: u8) -> Result<(), StoreError> {
    let flaw = view.world.flaw;
    let mut lease = Some(view.take(LeaseKind::Writer, Vec::new())?);
    let claims = Claims::read(view)?;
    for blob in image(number) {
        claims.claim(view, &[blob])?;
        if view.stat_blob(&blob)?.is_none() {
            view.event(
                || format!("publishes {}", &blob.hex()[..6]),
                |state| {
                    state.blobs.insert(blob, state.clock);
                },
            )?;
        }
    }
    if flaw == Flaw::EarlyEnd {
        lease = None;
    }
    let held = view.event(
        || format!("names image {number} {name} if it has {lease:?}"),
        |state| {
            let held = flaw == Flaw::NoLook || lease.as_ref().is_none_or(|lease| state.leases.contains_key(&lease.id));
            if held {
                state.refs.insert(name, number % IMAGES);
                state.finished += 1;
            }
            held
        },
    )?;
    if held { Ok(()) } else { Err(crash()) }
}

/// As a node that mounts an image and, some time later, unmounts it.
fn read(view: &View, name: u8) -> Result<(), StoreError> {
    let lease = view.take(LeaseKind::Writer, Vec::new())?;
    let claims = Claims::read(view)?;
    let Some(number) = view.event(|| format!("looks up {name}"), |state| state.refs.get(&name).copied())? else {
        return Ok(());
    };
    let blobs = image(number);
    claims.claim(view, &blobs)?;
    for blob in &blobs {
        if view.stat_blob(blob)?.is_none() {
            return Ok(());
        }
    }
    let manifest = oci_spec::image::Digest::from_str(&blobs.last().unwrap().to_string()).unwrap();
    let reading = view.take(LeaseKind::Reader, vec![Descriptor::new(MediaType::ImageManifest, 1, manifest)])?;
    // Only now, and only if nobody ended the other lease meanwhile, is the image safe to use.
    let held = view.event(
        || format!("uses {number} if it has {lease:?}"),
        |state| {
            let held = state.leases.contains_key(&lease.id);
            if held {
                state.relied.insert(reading.id.clone());
            }
            held
        },
    )?;
    if !held {
        return Err(crash());
    }
    drop(lease);
    for _ in 0..6 {
        view.pause(Duration::from_secs(1));
    }
    drop(reading);
    Ok(())
}

const WRITERS: usize = 3;
const ACTORS: usize = 7;

/// What an actor does again and again. After a crash it begins anew, as another process would.
fn act(view: &View, seed: u8) {
    let mut round = seed;
    while !view.lock().stopped {
        round = round.wrapping_mul(13).wrapping_add(7);
        let name = round % REFS;
        let done = match view.actor {
            0..WRITERS => write(view, name, round / 3),
            3 => read(view, name),
            4 | 5 => collector(view),
            _ => view.event(
                || format!("removes ref {name}"),
                |state| {
                    state.refs.remove(&name);
                },
            ),
        };
        let mut state = view.lock();
        let crashed = state.crashed.remove(&view.actor);
        if let Err(e) = done
            && !crashed
            && e.to_string() != crash().to_string()
        {
            state.wrong.get_or_insert(format!("{}: {e}", view.actor));
        }
    }
}

/// What happened to the store under a schedule: for each step whose turn it is, and whether something goes wrong.
fn run(flaw: Flaw, schedule: &[(u8, u8)]) -> Result<u64, String> {
    let world = Arc::new(World { state: Mutex::default(), changed: Condvar::new(), flaw });
    let view = |actor| View { world: Arc::clone(&world), actor };
    std::thread::scope(|scope| {
        for actor in 0..ACTORS {
            let view = view(actor);
            let seed = schedule.first().map_or(0, |(seed, _)| seed.wrapping_add(u8::try_from(actor * 31).unwrap()));
            scope.spawn(move || act(&view, seed));
        }
        for (actor, luck) in schedule {
            let mut state = world.state.lock().unwrap();
            while state.parked.len() < ACTORS || state.turn.is_some() {
                state = world.changed.wait(state).unwrap();
            }
            if state.wrong.is_some() {
                break;
            }
            let actor = usize::from(*actor) % ACTORS;
            match luck {
                0..6 => {
                    state.events.push(format!("{actor} crashes"));
                    state.crashed.insert(actor);
                    state.parked.remove(&actor);
                }
                6..9 => state.expiring = true,
                _ => state.turn = Some(actor),
            }
            world.changed.notify_all();
        }
        let mut state = world.state.lock().unwrap();
        while state.parked.len() < ACTORS || state.turn.is_some() {
            state = world.changed.wait(state).unwrap();
        }
        state.stopped = true;
        state.crashed.extend(0..ACTORS);
        world.changed.notify_all();
    });
    let view = view(ACTORS);
    view.lock().free = true;
    if view.lock().wrong.is_none() {
        // When all have died, a collector removes exactly what nothing needs, and leaves nothing of its own.
        let done = collector(&view);
        let mut state = view.lock();
        let needed: BTreeSet<Digest> = state.refs.values().copied().flat_map(image).collect();
        let left: BTreeSet<Digest> = state.blobs.keys().copied().collect();
        if done.is_err() || needed != left || !state.objects.is_empty() || !state.leases.is_empty() {
            let (objects, leases) = (state.objects.keys().collect::<Vec<_>>(), state.leases.keys().collect::<Vec<_>>());
            state.wrong = Some(format!("at the end: {done:?}, {needed:?}, {left:?}, {objects:?}, {leases:?}"));
        }
    }
    let state = view.lock();
    match &state.wrong {
        Some(wrong) => Err(format!("{}\n{wrong}", state.events.join("\n"))),
        None => Ok(state.finished),
    }
}

fn schedules() -> impl Strategy<Value = Vec<(u8, u8)>> {
    prop::collection::vec(any::<(u8, u8)>(), 0..800)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: std::env::var("PROPTEST_CASES").map_or(200, |text| text.parse().expect("PROPTEST_CASES is a number")),
        failure_persistence: None,
        max_shrink_iters: 2000,
        ..ProptestConfig::default()
    })]

    /// Every ref, and every reader, always reaches blobs that are there.
    #[test]
    fn nothing_needed_is_ever_deleted(schedule in schedules()) {
        if let Err(story) = run(Flaw::None, &schedule) {
            return Err(TestCaseError::fail(story));
        }
    }
}

/// Turns from a seed.
fn drawn(seed: u64, len: usize) -> Vec<(u8, u8)> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    (0..len).map(|_| (next(), next())).collect()
}

/// Each part of the protocol is needed: without it, the same schedules find a blob missing.
#[test]
fn without_any_of_its_parts_blobs_are_lost() {
    let finished: u64 = (0..20).map(|seed| run(Flaw::None, &drawn(seed, 1500)).unwrap()).sum();
    assert!(finished > 100, "only {finished} images were finished");
    for flaw in [Flaw::NoLeases, Flaw::NoClaims, Flaw::NoRescue, Flaw::NoSweep, Flaw::EarlyEnd, Flaw::NoLook] {
        let lost = (0..400).find(|seed| run(flaw, &drawn(*seed, 1500)).is_err());
        assert!(lost.is_some(), "{flaw:?} was not noticed");
    }
}
