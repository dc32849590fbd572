//! What is durable of which chunks are there: a small trait, RocksDB behind it, and a stand-in that forgets.

#[cfg(test)]
pub(crate) mod forgetful;
pub(crate) mod rocks;

use super::format::{GroupKey, Record};
use std::fmt;

/// Why the index did not do what it should.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct IndexError(pub(crate) String);

/// A change: a record, or none any more.
pub(crate) type Change = (GroupKey, Option<Record>);

/// Records of groups, and whether the last end was a proper one.
///
/// One thread changes it; any read it. Changes become durable in the order in which they were made, those of one call
/// together: a durable one makes all before it durable.
pub(crate) trait Index: fmt::Debug + Send + Sync {
    /// Calls `each` for every record, those of a blob in a row. What cannot be understood is left out.
    fn scan(&self, each: &mut dyn FnMut(GroupKey, Record)) -> Result<(), IndexError>;

    fn get(&self, key: &GroupKey) -> Result<Option<Record>, IndexError>;

    /// Makes the changes, all or none. With `durable` they have outlived any crash once this returns.
    fn apply(&self, changes: &[Change], durable: bool) -> Result<(), IndexError>;

    /// Whether the last end was a proper one. That is durably forgotten when this returns.
    fn take_clean(&self) -> Result<bool, IndexError>;

    /// Durably notes a proper end.
    fn set_clean(&self) -> Result<(), IndexError>;
}
