//! Whether a metadata image expects the devices that the manifest has for it. The kernel does not check.

use super::Layer;
use converter::erofs::format::{DeviceSlot, INCOMPAT_DEVICES_OR_HEAD2, MAGIC, SUPERBLOCK_OFFSET, Superblock};
use converter::read_at::ReadAt;
use std::io;
use zerocopy::FromBytes;

/// Reads the superblock and the device table of `image` and compares them with what `layer` says: the number of data
/// blobs, their order (where the table names digests) and their lengths.
///
/// # Errors
/// One sentence on what does not fit.
pub fn check(image: &impl ReadAt, layer: &Layer) -> Result<(), String> {
    let superblock: Superblock = read(image, SUPERBLOCK_OFFSET, "superblock")?;
    if superblock.magic.get() != MAGIC {
        return Err("it is not an EROFS image (wrong magic number)".to_owned());
    }
    if !(9..=16).contains(&superblock.block_bits) {
        return Err(format!("its block size is 2^{} bytes", superblock.block_bits));
    }
    let block = 1u64 << superblock.block_bits;
    let expected = u64::from(superblock.blocks.get()) * block;
    if expected > layer.metadata.size {
        return Err(format!("it has {} bytes, its superblock says {expected}", layer.metadata.size));
    }
    let has_table = superblock.feature_incompat.get() & INCOMPAT_DEVICES_OR_HEAD2 != 0;
    let devices = if has_table { usize::from(superblock.extra_devices.get()) } else { 0 };
    if devices != layer.data.len() {
        return Err(format!("it needs {devices} data blobs, the manifest has {}", layer.data.len()));
    }
    let table = u64::from(superblock.device_slot.get()) * size_of::<DeviceSlot>() as u64;
    let offsets = (table..).step_by(size_of::<DeviceSlot>());
    for ((id, blob), offset) in (1..).zip(&layer.data).zip(offsets) {
        let slot: DeviceSlot = read(image, offset, "device table")?;
        let is_digest = slot.tag.iter().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if is_digest && slot.tag != blob.digest.hex().as_bytes() {
            let tag = String::from_utf8_lossy(&slot.tag);
            return Err(format!("its device {id} is sha256:{tag}, the manifest has {} there", blob.digest));
        }
        // Zero blocks: whoever made the image did not say (mkfs.erofs up to 1.5).
        let blocks = u64::from(slot.blocks.get()) | u64::from(slot.blocks_hi.get()) << 32;
        if blob.size.div_ceil(block) < blocks {
            return Err(format!(
                "its device {id} has {blocks} blocks, data blob {} only {} bytes",
                blob.digest, blob.size
            ));
        }
    }
    Ok(())
}

fn read<T: FromBytes>(image: &impl ReadAt, offset: u64, what: &str) -> Result<T, String> {
    let mut bytes = vec![0; size_of::<T>()];
    image.read_exact_at(&mut bytes, offset).map_err(|e| match e.kind() {
        io::ErrorKind::UnexpectedEof => format!("it ends before its {what} does"),
        _ => format!("its {what} cannot be read: {e}"),
    })?;
    T::read_from_bytes(&bytes).map_err(|_| format!("its {what} cannot be read"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::Blob;
    use converter::manifest::OverlayXattrs;
    use fs3_client::Digest;
    use zerocopy::IntoBytes as _;

    const EMPTY: [u8; 128] = [0; 128];

    /// An image of two blocks with two devices of 3 and 5 blocks, and the layer that fits it.
    fn sound() -> (Superblock, [DeviceSlot; 2], Layer) {
        let mut superblock = Superblock::read_from_bytes(&EMPTY).unwrap();
        superblock.magic.set(MAGIC);
        superblock.block_bits = 12;
        superblock.blocks.set(2);
        superblock.feature_incompat.set(INCOMPAT_DEVICES_OR_HEAD2);
        superblock.extra_devices.set(2);
        superblock.device_slot.set(9);
        let data = [3u64, 5].map(|blocks| Blob { digest: Digest::of(&blocks.to_le_bytes()), size: blocks * 4096 });
        let slots = data.map(|blob| {
            let mut slot = DeviceSlot::read_from_bytes(&EMPTY).unwrap();
            slot.tag.copy_from_slice(blob.digest.hex().as_bytes());
            slot.blocks.set(u32::try_from(blob.size / 4096).unwrap());
            slot
        });
        let layer = Layer {
            image: "a:b".parse().unwrap(),
            metadata: Blob { digest: Digest::of(b"m"), size: 8192 },
            data: data.to_vec(),
            whiteouts: false,
            overlay_xattrs: OverlayXattrs::Trusted,
        };
        (superblock, slots, layer)
    }

    fn image(superblock: &Superblock, slots: &[DeviceSlot]) -> Vec<u8> {
        let mut bytes = vec![0; 8192];
        bytes[1024..1152].copy_from_slice(superblock.as_bytes());
        bytes[1152..1152 + 128 * slots.len()].copy_from_slice(slots.as_bytes());
        bytes
    }

    #[test]
    fn what_fits_and_what_does_not() {
        let (superblock, slots, layer) = sound();
        assert_eq!(check(&image(&superblock, &slots), &layer), Ok(()));

        let fails = |superblock: &Superblock, slots: &[DeviceSlot], layer: &Layer, text: &str| {
            let error = check(&image(superblock, slots), layer).unwrap_err();
            assert!(error.contains(text), "{error} / {text}");
        };
        let mut other = layer.clone();
        other.data.pop();
        fails(&superblock, &slots, &other, "it needs 2 data blobs, the manifest has 1");
        other.data = vec![layer.data[1], layer.data[0]];
        fails(&superblock, &slots, &other, "its device 1 is sha256:");
        other.data = layer.data.clone();
        other.data[1].size = 4 * 4096;
        fails(&superblock, &slots, &other, "its device 2 has 5 blocks");
        other = layer.clone();
        other.metadata.size = 4096;
        fails(&superblock, &slots, &other, "it has 4096 bytes, its superblock says 8192");

        let mut bad = superblock.clone();
        bad.magic.set(1);
        fails(&bad, &slots, &layer, "not an EROFS image");
        bad = superblock.clone();
        bad.block_bits = 200;
        fails(&bad, &slots, &layer, "block size is 2^200");
        bad = superblock.clone();
        bad.feature_incompat.set(0);
        fails(&bad, &slots, &layer, "it needs 0 data blobs, the manifest has 2");
        bad = superblock.clone();
        bad.device_slot.set(u16::MAX);
        fails(&bad, &slots, &layer, "it ends before its device table does");

        let mut untold = slots.clone();
        for slot in &mut untold {
            *slot = DeviceSlot::read_from_bytes(&EMPTY).unwrap();
        }
        assert_eq!(check(&image(&superblock, &untold), &layer), Ok(()));
        assert!(check(&vec![0; 1100], &layer).unwrap_err().contains("ends before its superblock"));
    }

    #[test]
    fn any_bytes_are_answered() {
        // A small generator (xorshift) rather than a dependency: noise behind a valid magic number and block size.
        let (superblock, _, layer) = sound();
        let mut state = 0x9E37_79B9_7F4A_7C15u64;
        for _ in 0..2000 {
            let mut bytes = image(&superblock, &[]);
            for at in (1032..1400).filter(|at| *at != 1036) {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                if state.is_multiple_of(5) {
                    bytes[at] = state.to_le_bytes()[7];
                }
            }
            let _ = check(&bytes, &layer);
        }
    }
}
