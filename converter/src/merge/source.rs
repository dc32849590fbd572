//! One layer's image as merging reads it: every part once, in tree order, and never more than the image has.

use super::plan::Fault;
use crate::compress::linked;
use crate::entry::Xattr;
use crate::erofs::format::{BLOCK_BITS, BLOCK_SIZE, DataLayout, FileType, encode_device, mode};
use crate::erofs::read::dir::{Block, Cursor};
use crate::erofs::read::nid_set::NidSet;
use crate::erofs::read::{Data, Image, Inode};
use crate::erofs::xattr::unshared_area;
use crate::extent::{Chunked, FileData, Runs, in_part};
use crate::manifest::OverlayXattrs;
use crate::read_at::ReadAt;
use crate::tree::{Kind, SetId, XattrSets};
use hashbrown::HashMap;
use std::collections::HashSet;

/// Bytes of the larger inode.
const EXTENDED: usize = 64;

/// A layer that is being merged.
pub(super) struct Source<'i, R> {
    pub(super) image: &'i Image<R>,
    number: u16,
    overlay: OverlayXattrs,
    /// Position in the list of all blobs of each of its devices.
    devices: &'i [u32],
    /// By the bytes beside an inode: what they mean.
    sets: HashMap<Box<[u8]>, Marks>,
    area: Vec<u8>,
    scratch: Vec<u8>,
    block: Block,
    /// Directories that were entered.
    entered: NidSet,
    /// Bytes that may still be read.
    budget: u64,
    /// Directories that nothing in the layer's source described, by inode number.
    implied: HashSet<u32>,
}

/// What attributes mean.
#[derive(Debug, Clone, Copy)]
pub(super) struct Marks {
    /// The attributes, less overlayfs' marks.
    pub(super) set: SetId,
    /// Bytes that they take up beside an inode when none is shared.
    area: usize,
    /// The directory hides what is below it.
    pub(super) opaque: bool,
}

impl Marks {
    const NONE: Self = Self { set: SetId::EMPTY, area: 0, opaque: false };
}

/// Which device a blob has in the merged image.
#[derive(Debug, Default)]
pub(super) struct Devices {
    /// By position in the list of all blobs; 0: none yet.
    numbers: Vec<u16>,
    /// The blobs in device order.
    pub(super) used: Vec<u32>,
}

impl Devices {
    /// The device of a blob: in the order of first use.
    fn number(&mut self, blob: u32) -> Result<u16, Fault> {
        let index = blob as usize;
        if index >= self.numbers.len() {
            self.numbers.resize(index + 1, 0);
        }
        if self.numbers[index] == 0 {
            self.used.push(blob);
            self.numbers[index] = u16::try_from(self.used.len()).map_err(|_| Fault::TooManyDevices)?;
        }
        Ok(self.numbers[index])
    }
}

impl<'i, R: ReadAt> Source<'i, R> {
    pub(super) fn new(
        image: &'i Image<R>,
        number: u16,
        overlay: OverlayXattrs,
        devices: &'i [u32],
        implied: &[u32],
    ) -> Result<Self, Fault> {
        if image.superblock().block_bits != BLOCK_BITS {
            return Err(Fault::Unsupported("blocks of another size than 4,096 bytes"));
        }
        if image.devices().len() != devices.len() {
            return Err(Fault::Devices { table: image.devices().len(), given: devices.len() });
        }
        Ok(Self {
            image,
            number,
            overlay,
            devices,
            sets: HashMap::new(),
            area: Vec::new(),
            scratch: Vec::new(),
            block: Block::default(),
            entered: NidSet::default(),
            // Inodes with what is beside them, and directories' blocks: no two of a sound image share a byte.
            budget: image.size(),
            implied: implied.iter().copied().collect(),
        })
    }

    fn spend(&mut self, bytes: u64) -> Result<(), Fault> {
        self.budget = self.budget.checked_sub(bytes).ok_or(Fault::Overlap)?;
        Ok(())
    }

    pub(super) fn is_implied(&self, directory: &Inode) -> bool {
        self.implied.contains(&directory.ino)
    }

    /// Calls `each` with every name of a directory but `.` and `..`, in order.
    pub(super) fn names(
        &mut self,
        directory: &Inode,
        mut each: impl FnMut(&[u8], u64, FileType) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        if !self.entered.insert(directory.nid) {
            return Err(Fault::EnteredTwice);
        }
        // What is beside the inode counts with it.
        let beside =
            if directory.layout == DataLayout::FlatInline { directory.size % u64::from(BLOCK_SIZE) } else { 0 };
        self.spend(self.image.body_size(directory) + (directory.size - beside))?;
        let mut cursor = Cursor::new(directory);
        // The name before, to see that they are in order.
        self.scratch.clear();
        while let Some(entry) = cursor.next_raw(self.image, &mut self.block) {
            let entry = entry?;
            if entry.name <= &self.scratch[..] {
                return Err(Fault::OutOfOrder);
            }
            self.scratch.clear();
            self.scratch.extend_from_slice(entry.name);
            if !matches!(entry.name, b"." | b"..") {
                each(entry.name, entry.nid, entry.file_type)?;
            }
        }
        Ok(())
    }

    /// The inode that a name leads to, which must be of the type that the name says.
    pub(super) fn inode(&mut self, nid: u64, file_type: FileType) -> Result<Inode, Fault> {
        let inode = self.image.inode(nid)?;
        if inode.file_type() != file_type {
            return Err(Fault::OtherType);
        }
        Ok(inode)
    }

    /// An inode's attributes.
    pub(super) fn marks(&mut self, inode: &Inode, sets: &mut XattrSets) -> Result<Marks, Fault> {
        if inode.xattr_size == 0 {
            return Ok(Marks::NONE);
        }
        self.image.xattr_area(inode, &mut self.area)?;
        // Marks mean something on directories only.
        self.area.push(u8::from(inode.is_dir()));
        if let Some(known) = self.sets.get(self.area.as_slice()) {
            return Ok(*known);
        }
        let mut opaque = false;
        let mut kept: Vec<Xattr> = Vec::new();
        for xattr in self.image.xattrs(inode)? {
            match xattr.name.strip_prefix(self.overlay.prefix().as_bytes()) {
                Some(b"opaque") if inode.is_dir() && xattr.value == b"y" => opaque = true,
                Some(b"origin") if inode.is_dir() => {}
                Some(rest) if !rest.starts_with(b"overlay.") => {
                    return Err(Fault::OverlayAttribute(crate::entry::printable(&xattr.name)));
                }
                _ if crate::tree::xattrs::unrepresentable(&xattr).is_some() => {
                    return Err(Fault::Unsupported("an attribute that is not written"));
                }
                _ => kept.push(xattr),
            }
        }
        let area = unshared_area(&kept);
        let marks = Marks { set: sets.intern(kept), area, opaque };
        self.sets.insert(self.area.as_slice().into(), marks);
        Ok(marks)
    }

    /// What an inode that is no directory holds.
    pub(super) fn kind(
        &mut self,
        inode: &Inode,
        marks: Marks,
        runs: &mut Runs,
        devices: &mut Devices,
    ) -> Result<Kind, Fault> {
        self.spend(self.image.body_size(inode))?;
        let device = || {
            let (major, minor) = inode.device_number().unwrap_or_default();
            encode_device(major.into(), minor.into()).unwrap_or_default()
        };
        Ok(match inode.file_type() {
            FileType::Regular => Kind::Regular(self.data(inode, marks, runs, devices)?),
            FileType::Symlink => {
                let text = self.image.read_link(inode)?;
                if text.contains(&0) {
                    return Err(Fault::LinkText);
                }
                if inode.layout == DataLayout::FlatPlain {
                    self.spend(inode.size)?;
                }
                Kind::Symlink(text.into_boxed_slice())
            }
            FileType::CharDevice => Kind::CharDevice(device()),
            FileType::BlockDevice => Kind::BlockDevice(device()),
            FileType::Fifo => Kind::Fifo,
            FileType::Socket => Kind::Socket,
            FileType::Directory | FileType::Unknown => return Err(Fault::OtherType),
        })
    }

    /// Where a regular file's contents are, in the merged layer's terms. Every form of data goes through here.
    fn data(&mut self, inode: &Inode, marks: Marks, runs: &mut Runs, devices: &mut Devices) -> Result<FileData, Fault> {
        if inode.size == 0 {
            return Ok(FileData::Empty);
        }
        match inode.layout {
            DataLayout::ChunkBased => self.chunked(inode, runs, devices),
            DataLayout::FlatInline | DataLayout::FlatPlain => {
                let extent = self.image.map(inode, 0)?;
                let len = u32::try_from(inode.size).ok().filter(|_| extent.len == inode.size);
                let (Data::Inline { offset }, Some(len)) = (extent.data, len) else {
                    return Err(Fault::Unsupported("a file whose blocks are in the metadata image"));
                };
                if EXTENDED + marks.area + len as usize > BLOCK_SIZE as usize {
                    return Err(Fault::Unsupported("a small file that would not fit beside its inode"));
                }
                let at = in_part(self.number, offset).ok_or(Fault::Unsupported("an image of 256 TiB"))?;
                Ok(FileData::Inline { at, len })
            }
            DataLayout::CompressedFull | DataLayout::CompressedCompact => {
                let own = self.devices;
                linked(self.image, inode, runs, |device| {
                    // The reader has checked that the device is in the table, which is as long as `own`.
                    let blob = own.get(usize::from(device) - 1).copied().ok_or(Fault::OtherType)?;
                    devices.number(blob)
                })
            }
        }
    }

    fn chunked(&mut self, inode: &Inode, runs: &mut Runs, devices: &mut Devices) -> Result<FileData, Fault> {
        let chunk_bits = self.image.chunk_bits(inode)?;
        let blocks_a_chunk = 1u32 << (u32::from(chunk_bits) - BLOCK_BITS).min(31);
        let first = runs.next();
        let own = self.devices;
        self.image.each_chunk(inode, &mut self.scratch, |data, _| {
            match data {
                Data::Hole => runs.push_holes(first, 1),
                Data::Block { device: 0, .. } | Data::Inline { .. } | Data::Compressed { .. } => {
                    return Err(Fault::Unsupported("a file whose blocks are in the metadata image"));
                }
                Data::Block { device, block } => {
                    // The reader has checked that the device is in the table, which is as long as `own`.
                    let blob = own.get(usize::from(device) - 1).copied().ok_or(Fault::OtherType)?;
                    let block = u32::try_from(block).map_err(|_| Fault::Unsupported("a data blob of 16 TiB"))?;
                    runs.push(first, devices.number(blob)?, block, blocks_a_chunk);
                }
            }
            Ok(())
        })?;
        let count = runs.next() - first;
        Ok(FileData::Chunked(Chunked { size: inode.size, chunk_bits, first, count }))
    }
}

/// Permission bits of an inode.
pub(super) const fn permissions(inode: &Inode) -> u16 {
    inode.mode & !mode::TYPE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_refers_to_as_many_blobs_as_a_device_number_counts() {
        let mut devices = Devices::default();
        for blob in 0..65_535 {
            assert_eq!(usize::from(devices.number(blob).unwrap()), blob as usize + 1);
        }
        assert!(matches!(devices.number(70_000), Err(Fault::TooManyDevices)));
        assert_eq!(devices.number(65_534).unwrap(), 65_535, "those that are known stay");
        assert!(Fault::TooManyDevices.to_string().contains("--pack"));
    }
}
