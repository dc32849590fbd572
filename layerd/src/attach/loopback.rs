//! EROFS mounts over loop devices.

use crate::MountError;
use crate::layer::{Blob, Layer};
use crate::mount::kernel::FsContext;
use crate::mount::loopdev::LoopDevice;
use fs3_client::StoreDir;
use std::os::fd::OwnedFd;

/// Bytes of a loop device's sector.
const SECTOR: u64 = 512;

/// Mounts the layer from read-only loop devices over its files, detached. The devices free themselves with the mount.
pub(super) fn attach(store: &StoreDir, layer: &Layer) -> Result<OwnedFd, MountError> {
    let context = FsContext::open(c"erofs", format!("mount layer {} through loop devices", layer.metadata.digest))?;
    context.flag(c"ro")?;
    let metadata = device(store, layer, &layer.metadata)?;
    context.string(c"source", metadata.path().as_os_str())?;
    let mut open = vec![metadata];
    for blob in &layer.data {
        let device = device(store, layer, blob)?;
        context.string(c"device", device.path().as_os_str())?;
        open.push(device);
    }
    // Only now may our descriptors go: the mount has its own.
    context.mount_read_only()
}

fn device(store: &StoreDir, layer: &Layer, blob: &Blob) -> Result<LoopDevice, MountError> {
    if !blob.size.is_multiple_of(SECTOR) {
        let what = format!(
            "blob {} has {} bytes, and a loop device would cut off its last {SECTOR}-byte sector",
            blob.digest, blob.size
        );
        return Err(MountError::BadLayer { name: layer.image.clone(), digest: layer.metadata.digest, what });
    }
    LoopDevice::over(&store.open_blob(&blob.digest, blob.size)?, &store.blob_path(&blob.digest))
}
