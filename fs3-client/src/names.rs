//! Small objects that change, beside the blobs: refs, records of finished layers, leases, lists of what may go.
//!
//! A name is a path such as `refs/team+app/1.2`. What is written under it is replaced as a whole, and may be replaced
//! only if nobody else did so meanwhile. Implementations: [`dir`] (a store's directory), [`memory`] (tests), [`s3`].

pub mod dir;
pub mod memory;
pub mod s3;

use crate::BlobError;
use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use std::fmt;
use std::time::SystemTime;

/// Longest object in bytes.
pub const OBJECT_MAX: u64 = 16 << 20;
/// Longest name in bytes.
const NAME_MAX: usize = 700;

/// Small objects by name.
///
/// What is put is durable when the call returns, and every later call sees it, from any machine. One exception: on 3FS
/// the other nodes may take a *replaced* or *deleted* object for what it was for half a minute, since they remember names
/// that long; a list always shows what is there, and an object under a new name is seen at once. So what must not be
/// missed there gets a new name each time, and is found by [`NameStore::list`], as leases are.
///
/// Names are checked with [`check_name`]. As [`crate::BlobStore`], implementations neither retry nor set deadlines.
#[async_trait]
pub trait NameStore: fmt::Debug + Send + Sync {
    /// The object and its version; `None` when there is none.
    ///
    /// # Errors
    /// [`BlobError::Corrupt`] above [`OBJECT_MAX`], or any other.
    async fn get(&self, name: &str) -> Result<Option<Named>, BlobError>;

    /// Replaces the object, as far as `condition` allows. Readers see the old one or the new one.
    ///
    /// Versions may be made of the contents alone, so writers for whom it matters who of them it was write different
    /// bytes. And when an answer is lost and others change the object before it can be looked at,
    /// [`PutOutcome::Conflict`] is told of a change that was made: whoever tries again writes again.
    ///
    /// # Errors
    /// Any; the object is then as it was, or the new one.
    async fn put(&self, name: &str, bytes: Bytes, condition: &Condition) -> Result<PutOutcome, BlobError>;

    /// Removes the object. One that is not there is removed already.
    ///
    /// # Errors
    /// Any.
    async fn delete(&self, name: &str) -> Result<(), BlobError>;

    /// All objects below the directory `below` (`refs`, or `` for all), at any depth, in no particular order. One that
    /// is put or deleted meanwhile may be in it or not.
    ///
    /// # Errors
    /// In the stream: any.
    fn list(&self, below: &str) -> BoxStream<'_, Result<ListedName, BlobError>>;
}

#[async_trait]
impl<T: NameStore + ?Sized> NameStore for std::sync::Arc<T> {
    async fn get(&self, name: &str) -> Result<Option<Named>, BlobError> {
        (**self).get(name).await
    }

    async fn put(&self, name: &str, bytes: Bytes, condition: &Condition) -> Result<PutOutcome, BlobError> {
        (**self).put(name, bytes, condition).await
    }

    async fn delete(&self, name: &str) -> Result<(), BlobError> {
        (**self).delete(name).await
    }

    fn list(&self, below: &str) -> BoxStream<'_, Result<ListedName, BlobError>> {
        (**self).list(below)
    }
}

/// An object as it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// Its contents.
    pub bytes: Bytes,
    /// Which contents these are.
    pub version: Version,
}

/// Tells contents of one object apart: an `ETag`, a digest. Only its own store can tell what it means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version(pub(crate) String);

/// When an object may be replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Condition {
    /// Always.
    Always,
    /// If there is none.
    Absent,
    /// If it still is this version.
    ///
    /// On a directory this is certain against processes of the same machine; another machine that shares the directory
    /// can come between the check and the rename.
    Unchanged(Version),
}

/// What became of a put.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PutOutcome {
    /// The object is the new one, and has this version.
    Done(Version),
    /// The condition did not hold.
    Conflict,
}

/// An object in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedName {
    /// Its whole name.
    pub name: String,
    /// Its length in bytes.
    pub size: u64,
    /// When it was put, by the store's clock.
    pub modified: SystemTime,
}

/// Whether `name` can be a name: up to 700 bytes, components of letters, digits and `._+-@`, none of them `.` or `..`.
///
/// # Errors
/// [`BlobError::Refused`].
pub fn check_name(name: &str) -> Result<(), BlobError> {
    let good = |component: &str| {
        !matches!(component, "" | "." | "..")
            && component.bytes().all(|b| b.is_ascii_alphanumeric() || b"._+-@".contains(&b))
    };
    if name.len() <= NAME_MAX && name.split('/').all(good) {
        return Ok(());
    }
    let what = name.chars().take(200).collect();
    let source = "a name has letters, digits and `._+-@`, in components between slashes".into();
    Err(BlobError::Refused { place: "the store".to_owned(), op: "take the name", what, source })
}

/// An object is longer than any may be.
pub(crate) fn too_long(place: &str, name: &str) -> BlobError {
    BlobError::Corrupt {
        place: place.to_owned(),
        what: name.to_owned(),
        how: format!("it has more than the {OBJECT_MAX} bytes that such an object may have"),
    }
}

#[cfg(test)]
mod tests {
    use super::check_name;

    #[test]
    fn names() {
        for good in ["refs/a+b/1.2", "leases/x", "converted/00ff", "gc/condemned@1"] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", "/", "a//b", "../x", "a/./b", "a/", "/a", "a b", "a\0", "ä", &"x".repeat(701)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }
}
