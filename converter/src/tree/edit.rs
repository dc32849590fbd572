//! Changes to a finished tree, for what [`crate::stack`] finds out. Names that are added or removed show in
//! [`Tree::names_of`] after [`Tree::sort`].

use super::{Directory, Edge, Inode, InodeId, Kind, NO_INODE, ROOT, SetId, Tree, whiteout_device};
use crate::entry::{Timestamp, Xattr};
use std::collections::{BTreeSet, HashMap, HashSet};

/// Names that are not sorted in yet.
#[derive(Debug, Default)]
pub(super) struct Added {
    edges: Vec<Edge>,
    index: HashMap<(InodeId, Box<[u8]>), InodeId>,
}

impl Tree {
    /// The inode that `name` of `directory` leads to.
    #[must_use]
    pub fn child(&self, directory: InodeId, name: &[u8]) -> Option<InodeId> {
        let range = self.range(directory);
        let edges = &self.edges[range];
        match edges.binary_search_by(|edge| self.name(edge).cmp(name)) {
            Ok(at) if edges[at].inode != NO_INODE => Some(edges[at].inode),
            _ if self.added.index.is_empty() => None,
            _ => self.added.index.get(&(directory, name.into())).copied(),
        }
    }

    /// The inode at `path`, whose components are names of this layer; no symbolic link is followed.
    #[must_use]
    pub(crate) fn at(&self, path: &[u8]) -> Option<InodeId> {
        path.split(|b| *b == b'/').filter(|c| !c.is_empty()).try_fold(ROOT, |at, name| self.child(at, name))
    }

    /// Whether `id` is a directory that hides what lower layers have in it.
    #[must_use]
    pub(crate) fn is_opaque(&self, id: InodeId) -> bool {
        matches!(self.inodes[id as usize].kind, Kind::Directory(Directory { opaque: true, .. }))
    }

    /// Whether `id` is a directory that nothing described.
    #[must_use]
    pub(crate) fn is_implied(&self, id: InodeId) -> bool {
        matches!(self.inodes[id as usize].kind, Kind::Directory(Directory { implied: true, .. }))
    }

    /// Hides what lower layers have in their roots under these names: whiteouts where this layer has nothing, and its
    /// own directories become opaque.
    pub(crate) fn hide_in_root(&mut self, names: &BTreeSet<Vec<u8>>) {
        for name in names {
            match self.child(ROOT, name) {
                Some(id) => {
                    if let Kind::Directory(directory) = &mut self.inodes[id as usize].kind {
                        directory.opaque = true;
                    }
                }
                None => {
                    let whiteout = self.whiteout_inode();
                    self.add_name(ROOT, name, whiteout);
                }
            }
        }
        self.sort();
    }

    fn whiteout_inode(&mut self) -> InodeId {
        if let Some(id) = self.whiteout {
            return id;
        }
        let id = u32::try_from(self.inodes.len()).expect("fewer than 2^32 inodes");
        self.inodes.push(whiteout_device());
        self.whiteout = Some(id);
        id
    }

    /// The set of `xattrs`, for an inode of this tree.
    pub(crate) fn intern(&mut self, xattrs: Vec<Xattr>) -> SetId {
        self.xattrs.intern(xattrs)
    }

    /// Puts `inode` into `directory` as `name`, which it does not have yet.
    ///
    /// # Panics
    /// When the names exceed 4 GiB: they came from a tree that was checked for that, and a lower layer's.
    pub(crate) fn add_name(&mut self, directory: InodeId, name: &[u8], inode: InodeId) {
        let name_start = u32::try_from(self.names.len()).expect("names of two checked trees");
        let name_len = u8::try_from(name.len()).expect("a name of a checked tree");
        self.names.extend_from_slice(name);
        self.added.edges.push(Edge { directory, inode, name_start, name_len });
        self.added.index.insert((directory, name.into()), inode);
    }

    /// Makes a directory without an entry of its own.
    ///
    /// # Panics
    /// When there are 2^32 inodes.
    pub(crate) fn add_directory(&mut self, parent: InodeId, name: &[u8]) -> InodeId {
        let id = self.new_directory(parent);
        self.add_name(parent, name, id);
        id
    }

    fn new_directory(&mut self, parent: InodeId) -> InodeId {
        let id = u32::try_from(self.inodes.len()).expect("fewer than 2^32 inodes");
        self.inodes.push(Inode {
            kind: Kind::Directory(Directory { parent, implied: true, ..Directory::default() }),
            mode: 0o755,
            uid: 0,
            gid: 0,
            mtime: Timestamp::default(),
            xattrs: SetId::EMPTY,
        });
        id
    }

    /// Sorts names, and tells every directory which are its own.
    pub(crate) fn sort(&mut self) {
        let added = std::mem::take(&mut self.added);
        self.edges.extend(added.edges);
        self.edges.retain(|e| e.inode != NO_INODE);
        let names = &self.names;
        let name = |e: &Edge| &names[e.name_start as usize..][..e.name_len as usize];
        self.edges.sort_unstable_by(|a, b| a.directory.cmp(&b.directory).then_with(|| name(a).cmp(name(b))));
        for inode in &mut self.inodes {
            if let Kind::Directory(d) = &mut inode.kind {
                (d.first, d.count) = (0, 0);
            }
        }
        let mut start = 0;
        for group in self.edges.chunk_by(|a, b| a.directory == b.directory) {
            if let Kind::Directory(d) = &mut self.inodes[group[0].directory as usize].kind {
                // There are fewer than 2^32 names: each has its own place among less than 4 GiB of them.
                (d.first, d.count) =
                    (u32::try_from(start).unwrap_or(u32::MAX), u32::try_from(group.len()).unwrap_or(u32::MAX));
            }
            start += group.len();
        }
    }

    /// Takes out every name for which `remove(path, kind of its inode)` says so.
    pub(crate) fn remove_names(&mut self, mut remove: impl FnMut(&[u8], &Kind) -> bool) {
        let mut gone: HashSet<InodeId> = HashSet::new();
        self.walk(|path, id| {
            if remove(path, &self.inodes[id as usize].kind) {
                gone.insert(id);
            }
        });
        if !gone.is_empty() {
            self.edges.iter_mut().filter(|e| gone.contains(&e.inode)).for_each(|e| e.inode = NO_INODE);
            self.sort();
        }
    }

    /// Takes out directories with all that is in them.
    pub(crate) fn remove_directories(&mut self, directories: &HashSet<InodeId>) {
        self.edges.iter_mut().filter(|e| directories.contains(&e.inode)).for_each(|e| e.inode = NO_INODE);
        self.sort();
    }

    /// Lets every name of a key lead to its value instead.
    pub(crate) fn replace_inodes(&mut self, same: &HashMap<InodeId, InodeId>) {
        for edge in self.edges.iter_mut().chain(&mut self.added.edges) {
            if let Some(id) = same.get(&edge.inode) {
                edge.inode = *id;
            }
        }
    }

    /// By inode: whether a directory above it is opaque, so that nothing of lower layers shows at its place.
    #[must_use]
    pub(crate) fn hidden_from_below(&self) -> Vec<bool> {
        let mut hidden = vec![false; self.inodes.len()];
        self.visit(|_, id| {
            if let Kind::Directory(directory) = &self.inodes[id as usize].kind
                && id != ROOT
                && let Kind::Directory(parent) = &self.inodes[directory.parent as usize].kind
            {
                hidden[id as usize] = parent.opaque || hidden[directory.parent as usize];
            }
        });
        hidden
    }

    /// The directories that have no entry of their own and hold nothing but whiteouts, however deep.
    #[must_use]
    pub(crate) fn directories_of_whiteouts(&self) -> HashSet<InodeId> {
        let mut directories = Vec::new();
        self.visit(|_, id| {
            if self.inodes[id as usize].kind.is_directory() {
                directories.push(id);
            }
        });
        let mut only: HashSet<InodeId> = HashSet::new();
        // Contents come after their directory in tree order.
        for id in directories.into_iter().rev() {
            let Kind::Directory(directory) = &self.inodes[id as usize].kind else { continue };
            if directory.implied
                && self.names_of(id).all(|(_, child)| Some(child) == self.whiteout || only.contains(&child))
            {
                only.insert(id);
            }
        }
        only
    }

    /// Moves what is in the directory `from` to `to`, making directories there as needed, and takes `from` out. A name
    /// that is there already stays; two directories become one. Returns the paths that were taken, or `None`, having
    /// done nothing, when something else is in the way.
    pub(crate) fn move_contents(&mut self, from: &[u8], to: &[Vec<u8>]) -> Option<Vec<Vec<u8>>> {
        let mut source = ROOT;
        let mut parent = ROOT;
        for component in from.split(|b| *b == b'/') {
            parent = source;
            let Some(child) = self.child(source, component) else { return Some(Vec::new()) };
            source = child;
        }
        let mut target = ROOT;
        for component in to {
            target = match self.child(target, component) {
                Some(child) if self.inodes[child as usize].kind.is_directory() => child,
                // It is removed, and made again by what is put there.
                Some(child) if Some(child) == self.whiteout => {
                    let made = self.new_directory(target);
                    self.rename_to(target, component, made);
                    self.hide_below(made);
                    made
                }
                Some(_) => return None,
                None => self.add_directory(target, component),
            };
        }
        if target == source {
            return Some(Vec::new());
        }
        self.detach(parent, source);
        Some(self.merge_into(source, target, to.join(&b'/')))
    }

    /// Returns the paths that both have, and that are not both directories.
    fn merge_into(&mut self, source: InodeId, target: InodeId, path: Vec<u8>) -> Vec<Vec<u8>> {
        let mut taken = Vec::new();
        let mut todo = vec![(source, target, path)];
        while let Some((source, target, path)) = todo.pop() {
            let path_of = |name: &[u8]| if path.is_empty() { name.to_vec() } else { [&path, &b"/"[..], name].concat() };
            let names: Vec<(Vec<u8>, InodeId)> = self.names_of(source).map(|(n, id)| (n.to_vec(), id)).collect();
            self.merge_attributes(source, target);
            for (name, id) in names {
                match self.child(target, &name) {
                    None => {
                        self.detach(source, id);
                        self.add_name(target, &name, id);
                        if let Kind::Directory(directory) = &mut self.inodes[id as usize].kind {
                            directory.parent = target;
                        }
                    }
                    Some(there)
                        if self.inodes[there as usize].kind.is_directory()
                            && self.inodes[id as usize].kind.is_directory() =>
                    {
                        todo.push((id, there, path_of(&name)));
                    }
                    // A whiteout acts on lower layers only: what this layer has stays, and hides them.
                    Some(there) if Some(there) == self.whiteout => {
                        self.detach(source, id);
                        self.rename_to(target, &name, id);
                        if let Kind::Directory(directory) = &mut self.inodes[id as usize].kind {
                            directory.parent = target;
                        }
                        self.hide_below(id);
                    }
                    Some(there) if Some(id) == self.whiteout => self.hide_below(there),
                    // The same inode under both paths.
                    Some(there) if there == id => {}
                    Some(_) => taken.push(path_of(&name)),
                }
            }
        }
        taken
    }

    /// What one directory is of two that become one: the one with an entry describes it.
    fn merge_attributes(&mut self, source: InodeId, target: InodeId) {
        let from = self.inodes[source as usize].clone();
        let into = &mut self.inodes[target as usize];
        let (Kind::Directory(from_directory), Kind::Directory(directory)) = (&from.kind, &mut into.kind) else {
            return;
        };
        directory.opaque |= from_directory.opaque;
        if directory.implied && !from_directory.implied {
            directory.implied = false;
            (into.mode, into.uid, into.gid) = (from.mode, from.uid, from.gid);
            (into.mtime, into.xattrs) = (from.mtime, from.xattrs);
        }
    }

    /// Lets a directory hide whatever lower layers have at its path; nothing for other kinds.
    fn hide_below(&mut self, id: InodeId) {
        if let Kind::Directory(directory) = &mut self.inodes[id as usize].kind {
            (directory.opaque, directory.implied) = (true, false);
        }
    }

    /// Lets `name` of `directory`, which is there, lead to `inode`.
    fn rename_to(&mut self, directory: InodeId, name: &[u8], inode: InodeId) {
        let range = self.range(directory);
        let edges = &self.edges[range.clone()];
        match edges.binary_search_by(|edge| self.name(edge).cmp(name)) {
            Ok(at) if edges[at].inode != NO_INODE => self.edges[range.start + at].inode = inode,
            _ => {
                let key = (directory, Box::from(name));
                let old = self.added.index.insert(key, inode);
                let (names, edges) = (&self.names, &mut self.added.edges);
                let same = |e: &&mut Edge| {
                    e.directory == directory
                        && Some(e.inode) == old
                        && names[e.name_start as usize..][..e.name_len as usize] == *name
                };
                edges.iter_mut().filter(same).for_each(|e| e.inode = inode);
            }
        }
    }

    /// Takes out whiteouts in or below opaque directories, where they hide nothing and would be listed (W06).
    pub(crate) fn remove_idle_whiteouts(&mut self) {
        let Some(whiteout) = self.whiteout else { return };
        let hidden = self.hidden_from_below();
        let opaque = |id: InodeId| matches!(self.inodes[id as usize].kind, Kind::Directory(d) if d.opaque);
        let idle: Vec<usize> = (0..self.edges.len())
            .filter(|at| {
                let edge = &self.edges[*at];
                edge.inode == whiteout && (hidden[edge.directory as usize] || opaque(edge.directory))
            })
            .collect();
        if !idle.is_empty() {
            idle.into_iter().for_each(|at| self.edges[at].inode = NO_INODE);
            self.sort();
        }
    }

    fn detach(&mut self, directory: InodeId, inode: InodeId) {
        let range = self.range(directory);
        self.edges[range].iter_mut().filter(|e| e.inode == inode).for_each(|e| e.inode = NO_INODE);
    }
}

#[cfg(test)]
mod tests;
