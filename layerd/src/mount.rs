//! A root: overlayfs over attached layers, or the one layer itself.
//!
//! | layers | writable | whiteouts | what is mounted |
//! |---|---|---|---|
//! | one | no | none | the layer's EROFS mount: overlayfs wants two lower directories, or an upper one |
//! | one | no | some | overlayfs over the layer and an empty directory, so that no whiteout shows |
//! | any | yes | any | overlayfs with the writable layer on top |
//! | more | no | any | overlayfs |
//! | none | any | | overlayfs over empty directories |

pub(crate) mod kernel;
pub(crate) mod loopdev;
mod overlay;
pub mod table;
mod upper;

use crate::MountError;
use crate::attach::{Attacher, How, Mode, Source};
use crate::layer::{self, Blob, Layer, Stack};
use converter::manifest::OverlayXattrs;
use fs3_client::{RefName, StoreDir};
use overlay::Overlay;
use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use upper::Upper;

/// Longest string that `fsconfig(2)` takes, in bytes.
const STRING_MAX: usize = 255;

/// What to mount, and how.
#[derive(Debug, Clone)]
pub struct Request {
    /// The images, bottom first.
    pub images: Vec<RefName>,
    /// Where to.
    pub mountpoint: PathBuf,
    /// Directory for the writable layer; without, the root is read-only.
    pub writable: Option<PathBuf>,
    /// How layers may be attached.
    pub attach: Mode,
    /// How overlayfs is given them.
    pub handover: Handover,
    /// Whether to check the digests of all blobs before.
    pub verify: bool,
}

/// How overlayfs is given its layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Handover {
    /// As descriptors of detached mounts, or parked where the kernel cannot do that
    #[default]
    Auto,
    /// Attached below /run for as long as it takes
    Parked,
}

/// What was mounted.
#[derive(Debug, serde::Serialize)]
pub struct Mounted {
    /// Where.
    pub mountpoint: PathBuf,
    /// `overlay` or `erofs`.
    pub kind: Kind,
    /// The layers, bottom first.
    pub layers: Vec<MountedLayer>,
    /// The writable layer's directory.
    pub writable: Option<PathBuf>,
    /// What was odd, one sentence each.
    pub warnings: Vec<String>,
}

/// What kind of mount a root is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// overlayfs over one or more layers.
    Overlay,
    /// One layer, itself.
    Erofs,
}

/// One layer of what was mounted.
#[derive(Debug, serde::Serialize)]
pub struct MountedLayer {
    /// The image that it was named by.
    pub image: RefName,
    /// The metadata image.
    pub metadata: Blob,
    /// The data blobs.
    pub data: Vec<Blob>,
    /// How the kernel reads them.
    pub attached: How,
}

/// Mounts what `request` asks for. Either the root is there when this returns, or nothing is left of the attempt.
///
/// # Errors
/// See [`MountError`]; data is checked before anything is mounted.
pub fn mount(store: &StoreDir, request: &Request) -> Result<Mounted, MountError> {
    let mountpoint = check_mountpoint(&request.mountpoint)?;
    let stack = Stack::new(layer::resolve(store, &request.images)?)?;
    for layer in stack.layers() {
        layer::check(store, layer, request.verify)?;
    }

    let kind = kind(store, request, stack.layers());
    let source = if kind == Kind::Erofs { Source::Shown } else { Source::Hidden };
    let mut attacher = Attacher::new(store, request.attach);
    let mut attached: Vec<(OwnedFd, How)> = Vec::with_capacity(stack.layers().len());
    for layer in stack.layers() {
        attached.push(attacher.attach(layer, source)?);
    }
    let layers = stack.layers().iter().zip(&attached).map(|(layer, (_, how))| MountedLayer {
        image: layer.image.clone(),
        metadata: layer.metadata,
        data: layer.data.clone(),
        attached: *how,
    });
    let mounted = Mounted {
        mountpoint: mountpoint.clone(),
        kind,
        layers: layers.collect(),
        writable: request.writable.as_ref().map(|dir| std::path::absolute(dir).unwrap_or_else(|_| dir.clone())),
        warnings: attacher.into_warning().into_iter().collect(),
    };
    let lowers: Vec<OwnedFd> = attached.into_iter().map(|(fd, _)| fd).collect();
    match kind {
        Kind::Erofs => kernel::attach_at(&lowers[0], &mountpoint)?,
        Kind::Overlay => mount_overlay(request, &stack, lowers, &mountpoint)?,
    }
    Ok(mounted)
}

/// A lone layer is its own root where that shows nothing that it should not. Its path must fit into one string of the
/// mount API, since it is by that path that [`crate::umount`] knows it again.
fn kind(store: &StoreDir, request: &Request, layers: &[Layer]) -> Kind {
    match layers {
        [layer]
            if request.writable.is_none()
                && !layer.whiteouts
                && store.blob_path(&layer.metadata.digest).as_os_str().as_bytes().len() <= STRING_MAX =>
        {
            Kind::Erofs
        }
        _ => Kind::Overlay,
    }
}

fn mount_overlay(request: &Request, stack: &Stack, mut lowers: Vec<OwnedFd>, at: &Path) -> Result<(), MountError> {
    let xattrs = stack.overlay_xattrs();
    if lowers.is_empty() {
        // An image without layers (M04) is an empty root.
        lowers.push(overlay::empty_directory()?);
    }
    let upper = match (&request.writable, lowers.last()) {
        (Some(dir), Some(top)) => Some(Upper::prepare(dir, top.as_fd(), xattrs)?),
        _ => None,
    };
    if lowers.len() == 1 && upper.is_none() {
        lowers.insert(0, overlay::empty_directory()?);
    }
    let overlay = Overlay { lowers: &lowers, upper: upper.as_ref(), user_xattrs: xattrs == OverlayXattrs::User };
    let root = overlay.mount(request.handover)?;
    kernel::attach_at(&root, at)?;
    if let Some(upper) = upper {
        upper.keep();
    }
    Ok(())
}

fn check_mountpoint(path: &Path) -> Result<PathBuf, MountError> {
    let fail = |why: &str| MountError::Mountpoint { path: path.to_owned(), why: why.to_owned() };
    let canonical = match fs::canonicalize(path) {
        Ok(canonical) => canonical,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(fail("there is no such directory to mount on (make it with `mkdir -p`)"));
        }
        Err(e) => return Err(MountError::io("find", path)(e)),
    };
    if !canonical.is_dir() {
        return Err(fail("it is not a directory"));
    }
    if table::read()?.iter().rev().find(|mount| mount.target == canonical).is_some_and(table::Mount::is_ours) {
        return Err(fail("a root is mounted there already (`layerd umount` takes it away)"));
    }
    Ok(canonical)
}
