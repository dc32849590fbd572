//! The EROFS reader over any bytes.

use crate::erofs::read::check::{DeviceInfo, Severity, check};
use crate::erofs::read::{Data, Image};
use crate::erofs::remap::{NewDevice, remap};
use crate::read_at::ReadAt;
use std::io;

/// File data that is read at most, so that an image with much sharing or large holes cannot take long.
const READ_LIMIT: u64 = 4 << 20;
/// Compressed clusters that are read at most.
const CLUSTER_LIMIT: u32 = 64;

/// A device of zeros without end.
struct Zeros;

impl ReadAt for Zeros {
    fn read_exact_at(&self, buf: &mut [u8], _: u64) -> io::Result<()> {
        buf.fill(0);
        Ok(())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(u64::MAX)
    }
}

/// Opens `data` as an image and does everything with it that a reader can.
///
/// Invariant: no panic, no allocation beyond what `data` justifies, time in proportion to its length. What can be
/// rewritten must still open, and if it is sound, have the same names.
///
/// # Panics
/// When the invariant is broken: that is the finding.
pub fn erofs(data: &[u8]) {
    let Ok(image) = Image::open(data) else { return };
    let _ = (image.superblock().features.names(), image.superblock().features.least_kernel());
    let devices: Vec<DeviceInfo> =
        image.devices().iter().map(|d| DeviceInfo { blocks: d.blocks, packed: false }).collect();
    let sound = check(&image, &devices).iter().all(|finding| finding.severity == Severity::Foreign);
    let names = read_all(&image);
    let blocks = u32::MAX;
    for count in [devices.len(), devices.len() + 3] {
        let new = vec![NewDevice { tag: b"fuzz".to_vec(), blocks }; count];
        let mut out = Vec::new();
        if remap(data, &new, |device, block, _| Ok((device, block)), &mut out).is_ok() {
            let again = Image::open(out.as_slice()).expect("a rewritten image opens");
            assert_eq!(again.devices().len(), count, "a rewritten image has the new devices");
            let again = read_all(&again);
            assert!(!sound || again == names, "a sound image has the same names when it is rewritten");
        }
    }
}

/// Reads names, links, xattrs and file data; returns the number of names and of broken ones.
fn read_all<R: ReadAt>(image: &Image<R>) -> (u64, u64) {
    let zeros = Zeros;
    let devices: Vec<&dyn ReadAt> = image.devices().iter().map(|_| &zeros as &dyn ReadAt).collect();
    let (mut names, mut errors, mut budget) = (0, 0, READ_LIMIT);
    let mut buf = vec![0; 64 << 10];
    let mut clusters = CLUSTER_LIMIT;
    let mut walk = image.walk();
    while let Some(visit) = walk.next() {
        let Ok(visit) = visit else {
            errors += 1;
            continue;
        };
        names += 1;
        let inode = visit.inode;
        if !visit.first {
            continue;
        }
        let _ = image.xattrs(inode);
        let _ = image.read_link(inode);
        for extent in image.extents(inode) {
            let Ok(extent) = extent else { break };
            let len = extent.len.min(buf.len() as u64).min(budget);
            if extent.data == Data::Hole || len == 0 {
                continue;
            }
            budget -= len;
            let part = usize::try_from(len).unwrap_or(0);
            if matches!(extent.data, Data::Compressed { .. }) {
                // Damaged data is an error; up to 12 MiB are decompressed for each of these.
                if clusters > 0 {
                    clusters -= 1;
                    let _ = image.read_file_at(inode, &devices, extent.file_offset, &mut buf[..part]);
                }
                continue;
            }
            let read = image.read_file_at(inode, &devices, extent.file_offset, &mut buf[..part]);
            assert_eq!(read.ok(), Some(part), "an extent inside its device can be read");
        }
    }
    (names, errors)
}
