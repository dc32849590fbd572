//! What a store's refs reach, for [`fs3_client::gc`]; and removing what does not matter without its blobs.

use crate::layer::Record;
use fs3_client::gc::{self, Collected, GcError, Marks, Options, Removed};
use fs3_client::{Digest, LeaseInfo, Store, StoreError};
use oci_spec::image::Descriptor;
use serde::Serialize;
use serde_json::Value;
use std::collections::{HashMap, HashSet, VecDeque};
use std::error::Error;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Manifests read at a time.
const READERS: usize = 8;

/// Why it is not known what a ref reaches.
#[derive(Debug, thiserror::Error)]
pub enum ReachError {
    /// A ref, or something of the store, cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A manifest cannot be read.
    #[error("{name}: {source}")]
    Manifest {
        /// The ref, or the lease, that names it.
        name: String,
        /// Why.
        source: StoreError,
    },
    /// A manifest is no JSON, or names what cannot be understood.
    #[error("{name}: manifest {digest}: {what}")]
    NotOne {
        /// The ref, or the lease, that names it.
        name: String,
        /// The manifest.
        digest: String,
        /// What is wrong.
        what: String,
    },
}

impl ReachError {
    /// Whether something in the store is damaged.
    #[must_use]
    pub fn is_corrupt(&self) -> bool {
        match self {
            Self::Store(e) | Self::Manifest { source: e, .. } => {
                e.is_corrupt() || matches!(e, StoreError::Missing { .. })
            }
            Self::NotOne { .. } => true,
        }
    }
}

/// What refs and leases reach. Manifests never change, so each is read once.
#[derive(Debug)]
pub struct Reach<'s> {
    store: &'s Store,
    read: Mutex<HashMap<Digest, Reached>>,
}

/// What a manifest names.
#[derive(Debug, Clone, Default)]
struct Reached {
    all: Vec<Digest>,
    /// Those that are manifests themselves, with their sizes.
    manifests: Vec<(Digest, u64)>,
}

impl<'s> Reach<'s> {
    /// Of this store.
    #[must_use]
    pub fn new(store: &'s Store) -> Self {
        Self { store, read: Mutex::default() }
    }

    /// Everything that `descriptor` names, itself included: for a manifest or index of any kind, ours or not, every
    /// digest that stands in it, which may be more than it needs.
    ///
    /// # Errors
    /// [`ReachError`] when one cannot be read. A manifest that an index names may be absent: sparse indexes exist.
    pub fn of(&self, name: &str, descriptor: &Descriptor) -> Result<Vec<Digest>, ReachError> {
        let digest = descriptor.digest().to_string();
        let digest: Digest = digest.parse().map_err(|e| ReachError::NotOne {
            name: name.to_owned(),
            digest: digest.clone(),
            what: format!("{e}"),
        })?;
        let mut found = HashSet::from([digest]);
        // Breadth first, and each once: an index may name another a thousand times, and that the next.
        let mut manifests = VecDeque::new();
        if is_manifest(descriptor.media_type().as_ref()) {
            manifests.push_back((digest, descriptor.size()));
        }
        let mut expanded = HashSet::from([digest]);
        while let Some((digest, size)) = manifests.pop_front() {
            let reached = self.read(name, &digest, size)?;
            found.extend(&reached.all);
            for (inner, size) in &reached.manifests {
                if expanded.insert(*inner) && self.store.blob_size(inner)?.is_some() {
                    manifests.push_back((*inner, *size));
                }
            }
        }
        Ok(found.into_iter().collect())
    }

    /// What a manifest names.
    fn read(&self, name: &str, digest: &Digest, size: u64) -> Result<Reached, ReachError> {
        if let Some(known) = self.lock().get(digest).cloned() {
            return Ok(known);
        }
        let not_one = |what| ReachError::NotOne { name: name.to_owned(), digest: digest.to_string(), what };
        let bytes = self.store.read_blob(digest, size);
        let bytes = bytes.map_err(|source| ReachError::Manifest { name: name.to_owned(), source })?;
        let document: Value = serde_json::from_slice(&bytes).map_err(|e| not_one(e.to_string()))?;
        let mut reached = Reached::default();
        walk(&document, &mut reached);
        reached.all.sort_unstable();
        reached.all.dedup();
        reached.manifests.sort_unstable();
        reached.manifests.dedup();
        self.lock().insert(*digest, reached.clone());
        Ok(reached)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Digest, Reached>> {
        self.read.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn is_manifest(media_type: &str) -> bool {
    ["manifest", "index"].iter().any(|word| media_type.contains(word))
}

/// Collects every string that is a digest: of descriptors, annotations, whatever there is.
fn walk(value: &Value, reached: &mut Reached) {
    match value {
        Value::String(text) => reached.all.extend(text.parse::<Digest>()),
        Value::Array(values) => values.iter().for_each(|value| walk(value, reached)),
        Value::Object(map) => {
            let text = |key| map.get(key).and_then(Value::as_str);
            let digest = text("digest").and_then(|digest| digest.parse().ok());
            if let (Some(digest), Some(size)) = (digest, map.get("size").and_then(Value::as_u64))
                && text("mediaType").is_some_and(is_manifest)
            {
                reached.manifests.push((digest, size));
            }
            map.values().for_each(|value| walk(value, reached));
        }
        _ => {}
    }
}

impl Marks for Reach<'_> {
    fn reachable(&mut self, leases: &[LeaseInfo]) -> Result<HashSet<Digest>, Box<dyn Error + Send + Sync>> {
        let refs = self.store.list_refs().map_err(ReachError::from)?;
        let mut roots: Vec<(String, Descriptor)> = refs.into_iter().map(|(name, d)| (name.to_string(), d)).collect();
        for lease in leases {
            let name = format!("lease {} of {}", lease.id, lease.host);
            roots.extend(lease.holds.iter().map(|descriptor| (name.clone(), descriptor.clone())));
        }
        let (next, found) = (AtomicUsize::new(0), Mutex::new(HashSet::new()));
        let work = || {
            while let Some((name, descriptor)) = roots.get(next.fetch_add(1, Ordering::Relaxed)) {
                let reached = self.of(name, descriptor)?;
                found.lock().unwrap_or_else(std::sync::PoisonError::into_inner).extend(reached);
            }
            Ok(())
        };
        std::thread::scope(|scope| -> Result<(), ReachError> {
            let workers: Vec<_> = (0..READERS.min(roots.len())).map(|_| scope.spawn(work)).collect();
            let done = workers.into_iter().map(|worker| match worker.join() {
                Ok(done) => done,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            done.collect()
        })?;
        Ok(found.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner))
    }
}

/// What was removed from a store, or would be.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Whether nothing was touched.
    pub dry_run: bool,
    /// The blobs.
    #[serde(flatten)]
    pub collected: Collected,
    /// Bytes of the removed blobs.
    pub removed_bytes: u64,
    /// Records of finished layers that lack blobs now.
    pub records_removed: usize,
    /// Files that dead writers had left in `tmp/`; nothing is looked for in a dry run.
    pub leftovers_removed: usize,
}

/// Removes what no ref and no lease reaches, the records that are worth nothing without it, and what dead writers left.
/// `each` is told of every blob. In a dry run nothing is written or removed.
///
/// # Errors
/// [`GcError`]; what was removed before it was not needed.
pub fn collect(
    store: &Store,
    options: &Options,
    dry_run: bool,
    each: &mut dyn FnMut(&Removed),
) -> Result<Report, GcError> {
    let mut marks = Reach::new(store);
    let mut leftovers_removed = 0;
    let collected = if dry_run {
        let collected = gc::survey(store, options, &mut marks)?;
        collected.removed.iter().for_each(each);
        collected
    } else {
        // First, since on a full disk there is no room for the list.
        leftovers_removed = store.sweep()?.removed;
        gc::collect(store, options, &mut marks, each)?
    };
    let records_removed = records(store, &collected, dry_run)?;
    let removed_bytes = collected.removed_bytes();
    Ok(Report { dry_run, collected, removed_bytes, records_removed, leftovers_removed })
}

/// Removes records whose blobs are gone. The records are listed before the blobs: those of a record were there first.
fn records(store: &Store, collected: &Collected, dry_run: bool) -> Result<usize, StoreError> {
    let listed = store.list_records()?;
    let mut there: HashSet<Digest> = store.list_blobs()?.into_iter().map(|blob| blob.digest).collect();
    if dry_run {
        for blob in &collected.removed {
            there.remove(&blob.digest);
        }
    }
    let mut removed = 0;
    for record in listed {
        let Some(bytes) = store.record(&record.name)? else { continue };
        // One that cannot be read may be a later version's; it costs little.
        let Ok(parsed) = serde_json::from_slice::<Record>(&bytes) else { continue };
        if parsed.blobs().all(|blob| there.contains(&blob.digest)) {
            continue;
        }
        if !dry_run {
            store.delete_record(&record.name)?;
        }
        removed += 1;
    }
    Ok(removed)
}
