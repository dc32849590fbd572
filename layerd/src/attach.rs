//! Layers as something that the kernel can mount: one detached EROFS mount each.
//!
//! An EROFS mount reads its metadata image and data blobs from files directly ("file-backed", Linux 6.12), or from
//! block devices. The kernel refuses files with `ENOTBLK` where it is older, and where they are on a stacked file
//! system (overlayfs, another file-backed EROFS) or on tmpfs. Then loop devices stand between.

pub mod file;
pub mod loopback;

use crate::MountError;
use crate::layer::Layer;
use fs3_client::StoreDir;
use rustix::io::Errno;
use std::os::fd::OwnedFd;

/// How layers may be attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Mode {
    /// Files where the kernel takes them, else loop devices
    #[default]
    Auto,
    /// Files only
    File,
    /// Loop devices only
    Loop,
}

/// How one layer was attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum How {
    /// The kernel reads the files.
    File,
    /// The kernel reads loop devices over the files.
    Loop,
}

/// The text that the kernel shows as a mount's source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Whatever is surest: nobody will see it.
    Hidden,
    /// The metadata image's path (or loop device), for a mount that people will look at.
    Shown,
}

/// Attaches layers, and remembers what the kernel said to the first one.
#[derive(Debug)]
pub struct Attacher<'a> {
    store: &'a StoreDir,
    mode: Mode,
    warning: Option<String>,
}

impl<'a> Attacher<'a> {
    /// Attaches from `store`.
    #[must_use]
    pub fn new(store: &'a StoreDir, mode: Mode) -> Self {
        Self { store, mode, warning: None }
    }

    /// Mounts one layer, detached: it is in no mount table, and gone when the descriptor and all that was mounted over
    /// it are.
    ///
    /// # Errors
    /// [`MountError::Store`] when a blob is not there in its length, [`MountError::Kernel`] when the kernel refuses.
    pub fn attach(&mut self, layer: &Layer, source: Source) -> Result<(OwnedFd, How), MountError> {
        let mut refused = None;
        if self.mode != Mode::Loop {
            match file::attach(self.store, layer, source) {
                Ok(mount) => return Ok((mount, How::File)),
                Err(refusal) if self.mode == Mode::Auto && wants_block_device(&refusal) => {
                    // Every other layer of this store will be refused just so: not worth asking, nor saying again.
                    self.mode = Mode::Loop;
                    self.warning =
                        Some(format!("loop devices are used, since the kernel takes no files here: {refusal}"));
                    refused = Some(refusal);
                }
                Err(refusal) => return Err(refusal),
            }
        }
        match (loopback::attach(self.store, layer), refused) {
            (Ok(mount), _) => Ok((mount, How::Loop)),
            // It was not about files after all.
            (Err(_), Some(refusal)) if refusal.errno() != Some(Errno::NOTBLK) => Err(refusal),
            (Err(e), _) => Err(e),
        }
    }

    /// Why loop devices had to be used, if they had to.
    #[must_use]
    pub fn into_warning(self) -> Option<String> {
        self.warning
    }
}

/// Whether the kernel's answer means that it would take block devices. `EINVAL` has other causes as well, which loop
/// devices then run into again.
fn wants_block_device(error: &MountError) -> bool {
    matches!(error.errno(), Some(Errno::NOTBLK | Errno::INVAL | Errno::OPNOTSUPP))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn o06_o11_which_answers_lead_to_loop_devices() {
        let kernel = |errno| MountError::Kernel { what: "mount".into(), errno, log: String::new() };
        assert!(wants_block_device(&kernel(Errno::NOTBLK)));
        assert!(wants_block_device(&kernel(Errno::INVAL)));
        assert!(!wants_block_device(&kernel(Errno::PERM)));
        assert!(!wants_block_device(&kernel(Errno::IO)));
        assert!(!wants_block_device(&MountError::TooManyLayers { count: 501 }));
    }
}
