//! A layer as inodes and names.
//!
//! [`build::Builder`] takes entries in the order of the source and applies what each means; [`Tree`] is the finished
//! layer: every directory's names sorted bytewise, whiteouts in their place, hard links as several names of one inode.
//! *Tree order* is the one order used for everything that is written: depth first, a directory before its contents,
//! names bytewise. It depends on the tree alone, so the same tree gives the same bytes wherever it came from.
//!
//! Memory is about 100 bytes an inode: names lie in one arena, and directories are ranges of one sorted array.

pub(crate) mod assemble;
pub mod build;
mod edit;
pub mod whiteout;
pub mod xattrs;

use crate::entry::Timestamp;
use crate::erofs::format::{FileType, mode};
use crate::extent::FileData;
use crate::manifest::OverlayXattrs;
pub use xattrs::{SetId, XattrSets};

/// Index into [`Tree::inodes`]; the root is [`ROOT`].
pub type InodeId = u32;

/// The root directory's inode.
pub const ROOT: InodeId = 0;

/// One inode.
#[derive(Debug, Clone)]
pub struct Inode {
    /// What it is, with what only that kind has.
    pub kind: Kind,
    /// Permission bits (`0o7777`).
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time.
    pub mtime: Timestamp,
    /// Extended attributes.
    pub xattrs: SetId,
}

/// What an inode is.
#[derive(Debug, Clone)]
pub enum Kind {
    /// A directory.
    Directory(Directory),
    /// A regular file.
    Regular(FileData),
    /// A symbolic link and its text.
    Symlink(Box<[u8]>),
    /// A character device (encoded as the kernel does).
    CharDevice(u32),
    /// A block device.
    BlockDevice(u32),
    /// A named pipe.
    Fifo,
    /// A Unix socket.
    Socket,
    /// While building: another name for the inode at this path, which has not been seen yet.
    PendingLink(Box<[u8]>),
}

/// What only directories have.
#[derive(Debug, Clone, Copy, Default)]
pub struct Directory {
    /// The directory above (the root's is the root).
    pub parent: InodeId,
    /// Hides what lower layers have under the same path.
    pub opaque: bool,
    /// No entry of the source described it: it is here only because something is inside.
    pub implied: bool,
    /// First name in [`Tree::names_of`]'s array.
    first: u32,
    /// Number of names.
    count: u32,
}

impl Kind {
    /// Type bits of `st_mode`.
    #[must_use]
    pub const fn type_bits(&self) -> u16 {
        match self {
            Self::Directory(_) => mode::DIRECTORY,
            Self::Regular(_) | Self::PendingLink(_) => mode::REGULAR,
            Self::Symlink(_) => mode::SYMLINK,
            Self::CharDevice(_) => mode::CHAR,
            Self::BlockDevice(_) => mode::BLOCK,
            Self::Fifo => mode::FIFO,
            Self::Socket => mode::SOCKET,
        }
    }

    /// Type as directories record it.
    #[must_use]
    pub const fn file_type(&self) -> FileType {
        match self {
            Self::Directory(_) => FileType::Directory,
            Self::Regular(_) | Self::PendingLink(_) => FileType::Regular,
            Self::Symlink(_) => FileType::Symlink,
            Self::CharDevice(_) => FileType::CharDevice,
            Self::BlockDevice(_) => FileType::BlockDevice,
            Self::Fifo => FileType::Fifo,
            Self::Socket => FileType::Socket,
        }
    }

    const fn is_directory(&self) -> bool {
        matches!(self, Self::Directory(_))
    }
}

/// A name in a directory.
#[derive(Debug, Clone, Copy)]
struct Edge {
    directory: InodeId,
    /// [`NO_INODE`]: removed.
    inode: InodeId,
    name_start: u32,
    name_len: u8,
}

const NO_INODE: InodeId = u32::MAX;

/// A finished layer.
#[derive(Debug)]
pub struct Tree {
    inodes: Vec<Inode>,
    edges: Vec<Edge>,
    names: Vec<u8>,
    xattrs: XattrSets,
    whiteout: Option<InodeId>,
    added: edit::Added,
}

impl Tree {
    /// All inodes, reachable or not; index with an [`InodeId`].
    #[must_use]
    pub fn inodes(&self) -> &[Inode] {
        &self.inodes
    }

    /// One inode.
    ///
    /// # Panics
    /// When `id` is not of this tree.
    #[must_use]
    pub fn inode(&self, id: InodeId) -> &Inode {
        &self.inodes[id as usize]
    }

    /// One inode, to change what it holds.
    ///
    /// # Panics
    /// When `id` is not of this tree.
    pub fn inode_mut(&mut self, id: InodeId) -> &mut Inode {
        &mut self.inodes[id as usize]
    }

    /// The sets of extended attributes that [`Inode::xattrs`] refers to.
    #[must_use]
    pub fn xattrs(&self) -> &XattrSets {
        &self.xattrs
    }

    /// The one inode that all whiteouts are names of, if there are any.
    #[must_use]
    pub fn whiteout(&self) -> Option<InodeId> {
        self.whiteout
    }

    /// The names of `directory` in bytewise order with their inodes; nothing for other kinds.
    pub fn names_of(&self, directory: InodeId) -> impl ExactSizeIterator<Item = (&[u8], InodeId)> + Clone {
        let (first, count) = match &self.inodes[directory as usize].kind {
            Kind::Directory(d) => (d.first as usize, d.count as usize),
            _ => (0, 0),
        };
        self.edges[first..first + count].iter().map(|edge| (self.name(edge), edge.inode))
    }

    /// Every reachable inode once, in tree order, with the number of its names (for a directory: 2 and one for each
    /// directory in it).
    #[must_use]
    pub fn order(&self) -> Vec<(InodeId, u32)> {
        let mut position = vec![u32::MAX; self.inodes.len()];
        let mut order: Vec<(InodeId, u32)> = Vec::new();
        self.visit(|_, inode| {
            let slot = &mut position[inode as usize];
            if *slot == u32::MAX {
                *slot = u32::try_from(order.len()).expect("inode ids are u32");
                order.push((inode, if self.inodes[inode as usize].kind.is_directory() { 2 } else { 1 }));
            } else {
                order[*slot as usize].1 += 1;
            }
            if let Kind::Directory(d) = &self.inodes[inode as usize].kind
                && inode != ROOT
            {
                order[position[d.parent as usize] as usize].1 += 1;
            }
        });
        order
    }

    /// Calls `visit(path depth, inode)` for every name in tree order, the root first.
    fn visit(&self, mut visit: impl FnMut(usize, InodeId)) {
        visit(0, ROOT);
        let mut stack = vec![self.range(ROOT)];
        while let Some(top) = stack.last_mut() {
            let Some(edge) = top.next() else {
                stack.pop();
                continue;
            };
            let inode = self.edges[edge].inode;
            visit(stack.len(), inode);
            if self.inodes[inode as usize].kind.is_directory() {
                stack.push(self.range(inode));
            }
        }
    }

    /// Calls `visit(path, inode)` for every name in tree order; the root's path is empty.
    pub fn walk(&self, mut visit: impl FnMut(&[u8], InodeId)) {
        visit(b"", ROOT);
        let mut path: Vec<u8> = Vec::new();
        let mut stack = vec![(self.range(ROOT), 0usize)];
        while let Some((range, base)) = stack.last_mut() {
            path.truncate(*base);
            let Some(edge) = range.next() else {
                stack.pop();
                continue;
            };
            let edge = self.edges[edge];
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(self.name(&edge));
            visit(&path, edge.inode);
            if self.inodes[edge.inode as usize].kind.is_directory() {
                let base = path.len();
                stack.push((self.range(edge.inode), base));
            }
        }
    }

    fn range(&self, directory: InodeId) -> std::ops::Range<usize> {
        match &self.inodes[directory as usize].kind {
            Kind::Directory(d) => d.first as usize..(d.first + d.count) as usize,
            _ => 0..0,
        }
    }

    fn name(&self, edge: &Edge) -> &[u8] {
        &self.names[edge.name_start as usize..edge.name_start as usize + edge.name_len as usize]
    }
}

impl Tree {
    /// Puts overlayfs' marks on the directories of a layer that was built from entries: those of
    /// `Tree::mark_layers`, and, where escaped whiteouts are (X03), the one by which an overlayfs inside the sandbox
    /// looks for such.
    pub fn mark_for_overlay(&mut self, namespace: OverlayXattrs) {
        self.mark_escaped(namespace);
        self.mark_layers(namespace);
    }

    fn mark_escaped(&mut self, namespace: OverlayXattrs) {
        let (inner_opaque, inner_whiteout) = (escaped(namespace, "opaque"), escaped(namespace, "whiteout"));
        if !self.xattrs.any_has(&inner_whiteout) {
            return;
        }
        let has = |sets: &XattrSets, set, name: &[u8]| sets.get(set).iter().any(|x| x.name == name);
        for id in 0..self.inodes.len() {
            let Kind::Directory(directory) = self.inodes[id].kind else { continue };
            let names = &self.edges[directory.first as usize..(directory.first + directory.count) as usize];
            let set = self.inodes[id].xattrs;
            if names.iter().any(|e| has(&self.xattrs, self.inodes[e.inode as usize].xattrs, &inner_whiteout))
                && !has(&self.xattrs, set, &inner_opaque)
            {
                self.inodes[id].xattrs = self.xattrs.with(set, &inner_opaque, b"x");
            }
        }
    }

    /// Opaque directories hide what is below them, and those with whiteouts are to be read as merged even where no
    /// lower layer has them, so that the whiteouts do not show (the kernel's `ovl_path_check_origin_xattr`).
    pub(crate) fn mark_layers(&mut self, namespace: OverlayXattrs) {
        let name = |what: &str| format!("{}{what}", namespace.prefix()).into_bytes();
        let (opaque, origin) = (name("opaque"), name("origin"));
        for id in 0..self.inodes.len() {
            let Kind::Directory(directory) = self.inodes[id].kind else { continue };
            let names = &self.edges[directory.first as usize..(directory.first + directory.count) as usize];
            let set = self.inodes[id].xattrs;
            if directory.opaque {
                self.inodes[id].xattrs = self.xattrs.with(set, &opaque, b"y");
            } else if self.whiteout.is_some() && names.iter().any(|e| Some(e.inode) == self.whiteout) {
                self.inodes[id].xattrs = self.xattrs.with(set, &origin, b"");
            }
        }
    }
}

/// What all whiteouts of a layer are names of.
fn whiteout_device() -> Inode {
    let (kind, mtime, xattrs) = (Kind::CharDevice(0), Timestamp::default(), SetId::EMPTY);
    Inode { kind, mode: 0, uid: 0, gid: 0, mtime, xattrs }
}

/// The name under which overlayfs shows its own attribute `what` to an overlayfs that lies on top of it.
fn escaped(namespace: OverlayXattrs, what: &str) -> Vec<u8> {
    format!("{}overlay.{what}", namespace.prefix()).into_bytes()
}
