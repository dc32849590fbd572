//! Where a file's bytes are, and reading them.

use super::super::format::{CHUNK_FORMAT_48BIT, CHUNK_FORMAT_BITS, CHUNK_FORMAT_INDEXES, DataLayout, FileType};
use super::{Image, Inode, ReadError};
use crate::compress::Algorithm;
use crate::read_at::ReadAt;

/// The longest symbolic link (`PATH_MAX` without its NUL).
const LINK_MAX: u64 = 4095;

/// What stands behind a range of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Data {
    /// Zeros that are stored nowhere.
    Hole,
    /// Bytes beside the inode.
    Inline {
        /// Byte offset in the image.
        offset: u64,
    },
    /// Whole blocks.
    Block {
        /// 0 for the image itself, else 1-based position in its device table.
        device: u16,
        /// First block on that device.
        block: u64,
    },
    /// Whole blocks that decompress to the range.
    Compressed {
        /// As for [`Data::Block`].
        device: u16,
        /// First block on that device.
        block: u64,
        /// Number of blocks.
        blocks: u32,
        /// How they are decoded.
        algorithm: Algorithm,
    },
}

/// A range of a file that is stored in one piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Where the range starts in the file, bytes.
    pub file_offset: u64,
    /// Its bytes (the last block's padding not counted).
    pub len: u64,
    /// Where they are.
    pub data: Data,
}

impl Extent {
    /// Byte offset behind the range, in the file.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.file_offset + self.len
    }

    /// Whether `next` continues this extent in the file and where it is stored.
    fn joins(&self, next: &Self, block_bits: u32) -> bool {
        match (self.data, next.data) {
            (Data::Hole, Data::Hole) => true,
            (Data::Block { device: a, block }, Data::Block { device: b, block: start }) => {
                a == b && self.len.trailing_zeros() >= block_bits && block + (self.len >> block_bits) == start
            }
            _ => false,
        }
    }
}

/// The chunk table of a chunk-based inode.
#[derive(Debug, Clone, Copy)]
pub(in crate::erofs) struct ChunkTable {
    /// Byte offset of the first record in the image.
    pub(in crate::erofs) offset: u64,
    /// Number of records.
    pub(in crate::erofs) count: u64,
    /// log2 of the chunk size.
    pub(in crate::erofs) chunk_bits: u32,
    /// 8-byte indexes with device ids, rather than 4-byte block numbers.
    pub(in crate::erofs) indexes: bool,
    /// Bits of a block address.
    pub(in crate::erofs) address_bits: u32,
}

impl ChunkTable {
    /// Bytes of one record.
    pub(in crate::erofs) const fn record(&self) -> u64 {
        if self.indexes { 8 } else { 4 }
    }
}

/// Iterates over a file's extents in file order.
#[derive(Debug)]
pub struct Extents<'a, R> {
    image: &'a Image<R>,
    inode: &'a Inode,
    at: u64,
    merge: bool,
    ahead: Option<Extent>,
    failed: bool,
}

impl<R: ReadAt> Extents<'_, R> {
    fn step(&mut self) -> Option<Result<Extent, ReadError>> {
        if let Some(extent) = self.ahead.take() {
            return Some(Ok(extent));
        }
        if self.failed || self.at >= self.inode.size {
            return None;
        }
        let next = self.image.map(self.inode, self.at);
        match &next {
            Ok(extent) => self.at = extent.end(),
            Err(_) => self.failed = true,
        }
        Some(next)
    }
}

impl<R: ReadAt> Iterator for Extents<'_, R> {
    type Item = Result<Extent, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut extent = match self.step()? {
            Ok(extent) => extent,
            failed => return Some(failed),
        };
        while self.merge && self.at < self.inode.size {
            match self.step() {
                Some(Ok(next)) if extent.joins(&next, self.image.superblock.block_bits) => extent.len += next.len,
                Some(Ok(next)) => {
                    self.ahead = Some(next);
                    break;
                }
                Some(Err(e)) => return Some(Err(e)),
                None => break,
            }
        }
        Some(Ok(extent))
    }
}

impl<R: ReadAt> Image<R> {
    /// Where the bytes of `inode` are, neighbouring chunks joined. Empty for what has no data.
    ///
    /// Every block range is inside its device (as the device table has it), or the iterator ends with an error.
    pub fn extents<'a>(&'a self, inode: &'a Inode) -> Extents<'a, R> {
        Extents { image: self, inode, at: self.first(inode), merge: true, ahead: None, failed: false }
    }

    /// As [`Image::extents`], but one item for each chunk.
    pub fn chunks<'a>(&'a self, inode: &'a Inode) -> Extents<'a, R> {
        Extents { image: self, inode, at: self.first(inode), merge: false, ahead: None, failed: false }
    }

    /// Device nodes and such have no data whatever their size says.
    #[allow(clippy::unused_self)]
    const fn first(&self, inode: &Inode) -> u64 {
        if inode.has_data() { 0 } else { inode.size }
    }

    /// Reads up to `buf.len()` bytes of a file from `offset`; returns how many there are before the file's end.
    /// `devices[n - 1]` is device `n`.
    ///
    /// # Errors
    /// When the file has no readable data there (compressed in a form that is not read, out of range), a device is missing, or a medium fails.
    pub fn read_file_at(
        &self,
        inode: &Inode,
        devices: &[&dyn ReadAt],
        offset: u64,
        buf: &mut [u8],
    ) -> Result<usize, ReadError> {
        let mut at = offset;
        let mut done = 0;
        while done < buf.len() && at < inode.size && inode.has_data() {
            let extent = self.map(inode, at)?;
            let want = (buf.len() - done) as u64;
            let take = usize::try_from(want.min(extent.end() - at)).unwrap_or(buf.len() - done);
            let part = &mut buf[done..done + take];
            let within = at - extent.file_offset;
            match extent.data {
                Data::Hole => part.fill(0),
                Data::Inline { offset } => self.cache.read(part, offset + within)?,
                Data::Block { device, block } => {
                    let position = (block << self.superblock.block_bits) + within;
                    self.read_blocks(inode, devices, device, position, part)?;
                }
                Data::Compressed { device, block, blocks, algorithm } => {
                    let plain = self.decompress(inode, devices, &extent, (device, block, blocks), algorithm)?;
                    let within = usize::try_from(within).unwrap_or(usize::MAX);
                    let source = plain.get(within..).and_then(|rest| rest.get(..take));
                    part.copy_from_slice(
                        source.ok_or_else(|| {
                            ReadError::inode(inode.nid, "data", "a cluster is shorter than its extent")
                        })?,
                    );
                }
            }
            done += take;
            at += take as u64;
        }
        Ok(done)
    }

    /// Fills `buf` from byte `position` of a device, 0 being the image itself.
    pub(super) fn read_blocks(
        &self,
        inode: &Inode,
        devices: &[&dyn ReadAt],
        device: u16,
        position: u64,
        buf: &mut [u8],
    ) -> Result<(), ReadError> {
        let Some(index) = usize::from(device).checked_sub(1) else { return self.cache.read(buf, position) };
        let Some(medium) = devices.get(index) else {
            return Err(ReadError::inode(inode.nid, "data", format!("device {device} was not given")));
        };
        let len = buf.len();
        medium.read_exact_at(buf, position).map_err(|source| ReadError::Io {
            medium: format!("device {device}"),
            offset: position,
            len,
            source,
        })
    }

    /// The text of a symbolic link.
    ///
    /// # Errors
    /// When `inode` is no symbolic link, or one whose text is empty, too long, or not readable.
    pub fn read_link(&self, inode: &Inode) -> Result<Vec<u8>, ReadError> {
        if inode.file_type() != FileType::Symlink {
            return Err(ReadError::inode(inode.nid, "i_mode", "not a symbolic link"));
        }
        let len = usize::try_from(inode.size).ok().filter(|len| *len > 0 && inode.size <= LINK_MAX);
        let Some(len) = len else {
            let what = format!("a symbolic link of {} bytes", inode.size);
            return Err(ReadError::inode(inode.nid, "i_size", what));
        };
        let mut text = vec![0; len];
        self.read_file_at(inode, &[], 0, &mut text)?;
        Ok(text)
    }

    /// The piece of a file that `at` (which must be below its size) lies in: one chunk, the blocks, or the tail.
    pub(crate) fn map(&self, inode: &Inode, at: u64) -> Result<Extent, ReadError> {
        let bits = self.superblock.block_bits;
        match inode.layout {
            DataLayout::FlatPlain => self.flat(inode, inode.size),
            DataLayout::FlatInline => {
                let tail_start = (inode.size.saturating_sub(1) >> bits) << bits;
                if at < tail_start { self.flat(inode, tail_start) } else { self.tail(inode, tail_start) }
            }
            DataLayout::ChunkBased => self.chunk(inode, at),
            DataLayout::CompressedFull | DataLayout::CompressedCompact => self.map_compressed(inode, at),
        }
    }

    fn flat(&self, inode: &Inode, len: u64) -> Result<Extent, ReadError> {
        // 48-bit images have holes for whole files; a compact inode may have only the low half of the address.
        let null = inode.data == (1 << 48) - 1 || (inode.compact && inode.data == (1 << 32) - 1);
        if null && inode.layout == DataLayout::FlatPlain && self.superblock.features.has_48bit() {
            return Ok(Extent { file_offset: 0, len, data: Data::Hole });
        }
        let data = self.locate(inode.nid, "i_u", 0, inode.data, len)?;
        Ok(Extent { file_offset: 0, len, data })
    }

    fn tail(&self, inode: &Inode, start: u64) -> Result<Extent, ReadError> {
        let offset = inode.body_offset();
        let len = inode.size - start;
        let block = u64::from(self.superblock.block_size());
        if offset % block + len > block {
            return Err(ReadError::inode(inode.nid, "inline data", "the tail crosses a block"));
        }
        if len > self.size() - offset {
            return Err(ReadError::inode(inode.nid, "inline data", "the tail is not inside the image"));
        }
        Ok(Extent { file_offset: start, len, data: Data::Inline { offset } })
    }

    /// Calls `each` with where every chunk of a chunk-based inode is, in file order, and its bytes; the indexes are read
    /// into `scratch` in large pieces.
    pub(crate) fn each_chunk<E: From<ReadError>>(
        &self,
        inode: &Inode,
        scratch: &mut Vec<u8>,
        mut each: impl FnMut(Data, u64) -> Result<(), E>,
    ) -> Result<(), E> {
        /// Records read at once.
        const BATCH: u64 = 4096;
        let table = self.chunk_table(inode)?;
        let width = if table.indexes { 8 } else { 4 };
        let mut index = 0;
        while index < table.count {
            let batch = (table.count - index).min(BATCH);
            scratch.resize(usize::try_from(batch * table.record()).unwrap_or(0), 0);
            self.cache.read(scratch, table.offset + index * table.record())?;
            for record in scratch.chunks_exact(width) {
                let mut raw = [0u8; 8];
                raw[8 - width..].copy_from_slice(record);
                let len = (inode.size - (index << table.chunk_bits)).min(1 << table.chunk_bits);
                each(self.decode_index(inode.nid, raw, table.address_bits, len)?, len)?;
                index += 1;
            }
        }
        Ok(())
    }

    /// log2 of the chunk size of a chunk-based inode.
    ///
    /// # Errors
    /// When the inode is broken.
    pub fn chunk_bits(&self, inode: &Inode) -> Result<u8, ReadError> {
        let bits = self.chunk_table(inode)?.chunk_bits;
        u8::try_from(bits).map_err(|_| ReadError::inode(inode.nid, "chunk format", format!("2^{bits} bytes")))
    }

    /// The chunk table of a chunk-based inode, checked to be inside the image.
    pub(in crate::erofs) fn chunk_table(&self, inode: &Inode) -> Result<ChunkTable, ReadError> {
        let format = u32::try_from(inode.data & 0xffff).unwrap_or(0);
        if format & !(CHUNK_FORMAT_BITS | CHUNK_FORMAT_INDEXES | CHUNK_FORMAT_48BIT) != 0 {
            return Err(ReadError::inode(inode.nid, "chunk format", format!("{format:#x} has undefined bits")));
        }
        let indexes = format & CHUNK_FORMAT_INDEXES != 0;
        let record = if indexes { 8 } else { 4 };
        let table = ChunkTable {
            offset: inode.body_offset().next_multiple_of(record),
            count: inode.size.div_ceil(1 << (self.superblock.block_bits + (format & CHUNK_FORMAT_BITS))),
            chunk_bits: self.superblock.block_bits + (format & CHUNK_FORMAT_BITS),
            indexes,
            address_bits: if indexes && format & CHUNK_FORMAT_48BIT != 0 { 48 } else { 32 },
        };
        let room = self.size().saturating_sub(table.offset) / record;
        if table.count > room {
            let what = format!("{} chunks have no room in the image", table.count);
            return Err(ReadError::inode(inode.nid, "chunk table", what));
        }
        Ok(table)
    }

    fn chunk(&self, inode: &Inode, at: u64) -> Result<Extent, ReadError> {
        let table = self.chunk_table(inode)?;
        let index = at >> table.chunk_bits;
        let file_offset = index << table.chunk_bits;
        let len = (inode.size - file_offset).min(1 << table.chunk_bits);
        let mut raw = [0u8; 8];
        let record = &mut raw[if table.indexes { 0 } else { 4 }..];
        self.cache.read(record, table.offset + index * table.record())?;
        let data = self.decode_index(inode.nid, raw, table.address_bits, len)?;
        Ok(Extent { file_offset, len, data })
    }

    /// Where the `len` bytes of a chunk are whose record is `raw`: `startblk_hi`, `device_id`, `startblk_lo`.
    pub(in crate::erofs) fn decode_index(
        &self,
        nid: u64,
        raw: [u8; 8],
        address_bits: u32,
        len: u64,
    ) -> Result<Data, ReadError> {
        let [hi0, hi1, dev0, dev1, b0, b1, b2, b3] = raw;
        let low = u64::from(u32::from_le_bytes([b0, b1, b2, b3]));
        let high = u64::from(u16::from_le_bytes([hi0, hi1])) << 32;
        let mask = (1u64 << address_bits) - 1;
        let block = (low | high) & mask;
        if block == mask {
            return Ok(Data::Hole);
        }
        // The kernel looks only at as many bits of the id as the number of devices needs.
        let id_mask = u16::try_from((self.devices.len() + 1).next_power_of_two() - 1).unwrap_or(u16::MAX);
        let device = u16::from_le_bytes([dev0, dev1]) & id_mask;
        self.locate(nid, "chunk index", device, block, len)
    }

    /// Checks that `len` bytes from `block` of `device` exist, and resolves unified addresses.
    pub(super) fn locate(
        &self,
        nid: u64,
        field: &'static str,
        device: u16,
        block: u64,
        len: u64,
    ) -> Result<Data, ReadError> {
        let bits = self.superblock.block_bits;
        let blocks = len.div_ceil(1 << bits);
        let (device, block) = if device == 0 { self.resolve_unified(block) } else { (device, block) };
        let end = block.checked_add(blocks);
        if device == 0 {
            // Blocks below 2^49 and lengths below 2^63 cannot overflow here.
            let fits = block.checked_mul(1 << bits).and_then(|b| b.checked_add(len)).is_some_and(|e| e <= self.size());
            if !fits {
                let what = format!("{blocks} blocks from block {block} are not inside the image");
                return Err(ReadError::inode(nid, field, what));
            }
        } else {
            let Some(known) = self.devices.get(usize::from(device) - 1) else {
                let what = format!("device {device} of {} devices", self.devices.len());
                return Err(ReadError::inode(nid, field, what));
            };
            if end.is_none_or(|end| known.blocks > 0 && end > known.blocks) {
                let what = format!(
                    "{blocks} blocks from block {block} are not inside device {device} of {} blocks",
                    known.blocks
                );
                return Err(ReadError::inode(nid, field, what));
            }
        }
        Ok(Data::Block { device, block })
    }

    /// An address without a device id may mean a device that has a place in the unified address space.
    fn resolve_unified(&self, block: u64) -> (u16, u64) {
        let after = self.unified.partition_point(|(start, _, _)| *start <= block);
        match after.checked_sub(1).and_then(|i| self.unified.get(i)) {
            Some((start, end, device)) if block < *end => (*device, block - start),
            _ => (0, block),
        }
    }
}
