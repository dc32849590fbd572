//! Extended attributes: those beside an inode, shared ones, and long name prefixes.

use super::super::format::{XATTR_PREFIXES, XattrHeader};
use super::{Image, Inode, ReadError};
use crate::entry::{Xattr, printable};
use crate::read_at::ReadAt;
use std::collections::HashSet;

/// Bytes of a header before a name (`struct erofs_xattr_entry`).
const ENTRY: u64 = 4;
/// Bit 7 of a name index: a long prefix.
const LONG_PREFIX: u8 = 0x80;
/// The longest xattr name that Linux has.
const NAME_MAX: usize = 255;

/// Long name prefixes: a short prefix's index, and what follows it.
#[derive(Debug)]
pub(super) enum LongPrefixes {
    Loaded(Vec<(u8, Vec<u8>)>),
    /// They are stored in a form that is not read.
    Unreadable(&'static str),
}

impl Default for LongPrefixes {
    fn default() -> Self {
        Self::Loaded(Vec::new())
    }
}

/// An xattr whose value has not been read.
#[derive(Debug)]
pub(super) struct Located {
    pub(super) name: Vec<u8>,
    value_offset: u64,
    value_len: u16,
}

impl<R: ReadAt> Image<R> {
    /// The extended attributes of `inode`: those stored beside it, then shared ones, each in stored order.
    ///
    /// # Errors
    /// When the area or a shared attribute is malformed, a name occurs twice, or a name prefix is not readable.
    pub fn xattrs(&self, inode: &Inode) -> Result<Vec<Xattr>, ReadError> {
        let located = self.locate_xattrs(inode)?;
        let total: u64 = located.iter().map(|x| u64::from(x.value_len)).sum();
        if total > self.size() {
            return Err(ReadError::inode(inode.nid, "xattrs", "their values add up to more than the image"));
        }
        located
            .into_iter()
            .map(|x| {
                let mut value = vec![0; usize::from(x.value_len)];
                self.cache.read(&mut value, x.value_offset)?;
                Ok(Xattr { name: x.name, value })
            })
            .collect()
    }

    /// The bytes beside `inode` that hold its attributes replace those in `area`. Within one image equal
    /// bytes mean equal attributes.
    pub(crate) fn xattr_area(&self, inode: &Inode, area: &mut Vec<u8>) -> Result<(), ReadError> {
        area.resize(inode.xattr_size as usize, 0);
        self.cache.read(area, inode.offset + inode.head_size())
    }

    /// Names and places of all xattrs, every range checked.
    pub(super) fn locate_xattrs(&self, inode: &Inode) -> Result<Vec<Located>, ReadError> {
        let mut found = Vec::new();
        if inode.xattr_size == 0 {
            return Ok(found);
        }
        let fail = |what: &str| ReadError::inode(inode.nid, "xattrs", what);
        let start = inode.offset + inode.head_size();
        let end = inode.body_offset();
        let mut header = [0u8; size_of::<XattrHeader>()];
        self.cache.read(&mut header, start)?;
        let shared = u64::from(header[4]);
        let ids = start + header.len() as u64;
        let mut at = ids + shared * 4;
        if at > end {
            return Err(fail("the shared ids are longer than the area"));
        }
        while at < end {
            let (xattr, next) = self.xattr_entry(inode.nid, at, end)?;
            found.push(xattr);
            at = next;
        }
        if shared > 0 && self.superblock.features.shared_xattrs_in_metabox() {
            return Err(ReadError::Unsupported { nid: inode.nid, what: "shared xattrs in a metabox" });
        }
        let area = u64::from(self.superblock.xattr_block) << self.superblock.block_bits;
        for index in 0..shared {
            let mut id = [0u8; 4];
            self.cache.read(&mut id, ids + index * 4)?;
            let at = area + u64::from(u32::from_le_bytes(id)) * 4;
            found.push(self.xattr_entry(inode.nid, at, self.size())?.0);
        }
        let mut names = HashSet::with_capacity(found.len());
        if let Some(twice) = found.iter().find(|x| !names.insert(x.name.as_slice())) {
            return Err(fail(&format!("`{}` occurs twice", printable(&twice.name))));
        }
        Ok(found)
    }

    /// The entry at `at`, which must end by `limit`, and where the next one starts.
    fn xattr_entry(&self, nid: u64, at: u64, limit: u64) -> Result<(Located, u64), ReadError> {
        let fail = |what: String| ReadError::inode(nid, "xattrs", what);
        let outside = || fail(format!("the entry at offset {at} is longer than its area"));
        if at.saturating_add(ENTRY) > limit {
            return Err(outside());
        }
        let mut head = [0u8; 4];
        self.cache.read(&mut head, at)?;
        let [name_len, name_index, size0, size1] = head;
        let value_len = u16::from_le_bytes([size0, size1]);
        let value_offset = at + ENTRY + u64::from(name_len);
        let next = (value_offset + u64::from(value_len)).next_multiple_of(4);
        // A shared entry at the image's very end may lack its padding.
        if value_offset + u64::from(value_len) > limit || (next > limit && limit != self.size()) {
            return Err(outside());
        }
        let mut name = self.name_prefix(nid, name_index)?;
        let prefix = name.len();
        name.resize(prefix + usize::from(name_len), 0);
        self.cache.read(&mut name[prefix..], at + ENTRY)?;
        if name.len() > NAME_MAX || name.contains(&0) {
            return Err(fail(format!("the name at offset {at} is too long or has a NUL")));
        }
        Ok((Located { name, value_offset, value_len }, next))
    }

    fn name_prefix(&self, nid: u64, index: u8) -> Result<Vec<u8>, ReadError> {
        let short = |index: u8| XATTR_PREFIXES.iter().find(|(i, _)| *i == index).map(|(_, prefix)| prefix.to_vec());
        let undefined = || ReadError::inode(nid, "xattrs", format!("name prefix {index:#x} is not defined"));
        if index & LONG_PREFIX == 0 {
            return short(index).ok_or_else(undefined);
        }
        match &self.prefixes {
            LongPrefixes::Unreadable(what) => Err(ReadError::Unsupported { nid, what }),
            LongPrefixes::Loaded(all) => {
                let (base, infix) = all.get(usize::from(index & !LONG_PREFIX)).ok_or_else(undefined)?;
                let mut name = short(*base).ok_or_else(undefined)?;
                name.extend_from_slice(infix);
                Ok(name)
            }
        }
    }

    /// Reads the table of long prefixes: each a u16 length, a base index and its rest, 4-aligned.
    pub(super) fn read_long_prefixes(&self) -> Result<LongPrefixes, ReadError> {
        let Some((count, start)) = self.superblock.prefixes else { return Ok(LongPrefixes::default()) };
        let packed = if self.superblock.features.plain_prefixes() { None } else { self.superblock.packed_nid };
        let packed = packed.map(|nid| self.inode(nid)).transpose()?;
        if packed.as_ref().is_some_and(Inode::is_compressed) {
            return Ok(LongPrefixes::Unreadable("a name prefix in a compressed packed inode"));
        }
        let fail = |what: &str| ReadError::superblock("xattr_prefix_start", what);
        let read = |buf: &mut [u8], at: u64| match &packed {
            None if at.saturating_add(buf.len() as u64) > self.size() => Err(fail("the table is not inside the image")),
            None => self.cache.read(buf, at),
            Some(inode) => match self.read_file_at(inode, &[], at, buf)? {
                n if n == buf.len() => Ok(()),
                _ => Err(fail("the table is not inside the packed inode")),
            },
        };
        let mut all = Vec::new();
        let mut at = start;
        for _ in 0..count {
            let mut len = [0u8; 2];
            read(&mut len, at)?;
            let len = usize::from(u16::from_le_bytes(len));
            if len == 0 || len > 1 + NAME_MAX {
                return Err(fail(&format!("a prefix of {len} bytes")));
            }
            let mut bytes = vec![0; len];
            read(&mut bytes, at + 2)?;
            all.push((bytes[0], bytes.split_off(1)));
            at = (at + 2 + len as u64).next_multiple_of(4);
        }
        Ok(LongPrefixes::Loaded(all))
    }
}
