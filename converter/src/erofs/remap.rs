//! Giving an image other devices: a new device table, and new device ids and blocks in its chunk indexes.
//!
//! A layer's metadata image names its data blob as one device. Some ways of attaching want many devices over the same
//! blob (a segment file for each MiB, each of which may be absent until it is filled), or another order of blobs. The
//! image itself is small and local, so it is rewritten for the mode in use; nids, names and attributes stay.
//!
//! The new table goes where the old one was, if it is no longer; else behind the image's last block; else, since the
//! superblock can name only the first 8 MiB as its place, at the front, and the whole image moves back by as many
//! blocks. Moving changes `meta_blkaddr`, `xattr_blkaddr` and every block address of the image itself, but no nid.
//!
//! The image is streamed: memory is one record for each chunk-based inode, and a window.

use super::format::{
    DeviceSlot, FileType, INCOMPAT_CHUNKED, INCOMPAT_DEVICES_OR_HEAD2, NULL_BLOCK, SUPERBLOCK_OFFSET, Superblock,
};
use super::read::{Data, Image, Inode, ReadError, superblock_checksum};
use crate::read_at::ReadAt;
use std::io::{self, Write};
use zerocopy::{FromBytes, FromZeros as _, IntoBytes};

/// The device table's place is a 16-bit count of its slots' size.
const SLOT: u64 = size_of::<DeviceSlot>() as u64;
/// Bytes that are patched and written at once; a multiple of every block size.
const WINDOW: usize = 256 << 10;
/// Bytes kept for a superblock and its extension slots in front of a device table that had to move there.
const HEAD: u64 = 256;

/// One device of the rewritten image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewDevice {
    /// What the table's tag says: up to 64 bytes, such as the blob's digest.
    pub tag: Vec<u8>,
    /// Its length in blocks. The kernel does not compare it with the file.
    pub blocks: u32,
}

/// Why an image was not rewritten.
#[derive(Debug, thiserror::Error)]
pub enum RemapError {
    /// The image cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The caller's map refused a chunk.
    #[error("inode {nid}: blocks {block}..+{blocks} of device {device} have no new place: {source}")]
    Map {
        /// The inode.
        nid: u64,
        /// Its device until now.
        device: u16,
        /// First block.
        block: u32,
        /// Number of blocks.
        blocks: u32,
        /// The map's reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The caller's map named a place that the new devices do not have.
    #[error("inode {nid}: {blocks} blocks from block {block} are not inside new device {device}")]
    OutOfRange {
        /// The inode.
        nid: u64,
        /// The new device.
        device: u16,
        /// The new first block.
        block: u32,
        /// Number of blocks.
        blocks: u32,
    },
    /// The image has something that cannot be given another place.
    #[error("inode {nid}: {what} cannot be rewritten")]
    Fixed {
        /// The inode.
        nid: u64,
        /// What it is.
        what: &'static str,
    },
    /// The new devices cannot be described.
    #[error("new devices: {0}")]
    Devices(String),
    /// The image as a whole cannot be rewritten.
    #[error("the image cannot be rewritten: {0}")]
    Image(&'static str),
    /// The output failed.
    #[error("cannot write the rewritten image: {0}")]
    Write(#[source] io::Error),
}

/// The result of a map: a device id (from 1) and a block, or why there is none.
pub type Place = Result<(u16, u32), Box<dyn std::error::Error + Send + Sync>>;

/// Writes `metadata` to `out` with `new_devices` instead of its devices.
///
/// `map(device, block, blocks)` is asked for every chunk on an extra device, in the order of the image, and answers where
/// those blocks are now. Holes and data in the image itself stay. The output is a pure function of the arguments.
///
/// # Errors
/// When the image is broken or of a kind that cannot be rewritten (compressed data, 48-bit addresses, chunks without
/// device ids), when `map` refuses or answers a place that does not exist, or when `out` fails. What was written to
/// `out` until then is useless.
pub fn remap<R: ReadAt>(
    metadata: R,
    new_devices: &[NewDevice],
    map: impl FnMut(u16, u32, u32) -> Place,
    out: impl Write,
) -> Result<(), RemapError> {
    let image = Image::open(metadata)?;
    let table = device_table(new_devices)?;
    let layout = place_table(&image, table.len() as u64)?;
    let patches = find_patches(&image, layout.shift)?;
    let mut rewrite = Rewrite { image: &image, new_devices, map, layout, patches: &patches, next: 0, current: None };
    rewrite.run(&table, out)
}

/// Where the device table goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Layout {
    /// Byte offset of the table in the new image.
    table: u64,
    /// Blocks in front of the old image.
    shift: u32,
    /// Bytes of the new image.
    size: u64,
}

fn device_table(devices: &[NewDevice]) -> Result<Vec<u8>, RemapError> {
    let fail = |what: String| Err(RemapError::Devices(what));
    if devices.len() > usize::from(u16::MAX) {
        return fail(format!("{} are more than 65535", devices.len()));
    }
    let mut table = Vec::with_capacity(devices.len() * size_of::<DeviceSlot>());
    for (device, id) in devices.iter().zip(1u32..) {
        let mut slot = DeviceSlot::new_zeroed();
        let Some(tag) = slot.tag.get_mut(..device.tag.len()) else {
            return fail(format!("the tag of device {id} has {} bytes, 64 is the most", device.tag.len()));
        };
        tag.copy_from_slice(&device.tag);
        slot.blocks = device.blocks.into();
        table.extend_from_slice(slot.as_bytes());
    }
    Ok(table)
}

fn place_table<R: ReadAt>(image: &Image<R>, len: u64) -> Result<Layout, RemapError> {
    let sb = image.superblock();
    if sb.features.incompat() & super::format::INCOMPAT_48BIT != 0 {
        return Err(RemapError::Image("48-bit addresses"));
    }
    if sb.features.incompat() & super::format::INCOMPAT_METABOX != 0 {
        return Err(RemapError::Image("a metabox"));
    }
    let block = u64::from(sb.block_size());
    let (old_table, old_len) = (sb.device_table, image.devices().len() as u64 * SLOT);
    let padded = image.size().next_multiple_of(block);
    if len <= old_len {
        let table = if len == 0 { 0 } else { old_table };
        return Ok(Layout { table, shift: 0, size: padded });
    }
    if padded / SLOT <= u64::from(u16::MAX) {
        // A block size is a multiple of the slot's, so the end of the image is a place that can be named.
        return Ok(Layout { table: padded, shift: 0, size: padded + len.next_multiple_of(block) });
    }
    if sb.features.incompat() & super::format::INCOMPAT_COMPRESSION_OR_BIG_PCLUSTER != 0 {
        return Err(RemapError::Image("it is too large to append a device table, and has compression configurations"));
    }
    // Behind the superblock, in front of everything: the old first block, superblock included, becomes unused bytes.
    let table = SUPERBLOCK_OFFSET + HEAD;
    let front = (table + len).next_multiple_of(block);
    let shift = u32::try_from(front / block).map_err(|_| RemapError::Image("too many blocks"))?;
    Ok(Layout { table, shift, size: front + padded })
}

/// Something in the old image that changes.
#[derive(Debug, Clone, Copy)]
struct Patch {
    /// Byte offset in the old image.
    offset: u64,
    /// Bytes.
    len: u64,
    nid: u64,
    kind: Kind,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    /// 8-byte chunk indexes: log2 of the chunk size in bytes, and the file's length in bytes.
    Indexes { chunk_bits: u32, file_size: u64 },
    /// 4-byte block numbers of the image itself.
    BlockMap,
    /// The start block of a flat inode.
    StartBlock,
}

/// Everything that changes, by offset. A walk refuses inodes that overlap, so the patches do not.
fn find_patches<R: ReadAt>(image: &Image<R>, shift: u32) -> Result<Vec<Patch>, RemapError> {
    let mut patches = Vec::new();
    let mut walk = image.walk();
    while let Some(visit) = walk.next() {
        let visit = visit?;
        if visit.first {
            patches.extend(patch_of(image, visit.inode, shift)?);
        }
    }
    if let Some(nid) = image.superblock().packed_nid {
        let inode = image.inode(nid)?;
        patches.extend(patch_of(image, &inode, shift)?);
    }
    patches.sort_unstable_by_key(|p: &Patch| p.offset);
    patches.dedup_by_key(|p| p.offset);
    Ok(patches)
}

fn patch_of<R: ReadAt>(image: &Image<R>, inode: &Inode, shift: u32) -> Result<Option<Patch>, RemapError> {
    use super::format::DataLayout;
    let fixed = |what| Err(RemapError::Fixed { nid: inode.nid, what });
    let data_kind = matches!(inode.file_type(), FileType::Regular | FileType::Directory | FileType::Symlink);
    if !data_kind || inode.size == 0 {
        return Ok(None);
    }
    let bits = image.superblock().block_bits;
    match inode.layout {
        DataLayout::CompressedFull | DataLayout::CompressedCompact if shift > 0 => fixed("compressed data"),
        DataLayout::CompressedFull | DataLayout::CompressedCompact if !image.devices().is_empty() => {
            fixed("compressed data, perhaps on an extra device,")
        }
        DataLayout::CompressedFull | DataLayout::CompressedCompact => Ok(None),
        DataLayout::ChunkBased => {
            let table = image.chunk_table(inode)?;
            if table.address_bits > 32 {
                return fixed("48-bit chunk indexes");
            }
            let kind = if table.indexes {
                Kind::Indexes { chunk_bits: table.chunk_bits, file_size: inode.size }
            } else {
                for chunk in image.chunks(inode) {
                    if matches!(chunk?.data, Data::Block { device: 1.., .. }) {
                        return fixed("a block map without device ids");
                    }
                }
                Kind::BlockMap
            };
            if !table.indexes && shift == 0 {
                return Ok(None);
            }
            Ok(Some(Patch { offset: table.offset, len: table.count * table.record(), nid: inode.nid, kind }))
        }
        DataLayout::FlatPlain | DataLayout::FlatInline => {
            let in_blocks = inode.layout == DataLayout::FlatPlain || inode.size > 1 << bits;
            match image.extents(inode).next() {
                Some(Err(e)) => Err(e.into()),
                Some(Ok(extent)) if matches!(extent.data, Data::Block { device: 1.., .. }) => {
                    fixed("flat data on an extra device")
                }
                _ if in_blocks && shift > 0 => {
                    let offset = inode.offset + 16;
                    Ok(Some(Patch { offset, len: 4, nid: inode.nid, kind: Kind::StartBlock }))
                }
                _ => Ok(None),
            }
        }
    }
}

struct Rewrite<'a, R, M> {
    image: &'a Image<R>,
    new_devices: &'a [NewDevice],
    map: M,
    layout: Layout,
    patches: &'a [Patch],
    /// The next patch, and the one in progress with the bytes of it that are done.
    next: usize,
    current: Option<(Patch, u64)>,
}

impl<R: ReadAt, M: FnMut(u16, u32, u32) -> Place> Rewrite<'_, R, M> {
    fn run(&mut self, table: &[u8], mut out: impl Write) -> Result<(), RemapError> {
        let block = u64::from(self.image.superblock().block_size());
        let size = self.image.size();
        let padded = size.next_multiple_of(block);
        let mut written = 0;
        if self.layout.shift > 0 {
            // The old first block is read twice: once for its superblock, once to move it.
            let front = usize::try_from(u64::from(self.layout.shift) * block)
                .map_err(|_| RemapError::Image("too many devices"))?;
            let mut bytes = vec![0; front];
            let head = usize::try_from(SUPERBLOCK_OFFSET + HEAD).unwrap_or(0).min(front);
            let available = usize::try_from(size).map_or(head, |size| size.min(head));
            self.read(&mut bytes[..available], 0)?;
            self.finish_head(&mut bytes, table)?;
            out.write_all(&bytes).map_err(RemapError::Write)?;
        }
        let mut window = vec![0; WINDOW];
        while written < padded {
            let len = usize::try_from(padded - written).map_or(WINDOW, |left| left.min(WINDOW));
            let bytes = &mut window[..len];
            let available = usize::try_from(size.saturating_sub(written)).map_or(len, |left| left.min(len));
            let (data, padding) = bytes.split_at_mut(available);
            padding.fill(0);
            self.read(data, written)?;
            self.patch(bytes, written)?;
            if self.layout.shift == 0 {
                self.put_table(bytes, written, table);
                if written == 0 {
                    self.finish_head(bytes, &[])?;
                }
            }
            out.write_all(bytes).map_err(RemapError::Write)?;
            written += len as u64;
        }
        if self.layout.shift == 0 && self.layout.table >= padded && !table.is_empty() {
            out.write_all(table).map_err(RemapError::Write)?;
            let padding = self.layout.size - padded - table.len() as u64;
            io::copy(&mut io::Read::take(io::repeat(0), padding), &mut out).map_err(RemapError::Write)?;
        }
        out.flush().map_err(RemapError::Write)
    }

    fn read(&self, buf: &mut [u8], offset: u64) -> Result<(), RemapError> {
        let len = buf.len();
        self.image
            .source()
            .read_exact_at(buf, offset)
            .map_err(|source| RemapError::Read(ReadError::Io { medium: "the image".to_owned(), offset, len, source }))
    }

    /// Puts the part of an in-place device table that lies in `bytes`, which stand at `at` of the image.
    fn put_table(&self, bytes: &mut [u8], at: u64, table: &[u8]) {
        let start = self.layout.table.max(at);
        let end = (self.layout.table + table.len() as u64).min(at + bytes.len() as u64);
        let range = |from: u64, to: u64, base: u64| {
            Some(usize::try_from(from.checked_sub(base)?).ok()?..usize::try_from(to.checked_sub(base)?).ok()?)
        };
        if start < end
            && let (Some(target), Some(source)) = (range(start, end, at), range(start, end, self.layout.table))
        {
            bytes[target].copy_from_slice(&table[source]);
        }
    }

    /// Rewrites the superblock in `bytes`, the start of the new image, and its checksum; puts `table` behind it.
    fn finish_head(&self, bytes: &mut [u8], table: &[u8]) -> Result<(), RemapError> {
        let too_short = RemapError::Image("the image is shorter than its superblock");
        let overflow = || RemapError::Image("block addresses beyond 32 bits");
        let Layout { table: table_offset, shift, size } = self.layout;
        let Some((_, tail)) = bytes.split_at_mut_checked(1024) else { return Err(too_short) };
        if let Some(place) = table_offset.checked_sub(SUPERBLOCK_OFFSET).and_then(|o| usize::try_from(o).ok())
            && let Some(target) = tail.get_mut(place..place.saturating_add(table.len()))
        {
            target.copy_from_slice(table);
        }
        let Ok((sb, _)) = Superblock::mut_from_prefix(tail) else { return Err(too_short) };
        if shift > 0 && 128 + 16 * u64::from(sb.extra_slots) > HEAD {
            return Err(RemapError::Image("a superblock with more than 8 extension slots"));
        }
        let add = |block: u32| block.checked_add(shift).ok_or_else(overflow);
        let block_bits = self.image.superblock().block_bits;
        let has_devices = !self.new_devices.is_empty();
        let incompat = sb.feature_incompat.get();
        sb.feature_incompat = if has_devices {
            incompat | INCOMPAT_DEVICES_OR_HEAD2 | INCOMPAT_CHUNKED
        } else if self.image.devices().is_empty() {
            incompat
        } else {
            incompat & !INCOMPAT_DEVICES_OR_HEAD2
        }
        .into();
        sb.extra_devices = u16::try_from(self.new_devices.len()).unwrap_or(u16::MAX).into();
        sb.device_slot = u16::try_from(table_offset / SLOT).map_err(|_| overflow())?.into();
        sb.blocks = u32::try_from(size >> block_bits).map_err(|_| overflow())?.into();
        sb.meta_block = add(sb.meta_block.get())?.into();
        sb.xattr_block = add(sb.xattr_block.get())?.into();
        let absolute_prefixes = self.image.superblock().packed_nid.is_none() || sb.feature_compat.get() & 0x10 != 0;
        if sb.xattr_prefix_count > 0 && absolute_prefixes {
            let moved = u64::from(shift) << block_bits >> 2;
            let start = u64::from(sb.xattr_prefix_start.get()) + moved;
            sb.xattr_prefix_start = u32::try_from(start).map_err(|_| overflow())?.into();
        }
        if sb.feature_compat.get() & super::format::COMPAT_CHECKSUM != 0 {
            let block = 1usize << block_bits;
            let covered = if block > 1024 { block - 1024 } else { block };
            let checksum = superblock_checksum(tail.get(..covered).unwrap_or(&[]));
            if let Some(field) = tail.get_mut(4..8) {
                field.copy_from_slice(&checksum.to_le_bytes());
            }
        }
        Ok(())
    }

    /// Applies what lies in `bytes`, which stand at `at` of the old image. Records never straddle a window, since both
    /// are aligned to the records' size.
    fn patch(&mut self, bytes: &mut [u8], at: u64) -> Result<(), RemapError> {
        let end = at + bytes.len() as u64;
        loop {
            let (patch, mut done) = match self.current.take() {
                Some(current) => current,
                None => match self.patches.get(self.next) {
                    Some(patch) if patch.offset < end => {
                        self.next += 1;
                        (*patch, 0)
                    }
                    _ => return Ok(()),
                },
            };
            let record = if matches!(patch.kind, Kind::Indexes { .. }) { 8 } else { 4 };
            while done < patch.len {
                let position = patch.offset + done;
                if position >= end {
                    self.current = Some((patch, done));
                    return Ok(());
                }
                let field = usize::try_from(position - at).ok().and_then(|o| bytes.get_mut(o..o.checked_add(record)?));
                let Some(field) = field else { return Err(RemapError::Image("an unaligned chunk table")) };
                self.patch_record(&patch, done / record as u64, field)?;
                done += record as u64;
            }
        }
    }

    fn patch_record(&mut self, patch: &Patch, index: u64, field: &mut [u8]) -> Result<(), RemapError> {
        let Kind::Indexes { chunk_bits, file_size } = patch.kind else {
            return self.move_block(patch.nid, field);
        };
        let Ok(raw) = <[u8; 8]>::try_from(&*field) else { return Ok(()) };
        let len = (file_size - (index << chunk_bits)).min(1 << chunk_bits);
        let too_long = RemapError::Fixed { nid: patch.nid, what: "a chunk of 2^32 blocks" };
        let blocks = len.div_ceil(u64::from(self.image.superblock().block_size()));
        // Bits of the old ids that did not count could count with more devices.
        field[..4].fill(0);
        let Data::Block { device, block } = self.image.decode_index(patch.nid, raw, 32, len)? else { return Ok(()) };
        if device == 0 {
            return self.move_block(patch.nid, &mut field[4..]);
        }
        let blocks = u32::try_from(blocks).map_err(|_| too_long)?;
        let Ok(block) = u32::try_from(block) else {
            return Err(RemapError::Fixed { nid: patch.nid, what: "a block address beyond 32 bits" });
        };
        let nid = patch.nid;
        let (new_device, new_block) = (self.map)(device, block, blocks).map_err(|source| RemapError::Map {
            nid,
            device,
            block,
            blocks,
            source,
        })?;
        let fits = usize::from(new_device)
            .checked_sub(1)
            .and_then(|index| self.new_devices.get(index))
            .is_some_and(|d| new_block.checked_add(blocks).is_some_and(|end| end <= d.blocks && end < NULL_BLOCK));
        if !fits {
            return Err(RemapError::OutOfRange { nid, device: new_device, block: new_block, blocks });
        }
        field[2..4].copy_from_slice(&new_device.to_le_bytes());
        field[4..].copy_from_slice(&new_block.to_le_bytes());
        Ok(())
    }

    /// Moves a 4-byte block address of the image itself; holes stay.
    fn move_block(&self, nid: u64, field: &mut [u8]) -> Result<(), RemapError> {
        let Ok(raw) = <[u8; 4]>::try_from(&*field) else { return Ok(()) };
        let block = u32::from_le_bytes(raw);
        if block != NULL_BLOCK {
            let moved = block.checked_add(self.layout.shift).filter(|b| *b != NULL_BLOCK);
            let moved = moved.ok_or(RemapError::Fixed { nid, what: "a block address at the end of 32 bits" })?;
            field.copy_from_slice(&moved.to_le_bytes());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
