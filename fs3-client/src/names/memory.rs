//! Small objects in memory, for tests.

use super::{Condition, ListedName, NameStore, Named, PutOutcome, Version, check_name};
use crate::BlobError;
use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

/// Small objects in memory.
#[derive(Debug, Default)]
pub struct MemoryNames {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    objects: BTreeMap<String, (Named, SystemTime)>,
    versions: u64,
}

#[async_trait]
impl NameStore for MemoryNames {
    async fn get(&self, name: &str) -> Result<Option<Named>, BlobError> {
        check_name(name)?;
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(state.objects.get(name).map(|(named, _)| named.clone()))
    }

    async fn put(&self, name: &str, bytes: Bytes, condition: &Condition) -> Result<PutOutcome, BlobError> {
        check_name(name)?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let there = state.objects.get(name).map(|(named, _)| &named.version);
        let holds = match condition {
            Condition::Always => true,
            Condition::Absent => there.is_none(),
            Condition::Unchanged(version) => there == Some(version),
        };
        if !holds {
            return Ok(PutOutcome::Conflict);
        }
        state.versions += 1;
        let version = Version(state.versions.to_string());
        let named = Named { bytes, version: version.clone() };
        state.objects.insert(name.to_owned(), (named, SystemTime::now()));
        Ok(PutOutcome::Done(version))
    }

    async fn delete(&self, name: &str) -> Result<(), BlobError> {
        check_name(name)?;
        self.state.lock().unwrap_or_else(PoisonError::into_inner).objects.remove(name);
        Ok(())
    }

    fn list(&self, below: &str) -> BoxStream<'_, Result<ListedName, BlobError>> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let inside =
            |name: &str| below.is_empty() || name.strip_prefix(below).is_some_and(|rest| rest.starts_with('/'));
        let listed = |(name, (named, modified)): (&String, &(Named, SystemTime))| {
            Ok(ListedName { name: name.clone(), size: named.bytes.len() as u64, modified: *modified })
        };
        let found: Vec<_> = state.objects.iter().filter(|(name, _)| inside(name)).map(listed).collect();
        futures::stream::iter(found).boxed()
    }
}
