//! The daemon: many disks as block devices, in one process, by name.
//!
//! ```text
//! client ─► control socket ([http]) ─► [devices] ─► [table] (a record a device, synced before the kernel is asked)
//!                                         │
//!                                         └► [disk] (image, writable layer) ─► [ublk](crate::ublk) ─► /dev/ublkbN
//! ```
//!
//! **What is promised is written down first.** A device's record exists before the kernel knows the device, and goes
//! after the kernel has forgotten it. The record and the kernel's device share a random number ([`table::Record::mark`],
//! which the kernel keeps), so that a daemon takes over its own devices alone, whatever happened to their numbers.
//!
//! **Ending is dying.** A daemon that is told to end, for an upgrade say, flushes and goes, and leaves its devices as a
//! kill would: the kernel holds requests until the next daemon has taken over. There is one path for both, and it is
//! tested at random moments. What is to go away is removed by name.
//!
//! **No stale byte.** A number of the kernel's is never given another disk: a device is taken over only for the layers
//! that it had ([`identity`]), and removed, loudly, where they are others now.
//!
//! The daemon has a mount namespace of its own. Were it the last that holds a mount of one of its devices, its end would
//! wait for itself.

pub mod config;
pub mod devices;
pub mod disk;
pub mod events;
pub mod http;
pub mod identity;
mod metrics;
pub mod namespace;
pub mod protocol;
pub mod serve;
pub mod supervise;
pub mod table;
