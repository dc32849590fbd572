//! The protocol on a real store.

use super::ground::{Act, Ground, HeldLease};
use crate::blob_store::{Listed, Stat};
use crate::lease::{LeaseInfo, LeaseKind};
use crate::names::Condition;
use crate::{Digest, Lease, Store, StoreError};
use std::time::Duration;

impl Ground for Store {
    fn object(&self, name: &str) -> Result<Option<Vec<u8>>, StoreError> {
        Ok(Self::object(self, name)?.map(|named| named.bytes.into()))
    }

    fn put_object(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        Self::put_object(self, name, bytes, &Condition::Always).map(drop)
    }

    fn delete_object(&self, name: &str) -> Result<(), StoreError> {
        Self::delete_object(self, name)
    }

    fn objects(&self, below: &str) -> Result<Vec<String>, StoreError> {
        Ok(self.list_objects(below)?.into_iter().map(|listed| listed.name).collect())
    }

    fn take_lease(&self, kind: LeaseKind, purpose: &str) -> Result<Box<dyn HeldLease>, StoreError> {
        Ok(Box::new(Lease::of_kind(self, kind, purpose, Vec::new())?))
    }

    fn leases(&self) -> Result<Vec<LeaseInfo>, StoreError> {
        Self::leases(self)
    }

    fn each_blob(&self, each: &mut dyn FnMut(Listed)) -> Result<(), StoreError> {
        self.list_blobs()?.into_iter().for_each(each);
        Ok(())
    }

    fn stat_blob(&self, digest: &Digest) -> Result<Option<Stat>, StoreError> {
        self.unclaimed_stat(digest)
    }

    fn holding(&self, lease: &dyn HeldLease, act: Act<'_>) -> Result<bool, StoreError> {
        if !lease.is_held() {
            return Ok(false);
        }
        match act {
            Act::Put(name, bytes) => Ground::put_object(self, name, bytes)?,
            Act::Delete(name) => Ground::delete_object(self, name)?,
            Act::DeleteBlob(digest) => self.delete_blob(digest)?,
        }
        Ok(true)
    }

    fn pause(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

impl HeldLease for Lease {
    fn id(&self) -> &str {
        Self::id(self)
    }

    fn is_held(&self) -> bool {
        self.check().is_ok()
    }
}
