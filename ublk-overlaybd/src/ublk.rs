//! Disks as `/dev/ublkbN`.
//!
//! A device is a [`disk`], which somebody else implements, behind a block device of the kernel. Each of its hardware
//! queues has a thread with an io_uring of its own ([`queue`](self)): requests arrive there as completions, those that
//! need no waiting are answered at once, and all others go to threads that may wait ([`offload`](self)), whose answers
//! come back through an eventfd that the queue's ring reads. So a request that misses a cache, or a sync, delays no
//! other; and each is answered within a deadline, with `EIO` if need be.
//!
//! A device is recoverable: when its process dies, the kernel keeps the requests that were under way, and gives them to
//! the process that takes the device over. The block device stays where it is; who uses it sees a pause.
//!
//! Everything that knows libublk 0.4 is in this module, since its next version is another library.

mod buffer;
pub mod device;
pub mod disk;
mod gate;
mod offload;
mod queue;
mod request;
pub mod support;
