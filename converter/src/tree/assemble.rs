//! A tree put together in tree order, from sources that are sorted already.

use super::{Directory, Edge, Inode, InodeId, Kind, NO_INODE, ROOT, Tree, XattrSets, edit, whiteout_device};
use std::ops::Range;

/// Builds a [`Tree`] whose inodes are numbered in tree order: the root first, a directory's names listed before any of
/// them gets its inode.
#[derive(Debug)]
pub(crate) struct Assembler {
    inodes: Vec<Inode>,
    edges: Vec<Edge>,
    names: Vec<u8>,
    pub(crate) xattrs: XattrSets,
    whiteout: Option<InodeId>,
}

/// More than a tree can count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TooMany(pub(crate) &'static str);

impl Assembler {
    /// A tree for about so many inodes.
    pub(crate) fn new(inodes: usize) -> Self {
        Self {
            inodes: Vec::with_capacity(inodes),
            edges: Vec::with_capacity(inodes),
            names: Vec::new(),
            xattrs: XattrSets::default(),
            whiteout: None,
        }
    }

    /// Adds an inode; the first one is the root.
    pub(crate) fn add(&mut self, inode: Inode) -> Result<InodeId, TooMany> {
        let id = u32::try_from(self.inodes.len()).ok().filter(|id| *id != NO_INODE).ok_or(TooMany("inodes"))?;
        self.inodes.push(inode);
        Ok(id)
    }

    /// Number of names so far: where the next one goes.
    pub(crate) fn edges(&self) -> usize {
        self.edges.len()
    }

    /// Adds a name to `directory`, behind those it has; which inode it leads to is said by [`Assembler::lead`].
    pub(crate) fn name(&mut self, directory: InodeId, name: &[u8]) -> Result<(), TooMany> {
        let name_start = u32::try_from(self.names.len()).map_err(|_| TooMany("bytes of names"))?;
        let name_len = u8::try_from(name.len()).map_err(|_| TooMany("bytes of a name"))?;
        if u32::try_from(self.edges.len()).is_err() {
            return Err(TooMany("names"));
        }
        self.names.extend_from_slice(name);
        self.edges.push(Edge { directory, inode: NO_INODE, name_start, name_len });
        Ok(())
    }

    /// Says which names are `directory`'s.
    pub(crate) fn list(&mut self, directory: InodeId, edges: &Range<usize>) {
        if let Kind::Directory(Directory { first, count, .. }) = &mut self.inodes[directory as usize].kind {
            // `name` counted them.
            *first = u32::try_from(edges.start).unwrap_or(u32::MAX);
            *count = u32::try_from(edges.len()).unwrap_or(0);
        }
    }

    /// Says what the name at `edge` leads to.
    pub(crate) fn lead(&mut self, edge: usize, inode: InodeId) {
        self.edges[edge].inode = inode;
    }

    /// The name at `edge`.
    pub(crate) fn name_at(&self, edge: usize) -> &[u8] {
        let edge = &self.edges[edge];
        &self.names[edge.name_start as usize..][..usize::from(edge.name_len)]
    }

    /// The inode of all whiteouts, made when first asked for.
    pub(crate) fn whiteout(&mut self) -> Result<InodeId, TooMany> {
        match self.whiteout {
            Some(id) => Ok(id),
            None => {
                let id = self.add(whiteout_device())?;
                self.whiteout = Some(id);
                Ok(id)
            }
        }
    }

    /// The finished tree; every name has its inode.
    pub(crate) fn finish(self) -> Tree {
        debug_assert!(self.edges.iter().all(|edge| edge.inode != NO_INODE), "a name leads nowhere");
        debug_assert!(!self.inodes.is_empty() && matches!(self.inodes[ROOT as usize].kind, Kind::Directory(_)));
        Tree {
            inodes: self.inodes,
            edges: self.edges,
            names: self.names,
            xattrs: self.xattrs,
            whiteout: self.whiteout,
            added: edit::Added::default(),
        }
    }
}

/// A directory to be listed.
pub(crate) fn directory(parent: InodeId, opaque: bool) -> Kind {
    Kind::Directory(Directory { parent, opaque, ..Directory::default() })
}
