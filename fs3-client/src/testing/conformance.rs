//! What every place for blobs, and every place for small objects, has to keep. Each backend and decorator passes these.
//!
//! They panic with a sentence when something is not kept, and leave some objects behind. Give them an empty place.

use crate::blob_store::{BlobError, BlobStore, Body, Listed};
use crate::names::{Condition, ListedName, NameStore, PutOutcome, Version};
use crate::{Digest, StoreDir};
use bytes::Bytes;
use futures::TryStreamExt as _;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// What a backend has besides `stat`, `read_range` and `put`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abilities {
    /// It can delete. Where not, it has to say so.
    pub delete: bool,
    /// It can list. Where not, it has to say so.
    pub list: bool,
    /// It knows when a blob was put.
    pub age: bool,
    /// Bytes of the largest blob that is put: more than the backend sends in one piece, to see the pieces.
    pub largest: u64,
}

impl Default for Abilities {
    /// All of them, and 20 MiB.
    fn default() -> Self {
        Self { delete: true, list: true, age: true, largest: 20 << 20 }
    }
}

/// Bytes that no two places of a blob have in common, from a seed.
#[must_use]
pub fn contents(seed: u64, len: u64) -> Bytes {
    let mut state = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(usize::try_from(len).expect("a length that fits"));
    bytes.into()
}

async fn list(store: &dyn BlobStore) -> Result<BTreeMap<Digest, Listed>, BlobError> {
    store.list().map_ok(|listed| (listed.digest, listed)).try_collect().await
}

fn missing<T>(outcome: Result<T, BlobError>, of: &str) {
    match outcome {
        Err(BlobError::NotFound { .. }) => {}
        Err(error) => panic!("{of} of a blob that is not there: {error}"),
        Ok(_) => panic!("{of} of a blob that is not there succeeds"),
    }
}

/// Checks the contract of [`BlobStore`] on an empty store.
///
/// # Panics
/// When it is not kept.
pub async fn blobs(store: &dyn BlobStore, abilities: Abilities) {
    absent(store, abilities).await;
    for len in [0, 1, 4095, 65_537, abilities.largest] {
        round_trip(store, abilities, len).await;
    }
    wrong_contents(store, abilities).await;
    together(store).await;
    if abilities.delete {
        deletion(store, abilities).await;
    } else {
        let outcome = store.delete(&Digest::of(b"whatever")).await;
        assert!(matches!(outcome, Err(BlobError::Unsupported { .. })), "no delete, but it answers {outcome:?}");
    }
    if !abilities.list {
        let outcome = list(store).await;
        assert!(matches!(outcome, Err(BlobError::Unsupported { .. })), "no list, but it answers {outcome:?}");
    }
}

async fn absent(store: &dyn BlobStore, abilities: Abilities) {
    let digest = Digest::of(b"never put");
    missing(store.stat(&digest).await, "stat");
    missing(store.read_range(&digest, 0..1).await, "read_range");
    missing(store.read_range(&digest, 5..10).await, "read_range");
    if abilities.delete {
        store.delete(&digest).await.expect("deleting what is not there is harmless");
    }
    if abilities.list {
        assert!(!list(store).await.expect("a list").contains_key(&digest), "a blob that was never put is listed");
    }
}

async fn round_trip(store: &dyn BlobStore, abilities: Abilities, len: u64) {
    let bytes = contents(len, len);
    let digest = Digest::of(&bytes);
    let before = SystemTime::now() - Duration::from_secs(5);
    // Small ones from memory, large ones from a file, and each of them twice: the second put is harmless.
    let file = tempfile_with(&bytes);
    for _ in 0..2 {
        let body = if len < 65_536 { Body::Bytes(bytes.clone()) } else { Body::File { file: Arc::clone(&file), len } };
        store.put(&digest, body).await.unwrap_or_else(|e| panic!("put of {len} bytes: {e}"));
    }
    let stat = store.stat(&digest).await.unwrap_or_else(|e| panic!("stat of {len} bytes: {e}"));
    assert_eq!(stat.size, len, "stat tells another length");
    if abilities.age {
        let put = stat.modified.expect("the store knows when a blob was put");
        assert!(put >= before && put <= SystemTime::now() + Duration::from_secs(5), "put {put:?}, which is not now");
    }
    let ranges = [0..len, 0..len.min(1), len.saturating_sub(1)..len, len / 3..len / 2, len / 2..len / 2, len..len];
    for range in ranges {
        let want = usize::try_from(range.start).expect("it fits")..usize::try_from(range.end).expect("it fits");
        let got = store.read_range(&digest, range.clone()).await.unwrap_or_else(|e| panic!("{range:?} of {len}: {e}"));
        assert!(got == bytes[want], "{range:?} of {len} bytes are {} other bytes", got.len());
    }
    for range in [0..len + 1, len..len + 1, len + 5..len + 9, len.saturating_sub(1)..len + 100] {
        let outcome = store.read_range(&digest, range.clone()).await;
        match outcome {
            Err(BlobError::Corrupt { .. }) => {}
            Err(error) => panic!("{range:?} of {len} bytes fails with: {error}"),
            Ok(bytes) => panic!("{range:?} of {len} bytes gives {} bytes", bytes.len()),
        }
    }
    if abilities.list {
        let all = list(store).await.expect("a list");
        let listed = all.get(&digest).expect("a blob that was put is listed");
        assert_eq!(listed.stat.size, len, "the list tells another length");
        assert_eq!(listed.stat.modified.is_some(), abilities.age);
    }
}

fn tempfile_with(bytes: &[u8]) -> Arc<std::fs::File> {
    // Through a store's directory, since this module has no crate for temporary files.
    let dir =
        std::env::temp_dir().join(format!("conformance-{}-{:?}", std::process::id(), std::thread::current().id()));
    let staged = StoreDir::create(&dir).and_then(|dir| dir.stage("conformance")).expect("a temporary file");
    (&*staged).write_all(bytes).expect("a temporary file can be written");
    let file = staged.try_clone().expect("a second handle");
    drop(staged);
    let _ = std::fs::remove_dir_all(dir);
    Arc::new(file)
}

async fn wrong_contents(store: &dyn BlobStore, abilities: Abilities) {
    for len in [3, abilities.largest] {
        let digest = Digest::of(format!("not these {len}").as_bytes());
        let outcome = store.put(&digest, Body::Bytes(contents(1, len))).await;
        assert!(matches!(outcome, Err(BlobError::Corrupt { .. })), "{len} wrong bytes are put: {outcome:?}");
        missing(store.stat(&digest).await, "stat, after wrong bytes were refused,");
    }
    let short = Body::File { file: tempfile_with(b"abc"), len: 10 };
    let digest = Digest::of(b"abcdefghij");
    let outcome = store.put(&digest, short).await;
    assert!(outcome.is_err(), "a file that is shorter than it was said to be is put");
    missing(store.stat(&digest).await, "stat, after a short file was refused,");
}

/// Several tasks put and read the same blobs.
async fn together(store: &dyn BlobStore) {
    let blobs: Vec<Bytes> = (0..4).map(|n| contents(100 + n, 10_000)).collect();
    let work = (0..12).map(|n| {
        let bytes = blobs[n % blobs.len()].clone();
        async move {
            let digest = Digest::of(&bytes);
            store.put(&digest, Body::Bytes(bytes.clone())).await.expect("a put beside others");
            let got = store.read_range(&digest, 0..10_000).await.expect("a read beside puts of the same");
            assert!(got == bytes, "a read beside puts of the same gives other bytes");
        }
    });
    futures::future::join_all(work).await;
}

async fn deletion(store: &dyn BlobStore, abilities: Abilities) {
    let bytes = contents(7, 1000);
    let digest = Digest::of(&bytes);
    for _ in 0..2 {
        store.put(&digest, Body::Bytes(bytes.clone())).await.expect("a put");
        store.delete(&digest).await.expect("a delete");
        missing(store.stat(&digest).await, "stat");
        missing(store.read_range(&digest, 0..10).await, "read_range");
        if abilities.list {
            assert!(!list(store).await.expect("a list").contains_key(&digest), "a deleted blob is listed");
        }
    }
}

async fn listed(store: &dyn NameStore, below: &str) -> Vec<ListedName> {
    let mut all: Vec<ListedName> = store.list(below).try_collect().await.expect("a list of names");
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

async fn put(store: &dyn NameStore, name: &str, text: &'static str, condition: Condition) -> Option<Version> {
    match store.put(name, Bytes::from_static(text.as_bytes()), &condition).await {
        Ok(PutOutcome::Done(version)) => Some(version),
        Ok(PutOutcome::Conflict) => None,
        Err(error) => panic!("put of {name} {condition:?}: {error}"),
    }
}

/// Checks the contract of [`NameStore`] on an empty store. `certain` says that answers are never lost; where they are, a
/// conflict may be told of a change that was made.
///
/// # Panics
/// When it is not kept.
pub async fn names(store: &dyn NameStore, certain: bool) {
    const NAME: &str = "refs/team+app/1.2";
    assert_eq!(store.get(NAME).await.expect("a get"), None);
    store.delete(NAME).await.expect("deleting what is not there is harmless");
    assert!(listed(store, "refs").await.is_empty());

    let first = put(store, NAME, "one", Condition::Absent).await.expect("there was none");
    assert_eq!(put(store, NAME, "two", Condition::Absent).await, None, "there is one");
    let there = store.get(NAME).await.expect("a get").expect("it was put");
    assert_eq!((&there.bytes[..], &there.version), (&b"one"[..], &first));
    let second = put(store, NAME, "two", Condition::Unchanged(first.clone())).await.expect("nobody changed it");
    assert_eq!(put(store, NAME, "three", Condition::Unchanged(first.clone())).await, None, "it was changed");
    assert_eq!(store.get(NAME).await.expect("a get").expect("it is there").bytes, "two");
    put(store, NAME, "four", Condition::Always).await.expect("always");
    assert_eq!(put(store, NAME, "five", Condition::Unchanged(second)).await, None, "it was changed");
    put(store, "refs/other/x", "", Condition::Always).await.expect("an empty object is one");
    put(store, "refs2/a", "not below refs", Condition::Always).await.expect("always");

    let found = listed(store, "refs").await;
    let sizes: Vec<(&str, u64)> = found.iter().map(|l| (l.name.as_str(), l.size)).collect();
    assert_eq!(sizes, [("refs/other/x", 0), (NAME, 4)]);
    let old = found.iter().any(|l| {
        l.modified.duration_since(SystemTime::now()).unwrap_or_else(|e| e.duration()) > Duration::from_secs(10)
    });
    assert!(!old, "objects that were put now have other times: {found:?}");

    store.delete(NAME).await.expect("a delete");
    assert_eq!(store.get(NAME).await.expect("a get"), None);
    assert_eq!(put(store, NAME, "six", Condition::Unchanged(first)).await, None, "it is not there");
    assert_eq!(listed(store, "refs").await.len(), 1);
    for bad in ["../x", "", "a//b", "a b"] {
        assert!(store.get(bad).await.is_err(), "`{bad}` is taken as a name");
        assert!(store.put(bad, Bytes::new(), &Condition::Always).await.is_err(), "`{bad}` is taken as a name");
    }
    race(store, certain).await;
}

/// Many count together, each by reading, adding one and replacing what nobody changed: no count is lost.
async fn race(store: &dyn NameStore, certain: bool) {
    const NAME: &str = "refs/race/count";
    const EACH: u32 = 5;
    const TASKS: u32 = 6;
    let number = |bytes: &Bytes| -> u32 {
        let text = std::str::from_utf8(bytes).expect("a number");
        text.split(' ').next().expect("a word").parse().expect("a number")
    };
    let count = |task: u32| async move {
        let mut done = 0;
        while done < EACH {
            let there = store.get(NAME).await.expect("a get");
            let (last, condition) = match &there {
                Some(named) => (number(&named.bytes), Condition::Unchanged(named.version.clone())),
                None => (0, Condition::Absent),
            };
            // Nobody else writes the same: who writes what another did is taken for that one, and need not care.
            let next = Bytes::from(format!("{} by {task}", last + 1));
            if let PutOutcome::Done(_) = store.put(NAME, next, &condition).await.expect("a put") {
                done += 1;
            }
        }
    };
    futures::future::join_all((0..TASKS).map(count)).await;
    let last = store.get(NAME).await.expect("a get").expect("it was counted");
    let counted = number(&last.bytes);
    assert!(counted >= TASKS * EACH, "counts were lost: {counted}");
    assert!(counted == TASKS * EACH || !certain, "changes were told as conflicts: {counted}");
}
