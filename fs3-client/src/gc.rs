//! Removing blobs that nobody needs, beside writers on this machine and others.
//!
//! Whether a blob is needed is found by marking from all refs. That takes time, and meanwhile a writer may find an old
//! blob in the store and rely on it. The two agree through small objects of the store; all they ask of it is that what
//! was put, deleted or listed is seen by whoever asks later (directories, 3FS and S3 do). Only the end of a dead
//! machine's lease, and the grace, are a matter of time.
//!
//! ```text
//! leases/<id>                  who is at work: writers, readers (with what they hold), at most one collector
//! gc/condemned-<generation>    blobs that may be deleted
//! gc/state                     which list counts, and its phase: `condemned`, then `sweep`
//! gc/rescued/<generation>@<hex>   blobs that a writer has taken off the list
//! ```
//!
//! **The writer** takes a lease before it looks anything up, and only then reads the state. While there is a list, it
//! *claims* every blob of the list before it looks whether the blob is there ([`claims`]): it puts the blob among the
//! rescued, then reads the state again. In phase `condemned` the blob is its own now. In phase `sweep` it waits for the
//! end of the list, and then sees whether the blob is left. The lease ends after the ref was written.
//!
//! **The collector** ([`collect()`]) takes a lease of its own and gives up when another collector has one; two that
//! begin at once see each other. It lists what is unreachable and older than the grace, and makes that the state in
//! phase `condemned`. It waits until every writer's lease that it sees *then* has ended, and marks again. It makes the
//! phase `sweep`, reads what was rescued, deletes what is on the list and neither rescued nor reached, and removes the
//! state, then the list.
//!
//! Why nothing that is needed is deleted. Let a writer rely on blob B, and a list have B on it:
//!
//! * The writer read the state before the list was the state. Then its lease was there when the collector read the
//!   leases, and the collector waited for its end. By then the ref was written, and the mark after that found B.
//! * It read the state later. Then it claimed B. If it saw `condemned` after its rescue, the rescue was there when the
//!   collector, which reads the rescued after it wrote `sweep`, read them. If it saw `sweep`, it went on only when the
//!   list was gone, and that collector deletes nothing after that. The next list comes after the writer's lease.
//!
//! A collector that dies leaves a state behind. The next one goes on with it: in phase `sweep` it deletes, since
//! everybody who came before the list was waited for, and all others know it. A writer that finds a dead collector's
//! sweep ends the list itself, so that it need not wait for the next. A lease of the dead ends with its lock where one
//! can be asked, else when it was not renewed for its time; it is deleted before anything is marked, and its holder, if
//! it lives after all, finds that out before it writes a ref.
//!
//! What is assumed: nobody stands still, between looking at its own lease and the one operation that follows (writing a
//! ref; deleting a blob), for longer than a lease outlasts its last renewal. A collector looks again at a blob's time
//! before it deletes it, so that even then a blob that was published anew is not taken for the old one.
//!
//! Blobs younger than the grace stay in any case: those of writers that take no lease (earlier versions, plain copies).

pub(crate) mod claims;
pub mod collect;
pub(crate) mod ground;
mod list;
#[cfg(test)]
mod model;
mod store;
#[cfg(test)]
mod tests;

pub use collect::{Collected, GcError, Marks, Options, Removed, collect, survey};
