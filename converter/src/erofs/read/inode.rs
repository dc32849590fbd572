//! One inode: attributes and where its parts are.

use super::super::format::{self, CompactInode, DataLayout, ExtendedInode, FileType, SLOT_SIZE, mode};
use super::{Image, ReadError};
use crate::entry::Timestamp;
use crate::read_at::ReadAt;
use zerocopy::FromBytes;

/// All bits of an inode's format that are defined.
const FORMAT_KNOWN: u16 = 0x1f;
/// Bit 4 of the format: nlink is 1 and its field holds something else (files), or `.` is left out (directories).
const FORMAT_BIT_4: u16 = 1 << 4;
/// The bit of a nid that says "in the metabox".
const NID_METABOX: u64 = 1 << 63;

/// An inode as it is in the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inode {
    /// Its number.
    pub nid: u64,
    /// Whether it has the 32-byte form.
    pub compact: bool,
    /// How its data is stored.
    pub layout: DataLayout,
    /// Type and permissions, as `st_mode`.
    pub mode: u16,
    /// Hard links.
    pub nlink: u32,
    /// Length in bytes.
    pub size: u64,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time.
    pub mtime: Timestamp,
    /// Inode number for 32-bit `stat`.
    pub ino: u32,
    /// Bytes of the inline xattr area behind the inode.
    pub xattr_size: u32,
    /// Whether the directory leaves out its `.` entry (48-bit images).
    pub dot_omitted: bool,
    /// Byte offset of the inode in the image.
    pub offset: u64,
    /// Start block with its high bits, device number, or chunk format.
    pub(super) data: u64,
}

impl Inode {
    /// What kind of object it is.
    #[must_use]
    pub const fn file_type(&self) -> FileType {
        file_type_of_mode(self.mode)
    }

    /// Whether it is a directory.
    #[must_use]
    pub const fn is_dir(&self) -> bool {
        self.mode & mode::TYPE == mode::DIRECTORY
    }

    /// Whether it is a regular file.
    #[must_use]
    pub const fn is_regular(&self) -> bool {
        self.mode & mode::TYPE == mode::REGULAR
    }

    /// Major and minor of a device node.
    #[must_use]
    pub fn device_number(&self) -> Option<(u32, u32)> {
        matches!(self.file_type(), FileType::CharDevice | FileType::BlockDevice)
            .then(|| format::decode_device(u32::try_from(self.data & 0xffff_ffff).unwrap_or(0)))
    }

    /// Whether it is the character device 0:0, overlayfs' whiteout.
    #[must_use]
    pub fn is_whiteout(&self) -> bool {
        self.file_type() == FileType::CharDevice && self.device_number() == Some((0, 0))
    }

    /// Whether its data is compressed.
    #[must_use]
    pub const fn is_compressed(&self) -> bool {
        matches!(self.layout, DataLayout::CompressedFull | DataLayout::CompressedCompact)
    }

    /// Blocks of a compressed file as it is stored, by its inode; `None` for other layouts.
    #[must_use]
    pub fn compressed_blocks(&self) -> Option<u64> {
        self.is_compressed().then_some(self.data)
    }

    /// Bytes of the inode itself.
    pub(super) const fn head_size(&self) -> u64 {
        if self.compact { 32 } else { 64 }
    }

    /// Byte offset behind the inode and its xattrs: an inline tail, or (aligned) a chunk index.
    pub(super) const fn body_offset(&self) -> u64 {
        self.offset + self.head_size() + self.xattr_size as u64
    }

    /// Whether its kind has data at all.
    pub(super) const fn has_data(&self) -> bool {
        matches!(self.mode & mode::TYPE, mode::REGULAR | mode::DIRECTORY | mode::SYMLINK)
    }
}

/// What kind of object `mode` says.
#[must_use]
pub const fn file_type_of_mode(mode: u16) -> FileType {
    match mode & mode::TYPE {
        mode::REGULAR => FileType::Regular,
        mode::DIRECTORY => FileType::Directory,
        mode::CHAR => FileType::CharDevice,
        mode::BLOCK => FileType::BlockDevice,
        mode::FIFO => FileType::Fifo,
        mode::SOCKET => FileType::Socket,
        mode::SYMLINK => FileType::Symlink,
        _ => FileType::Unknown,
    }
}

impl<R: ReadAt> Image<R> {
    /// Reads inode `nid`.
    ///
    /// # Errors
    /// When it lies outside the image, has an undefined form, or stands in a metabox.
    pub fn inode(&self, nid: u64) -> Result<Inode, ReadError> {
        if nid & NID_METABOX != 0 {
            return Err(ReadError::Unsupported { nid: nid & !NID_METABOX, what: "a metabox inode" });
        }
        let outside = || ReadError::inode(nid, "nid", "the inode is not inside the image");
        let offset = nid
            .checked_mul(u64::from(SLOT_SIZE))
            .and_then(|n| n.checked_add(self.superblock.meta_offset()))
            .ok_or_else(outside)?;
        let room = self.size().checked_sub(offset).filter(|room| *room >= 32).ok_or_else(outside)?;
        let mut bytes = [0u8; 64];
        let available = if room >= 64 { 64 } else { 32 };
        self.cache.read(&mut bytes[..available], offset)?;
        let format_bits = u16::from_le_bytes([bytes[0], bytes[1]]);
        if format_bits & !FORMAT_KNOWN != 0 {
            return Err(ReadError::inode(nid, "i_format", format!("{format_bits:#x} has undefined bits")));
        }
        let layout = match format_bits >> 1 & 7 {
            0 => DataLayout::FlatPlain,
            1 => DataLayout::CompressedFull,
            2 => DataLayout::FlatInline,
            3 => DataLayout::CompressedCompact,
            4 => DataLayout::ChunkBased,
            other => return Err(ReadError::inode(nid, "i_format", format!("data layout {other} is not defined"))),
        };
        let inode = if format_bits & 1 == 0 {
            self.compact(nid, offset, format_bits, layout, &bytes)
        } else if available == 64 {
            self.extended(nid, offset, format_bits, layout, &bytes)
        } else {
            None
        };
        let inode = inode.ok_or_else(outside)?;
        self.check_inode(&inode)?;
        Ok(inode)
    }

    fn compact(&self, nid: u64, offset: u64, bits: u16, layout: DataLayout, bytes: &[u8; 64]) -> Option<Inode> {
        let raw = CompactInode::read_from_bytes(&bytes[..32]).ok()?;
        let is_dir = raw.mode.get() & mode::TYPE == mode::DIRECTORY;
        let nlink_is_1 = bits & FORMAT_BIT_4 != 0 && !is_dir;
        let high = if nlink_is_1 { raw.nlink.get() } else { 0 };
        let sb = &self.superblock;
        Some(Inode {
            nid,
            compact: true,
            layout,
            mode: raw.mode.get(),
            nlink: if nlink_is_1 { 1 } else { u32::from(raw.nlink.get()) },
            size: u64::from(raw.size.get()),
            uid: u32::from(raw.uid.get()),
            gid: u32::from(raw.gid.get()),
            mtime: Timestamp { secs: sb.epoch.wrapping_add(i64::from(raw.reserved.get())), nanos: sb.fixed_nsec },
            ino: raw.ino.get(),
            xattr_size: xattr_size(raw.xattr_count.get()),
            dot_omitted: bits & FORMAT_BIT_4 != 0 && is_dir,
            offset,
            data: self.wide(raw.data.get(), high),
        })
    }

    fn extended(&self, nid: u64, offset: u64, bits: u16, layout: DataLayout, bytes: &[u8; 64]) -> Option<Inode> {
        let raw = ExtendedInode::read_from_bytes(bytes).ok()?;
        let is_dir = raw.mode.get() & mode::TYPE == mode::DIRECTORY;
        Some(Inode {
            nid,
            compact: false,
            layout,
            mode: raw.mode.get(),
            nlink: raw.nlink.get(),
            size: raw.size.get(),
            uid: raw.uid.get(),
            gid: raw.gid.get(),
            mtime: Timestamp { secs: raw.mtime.get().cast_signed(), nanos: raw.mtime_nsec.get() },
            ino: raw.ino.get(),
            xattr_size: xattr_size(raw.xattr_count.get()),
            dot_omitted: bits & FORMAT_BIT_4 != 0 && is_dir,
            offset,
            data: self.wide(raw.data.get(), raw.reserved.get()),
        })
    }

    /// A start block with its high bits, which count only in 48-bit images.
    fn wide(&self, low: u32, high: u16) -> u64 {
        u64::from(low) | if self.superblock.features.has_48bit() { u64::from(high) << 32 } else { 0 }
    }

    fn check_inode(&self, inode: &Inode) -> Result<(), ReadError> {
        if inode.file_type() == FileType::Unknown {
            return Err(ReadError::inode(inode.nid, "i_mode", format!("{:#o} is no file type", inode.mode)));
        }
        if i64::try_from(inode.size).is_err() {
            return Err(ReadError::inode(inode.nid, "i_size", format!("{} is more than a file can have", inode.size)));
        }
        // Only inodes inside the image come here, so this cannot overflow.
        if inode.body_offset() > self.size() {
            return Err(ReadError::inode(inode.nid, "i_xattr_icount", "the xattrs are not inside the image"));
        }
        Ok(())
    }
}

/// Bytes of an inline xattr area (`erofs_xattr_ibody_size`).
fn xattr_size(count: u16) -> u32 {
    if count == 0 { 0 } else { 12 + 4 * (u32::from(count) - 1) }
}
