//! Writes a planned metadata image, front to back.

mod clusters;

use super::dirents;
use super::format::{
    BLOCK_BITS, BLOCK_SIZE, CHUNK_FORMAT_INDEXES, COMPAT_CHECKSUM, COMPAT_MTIME, ChunkIndex, CompactInode, DataLayout,
    DeviceSlot, ExtendedInode, INCOMPAT_CHUNKED, INCOMPAT_COMPRESSION_OR_BIG_PCLUSTER, INCOMPAT_DEVICES_OR_HEAD2,
    INCOMPAT_ZERO_PADDING, Lz4Config, MAGIC, NULL_BLOCK, SEGMENT_BLOCKS, SLOT_SIZE, SUPERBLOCK_AT, SUPERBLOCK_OFFSET,
    Superblock, ZstdConfig, crc32c,
};
use super::output::{self, Output};
use super::plan::{Compression, Node, Plan, PlanError};
use crate::compress::Algorithm;
use crate::extent::{ClusterRun, FileData, Runs, part_of};
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
    /// How files are compressed.
    pub compressed: Compressions,
}

/// The algorithms of an image's compressed files.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Compressions {
    /// Some are compressed with LZ4.
    pub lz4: bool,
    /// Some are compressed with zstd.
    pub zstd: bool,
}

impl Compressions {
    /// Those that are used, in the order of their numbers.
    pub fn iter(self) -> impl Iterator<Item = Algorithm> {
        [(self.lz4, Algorithm::Lz4), (self.zstd, Algorithm::Zstd)].into_iter().filter(|(used, _)| *used).map(|(_, a)| a)
    }
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

/// As [`write()`], with what [`Tree::order`] gave, and with contents in any place.
///
/// # Errors
/// As [`write()`].
pub fn write_ordered(
    tree: &Tree,
    order: &[(InodeId, u32)],
    runs: &Runs,
    contents: Contents<'_>,
    devices: &[Device],
    out: &File,
) -> Result<Written, WriteError> {
    let plan = Plan::of_ordered(tree, order, runs, devices.len())?;
    let size = u64::from(plan.blocks) * u64::from(BLOCK_SIZE);
    let hash = output::to_file(out, size, |image| write_plan(&plan, runs, contents, devices, image))?;
    // The identity follows from the contents, so that two images share it only when they are the same.
    let mut superblock = superblock(&plan, devices.len());
    superblock.uuid = uuid_from(hash.finalize().as_bytes());
    seal(&mut superblock, out)?;
    let compressed = Compressions { lz4: plan.compression.lz4_blocks > 0, zstd: plan.compression.zstd_window > 0 };
    Ok(Written { digest: digest_of(out, size)?, size, inodes: plan.nodes.len() as u64, compressed })
}

fn write_plan(
    plan: &Plan<'_>,
    runs: &Runs,
    contents: Contents<'_>,
    devices: &[Device],
    image: &mut Output,
) -> Result<(), WriteError> {
    let unified = unified_starts(plan, devices)?;
    image.pad_to(SUPERBLOCK_OFFSET)?;
    image.put(superblock(plan, devices.len()).as_bytes())?;
    put_configurations(plan.compression, image)?;
    image.pad_to(plan.device_table() as u64)?;
    for (device, start) in devices.iter().zip(&unified) {
        image.put(device_slot(device, *start).as_bytes())?;
    }
    let mut window = Window::new(contents)?;
    let mut names = dirents::Packer::default();
    for node in plan.by_slot() {
        image.pad_to(u64::from(node.slot) * u64::from(SLOT_SIZE))?;
        put_node(plan, node, runs, &unified, &mut window, &mut names, image)?;
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
    let mut algorithms = 0u16;
    if plan.compression.is_used() {
        incompat |= INCOMPAT_ZERO_PADDING | INCOMPAT_COMPRESSION_OR_BIG_PCLUSTER;
        algorithms |= u16::from(plan.compression.lz4_blocks > 0) << (Algorithm::Lz4 as u8);
        algorithms |= u16::from(plan.compression.zstd_window > 0) << (Algorithm::Zstd as u8);
    }
    let slot = plan.device_table() / size_of::<DeviceSlot>();
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
        compression: algorithms.into(),
        extra_devices: u16::try_from(devices).expect("checked by the caller: at most 65,535").into(),
        device_slot: u16::try_from(if devices > 0 { slot } else { 0 }).expect("9 or 10").into(),
        dir_block_bits: 0,
        xattr_prefix_count: 0,
        xattr_prefix_start: 0.into(),
        packed_nid: 0.into(),
        xattr_filter_reserved: 0,
        reserved: [0; 23],
    }
}

/// Where each device starts in the unified address space: behind the image and one another. All 0 without compressed
/// files, which alone need it.
fn unified_starts(plan: &Plan<'_>, devices: &[Device]) -> Result<Vec<u32>, PlanError> {
    if !plan.compression.is_used() {
        return Ok(vec![0; devices.len()]);
    }
    let mut end = u64::from(plan.blocks);
    let place = |device: &Device| {
        let start = end.next_multiple_of(SEGMENT_BLOCKS.into());
        end = start + u64::from(device.blocks);
        // The last number means "no block".
        u32::try_from(start).ok().filter(|_| end < u64::from(NULL_BLOCK))
    };
    let starts: Option<Vec<u32>> = devices.iter().map(place).collect();
    starts.ok_or(PlanError::TooLarge("blocks of all its data blobs together, as compressed files do"))
}

fn put_configurations(compression: Compression, image: &mut Output) -> io::Result<()> {
    if compression.lz4_blocks > 0 {
        let max_blocks = compression.lz4_blocks.into();
        image.put(
            Lz4Config { size: 14.into(), max_distance: 65_535.into(), max_blocks, reserved: [0; 10] }.as_bytes(),
        )?;
    }
    if compression.zstd_window > 0 {
        let window_log = compression.zstd_window - 10;
        image.put(ZstdConfig { size: 6.into(), format: 0, window_log, reserved: [0; 4] }.as_bytes())?;
    }
    Ok(())
}

fn device_slot(device: &Device, unified_start: u32) -> DeviceSlot {
    let mut tag = [0; 64];
    tag.copy_from_slice(device.digest.hex().as_bytes());
    DeviceSlot {
        tag,
        blocks: device.blocks.into(),
        unified_start: unified_start.into(),
        blocks_hi: 0.into(),
        unified_start_hi: 0.into(),
        reserved: [0; 52],
    }
}

fn put_node(
    plan: &Plan<'_>,
    node: &Node,
    runs: &Runs,
    unified: &[u32],
    contents: &mut Window<'_>,
    names: &mut dirents::Packer,
    image: &mut Output,
) -> Result<(), WriteError> {
    let inode = plan.tree.inode(node.inode);
    let xattrs = plan.xattr_area(node.inode);
    put_header(plan, node, runs, xattrs.len(), image)?;
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
        Kind::Regular(FileData::Compressed(file)) => {
            image.pad_to(image.position().next_multiple_of(8))?;
            clusters::put(file, runs.clusters_of(file), unified, &mut |bytes| image.put(bytes))?;
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

fn put_header(
    plan: &Plan<'_>,
    node: &Node,
    runs: &Runs,
    xattr_area: usize,
    image: &mut Output,
) -> Result<(), WriteError> {
    let inode = plan.tree.inode(node.inode);
    // 0 for none, else 1 and a unit for each 4 bytes behind the 12 of the header.
    let xattr_count = if xattr_area == 0 { 0 } else { (xattr_area - 12) / 4 + 1 };
    let xattr_count = u16::try_from(xattr_count).map_err(|_| PlanError::TooLarge("an inode's xattrs"))?;
    let format = u16::from(node.extended) | ((node.layout as u16) << 1);
    let mode = inode.kind.type_bits() | inode.mode;
    let data = match &inode.kind {
        Kind::CharDevice(device) | Kind::BlockDevice(device) => *device,
        Kind::Regular(FileData::Chunked(file)) => (u32::from(file.chunk_bits) - BLOCK_BITS) | CHUNK_FORMAT_INDEXES,
        // What `stat` shows as blocks.
        Kind::Regular(FileData::Compressed(file)) => {
            let stored = |run: &ClusterRun| u64::from(run.repeat) * u64::from(run.blocks);
            u32::try_from(runs.clusters_of(file).iter().map(stored).sum::<u64>()).unwrap_or(u32::MAX)
        }
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
