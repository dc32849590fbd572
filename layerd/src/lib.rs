//! A node's layers and sandbox roots: from names in a store to a mounted root.
//!
//! ```text
//! NAME:TAG ─ layer::resolve ─► layers, bottom first ─ layer::Stack ─► what overlayfs will be given
//!    ─ layer::check ─► every blob is there, and is what the metadata image expects
//!    ─ attach ─► one detached EROFS mount a layer (file-backed; through loop devices where the kernel wants them)
//!    ─ mount ─► overlayfs over them (or the one EROFS mount itself), moved to the mountpoint as the last step
//! ```
//!
//! The kernel mounts an EROFS image with missing, short or wrong devices without a word, and answers reads with `EIO`
//! or, worse, other data. So [`layer::check`] looks before anything is mounted.
//!
//! Nothing is visible before the last step. The layers are mounted *detached* (`fsmount(2)` without `move_mount(2)`):
//! they are in no mount table, overlayfs holds them, and they go with it, as their loop devices do (`AUTOCLEAR`). So a
//! step that fails needs no undoing but closing file descriptors and removing directories that were made for it, and
//! [`umount`] is one unmount.

pub mod attach;
pub mod cli;
pub mod error;
pub mod layer;
pub mod mount;
pub mod umount;

pub use error::MountError;
