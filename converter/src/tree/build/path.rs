//! From a path of the source to a directory or an inode of the tree, inside the layer's own root.

use super::{Builder, FOLLOW_MAX, TreeError, implied_directory};
use crate::entry::printable;
use crate::tree::{InodeId, Kind, ROOT};
use std::collections::VecDeque;

impl Builder {
    /// The directory at `components`, following symbolic links inside the root and making what is missing.
    pub(super) fn directory_at(&mut self, path: &[u8], components: &[&[u8]]) -> Result<InodeId, TreeError> {
        let joined = components.join(&b'/');
        if let Some((last, id)) = &self.last_parent
            && *last == joined
        {
            return Ok(*id);
        }
        let mut todo: VecDeque<Vec<u8>> = components.iter().map(|c| c.to_vec()).collect();
        let mut current = ROOT;
        let mut followed = 0;
        while let Some(component) = todo.pop_front() {
            if component == b".." {
                current = self.parent_of(current);
                continue;
            }
            let Some(edge) = self.lookup(current, &component) else {
                let id = self.push_inode(path, implied_directory(current))?;
                self.put_name(path, current, &component, id, None)?;
                current = id;
                continue;
            };
            let inode = self.edges[edge as usize].inode;
            match &self.inodes[inode as usize].kind {
                Kind::Directory(_) => current = inode,
                Kind::Symlink(target) => {
                    followed += 1;
                    if followed > FOLLOW_MAX {
                        return Err(TreeError::SymlinkLoop { path: printable(path) });
                    }
                    if target.starts_with(b"/") {
                        current = ROOT;
                    }
                    for part in target.rsplit(|b| *b == b'/').filter(|p| !p.is_empty() && *p != b".") {
                        todo.push_front(part.to_vec());
                    }
                }
                _ => {
                    return Err(TreeError::ParentNotDirectory { path: printable(path), parent: printable(&component) });
                }
            }
        }
        self.last_parent = Some((joined, current));
        Ok(current)
    }

    /// The inode at `components`; parents that are symbolic links are followed, the last component is not.
    pub(super) fn find(&self, path: &[u8], components: &[&[u8]]) -> Result<Option<InodeId>, TreeError> {
        let mut todo: VecDeque<&[u8]> = components.iter().copied().collect();
        let mut current = ROOT;
        let mut followed = 0;
        while let Some(component) = todo.pop_front() {
            if component == b".." {
                current = self.parent_of(current);
                continue;
            }
            let Some(edge) = self.lookup(current, component) else {
                return Ok(None);
            };
            let inode = self.edges[edge as usize].inode;
            match &self.inodes[inode as usize].kind {
                _ if todo.is_empty() => return Ok(Some(inode)),
                Kind::Directory(_) => current = inode,
                Kind::Symlink(target) => {
                    followed += 1;
                    if followed > FOLLOW_MAX {
                        return Err(TreeError::SymlinkLoop { path: printable(path) });
                    }
                    if target.starts_with(b"/") {
                        current = ROOT;
                    }
                    for part in target.rsplit(|b| *b == b'/').filter(|p| !p.is_empty() && *p != b".") {
                        todo.push_front(part);
                    }
                }
                _ => return Ok(None),
            }
        }
        Ok(Some(current))
    }

    pub(super) fn parent_of(&self, directory: InodeId) -> InodeId {
        match &self.inodes[directory as usize].kind {
            Kind::Directory(d) => d.parent,
            _ => ROOT,
        }
    }
}

pub(super) fn components_of<'p>(path: &[u8], text: &'p [u8], what: &'static str) -> Result<Vec<&'p [u8]>, TreeError> {
    let components: Vec<&[u8]> = text.split(|b| *b == b'/').filter(|c| !c.is_empty() && *c != b".").collect();
    if components.contains(&&b".."[..]) {
        return Err(TreeError::Escapes { path: printable(path), what });
    }
    Ok(components)
}

/// A path as (parents, name), or `None` for the root.
#[expect(clippy::type_complexity, reason = "named nowhere else")]
pub(super) fn split_path(path: &[u8]) -> Result<Option<(Vec<&[u8]>, &[u8])>, TreeError> {
    let mut components = components_of(path, path, "its path")?;
    Ok(components.pop().map(|name| (components, name)))
}
