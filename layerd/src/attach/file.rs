//! File-backed EROFS mounts.

use super::Source;
use crate::MountError;
use crate::layer::Layer;
use crate::mount::kernel::{FsContext, fd_path};
use fs3_client::StoreDir;
use std::os::fd::{AsFd as _, OwnedFd};

/// Mounts the layer from its files, detached.
///
/// The kernel gets the files by our descriptors (`/proc/self/fd/…`): so it opens just what was checked, and a store
/// path may have any length (`fsconfig(2)` takes strings of 255 bytes) and any bytes.
pub(super) fn attach(store: &StoreDir, layer: &Layer, source: Source) -> Result<OwnedFd, MountError> {
    let context = FsContext::open(c"erofs", format!("mount layer {}", layer.metadata.digest))?;
    context.flag(c"ro")?;
    let metadata = store.open_blob(&layer.metadata.digest, layer.metadata.size)?;
    match source {
        Source::Hidden => context.string(c"source", fd_path(metadata.as_fd()).as_os_str())?,
        Source::Shown => context.string(c"source", store.blob_path(&layer.metadata.digest).as_os_str())?,
    }
    let mut open = Vec::new();
    for blob in &layer.data {
        let file = store.open_blob(&blob.digest, blob.size)?;
        context.string(c"device", fd_path(file.as_fd()).as_os_str())?;
        open.push(file);
    }
    context.mount_read_only()
}
