//! Directories, entry by entry.
//!
//! A directory is a run of blocks; each starts with an array of 12-byte entries, the names behind it. The cursor holds
//! no block: it is lent one, which all directories of a walk share, so that a walk of any depth costs one buffer.

use super::super::format::{DataLayout, FileType};
use super::{Data, Image, Inode, ReadError};
use crate::read_at::ReadAt;

/// Bytes of one entry (`struct erofs_dirent`).
const DIRENT: u64 = 12;
/// The longest name.
const NAME_MAX: u64 = 255;

/// One name of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    /// The name: 1 to 255 bytes, without NUL or `/`.
    pub name: Vec<u8>,
    /// The inode it names.
    pub nid: u64,
    /// The type as the entry has it; undefined values are [`FileType::Unknown`].
    pub file_type: FileType,
}

impl DirEntry {
    /// Whether it is `.` or `..`.
    #[must_use]
    pub fn is_dot(&self) -> bool {
        matches!(self.name.as_slice(), b"." | b"..")
    }
}

/// One block of a directory in memory; whoever reads directories lends it to the cursors.
#[derive(Debug, Default)]
pub(crate) struct Block {
    /// Where it is in the image; meaningless while `bytes` is empty.
    base: u64,
    bytes: Vec<u8>,
}

impl Block {
    fn load<R: ReadAt>(&mut self, image: &Image<R>, base: u64, len: u64) -> Result<&[u8], ReadError> {
        if self.base != base || self.bytes.len() as u64 != len {
            // At most a block of 64 KiB.
            self.bytes.resize(usize::try_from(len).unwrap_or(0), 0);
            if let Err(e) = image.cache.read(&mut self.bytes, base) {
                self.bytes.clear();
                return Err(e);
            }
            self.base = base;
        }
        Ok(&self.bytes)
    }
}

/// One name, borrowed from its block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawEntry<'b> {
    /// As [`DirEntry::name`].
    pub(crate) name: &'b [u8],
    /// As [`DirEntry::nid`].
    pub(crate) nid: u64,
    /// As [`DirEntry::file_type`].
    pub(crate) file_type: FileType,
}

/// A position in a directory; does not borrow the image.
#[derive(Debug, Clone)]
pub(crate) struct Cursor {
    inode: Inode,
    /// Byte offset in the directory of the block that is open.
    block_start: u64,
    /// Where that block is in the image, its bytes, and its number of names; 0 names: not opened yet.
    base: u64,
    len: u64,
    count: u64,
    index: u64,
}

impl Cursor {
    pub(crate) fn new(inode: &Inode) -> Self {
        Self { inode: inode.clone(), block_start: 0, base: 0, len: 0, count: 0, index: 0 }
    }

    pub(super) fn nid(&self) -> u64 {
        self.inode.nid
    }

    /// The next entry. After an error the cursor stands at its end.
    pub(super) fn next<R: ReadAt>(
        &mut self,
        image: &Image<R>,
        block: &mut Block,
    ) -> Option<Result<DirEntry, ReadError>> {
        let entry = self.next_raw(image, block)?;
        Some(entry.map(|entry| DirEntry { name: entry.name.to_vec(), nid: entry.nid, file_type: entry.file_type }))
    }

    /// As [`Cursor::next`], without a copy of the name.
    pub(crate) fn next_raw<'b, R: ReadAt>(
        &mut self,
        image: &Image<R>,
        block: &'b mut Block,
    ) -> Option<Result<RawEntry<'b>, ReadError>> {
        if self.index == self.count {
            self.block_start += self.len;
            if self.block_start >= self.inode.size {
                return None;
            }
            if let Err(e) = self.open_block(image, block) {
                self.finish();
                return Some(Err(e));
            }
        }
        let entry = block
            .load(image, self.base, self.len)
            .and_then(|bytes| parse(bytes, self.index, self.count).map_err(|what| self.fail(what)));
        self.index += 1;
        if entry.is_err() {
            self.finish();
        }
        Some(entry)
    }

    fn finish(&mut self) {
        self.block_start = self.inode.size;
        self.len = 0;
        self.count = 0;
        self.index = 0;
    }

    fn fail(&self, what: &str) -> ReadError {
        let block = self.block_start / self.len.max(1);
        ReadError::inode(self.inode.nid, "directory", format!("block {block}, entry {}: {what}", self.index))
    }

    fn open_block<R: ReadAt>(&mut self, image: &Image<R>, block: &mut Block) -> Result<(), ReadError> {
        if self.inode.layout == DataLayout::ChunkBased {
            return Err(ReadError::Unsupported { nid: self.inode.nid, what: "a chunk-based directory" });
        }
        let extent = image.map(&self.inode, self.block_start)?;
        self.base = match extent.data {
            Data::Inline { offset } => offset,
            Data::Block { device: 0, block } => {
                (block << image.superblock.block_bits) + (self.block_start - extent.file_offset)
            }
            Data::Block { .. } | Data::Compressed { .. } => {
                return Err(ReadError::Unsupported { nid: self.inode.nid, what: "a directory on an extra device" });
            }
            Data::Hole => return Err(self.fail("the block is a hole")),
        };
        self.len = (self.inode.size - self.block_start).min(u64::from(image.superblock.block_size()));
        self.index = 0;
        self.count = 0;
        if self.len < DIRENT {
            return Err(self.fail("the block is too short for a name"));
        }
        let first = name_offset(block.load(image, self.base, self.len)?, 0);
        match first {
            Some(first) if first >= DIRENT && first % DIRENT == 0 && first < self.len => self.count = first / DIRENT,
            _ => return Err(self.fail("the first name offset is impossible")),
        }
        Ok(())
    }
}

/// The bytes of entry `index` of a block.
fn record(block: &[u8], index: u64) -> Option<&[u8; 12]> {
    block.get(usize::try_from(index * DIRENT).ok()?..)?.first_chunk()
}

/// Where the name of entry `index` starts in its block.
fn name_offset(block: &[u8], index: u64) -> Option<u64> {
    record(block, index).map(|raw| u64::from(u16::from_le_bytes([raw[8], raw[9]])))
}

/// Entry `index` of the `count` of a block, or what is wrong with it.
fn parse(block: &[u8], index: u64, count: u64) -> Result<RawEntry<'_>, &'static str> {
    const OUTSIDE: &str = "its name is not inside the block";
    let raw = record(block, index).ok_or(OUTSIDE)?;
    let (last, len) = (index + 1 == count, block.len() as u64);
    let start = name_offset(block, index).ok_or(OUTSIDE)?;
    let end = if last { len.min(start + NAME_MAX + 1) } else { name_offset(block, index + 1).ok_or(OUTSIDE)? };
    if start < count * DIRENT || end <= start || end > len {
        return Err(OUTSIDE);
    }
    if end - start > NAME_MAX + 1 {
        return Err("its name is longer than 255 bytes");
    }
    let range = usize::try_from(start).ok().zip(usize::try_from(end).ok());
    let name = range.and_then(|(start, end)| block.get(start..end)).ok_or(OUTSIDE)?;
    // Only the last name of a block may be followed by padding.
    let name = match name.iter().position(|b| *b == 0) {
        Some(nul) if last => &name[..nul],
        Some(_) => return Err("its name has a NUL"),
        None => name,
    };
    if name.len() as u64 > NAME_MAX {
        return Err("its name is longer than 255 bytes");
    }
    if name.is_empty() || name.contains(&b'/') {
        return Err("its name is empty or has a slash");
    }
    let [a, b, c, d, e, f, g, h, ..] = *raw;
    Ok(RawEntry { name, nid: u64::from_le_bytes([a, b, c, d, e, f, g, h]), file_type: file_type(raw[10]) })
}

fn file_type(byte: u8) -> FileType {
    match byte {
        1 => FileType::Regular,
        2 => FileType::Directory,
        3 => FileType::CharDevice,
        4 => FileType::BlockDevice,
        5 => FileType::Fifo,
        6 => FileType::Socket,
        7 => FileType::Symlink,
        _ => FileType::Unknown,
    }
}

/// Iterates over a directory's entries in their stored order, `.` and `..` included.
#[derive(Debug)]
pub struct Dir<'a, R> {
    image: &'a Image<R>,
    cursor: Cursor,
    block: Block,
}

impl<R: ReadAt> Iterator for Dir<'_, R> {
    type Item = Result<DirEntry, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.cursor.next(self.image, &mut self.block)
    }
}

impl<R: ReadAt> Image<R> {
    /// The entries of a directory.
    ///
    /// # Errors
    /// When `inode` is no directory.
    pub fn dir(&self, inode: &Inode) -> Result<Dir<'_, R>, ReadError> {
        if !inode.is_dir() {
            return Err(ReadError::inode(inode.nid, "i_mode", "not a directory"));
        }
        Ok(Dir { image: self, cursor: Cursor::new(inode), block: Block::default() })
    }

    /// The node that `name` leads to in a directory.
    ///
    /// # Errors
    /// When `inode` is no directory, or a broken one.
    pub fn lookup(&self, inode: &Inode, name: &[u8]) -> Result<Option<u64>, ReadError> {
        let mut dir = self.dir(inode)?;
        let block_size = u64::from(self.superblock.block_size());
        let at = |block: u64| Cursor { block_start: block * block_size, ..Cursor::new(inode) };
        // The name is in the last block that begins with it or one before it, if anywhere.
        let (mut first, mut last) = (0, inode.size.div_ceil(block_size).max(1) - 1);
        while first < last {
            let middle = last - (last - first) / 2;
            match at(middle).next(self, &mut dir.block) {
                Some(entry) if entry.as_ref().is_ok_and(|e| e.name.as_slice() > name) => last = middle - 1,
                Some(Err(e)) => return Err(e),
                _ => first = middle,
            }
        }
        dir.cursor = at(first);
        for entry in dir {
            let entry = entry?;
            match entry.name.as_slice().cmp(name) {
                std::cmp::Ordering::Less => {}
                std::cmp::Ordering::Equal => return Ok(Some(entry.nid)),
                // Sorted: it will not come.
                std::cmp::Ordering::Greater => return Ok(None),
            }
        }
        Ok(None)
    }
}
