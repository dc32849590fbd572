//! Writes a planned metadata image, front to back.

use super::dirents;
use super::format::{
    BLOCK_BITS, BLOCK_SIZE, CHUNK_FORMAT_INDEXES, COMPAT_CHECKSUM, COMPAT_MTIME, ChunkIndex, CompactInode, DataLayout,
    DeviceSlot, ExtendedInode, INCOMPAT_CHUNKED, INCOMPAT_DEVICES_OR_HEAD2, MAGIC, NULL_BLOCK, SLOT_SIZE,
    SUPERBLOCK_AT, SUPERBLOCK_OFFSET, Superblock, crc32c,
};
use super::output::{self, Output};
use super::plan::{Node, Plan, PlanError};
use crate::extent::{FileData, Runs, part_of};
use crate::read_at::ReadAt;
use crate::tree::{InodeId, Kind, ROOT, Tree};
use fs3_client::{Digest, Hasher};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use zerocopy::IntoBytes as _;

/// A device that chunk indexes refer to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// Digest of the blob: its slot is tagged with the hex digits.
    pub digest: Digest,
    /// Length in blocks.
    pub blocks: u32,
}

/// Why an image was not written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The tree does not fit EROFS.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Reading the spool or writing the image failed.
    #[error("writing the metadata image: {0}")]
    Io(#[from] io::Error),
}

/// A written image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// Of the whole image.
    pub digest: Digest,
    /// Length in bytes.
    pub size: u64,
    /// Number of inodes.
    pub inodes: u64,
}

/// Where the contents of inline files are.
#[derive(Clone, Copy)]
pub enum Contents<'s> {
    /// In one spool, nearly in the order in which they are asked for.
    Spool(&'s dyn ReadAt),
    /// In several images ([`crate::extent::in_part`]), which read in large pieces by themselves.
    Images(&'s [&'s dyn ReadAt]),
}

impl std::fmt::Debug for Contents<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Spool(_) => "Spool",
            Self::Images(_) => "Images",
        })
    }
}

/// Writes the metadata image of `tree` to `out`, an empty file. `spool` holds the contents of inline files, `runs` the
/// places of the others on `devices`. The same arguments give the same bytes.
///
/// # Errors
/// When the tree does not fit EROFS, or reading or writing fails; `out` is then to be thrown away.
pub fn write(
    tree: &Tree,
    runs: &Runs,
    spool: &dyn ReadAt,
    devices: &[Device],
    out: &File,
) -> Result<Written, WriteError> {
    write_ordered(tree, &tree.order(), runs, Contents::Spool(spool), devices, out)
}

/// As [`write`], with what [`Tree::order`] gave, and with contents in any place.
///
/// # Errors
/// As [`write`].
pub fn write_ordered(
    tree: &Tree,
    order: &[(InodeId, u32)],
    runs: &Runs,
    contents: Contents<'_>,
    devices: &[Device],
    out: &File,
) -> Result<Written, WriteError> {
    let plan = Plan::of_ordered(tree, order, devices.len())?;
    let size = u64::from(plan.blocks) * u64::from(BLOCK_SIZE);
    let hash = output::to_file(out, size, |image| write_plan(&plan, runs, contents, devices, image))?;
    // The identity follows from the contents, so that two images share it only when they are the same.
    let mut superblock = superblock(&plan, devices.len());
    superblock.uuid = uuid_from(hash.finalize().as_bytes());
    seal(&mut superblock, out)?;
    Ok(Written { digest: digest_of(out, size)?, size, inodes: plan.nodes.len() as u64 })
}

fn write_plan(
    plan: &Plan<'_>,
    runs: &Runs,
    contents: Contents<'_>,
    devices: &[Device],
    image: &mut Output,
) -> Result<(), WriteError> {
    image.pad_to(SUPERBLOCK_OFFSET)?;
    image.put(superblock(plan, devices.len()).as_bytes())?;
    for device in devices {
        image.put(device_slot(device).as_bytes())?;
    }
    let mut window = Window::new(contents)?;
    let mut names = dirents::Packer::default();
    for node in plan.by_slot() {
        image.pad_to(u64::from(node.slot) * u64::from(SLOT_SIZE))?;
        put_node(plan, node, runs, &mut window, &mut names, image)?;
    }
    for node in plan.nodes.iter().filter(|node| node.block != NULL_BLOCK) {
        image.pad_to(u64::from(node.block) * u64::from(BLOCK_SIZE))?;
        put_blocks(plan, node, &mut names, image)?;
    }
    if !plan.shared_area.is_empty() {
        image.pad_to(u64::from(plan.xattr_block) * u64::from(BLOCK_SIZE))?;
        image.put(&plan.shared_area)?;
    }
    Ok(image.pad_to(u64::from(plan.blocks) * u64::from(BLOCK_SIZE))?)
}

fn superblock(plan: &Plan<'_>, devices: usize) -> Superblock {
    let mut incompat = 0;
    if plan.chunked {
        incompat |= INCOMPAT_CHUNKED;
    }
    if devices > 0 {
        incompat |= INCOMPAT_DEVICES_OR_HEAD2;
    }
    let slot = (SUPERBLOCK_AT + size_of::<Superblock>()) / size_of::<DeviceSlot>();
    Superblock {
        magic: MAGIC.into(),
        checksum: 0.into(),
        feature_compat: (COMPAT_CHECKSUM | COMPAT_MTIME).into(),
        block_bits: u8::try_from(BLOCK_BITS).expect("12"),
        extra_slots: 0,
        root_nid: u16::try_from(plan.nid(ROOT)).expect("the root is placed first").into(),
        inodes: (plan.nodes.len() as u64).into(),
        epoch: plan.epoch.secs.cast_unsigned().into(),
        fixed_nsec: plan.epoch.nanos.into(),
        blocks: plan.blocks.into(),
        meta_block: plan.meta_block.into(),
        xattr_block: plan.xattr_block.into(),
        uuid: [0; 16],
        volume_name: [0; 16],
        feature_incompat: incompat.into(),
        compression: 0.into(),
        extra_devices: u16::try_from(devices).expect("checked by the caller: at most 65,535").into(),
        device_slot: u16::try_from(if devices > 0 { slot } else { 0 }).expect("9").into(),
        dir_block_bits: 0,
        xattr_prefix_count: 0,
        xattr_prefix_start: 0.into(),
        packed_nid: 0.into(),
        xattr_filter_reserved: 0,
        reserved: [0; 23],
    }
}

fn device_slot(device: &Device) -> DeviceSlot {
    let mut tag = [0; 64];
    tag.copy_from_slice(device.digest.hex().as_bytes());
    DeviceSlot {
        tag,
        blocks: device.blocks.into(),
        unified_start: 0.into(),
        blocks_hi: 0.into(),
        unified_start_hi: 0.into(),
        reserved: [0; 52],
    }
}

fn put_node(
    plan: &Plan<'_>,
    node: &Node,
    runs: &Runs,
    contents: &mut Window<'_>,
    names: &mut dirents::Packer,
    image: &mut Output,
) -> Result<(), WriteError> {
    let inode = plan.tree.inode(node.inode);
    let xattrs = plan.xattr_area(node.inode);
    put_header(plan, node, xattrs.len(), image)?;
    image.put(xattrs)?;
    match &inode.kind {
        Kind::Regular(FileData::Inline { at, len }) => contents.copy(*at, *len as usize, image)?,
        Kind::Regular(FileData::Chunked(file)) => {
            image.pad_to(image.position().next_multiple_of(8))?;
            let blocks_a_chunk = 1u64 << (u32::from(file.chunk_bits) - BLOCK_BITS);
            for run in runs.of(file) {
                for chunk in 0..u64::from(run.chunks) {
                    let block = if run.block == NULL_BLOCK {
                        NULL_BLOCK
                    } else {
                        u32::try_from(u64::from(run.block) + chunk * blocks_a_chunk)
                            .map_err(|_| PlanError::TooLarge("a data blob's blocks"))?
                    };
                    let device = if run.block == NULL_BLOCK { 0 } else { run.device };
                    let index = ChunkIndex { block_hi: 0.into(), device: device.into(), block: block.into() };
                    image.put(index.as_bytes())?;
                }
            }
        }
        Kind::Directory(_) | Kind::Symlink(_) if node.layout == DataLayout::FlatInline => {
            let whole = node.size / u64::from(BLOCK_SIZE);
            let mut index = 0;
            each_block(plan, node, names, |bytes| {
                if index == whole {
                    image.put(bytes)?;
                }
                index += 1;
                Ok(())
            })?;
        }
        _ => {}
    }
    Ok(())
}

fn put_header(plan: &Plan<'_>, node: &Node, xattr_area: usize, image: &mut Output) -> Result<(), WriteError> {
    let inode = plan.tree.inode(node.inode);
    // 0 for none, else 1 and a unit for each 4 bytes behind the 12 of the header.
    let xattr_count = if xattr_area == 0 { 0 } else { (xattr_area - 12) / 4 + 1 };
    let xattr_count = u16::try_from(xattr_count).map_err(|_| PlanError::TooLarge("an inode's xattrs"))?;
    let format = u16::from(node.extended) | ((node.layout as u16) << 1);
    let mode = inode.kind.type_bits() | inode.mode;
    let data = match &inode.kind {
        Kind::CharDevice(device) | Kind::BlockDevice(device) => *device,
        Kind::Regular(FileData::Chunked(file)) => (u32::from(file.chunk_bits) - BLOCK_BITS) | CHUNK_FORMAT_INDEXES,
        _ if node.block != NULL_BLOCK => node.block,
        _ => 0,
    };
    let ino = plan.position[node.inode as usize] + 1;
    if node.extended {
        let header = ExtendedInode {
            format: format.into(),
            xattr_count: xattr_count.into(),
            mode: mode.into(),
            reserved: 0.into(),
            size: node.size.into(),
            data: data.into(),
            ino: ino.into(),
            uid: inode.uid.into(),
            gid: inode.gid.into(),
            mtime: inode.mtime.secs.cast_unsigned().into(),
            mtime_nsec: inode.mtime.nanos.into(),
            nlink: node.links.into(),
            reserved2: [0; 16],
        };
        image.put(header.as_bytes())?;
    } else {
        let narrow = |n: u32| u16::try_from(n).expect("the plan checked that a compact inode holds it");
        let header = CompactInode {
            format: format.into(),
            xattr_count: xattr_count.into(),
            mode: mode.into(),
            nlink: narrow(node.links).into(),
            size: u32::try_from(node.size).expect("the plan checked that a compact inode holds it").into(),
            reserved: 0.into(),
            data: data.into(),
            ino: ino.into(),
            uid: narrow(inode.uid).into(),
            gid: narrow(inode.gid).into(),
            reserved2: 0.into(),
        };
        image.put(header.as_bytes())?;
    }
    Ok(())
}

/// The blocks of a directory or symlink that are not beside the inode.
fn put_blocks(plan: &Plan<'_>, node: &Node, names: &mut dirents::Packer, image: &mut Output) -> Result<(), WriteError> {
    let whole = node.size / u64::from(BLOCK_SIZE);
    let mut index = 0;
    each_block(plan, node, names, |bytes| {
        if index < whole || node.layout == DataLayout::FlatPlain {
            image.put(bytes)?;
        }
        index += 1;
        Ok(())
    })
}

fn each_block(
    plan: &Plan<'_>,
    node: &Node,
    packer: &mut dirents::Packer,
    mut emit: impl FnMut(&[u8]) -> Result<(), WriteError>,
) -> Result<(), WriteError> {
    match &plan.tree.inode(node.inode).kind {
        Kind::Symlink(target) => emit(target),
        Kind::Directory(directory) => {
            let names = plan.tree.names_of(node.inode).map(|(name, inode)| dirents::Name {
                name,
                nid: plan.nid(inode),
                file_type: plan.tree.inode(inode).kind.file_type(),
            });
            let dotted = dirents::with_dots(names, plan.nid(node.inode), plan.nid(directory.parent));
            packer.pack(dotted, emit)
        }
        _ => Ok(()),
    }
}

/// A version 8 UUID (RFC 9562) of the first bytes of `hash`.
fn uuid_from(hash: &[u8; 32]) -> [u8; 16] {
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&hash[..16]);
    uuid[6] = (uuid[6] & 0x0f) | 0x80;
    uuid[8] = (uuid[8] & 0x3f) | 0x80;
    uuid
}

/// Puts the final superblock in place, with the checksum over its block.
fn seal(superblock: &mut Superblock, out: &File) -> io::Result<()> {
    let mut block = vec![0; BLOCK_SIZE as usize - SUPERBLOCK_AT];
    ReadAt::read_exact_at(out, &mut block, SUPERBLOCK_OFFSET)?;
    superblock.checksum = 0.into();
    block[..size_of::<Superblock>()].copy_from_slice(superblock.as_bytes());
    superblock.checksum = crc32c(!0, &block).into();
    out.write_all_at(superblock.as_bytes(), SUPERBLOCK_OFFSET)
}

/// Digest of the first `size` bytes of `file`.
fn digest_of(file: &File, size: u64) -> io::Result<Digest> {
    let mut hasher = Hasher::default();
    let mut buffer = vec![0; output::PIECE];
    let mut at = 0;
    while at < size {
        let take = usize::try_from((size - at).min(output::PIECE as u64)).expect("at most 1 MiB");
        ReadAt::read_exact_at(file, &mut buffer[..take], at)?;
        hasher.update(&buffer[..take]);
        at += take as u64;
    }
    Ok(hasher.finish())
}

/// Contents of inline files, read in large pieces.
struct Window<'s> {
    contents: Contents<'s>,
    size: u64,
    start: u64,
    bytes: Vec<u8>,
}

const WINDOW: usize = 256 << 10;

impl<'s> Window<'s> {
    fn new(contents: Contents<'s>) -> io::Result<Self> {
        let size = match contents {
            Contents::Spool(spool) => spool.size()?,
            Contents::Images(_) => 0,
        };
        Ok(Self { contents, size, start: 0, bytes: Vec::new() })
    }

    fn copy(&mut self, at: u64, len: usize, image: &mut Output) -> io::Result<()> {
        match self.contents {
            Contents::Spool(spool) => {
                let held = self.start..self.start + self.bytes.len() as u64;
                if !(held.contains(&at) && at + len as u64 <= held.end) {
                    let left = usize::try_from(self.size.saturating_sub(at)).unwrap_or(usize::MAX);
                    self.bytes.resize(left.min(WINDOW).max(len), 0);
                    self.start = at;
                    spool.read_exact_at(&mut self.bytes, at)?;
                }
                let from = usize::try_from(at - self.start).expect("inside the window");
                image.put(&self.bytes[from..from + len])
            }
            Contents::Images(images) => {
                let (part, offset) = part_of(at);
                let source = images.get(part).ok_or(io::ErrorKind::InvalidInput)?;
                image.put_with(len, |buffer| source.read_exact_at(buffer, offset))
            }
        }
    }
}
