//! What the protocol asks of a store, so that it can be proved on one that is in memory and has any order of events.

use crate::blob_store::{Listed, Stat};
use crate::lease::{LeaseInfo, LeaseKind};
use crate::{Digest, StoreError};
use std::fmt;
use std::time::Duration;

/// A store as the protocol sees it. Each method is one event: what it did is seen by all calls that begin later.
pub(crate) trait Ground: Sync {
    fn object(&self, name: &str) -> Result<Option<Vec<u8>>, StoreError>;

    fn put_object(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError>;

    /// One that is not there is deleted already.
    fn delete_object(&self, name: &str) -> Result<(), StoreError>;

    /// The names of all objects below a directory.
    fn objects(&self, below: &str) -> Result<Vec<String>, StoreError>;

    /// Takes a lease, which others see from now on.
    fn take_lease(&self, kind: LeaseKind, purpose: &str) -> Result<Box<dyn HeldLease>, StoreError>;

    /// The leases that live. Those that ended are deleted before this returns.
    fn leases(&self) -> Result<Vec<LeaseInfo>, StoreError>;

    fn each_blob(&self, each: &mut dyn FnMut(Listed)) -> Result<(), StoreError>;

    fn stat_blob(&self, digest: &Digest) -> Result<Option<Stat>, StoreError>;

    /// Does `act` if `lease` is held, and tells whether it did. That the two are one event is what the protocol assumes:
    /// see [`super`].
    fn holding(&self, lease: &dyn HeldLease, act: Act<'_>) -> Result<bool, StoreError>;

    /// Lets time go by.
    fn pause(&self, time: Duration);
}

/// What only the one collector may do.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Act<'a> {
    /// Write the object.
    Put(&'a str, &'a [u8]),
    /// Delete the object.
    Delete(&'a str),
    /// Delete the blob.
    DeleteBlob(&'a Digest),
}

/// A lease of this process. It ends when it is dropped.
pub(crate) trait HeldLease: fmt::Debug + Send + Sync {
    /// Its name below `leases/`.
    fn id(&self) -> &str;

    /// Whether it is certain that nobody has ended it.
    fn is_held(&self) -> bool;
}
