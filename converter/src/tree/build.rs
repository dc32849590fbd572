//! From entries in source order to a [`Tree`].
//!
//! The rules are those of extraction into an empty directory, whose later layers know nothing of it: an entry replaces
//! what had its path before (a directory over a directory keeps the contents), symbolic links among a path's parents
//! are followed inside the layer's own root, missing parents are made. Whiteouts are collected apart and placed at
//! the end, so that the order of entries does not matter (W01). [`crate::design`] has the reasons.

mod error;
mod path;
mod settle;

pub use error::TreeError;

use super::whiteout::{Meaning, meaning};
use super::xattrs::{SetId, XattrSets, unrepresentable};
use super::{Directory, Edge, Inode, InodeId, Kind, NO_INODE, ROOT, Tree, escaped};
use crate::entry::{Entry, EntryKind, Timestamp, Warning, Xattr, printable};
use crate::erofs::format::encode_device;
use crate::extent::FileData;
use crate::manifest::OverlayXattrs;
use hashbrown::HashTable;
use path::{components_of, split_path};
use std::hash::{BuildHasher as _, Hasher as _, RandomState};

/// Longest name of one path component, in bytes (`NAME_MAX`).
const NAME_MAX: usize = 255;
/// Longest text of a symbolic link, in bytes (`PATH_MAX` less the NUL).
const SYMLINK_MAX: usize = 4095;
/// Most symbolic links followed for one path, as the kernel's `MAXSYMLINKS`.
const FOLLOW_MAX: u32 = 40;

/// What building a tree can be told.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Whether `.wh.*` names are whiteouts (layers) or ordinary names (a plain directory).
    pub whiteouts: bool,
    /// Namespace for overlayfs' own attributes.
    pub overlay: OverlayXattrs,
    /// Most inodes in a layer.
    pub max_inodes: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { whiteouts: true, overlay: OverlayXattrs::Trusted, max_inodes: 1 << 23 }
    }
}

/// What the caller has to do with an entry's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placed {
    /// Store it; then give it to [`Builder::set_data`] for this inode.
    File(InodeId),
    /// There is none, or it belongs to nothing.
    Nothing,
}

/// What a layer without its lowers could not settle.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Open {
    /// Hard links to paths that the layer does not have: (inode of the pending link, target path).
    pub links: Vec<(InodeId, Box<[u8]>)>,
    /// Whether any directory, the root included, is there without an entry of its own, or the root is opaque.
    pub implied: bool,
}

/// Takes entries, makes a tree.
pub struct Builder {
    options: Options,
    inodes: Vec<Inode>,
    edges: Vec<Edge>,
    names: Vec<u8>,
    index: HashTable<u32>,
    hasher: RandomState,
    xattrs: XattrSets,
    whiteouts: Vec<Edge>,
    warnings: Warnings,
    /// Bytes of symbolic links and of pending hard links' targets.
    targets: u64,
    /// The parent part of the last path and where it led; forgotten when anything is replaced.
    last_parent: Option<(Vec<u8>, InodeId)>,
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder").field("inodes", &self.inodes.len()).finish_non_exhaustive()
    }
}

impl Builder {
    /// A layer with nothing but an implied root.
    #[must_use]
    pub fn new(options: Options) -> Self {
        Self {
            options,
            inodes: vec![implied_directory(ROOT)],
            edges: Vec::new(),
            names: Vec::new(),
            index: HashTable::new(),
            hasher: RandomState::new(),
            xattrs: XattrSets::default(),
            whiteouts: Vec::new(),
            warnings: Warnings::default(),
            targets: 0,
            last_parent: None,
        }
    }

    /// Adds one entry.
    ///
    /// # Errors
    /// When the entry cannot be part of any tree; the layer is then to be refused.
    pub fn entry(&mut self, mut entry: Entry) -> Result<Placed, TreeError> {
        let path = entry.path.clone();
        self.settle_owner(&mut entry);
        self.check_text(&path)?;
        let Some((parent, name)) = split_path(&path)? else {
            return self.root_entry(entry);
        };
        if self.options.whiteouts && self.whiteout_entry(&path, &parent, name)? {
            return Ok(Placed::Nothing);
        }
        let directory = self.directory_at(&path, &parent)?;
        if let EntryKind::HardLink { target } = &entry.kind {
            self.hard_link(&path, directory, name, target)?;
            return Ok(Placed::Nothing);
        }
        let existing = self.lookup(directory, name);
        if let EntryKind::Directory = entry.kind
            && let Some(id) = existing.map(|e| self.edges[e as usize].inode)
            && self.inodes[id as usize].kind.is_directory()
        {
            self.describe_directory(id, &path, entry);
            return Ok(Placed::Nothing);
        }
        let is_file = matches!(entry.kind, EntryKind::Regular { .. });
        let mut inode = self.new_inode(&path, directory, entry)?;
        if let Kind::Directory(made) = &mut inode.kind {
            // What it replaces had replaced what is below, a directory with all its contents perhaps.
            made.opaque = existing.is_some();
        }
        let id = self.push_inode(&path, inode)?;
        self.put_name(&path, directory, name, id, existing)?;
        let regular = matches!(self.inodes[id as usize].kind, Kind::Regular(_));
        Ok(if is_file && regular { Placed::File(id) } else { Placed::Nothing })
    }

    /// Says where the contents of `inode` went.
    pub fn set_data(&mut self, inode: InodeId, data: FileData) {
        self.inodes[inode as usize].kind = Kind::Regular(data);
    }

    /// Length of the inline xattr area that `inode` would have if none of its attributes were shared.
    #[must_use]
    pub fn xattr_area(&self, inode: InodeId) -> usize {
        crate::erofs::xattr::unshared_area(self.xattrs.get(self.inodes[inode as usize].xattrs))
    }

    /// What was odd so far.
    pub fn take_warnings(&mut self) -> Vec<Warning> {
        std::mem::take(&mut self.warnings).finish()
    }

    /// The tree, and what it leaves to the layers below.
    #[must_use]
    pub fn finish(mut self) -> (Tree, Open) {
        self.settle_links();
        let whiteout = self.place_whiteouts();
        let mut tree = Tree {
            inodes: self.inodes,
            edges: self.edges,
            names: self.names,
            xattrs: self.xattrs,
            whiteout,
            added: super::edit::Added::default(),
        };
        tree.sort();
        let open = tree.open();
        (tree, open)
    }

    /// What is kept until the end is bounded, however small its packed form.
    fn check_text(&self, path: &[u8]) -> Result<(), TreeError> {
        let limit = u64::from(self.options.max_inodes) * TEXT_PER_INODE;
        if self.names.len() as u64 + self.targets + self.xattrs.bytes() > limit {
            let what = "bytes of names, links and extended attributes";
            return Err(TreeError::TooMany { path: printable(path), what, limit });
        }
        Ok(())
    }

    fn root_entry(&mut self, entry: Entry) -> Result<Placed, TreeError> {
        match entry.kind {
            EntryKind::Directory => {
                let path = entry.path.clone();
                self.describe_directory(ROOT, &path, entry);
                Ok(Placed::Nothing)
            }
            _ if entry.path.is_empty() => Err(TreeError::EmptyName),
            _ => Err(TreeError::Root { path: printable(&entry.path) }),
        }
    }

    /// Handles every name with a whiteout's meaning; `true` when the entry is done with.
    fn whiteout_entry(&mut self, path: &[u8], parent: &[&[u8]], name: &[u8]) -> Result<bool, TreeError> {
        for component in parent {
            match meaning(component) {
                Meaning::Ordinary => {}
                Meaning::Bookkeeping => return Ok(true),
                _ => {
                    self.warnings.push(path, "is inside a whiteout; left out");
                    return Ok(true);
                }
            }
        }
        match meaning(name) {
            Meaning::Ordinary => return Ok(false),
            Meaning::Bookkeeping => {}
            Meaning::Invalid => return Err(TreeError::InvalidWhiteout { path: printable(path) }),
            Meaning::Opaque => {
                let id = self.directory_at(path, parent)?;
                if let Kind::Directory(d) = &mut self.inodes[id as usize].kind {
                    d.opaque = true;
                }
            }
            Meaning::Whiteout(hidden) => {
                let directory = self.directory_at(path, parent)?;
                let edge = self.make_edge(path, directory, hidden, NO_INODE)?;
                self.whiteouts.push(edge);
            }
        }
        Ok(true)
    }

    /// 4294967295 is no id to Linux, but "leave it as it is" to chown: so an extractor leaves such a file to root. In an
    /// image it would be a file that nobody may write or copy up.
    fn settle_owner(&mut self, entry: &mut Entry) {
        for id in [&mut entry.uid, &mut entry.gid] {
            if *id == u32::MAX {
                *id = 0;
                let message = "is owned by 4294967295, which is no id; given to 0, as extraction does";
                self.warnings.push(&entry.path, message);
            }
        }
    }

    fn describe_directory(&mut self, id: InodeId, path: &[u8], entry: Entry) {
        let xattrs = self.intern(path, entry.xattrs);
        let inode = &mut self.inodes[id as usize];
        inode.mode = entry.mode & 0o7777;
        inode.uid = entry.uid;
        inode.gid = entry.gid;
        inode.mtime = entry.mtime;
        inode.xattrs = xattrs;
        if let Kind::Directory(d) = &mut inode.kind {
            d.implied = false;
        }
    }

    fn new_inode(&mut self, path: &[u8], parent: InodeId, entry: Entry) -> Result<Inode, TreeError> {
        let device = |major, minor| {
            encode_device(major, minor).ok_or_else(|| TreeError::Device { path: printable(path), major, minor })
        };
        let mut mode = entry.mode & 0o7777;
        let mut xattrs = self.intern(path, entry.xattrs);
        let kind = match entry.kind {
            EntryKind::Regular { .. } => Kind::Regular(FileData::Empty),
            EntryKind::Directory => {
                Kind::Directory(Directory { parent, opaque: false, implied: false, first: 0, count: 0 })
            }
            EntryKind::Symlink { target } => {
                if target.is_empty() || target.len() > SYMLINK_MAX {
                    return Err(TreeError::SymlinkLength { path: printable(path), len: target.len() });
                }
                // Linux has no permissions on symbolic links; what a tar says is never seen after extraction.
                mode = 0o777;
                self.targets += target.len() as u64;
                Kind::Symlink(target.into_boxed_slice())
            }
            EntryKind::CharDevice { major: 0, minor: 0 } => {
                xattrs = self.escape_whiteout_device(path, xattrs);
                Kind::Regular(FileData::Empty)
            }
            EntryKind::CharDevice { major, minor } => Kind::CharDevice(device(major, minor)?),
            EntryKind::BlockDevice { major, minor } => Kind::BlockDevice(device(major, minor)?),
            EntryKind::Fifo => Kind::Fifo,
            EntryKind::Socket => Kind::Socket,
            EntryKind::HardLink { target } => Kind::PendingLink(target.into_boxed_slice()),
        };
        Ok(Inode { kind, mode, uid: entry.uid, gid: entry.gid, mtime: entry.mtime, xattrs })
    }

    /// A real 0:0 device would be a whiteout of ours (X03). It becomes the kernel's other form of a whiteout, an empty
    /// file with an xattr, escaped once: what an overlayfs *inside* the sandbox then takes for a whiteout again
    /// ([`Tree::mark_for_overlay`] marks the directory).
    fn escape_whiteout_device(&mut self, path: &[u8], xattrs: SetId) -> SetId {
        self.warnings.push(
            path,
            "is a 0:0 character device, which overlayfs would take for a whiteout; kept as an empty file marked with \
             the overlay.whiteout attribute",
        );
        self.xattrs.with(xattrs, &escaped(self.options.overlay, "whiteout"), b"")
    }

    /// Escapes overlayfs' own attributes, so that they mean in the sandbox what they meant in the source, and drops
    /// those that EROFS has no place for.
    fn intern(&mut self, path: &[u8], xattrs: Vec<Xattr>) -> SetId {
        let prefix = self.options.overlay.prefix().as_bytes();
        let mut kept = Vec::with_capacity(xattrs.len());
        let mut area = 0;
        for mut xattr in xattrs {
            if let Some(rest) = xattr.name.strip_prefix(prefix) {
                xattr.name = [prefix, b"overlay.", rest].concat();
            }
            area += 8 + xattr.name.len() + xattr.value.len();
            let problem = unrepresentable(&xattr).or((area > MAX_XATTR_AREA).then_some("all together exceed 64 KiB"));
            match problem {
                None => kept.push(xattr),
                Some(problem) => self
                    .warnings
                    .push(path, format!("extended attribute `{}` left out: {problem}", printable(&xattr.name))),
            }
        }
        self.xattrs.intern(kept)
    }

    fn hard_link(&mut self, path: &[u8], directory: InodeId, name: &[u8], target: &[u8]) -> Result<(), TreeError> {
        let components = components_of(path, target, "its link target")?;
        let existing = self.lookup(directory, name);
        match self.find(path, &components)? {
            // The same name again (L01), or a second link where the first already is.
            Some(id) if existing.is_some_and(|e| self.edges[e as usize].inode == id) => Ok(()),
            Some(id) if !self.inodes[id as usize].kind.is_directory() => {
                self.put_name(path, directory, name, id, existing)
            }
            Some(id) if id == ROOT || !matches!(self.inodes[id as usize].kind, Kind::Directory(d) if d.implied) => {
                Err(TreeError::LinkToDirectory { path: printable(path), target: printable(target) })
            }
            // Nothing, or a directory that is only implied: a lower layer may have a symbolic link there.
            _ => {
                self.targets += target.len() as u64;
                let kind = Kind::PendingLink(components.join(&b'/').into_boxed_slice());
                let inode = Inode { kind, ..implied_directory(directory) };
                let id = self.push_inode(path, inode)?;
                self.put_name(path, directory, name, id, existing)
            }
        }
    }

    fn push_inode(&mut self, path: &[u8], inode: Inode) -> Result<InodeId, TreeError> {
        if self.inodes.len() >= self.options.max_inodes as usize {
            let limit = u64::from(self.options.max_inodes);
            return Err(TreeError::TooMany { path: printable(path), what: "inodes", limit });
        }
        self.inodes.push(inode);
        Ok(id_of(self.inodes.len() - 1))
    }

    fn put_name(
        &mut self,
        path: &[u8],
        directory: InodeId,
        name: &[u8],
        inode: InodeId,
        existing: Option<u32>,
    ) -> Result<(), TreeError> {
        if let Some(edge) = existing {
            self.edges[edge as usize].inode = inode;
            self.last_parent = None;
            return Ok(());
        }
        let edge = self.make_edge(path, directory, name, inode)?;
        self.insert_edge(edge);
        Ok(())
    }

    fn make_edge(&mut self, path: &[u8], directory: InodeId, name: &[u8], inode: InodeId) -> Result<Edge, TreeError> {
        let problem = if name.len() > NAME_MAX {
            Some("is longer than 255 bytes")
        } else if name.contains(&0) {
            Some("holds a NUL")
        } else {
            None
        };
        if let Some(what) = problem {
            return Err(TreeError::Name { path: printable(path), name: printable(name), what });
        }
        let too_many = |what, limit| TreeError::TooMany { path: printable(path), what, limit };
        let name_start =
            u32::try_from(self.names.len()).map_err(|_| too_many("bytes of names", u64::from(u32::MAX)))?;
        // Every name costs memory, hard links included, which make no inode.
        let limit = u64::from(self.options.max_inodes) * 4;
        if self.edges.len() as u64 + self.whiteouts.len() as u64 >= limit {
            return Err(too_many("names", limit));
        }
        self.names.extend_from_slice(name);
        let name_len = u8::try_from(name.len()).unwrap_or(u8::MAX);
        Ok(Edge { directory, inode, name_start, name_len })
    }

    fn insert_edge(&mut self, edge: Edge) {
        let hash = self.hash(edge.directory, self.name_of(&edge));
        let index = id_of(self.edges.len());
        self.edges.push(edge);
        let (edges, names, hasher) = (&self.edges, &self.names, &self.hasher);
        self.index.insert_unique(hash, index, |e| {
            let edge = &edges[*e as usize];
            hash_name(hasher, edge.directory, &names[edge.name_start as usize..][..edge.name_len as usize])
        });
    }

    fn lookup(&self, directory: InodeId, name: &[u8]) -> Option<u32> {
        let hash = self.hash(directory, name);
        self.index
            .find(hash, |e| {
                let edge = &self.edges[*e as usize];
                edge.directory == directory && self.name_of(edge) == name
            })
            .copied()
    }

    fn hash(&self, directory: InodeId, name: &[u8]) -> u64 {
        hash_name(&self.hasher, directory, name)
    }

    fn name_of(&self, edge: &Edge) -> &[u8] {
        &self.names[edge.name_start as usize..][..edge.name_len as usize]
    }
}

/// Bytes of names, links and distinct sets of attributes that a layer may have for each inode that it may have.
const TEXT_PER_INODE: u64 = 32;

/// Most warnings that are kept, and most bytes of them.
const WARNINGS_MAX: usize = 1000;
const WARNINGS_BYTES_MAX: usize = 1 << 20;

/// Warnings, the first of them.
#[derive(Default)]
struct Warnings {
    kept: Vec<Warning>,
    bytes: usize,
    more: u64,
}

impl Warnings {
    fn push(&mut self, path: &[u8], message: impl Into<String>) {
        if self.kept.len() >= WARNINGS_MAX || self.bytes >= WARNINGS_BYTES_MAX {
            self.more += 1;
            return;
        }
        let warning = Warning::new(path, message);
        self.bytes += warning.entry.len() + warning.message.len();
        self.kept.push(warning);
    }

    fn finish(mut self) -> Vec<Warning> {
        if self.more > 0 {
            self.kept.push(Warning::new(b"", format!("{} more warnings like these", self.more)));
        }
        self.kept
    }
}

/// Most bytes of extended attributes on one inode, as Linux' `XATTR_LIST_MAX` and value limits make sensible.
const MAX_XATTR_AREA: usize = 64 << 10;

fn hash_name(hasher: &RandomState, directory: InodeId, name: &[u8]) -> u64 {
    let mut state = hasher.build_hasher();
    state.write_u32(directory);
    state.write(name);
    state.finish()
}

fn id_of(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(NO_INODE)
}

/// What a directory is that no entry describes: 0755, owned by root, 1970 (T10).
fn implied_directory(parent: InodeId) -> Inode {
    Inode {
        kind: Kind::Directory(Directory { parent, opaque: false, implied: true, first: 0, count: 0 }),
        mode: 0o755,
        uid: 0,
        gid: 0,
        mtime: Timestamp::default(),
        xattrs: SetId::EMPTY,
    }
}

impl Tree {
    /// What the layers below have to settle.
    #[must_use]
    pub fn open(&self) -> Open {
        let mut open = Open::default();
        let mut seen = std::collections::HashSet::new();
        self.visit(|_, id| match &self.inodes[id as usize].kind {
            Kind::PendingLink(target) if seen.insert(id) => open.links.push((id, target.clone())),
            Kind::Directory(d) => open.implied |= d.implied || (id == ROOT && d.opaque),
            _ => {}
        });
        open
    }
}

#[cfg(test)]
mod tests;
