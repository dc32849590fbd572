//! Every name of an image in a fixed order.

use super::super::format::{DataLayout, SLOT_SIZE};
use super::dir::{Block, Cursor};
use super::nid_set::NidSet;
use super::{DirEntry, Image, Inode, ReadError};
use crate::read_at::ReadAt;
use std::fmt;

/// One name met by a [`Walk`].
#[derive(Debug)]
pub struct Visit<'w> {
    /// The path from the root, without a leading slash; empty for the root itself.
    pub path: &'w [u8],
    /// nid of the directory that holds the name; the root's own for the root.
    pub parent: u64,
    /// The directory entry; `None` for the root.
    pub entry: Option<&'w DirEntry>,
    /// The inode it names.
    pub inode: &'w Inode,
    /// Whether this is the first name of that inode.
    pub first: bool,
}

/// A walk over an image: a directory before its contents, names in stored order.
///
/// It is no [`Iterator`], because a visit borrows the walk's path: call [`Walk::next`] in a `while let`. After an error
/// the walk goes on behind what is broken, so that a checker finds more than the first fault; other callers stop.
/// A directory that is reached twice is an error, and so are inodes that overlap (with their xattrs, tails and chunk
/// tables) and directories that add up to more bytes than the image has. Therefore a walk, and whatever reads each
/// visited inode's metadata once, do work in proportion to the image. The memory is about 150 bytes for each level of
/// depth and two bits for each inode.
pub struct Walk<'a, R> {
    image: &'a Image<R>,
    started: bool,
    /// A directory that was just visited and is to be entered next.
    enter: Option<Inode>,
    stack: Vec<Level>,
    block: Block,
    path: Vec<u8>,
    /// Inodes that were visited.
    seen: NidSet,
    /// Slots that visited inodes take up.
    slots: NidSet,
    /// Directory bytes that may still be read.
    budget: u64,
    entry: Option<DirEntry>,
    inode: Option<Inode>,
    first: bool,
}

struct Level {
    cursor: Cursor,
    /// Length of the directory's own path.
    path_len: usize,
}

impl<R> fmt::Debug for Walk<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Walk").field("depth", &self.stack.len()).finish_non_exhaustive()
    }
}

impl<R: ReadAt> Image<R> {
    /// Walks the whole tree from the root.
    pub fn walk(&self) -> Walk<'_, R> {
        Walk {
            image: self,
            started: false,
            enter: None,
            stack: Vec::new(),
            block: Block::default(),
            path: Vec::new(),
            seen: NidSet::default(),
            slots: NidSet::default(),
            budget: self.size(),
            entry: None,
            inode: None,
            first: false,
        }
    }

    /// Bytes of an inode with its xattrs and its tail or chunk table, as far as they are sound.
    pub(crate) fn body_size(&self, inode: &Inode) -> u64 {
        let head = inode.body_offset() - inode.offset;
        if !inode.has_data() {
            return head;
        }
        match inode.layout {
            DataLayout::ChunkBased => {
                let table = self.chunk_table(inode);
                table.map_or(head, |table| table.offset + table.count * table.record() - inode.offset)
            }
            DataLayout::CompressedFull if inode.size > 0 => {
                self.cluster_map(inode).map_or(head, |map| map.end() - inode.offset)
            }
            DataLayout::FlatInline if inode.size > 0 => {
                head + ((inode.size - 1) % u64::from(self.superblock.block_size()) + 1)
            }
            _ => head,
        }
    }
}

impl<R: ReadAt> Walk<'_, R> {
    /// The next name, or what is wrong with it.
    ///
    /// # Errors
    /// A broken inode, directory entry or directory; the walk may go on.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Option<Result<Visit<'_>, ReadError>> {
        match self.advance()? {
            Err(e) => Some(Err(e)),
            Ok(parent) => {
                let inode = self.inode.as_ref()?;
                let (path, entry, first) = (self.path.as_slice(), self.entry.as_ref(), self.first);
                Some(Ok(Visit { path, parent, entry, inode, first }))
            }
        }
    }

    /// Path of what [`Walk::next`] returned last, also after an error.
    #[must_use]
    pub fn path(&self) -> &[u8] {
        &self.path
    }

    /// How many inodes were visited so far.
    #[must_use]
    pub const fn inodes(&self) -> u64 {
        self.seen.len()
    }

    /// Steps to the next name; returns its directory's nid.
    fn advance(&mut self) -> Option<Result<u64, ReadError>> {
        if !self.started {
            self.started = true;
            return Some(self.image.root().and_then(|root| {
                let nid = root.nid;
                self.visit(None, root).map(|()| nid)
            }));
        }
        if let Some(inode) = self.enter.take() {
            self.stack.push(Level { cursor: Cursor::new(&inode), path_len: self.path.len() });
        }
        loop {
            let level = self.stack.last_mut()?;
            self.path.truncate(level.path_len);
            match level.cursor.next(self.image, &mut self.block) {
                None => {
                    self.stack.pop();
                }
                Some(Err(e)) => return Some(Err(e)),
                Some(Ok(entry)) if entry.is_dot() => {}
                Some(Ok(entry)) => {
                    let parent = level.cursor.nid();
                    if !self.path.is_empty() {
                        self.path.push(b'/');
                    }
                    self.path.extend_from_slice(&entry.name);
                    let inode = self.image.inode(entry.nid);
                    return Some(inode.and_then(|inode| self.visit(Some(entry), inode)).map(|()| parent));
                }
            }
        }
    }

    fn visit(&mut self, entry: Option<DirEntry>, inode: Inode) -> Result<(), ReadError> {
        self.first = self.seen.insert(inode.nid);
        if self.first {
            let size = self.image.body_size(&inode);
            if self.image.is_table_or_superblock(inode.offset, size) {
                return Err(ReadError::inode(inode.nid, "nid", "it overlaps the superblock or the device table"));
            }
            let slots = size.div_ceil(u64::from(SLOT_SIZE));
            if !(inode.nid..inode.nid + slots).all(|slot| self.slots.insert(slot)) {
                return Err(ReadError::inode(inode.nid, "nid", "it overlaps another inode"));
            }
        }
        if inode.is_dir() {
            if !self.first {
                let what = "the directory is reached twice (a loop or a hard link)";
                return Err(ReadError::inode(inode.nid, "directory", what));
            }
            if inode.size > self.budget {
                let what = "the directories up to here add up to more bytes than the image has";
                return Err(ReadError::inode(inode.nid, "i_size", what));
            }
            self.budget -= inode.size;
            self.enter = Some(inode.clone());
        }
        self.entry = entry;
        self.inode = Some(inode);
        Ok(())
    }
}
