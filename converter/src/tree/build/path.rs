//! From a path of the source to a directory or an inode of the tree, inside the layer's own root.

use super::{Builder, FOLLOW_MAX, TreeError, implied_directory};
use crate::entry::printable;
use crate::tree::{InodeId, Kind, ROOT};
use std::collections::VecDeque;

/// A path that is being walked.
struct Way {
    /// Where it has come to.
    at: InodeId,
    /// The components ahead.
    todo: VecDeque<Vec<u8>>,
    followed: u32,
}

/// Where a walk stops.
enum Stop {
    /// At its end.
    At(InodeId),
    /// Before a name that is not there.
    Missing(Vec<u8>),
    /// Before something that has nothing below it.
    Blocked(Vec<u8>),
}

impl Way {
    fn new(components: &[&[u8]]) -> Self {
        Self { at: ROOT, todo: components.iter().map(|c| c.to_vec()).collect(), followed: 0 }
    }

    /// Puts a symbolic link's text before what is ahead.
    fn follow(&mut self, target: &[u8], path: &[u8]) -> Result<(), TreeError> {
        self.followed += 1;
        if self.followed > FOLLOW_MAX {
            return Err(TreeError::SymlinkLoop { path: printable(path) });
        }
        if target.starts_with(b"/") {
            self.at = ROOT;
        }
        for part in target.rsplit(|b| *b == b'/').filter(|p| !p.is_empty() && *p != b".") {
            self.todo.push_front(part.to_vec());
        }
        Ok(())
    }
}

impl Builder {
    /// Walks as far as the tree goes, following symbolic links inside the root; what the last component names is not
    /// followed when `keep_last`.
    fn walk(&self, way: &mut Way, path: &[u8], keep_last: bool) -> Result<Stop, TreeError> {
        while let Some(component) = way.todo.pop_front() {
            if component == b".." {
                way.at = self.parent_of(way.at);
                continue;
            }
            let Some(edge) = self.lookup(way.at, &component) else { return Ok(Stop::Missing(component)) };
            let inode = self.edges[edge as usize].inode;
            match &self.inodes[inode as usize].kind {
                _ if keep_last && way.todo.is_empty() => return Ok(Stop::At(inode)),
                Kind::Directory(_) => way.at = inode,
                Kind::Symlink(target) => way.follow(target, path)?,
                _ => return Ok(Stop::Blocked(component)),
            }
        }
        Ok(Stop::At(way.at))
    }

    /// The directory at `components`, made with its parents where it is missing.
    pub(super) fn directory_at(&mut self, path: &[u8], components: &[&[u8]]) -> Result<InodeId, TreeError> {
        let joined = components.join(&b'/');
        if let Some((last, id)) = &self.last_parent
            && *last == joined
        {
            return Ok(*id);
        }
        let mut way = Way::new(components);
        loop {
            match self.walk(&mut way, path, false)? {
                Stop::At(directory) => {
                    self.last_parent = Some((joined, directory));
                    return Ok(directory);
                }
                Stop::Missing(name) => {
                    let id = self.push_inode(path, implied_directory(way.at))?;
                    self.put_name(path, way.at, &name, id, None)?;
                    way.at = id;
                }
                Stop::Blocked(name) => {
                    return Err(TreeError::ParentNotDirectory { path: printable(path), parent: printable(&name) });
                }
            }
        }
    }

    /// The inode at `components`; parents that are symbolic links are followed, the last component is not.
    pub(super) fn find(&self, path: &[u8], components: &[&[u8]]) -> Result<Option<InodeId>, TreeError> {
        match self.walk(&mut Way::new(components), path, true)? {
            Stop::At(inode) => Ok(Some(inode)),
            Stop::Missing(_) | Stop::Blocked(_) => Ok(None),
        }
    }

    fn parent_of(&self, directory: InodeId) -> InodeId {
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
