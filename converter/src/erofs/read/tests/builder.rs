//! Builds small images by hand, odd ones included.

use super::super::superblock_checksum;
use crate::erofs::format::{
    COMPAT_CHECKSUM, CompactInode, DeviceSlot, FileType, INCOMPAT_CHUNKED, INCOMPAT_DEVICES_OR_HEAD2, MAGIC, Superblock,
};
use zerocopy::{FromZeros as _, IntoBytes as _};

/// An image in the making: nid 0 is byte 0, inodes are placed one after the other behind the superblock.
#[derive(Debug)]
pub(crate) struct Builder {
    bits: u8,
    bytes: Vec<u8>,
    devices: Vec<u32>,
    root: u16,
    pub(crate) inodes: u64,
    checksum: bool,
}

impl Builder {
    pub(crate) fn new(bits: u8) -> Self {
        let bytes = vec![0; 1024 + 128 + 32];
        Self { bits, bytes, devices: Vec::new(), root: 0, inodes: 0, checksum: true }
    }

    pub(crate) fn without_checksum(mut self) -> Self {
        self.checksum = false;
        self
    }

    pub(crate) fn block(&self) -> usize {
        1 << self.bits
    }

    /// Places an inode with `body` behind it so that the body does not cross a block; returns its nid.
    pub(crate) fn raw(&mut self, mut inode: CompactInode, body: &[u8]) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(32), 0);
        let block = self.block();
        let body_start = self.bytes.len() + 32;
        if body.len() < block && body_start / block != (body_start + body.len().max(1) - 1) / block {
            self.bytes.resize(self.bytes.len().next_multiple_of(block), 0);
        }
        let nid = self.bytes.len() / 32;
        self.inodes += 1;
        inode.ino = u32::try_from(self.inodes).unwrap().into();
        self.bytes.extend_from_slice(inode.as_bytes());
        self.bytes.extend_from_slice(body);
        nid as u64
    }

    pub(crate) fn inode(mode: u16, layout: u16, nlink: u16, size: usize) -> CompactInode {
        let mut inode = CompactInode::new_zeroed();
        inode.format = (layout << 1).into();
        inode.mode = mode.into();
        inode.nlink = nlink.into();
        inode.size = u32::try_from(size).unwrap().into();
        inode
    }

    /// A file with its bytes beside its inode.
    pub(crate) fn file(&mut self, bytes: &[u8]) -> u64 {
        self.raw(Self::inode(0o100_644, 2, 1, bytes.len()), bytes)
    }

    /// A chunk-based file with indexes (device, block).
    pub(crate) fn chunked(&mut self, size: usize, chunk_bits: u32, chunks: &[(u16, u32)]) -> u64 {
        let mut inode = Self::inode(0o100_644, 4, 1, size);
        inode.data = (chunk_bits | 0x20).into();
        let body: Vec<u8> = chunks
            .iter()
            .flat_map(|(device, block)| {
                [vec![0, 0], device.to_le_bytes().to_vec(), block.to_le_bytes().to_vec()].concat()
            })
            .collect();
        self.raw(inode, &body)
    }

    /// One directory block; the names must be sorted by the caller, `.` and `..` included.
    pub(crate) fn dir_block(entries: &[(&[u8], u64, FileType)]) -> Vec<u8> {
        let mut names = 12 * entries.len();
        let mut out = Vec::new();
        for (name, nid, file_type) in entries {
            out.extend(nid.to_le_bytes());
            out.extend(u16::try_from(names).unwrap().to_le_bytes());
            out.extend([*file_type as u8, 0]);
            names += name.len();
        }
        for (name, _, _) in entries {
            out.extend(*name);
        }
        out
    }

    /// A directory with one inline block; its nid must be known beforehand: [`Builder::next_dir`].
    pub(crate) fn dir(&mut self, parent: Option<u64>, entries: &[(&[u8], u64, FileType)]) -> u64 {
        let mut all = entries.to_vec();
        all.push((b".", 0, FileType::Directory));
        all.push((b"..", 0, FileType::Directory));
        all.sort_by_key(|(name, _, _)| *name);
        let children = entries.iter().filter(|(_, _, t)| *t == FileType::Directory).count();
        let inode = Self::inode(0o040_755, 2, u16::try_from(2 + children).unwrap(), Self::dir_block(&all).len());
        let nid = self.raw(inode, &Self::dir_block(&all));
        for entry in &mut all {
            match entry.0 {
                b"." => entry.1 = nid,
                b".." => entry.1 = parent.unwrap_or(nid),
                _ => {}
            }
        }
        let block = Self::dir_block(&all);
        let at = usize::try_from(nid).unwrap() * 32 + 32;
        self.bytes[at..at + block.len()].copy_from_slice(&block);
        nid
    }

    /// Sets where `..` of an inline directory points.
    pub(crate) fn set_parent(&mut self, dir: u64, parent: u64) {
        let at = usize::try_from(dir).unwrap() * 32 + 32;
        let offset = |bytes: &[u8], entry: usize| usize::from(u16::from_le_bytes([bytes[entry + 8], bytes[entry + 9]]));
        let count = offset(&self.bytes, at) / 12;
        for index in 0..count {
            let entry = at + 12 * index;
            let name = at + offset(&self.bytes, entry);
            let end = if index + 1 < count { at + offset(&self.bytes, entry + 12) } else { name + 2 };
            // A test may have broken the directory on purpose.
            if self.bytes.get(name..end) == Some(b"..") {
                self.bytes[entry..entry + 8].copy_from_slice(&parent.to_le_bytes());
            }
        }
    }

    pub(crate) fn root(mut self, entries: &[(&[u8], u64, FileType)]) -> Self {
        let nid = self.dir(None, entries);
        for (_, child, _) in entries.iter().filter(|(_, _, t)| *t == FileType::Directory) {
            self.set_parent(*child, nid);
        }
        self.root_is(nid)
    }

    pub(crate) fn root_is(mut self, nid: u64) -> Self {
        self.root = u16::try_from(nid).unwrap();
        self
    }

    pub(crate) fn devices(mut self, blocks: &[u32]) -> Self {
        self.devices = blocks.to_vec();
        self
    }

    pub(crate) fn bytes(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    pub(crate) fn finish(mut self) -> Vec<u8> {
        let mut sb = Superblock::new_zeroed();
        self.bytes.resize(self.bytes.len().next_multiple_of(128), 0);
        sb.device_slot = u16::try_from(self.bytes.len() / 128).unwrap_or(0).into();
        for blocks in &self.devices {
            let mut slot = DeviceSlot::new_zeroed();
            slot.blocks = (*blocks).into();
            self.bytes.extend_from_slice(slot.as_bytes());
        }
        let block = self.block();
        self.bytes.resize(self.bytes.len().next_multiple_of(block.max(4096)), 0);
        sb.magic = MAGIC.into();
        sb.block_bits = self.bits;
        sb.root_nid = self.root.into();
        sb.inodes = self.inodes.into();
        sb.blocks = u32::try_from(self.bytes.len() / block).unwrap().into();
        sb.feature_incompat = (INCOMPAT_CHUNKED | INCOMPAT_DEVICES_OR_HEAD2).into();
        sb.extra_devices = u16::try_from(self.devices.len()).unwrap().into();
        sb.feature_compat = if self.checksum { COMPAT_CHECKSUM } else { 0 }.into();
        self.bytes[1024..1152].copy_from_slice(sb.as_bytes());
        let covered = if block > 1024 { block - 1024 } else { block };
        let checksum = superblock_checksum(&self.bytes[1024..1024 + covered]);
        if self.checksum {
            self.bytes[1028..1032].copy_from_slice(&checksum.to_le_bytes());
        }
        self.bytes
    }
}
