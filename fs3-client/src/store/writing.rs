//! A store in the hands of a writer: it has a lease, and claims what it comes to rely on.

use super::{Lease, Store};
use crate::gc::claims::Claims;
use crate::lease::LeaseKind;
use crate::{Digest, StoreError};
use oci_spec::image::Descriptor;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What all clones of a writer's store share.
#[derive(Debug)]
pub(super) struct Writing {
    /// The store without a writer.
    plain: Store,
    claims: Claims,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// `None` when it was given up.
    lease: Option<Lease>,
    /// Files that are being written.
    staged: HashSet<PathBuf>,
}

impl Store {
    /// The same store for one who writes to it. It has a lease until the last clone of it is dropped: nothing that it
    /// finds in the store, or puts there, is removed by a [`crate::gc`] before that. The ref has to be written through
    /// it too. A store that is a writer's already is returned as it is.
    ///
    /// # Errors
    /// What the system or the backend says.
    pub fn writing(&self, purpose: &str) -> Result<Self, StoreError> {
        if self.writing.is_some() {
            return Ok(self.clone());
        }
        // The lease first: see `gc`.
        let lease = Lease::of_kind(self, LeaseKind::Writer, purpose, Vec::new())?;
        let claims = Claims::read(self)?;
        let state = State { lease: Some(lease), staged: HashSet::new() };
        let writing = Arc::new(Writing { plain: self.clone(), claims, state: Mutex::new(state) });
        Ok(Self { place: self.place.clone(), writing: Some(writing) })
    }

    /// Says that `digests` will be relied on, before one looks whether they are there. All methods of a writer's store
    /// that take a digest do so by themselves; this is for many at once. Without a writer it does nothing.
    ///
    /// # Errors
    /// What the system or the backend says; [`StoreError::Collector`] when a gc's deletions do not end.
    pub fn claim(&self, digests: &[Digest]) -> Result<(), StoreError> {
        match &self.writing {
            Some(writing) => writing.claims.claim(&writing.plain, digests),
            None => Ok(()),
        }
    }

    /// Whether the writer's lease is held. Without a writer there is nothing to lose.
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`], also when it was given up.
    pub fn check_lease(&self) -> Result<(), StoreError> {
        self.writing.as_ref().map_or(Ok(()), |writing| writing.check())
    }

    /// Ends the writer's work from outside, for instance because it hangs: its lease ends, the files that it is writing
    /// are removed, and whatever it tries to write from now on fails.
    pub fn give_up(&self) {
        let Some(writing) = &self.writing else { return };
        let (lease, staged) = {
            let mut state = writing.state();
            (state.lease.take(), std::mem::take(&mut state.staged))
        };
        for path in staged {
            if let Err(e) = std::fs::remove_file(&path)
                && e.kind() != std::io::ErrorKind::NotFound
            {
                tracing::warn!("cannot remove {}: {e}", path.display());
            }
        }
        drop(lease);
    }

    /// Takes a lease for one who reads: what `needs` names (manifests, with all they reach) stays until the lease ends,
    /// refs or no refs. `reaches` is all of that, as the manifests have it.
    ///
    /// It does not end with its process, since mounts do not either, but after a day without renewal, or when it is
    /// dropped. [`Lease::leave`] keeps it for a process that comes after.
    ///
    /// # Errors
    /// [`StoreError::Missing`] when not all is there, or what the system or the backend says.
    pub fn reading(&self, purpose: &str, needs: Vec<Descriptor>, reaches: &[Digest]) -> Result<Lease, StoreError> {
        let writer = self.writing(purpose)?;
        writer.claim(reaches)?;
        for digest in reaches {
            if self.unclaimed_stat(digest)?.is_none() {
                return Err(StoreError::Missing { digest: *digest, path: digest.to_string().into() });
            }
        }
        let lease = Lease::of_kind(self, LeaseKind::Reader, purpose, needs)?;
        // Until here nothing could go; from here on nothing that the new lease names.
        writer.check_lease()?;
        Ok(lease)
    }
}

impl Writing {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self) -> Result<(), StoreError> {
        match &self.state().lease {
            Some(lease) => lease.check(),
            None => Err(super::held::lost(&self.plain, "the work was given up")),
        }
    }

    /// Takes note of a file that is being written.
    pub(super) fn begin(&self, path: &Path) -> Result<(), StoreError> {
        let mut state = self.state();
        if state.lease.is_none() {
            drop(state);
            return self.check();
        }
        state.staged.insert(path.to_owned());
        Ok(())
    }

    /// The file is not there any more under this name.
    pub(super) fn end(&self, path: &Path) {
        self.state().staged.remove(path);
    }

    /// Before `digest` is published.
    pub(super) fn publishing(&self, digest: &Digest) -> Result<(), StoreError> {
        self.check()?;
        self.claims.claim(&self.plain, &[*digest])
    }
}
