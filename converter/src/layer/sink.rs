//! Entries in, tree and data out: the one thread of a layer that decides.

use super::{LayerError, Options};
use crate::blob::Writer;
use crate::blob::foreign::Find;
use crate::blob::spool::Spool;
use crate::entry::{Entry, EntryKind, EntrySink, Warning};
use crate::erofs::format::{BLOCK_SIZE, ExtendedInode};
use crate::extent::FileData;
use crate::tree::InodeId;
use crate::tree::build::{self, Builder, Placed};

/// Builds the tree, and sends each file's bytes to the spool or to the data blob.
#[derive(Debug)]
pub(super) struct Sink<'f> {
    pub(super) builder: Builder,
    pub(super) blob: Writer<'f>,
    pub(super) spool: Spool,
    inline_max: u64,
    current: Current,
    small: Vec<u8>,
}

#[derive(Debug, Clone, Copy)]
enum Current {
    Nothing,
    Small(InodeId),
    Chunked(InodeId),
}

impl<'f> Sink<'f> {
    pub(super) fn new(options: &Options, whiteouts: bool, spool: Spool, find: Option<&'f dyn Find>) -> Self {
        let tree = build::Options { whiteouts, overlay: options.overlay, max_inodes: options.max_inodes };
        Self {
            builder: Builder::new(tree),
            blob: Writer::new(options.chunks, options.compress, find),
            spool,
            inline_max: u64::from(options.inline_max),
            current: Current::Nothing,
            small: Vec::new(),
        }
    }

    pub(super) fn take_warnings(&mut self) -> Vec<Warning> {
        self.builder.take_warnings()
    }

    /// Whether a file goes beside its inode. Judged with the larger inode and no shared xattrs, which is known before
    /// the rest of the layer is; so the answer depends on the file alone.
    fn is_small(&self, inode: InodeId, size: u64) -> bool {
        let beside = size_of::<ExtendedInode>() + self.builder.xattr_area(inode);
        size <= self.inline_max && size + beside as u64 <= u64::from(BLOCK_SIZE)
    }
}

impl EntrySink for Sink<'_> {
    type Error = LayerError;

    fn entry(&mut self, entry: Entry) -> Result<(), LayerError> {
        let size = match entry.kind {
            EntryKind::Regular { size, .. } => size,
            _ => 0,
        };
        self.current = match self.builder.entry(entry)? {
            Placed::File(inode) if size > 0 && self.is_small(inode, size) => {
                self.small.clear();
                // At most a block, as was just judged.
                self.small.resize(usize::try_from(size).unwrap_or(0), 0);
                Current::Small(inode)
            }
            Placed::File(inode) if size > 0 => {
                self.blob.begin(size);
                Current::Chunked(inode)
            }
            _ => Current::Nothing,
        };
        Ok(())
    }

    fn data(&mut self, offset: u64, bytes: &[u8]) -> Result<(), LayerError> {
        match self.current {
            Current::Nothing => {}
            Current::Small(_) => {
                let at = usize::try_from(offset).expect("inside a small file");
                self.small[at..at + bytes.len()].copy_from_slice(bytes);
            }
            Current::Chunked(_) => self.blob.data(offset, bytes)?,
        }
        Ok(())
    }

    fn end_entry(&mut self) -> Result<(), LayerError> {
        match std::mem::replace(&mut self.current, Current::Nothing) {
            Current::Nothing => {}
            Current::Small(inode) => {
                let at = self.spool.append(&self.small).map_err(LayerError::Scratch)?;
                let len = u32::try_from(self.small.len()).expect("at most a block");
                self.builder.set_data(inode, FileData::Inline { at, len });
            }
            Current::Chunked(inode) => {
                let data = self.blob.end()?;
                self.builder.set_data(inode, data);
            }
        }
        Ok(())
    }
}
