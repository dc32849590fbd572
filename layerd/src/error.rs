//! What can go wrong between a name and a mounted root.

use converter::manifest::ManifestError;
use fs3_client::{Digest, RefName, StoreError};
use rustix::io::Errno;
use std::io;
use std::path::{Path, PathBuf};

/// Why a root could not be mounted or unmounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The store lacks something, or it is damaged.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The ref does not lead to a converted image.
    #[error("{name}: {source}")]
    Manifest {
        /// Which image.
        name: RefName,
        /// What is wrong with its manifest.
        source: ManifestError,
    },
    /// A metadata image does not fit what the manifest says about it.
    #[error("layer {digest} of {name} is damaged: {what}")]
    BadLayer {
        /// Which image.
        name: RefName,
        /// The metadata image.
        digest: Digest,
        /// What does not fit.
        what: String,
    },
    /// More layers than overlayfs takes.
    #[error("{count} layers are more than the {} that overlayfs takes", crate::layer::MAX_LAYERS)]
    TooManyLayers {
        /// How many there are, each counted once.
        count: usize,
    },
    /// Layers whose overlay marks live in different xattr namespaces: one mount reads only one of them.
    #[error("{trusted} has its whiteouts in trusted.overlay.*, {user} in user.overlay.*: one mount cannot honour both")]
    MixedXattrs {
        /// An image of the one kind.
        trusted: RefName,
        /// An image of the other kind.
        user: RefName,
    },
    /// Nothing can be mounted (or unmounted) there.
    #[error("{}: {why}", path.display())]
    Mountpoint {
        /// The mountpoint.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// Something holds the mount.
    #[error("{} is busy{}", path.display(), if users.is_empty() { String::new() } else { format!(": {}", users.join(", ")) })]
    Busy {
        /// The mountpoint.
        path: PathBuf,
        /// Who holds it, as far as can be told.
        users: Vec<String>,
    },
    /// The directory for the writable layer cannot be one.
    #[error("{} cannot hold a writable layer: {why}", path.display())]
    Upper {
        /// The directory.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// The kernel refused a step of mounting.
    #[error("cannot {what}: {}{}", io::Error::from(*errno), if log.is_empty() { String::new() } else { format!(" (the kernel says: {log})") })]
    Kernel {
        /// The step, as a verb with its object.
        what: String,
        /// Its answer.
        errno: Errno,
        /// What it wrote into the mount context, if anything.
        log: String,
    },
    /// The operating system refused something else.
    #[error("cannot {op} {}: {source}", path.display())]
    Io {
        /// What was being done, as a verb.
        op: &'static str,
        /// On which file or directory.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

impl MountError {
    /// For `map_err`: an I/O error of `op` on `path`.
    pub(crate) fn io<E: Into<io::Error>>(op: &'static str, path: &Path) -> impl FnOnce(E) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { op, path, source: source.into() }
    }

    /// Whether stored data is not what it should be: exit code 3.
    #[must_use]
    pub fn is_corrupt(&self) -> bool {
        match self {
            Self::Store(e) => e.is_corrupt(),
            Self::Manifest { source, .. } => !matches!(source, ManifestError::OtherArtifact { .. }),
            Self::BadLayer { .. } => true,
            _ => false,
        }
    }

    /// What the kernel answered, if it was the kernel.
    #[must_use]
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Kernel { errno, .. } => Some(*errno),
            _ => None,
        }
    }

    /// What the person could do about it.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Store(StoreError::NotAStore { .. }) => {
                Some("a store is made by `dsec-convert convert … --store STORE`; is the path right, and is it mounted?")
            }
            Self::Store(StoreError::NoSuchRef { .. }) => Some("`dsec-convert list STORE` shows what is there"),
            Self::Store(StoreError::Missing { .. } | StoreError::Corrupt { .. }) | Self::BadLayer { .. } => {
                Some("`dsec-convert verify STORE NAME:TAG` shows all that is wrong; converting again replaces it")
            }
            Self::Manifest { .. } => Some("only images that `dsec-convert convert` has made can be mounted"),
            Self::TooManyLayers { .. } => {
                Some("`dsec-convert merge STORE NAME:TAG … --name NAME:TAG` makes one layer of many")
            }
            Self::MixedXattrs { .. } => Some("convert both with, or both without `--userxattr`"),
            Self::Busy { .. } => Some("end what uses it, or detach it now and let the kernel finish later: `--lazy`"),
            Self::Kernel { errno: Errno::PERM | Errno::ACCESS, .. } => Some("mounting needs root (CAP_SYS_ADMIN)"),
            Self::Kernel { errno: Errno::NODEV, .. } => {
                Some("this kernel lacks the file system; try `modprobe erofs overlay`")
            }
            Self::Kernel { errno: Errno::NOTBLK, .. } => {
                Some("files cannot back an EROFS mount here; `--attach loop` (or auto) uses loop devices")
            }
            Self::Kernel { errno: Errno::INVAL, log, .. } if log.is_empty() => {
                Some("the kernel's own log (`dmesg`) often says what it did not like")
            }
            _ => None,
        }
    }
}
