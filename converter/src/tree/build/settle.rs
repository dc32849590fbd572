//! What only the whole layer tells: links to what came after them, and whiteouts.

use super::{Builder, FOLLOW_MAX, id_of};
use crate::tree::{InodeId, Kind, NO_INODE, whiteout_device};
use std::collections::{HashMap, HashSet};

impl Builder {
    /// Gives pending links the inodes that came after them (L03). A link may lead to another pending link.
    pub(super) fn settle_links(&mut self) {
        let mut pending: Vec<usize> = (0..self.edges.len())
            .filter(|e| {
                let inode = self.edges[*e].inode;
                inode != NO_INODE && matches!(self.inodes[inode as usize].kind, Kind::PendingLink(_))
            })
            .collect();
        // Parents may themselves be links that were pending: one round for each such step, as few as for symbolic links.
        for _ in 0..FOLLOW_MAX {
            let leads: HashMap<InodeId, InodeId> =
                pending.iter().filter_map(|e| self.link_target(*e).map(|to| (self.edges[*e].inode, to))).collect();
            let starts = pending.iter().map(|e| self.edges[*e].inode);
            let ends = ends_of_chains(starts, &leads);
            let before = pending.len();
            pending.retain(|edge| {
                let inode = &mut self.edges[*edge].inode;
                *inode = ends.get(inode).copied().unwrap_or(*inode);
                matches!(self.inodes[*inode as usize].kind, Kind::PendingLink(_))
            });
            if pending.is_empty() || pending.len() == before {
                return;
            }
        }
    }

    /// What the pending link at `edge` is a name of, as far as the layer has it; that may be a pending link again.
    fn link_target(&self, edge: usize) -> Option<InodeId> {
        let Kind::PendingLink(target) = &self.inodes[self.edges[edge].inode as usize].kind else { return None };
        let components: Vec<&[u8]> = target.split(|b| *b == b'/').collect();
        let found = self.find(b"", &components).ok().flatten()?;
        (!self.inodes[found as usize].kind.is_directory()).then_some(found)
    }

    /// Turns collected whiteouts into names of one 0:0 device, and marks directories opaque that were removed and
    /// made again. Whiteouts under an opaque directory hide nothing and would show as ghosts (W06): they are dropped.
    pub(super) fn place_whiteouts(&mut self) -> Option<InodeId> {
        let whiteouts = std::mem::take(&mut self.whiteouts);
        let empty = if whiteouts.is_empty() { Vec::new() } else { self.without_contents() };
        let mut left = Vec::new();
        for edge in whiteouts {
            let name = self.name_of(&edge).to_vec();
            let existing = self.lookup(edge.directory, &name).map(|e| e as usize);
            match existing.map(|e| self.edges[e].inode) {
                None => left.push((edge, None)),
                // Nothing but whiteouts made it: what is to be removed there, is removed with it.
                Some(id) if empty[id as usize] => left.push((edge, existing)),
                Some(id) => {
                    if let Kind::Directory(d) = &mut self.inodes[id as usize].kind {
                        // The one below is gone: this is another one, which owes it neither attributes nor place.
                        (d.opaque, d.implied) = (true, false);
                    }
                }
            }
        }
        let hidden = if left.is_empty() { Vec::new() } else { self.in_opaque() };
        let mut whiteout = None;
        for (mut edge, existing) in left {
            if hidden[edge.directory as usize] {
                if let Some(existing) = existing {
                    self.edges[existing].inode = NO_INODE;
                }
                continue;
            }
            let name = self.name_of(&edge).to_vec();
            let twice = existing.is_none() && self.lookup(edge.directory, &name).is_some();
            if twice {
                continue;
            }
            let id = *whiteout.get_or_insert_with(|| {
                self.inodes.push(whiteout_device());
                id_of(self.inodes.len() - 1)
            });
            edge.inode = id;
            match existing {
                Some(existing) => self.edges[existing].inode = id,
                None => self.insert_edge(edge),
            }
        }
        whiteout
    }

    /// By inode: whether it is a directory without an entry of its own, in which nothing is but such directories.
    fn without_contents(&self) -> Vec<bool> {
        let mut empty: Vec<bool> =
            self.inodes.iter().map(|i| matches!(i.kind, Kind::Directory(d) if d.implied)).collect();
        let mut reached = vec![false; self.inodes.len()];
        for edge in self.edges.iter().filter(|e| e.inode != NO_INODE) {
            reached[edge.inode as usize] = true;
            if !empty[edge.inode as usize] {
                empty[edge.directory as usize] = false;
            }
        }
        // Directories come after their parents.
        for id in (1..self.inodes.len()).rev() {
            if let Kind::Directory(d) = &self.inodes[id].kind
                && reached[id]
                && !empty[id]
            {
                empty[d.parent as usize] = false;
            }
        }
        empty
    }

    /// By inode: whether it is an opaque directory or inside one. One pass, since directories come after their parents.
    fn in_opaque(&self) -> Vec<bool> {
        let mut hidden = vec![false; self.inodes.len()];
        for (id, inode) in self.inodes.iter().enumerate() {
            if let Kind::Directory(d) = &inode.kind {
                hidden[id] = d.opaque || hidden[d.parent as usize];
            }
        }
        hidden
    }
}

/// Where each chain of links ends that lead to each other: at an object, or at the link that leads out of the layer.
/// Links in a circle, and those that lead into one, stay as they are.
fn ends_of_chains(
    starts: impl Iterator<Item = InodeId>,
    leads: &HashMap<InodeId, InodeId>,
) -> HashMap<InodeId, InodeId> {
    let mut ends: HashMap<InodeId, InodeId> = HashMap::with_capacity(leads.len());
    let mut on_way = HashSet::new();
    for start in starts {
        let mut way = Vec::new();
        let mut at = start;
        let end = loop {
            if let Some(end) = ends.get(&at) {
                break Some(*end);
            }
            let Some(next) = leads.get(&at) else { break Some(at) };
            if !on_way.insert(at) {
                break None;
            }
            way.push(at);
            at = *next;
        };
        for id in way {
            on_way.remove(&id);
            ends.insert(id, end.unwrap_or(id));
        }
    }
    ends
}
