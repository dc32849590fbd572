//! Hard links whose target only a lower layer has: those that can be made once that layer is merged in.
//!
//! A layer that was converted alone lists them in the manifest ([`Unresolved`]) and lacks their names. Where a layer
//! below it in the merge has the target, the name becomes one more name of that inode. Where none has, and none hides
//! it, the link stays on the list: layers further down may have it.

use super::plan::{Fault, How, Layer, PlanError};
use crate::entry::printable;
use crate::erofs::format::FileType;
use crate::erofs::read::Image;
use crate::manifest::Unresolved;
use crate::read_at::ReadAt;
use crate::stack::below::{Above, Below, Found};
use hashbrown::HashMap;
use std::collections::HashSet;

/// What a name that is not in its layer's image leads to.
#[derive(Debug)]
pub(super) enum Injected {
    /// What a layer has: its position, the inode, its type.
    Resolved(u16, u64, FileType),
    /// Not known yet: position in the layer's list.
    Open(usize),
}

/// A name and what it leads to.
type Name = (Vec<u8>, Injected);
/// A name that a link made: its layer, and its inode.
type Made = (usize, (u16, u64, FileType));

/// All links of all layers.
#[derive(Debug, Default)]
pub(super) struct Links<'i> {
    lists: Vec<&'i Unresolved>,
    /// By layer and directory: names and what they lead to.
    names: HashMap<(usize, u64), Vec<Name>>,
    /// Inodes that got names.
    targets: HashSet<(u16, u64)>,
}

impl Links<'_> {
    /// Whether the inode has more names than its own layer gives it.
    pub(super) fn is_target(&self, layer: u16, nid: u64) -> bool {
        !self.targets.is_empty() && self.targets.contains(&(layer, nid))
    }

    /// Whether the directory has names that its image lacks.
    pub(super) fn is_in(&self, layer: usize, directory: u64) -> bool {
        !self.names.is_empty() && self.names.contains_key(&(layer, directory))
    }

    /// Those names.
    pub(super) fn of(&self, layer: usize, directory: u64) -> &[(Vec<u8>, Injected)] {
        if self.names.is_empty() { &[] } else { self.names.get(&(layer, directory)).map_or(&[], Vec::as_slice) }
    }

    /// A link of a layer's list as it is written there.
    pub(super) fn open(&self, layer: usize, position: usize) -> (String, String) {
        self.lists[layer].links[position].clone()
    }
}

type Own<'i, R> = Below<&'i Image<R>>;

/// Looks for the targets of all links.
pub(super) fn resolve<'i, R: ReadAt>(layers: &[Layer<'i, R>], how: How) -> Result<Links<'i>, PlanError> {
    let lists: Vec<&Unresolved> = layers.iter().map(|layer| layer.unresolved).collect();
    let mut links = Links { lists, ..Links::default() };
    // Links of lower layers by path, the topmost last.
    let mut made: HashMap<Vec<u8>, Vec<Made>> = HashMap::new();
    for (number, layer) in layers.iter().enumerate() {
        if layer.unresolved.links.is_empty() {
            continue;
        }
        let about = |path: &[u8]| {
            let path = printable(path);
            move |fault: Fault| PlanError { layer: number, path, fault }
        };
        let images = |range: std::ops::Range<usize>| -> Result<Own<'i, R>, Fault> {
            Ok(Below::new(layers[range].iter().map(|layer| layer.image).collect(), how.overlay)?)
        };
        let own = images(number..number + 1).map_err(about(b""))?;
        let below = images(0..number).map_err(about(b""))?;
        for (position, (path, target)) in layer.unresolved.links.iter().enumerate() {
            let bytes = |text: &str| {
                let bytes = hex::decode(text).ok().filter(|bytes| !bytes.is_empty());
                bytes.ok_or_else(|| about(b"")(Fault::Unresolved(format!("`{text}` is not a path in hex"))))
            };
            let (path, target) = (bytes(path)?, bytes(target)?);
            let fail = about(&path);
            let found = one(number, &own, &below, &made, &target).and_then(|found| {
                let (directory, name) = place(&own, &path)?;
                Ok((found, directory, name))
            });
            let (found, directory, name) = found.map_err(fail)?;
            let injected = match found {
                Some((layer, nid, file_type)) => {
                    links.targets.insert((layer, nid));
                    made.entry(path).or_default().push((number, (layer, nid, file_type)));
                    Injected::Resolved(layer, nid, file_type)
                }
                None if how.bottom => return Err(about(&path)(Fault::DanglingLink(printable(&target)))),
                None => Injected::Open(position),
            };
            links.names.entry((number, directory)).or_default().push((name, injected));
        }
    }
    Ok(links)
}

/// The directory of the layer that a link is to be in, and its name there.
fn place<R: ReadAt>(own: &Own<'_, R>, path: &[u8]) -> Result<(u64, Vec<u8>), Fault> {
    let (parent, name) = match path.iter().rposition(|b| *b == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (&b""[..], path),
    };
    let fits = !name.is_empty() && name.len() <= 255 && !matches!(name, b"." | b"..") && !name.contains(&0);
    let directory = match own.look(parent)? {
        _ if !fits => None,
        Found::Directory(inode, _) => Some(inode.nid),
        _ => None,
    };
    let what = || Fault::Unresolved(format!("the layer has no directory for `{}`", printable(path)));
    Ok((directory.ok_or_else(what)?, name.to_vec()))
}

type Target = (u16, u64, FileType);

/// What one link leads to; `None` when that may be known further down.
fn one<R: ReadAt>(
    number: usize,
    own: &Own<'_, R>,
    below: &Own<'_, R>,
    made: &HashMap<Vec<u8>, Vec<(usize, Target)>>,
    target: &[u8],
) -> Result<Option<Target>, Fault> {
    // A failure inside the question is told by what is asked next.
    let above = |path: &[u8]| match own.look(path) {
        Ok(Found::Object(inode, _)) if inode.file_type() == FileType::Symlink => {
            own.layer(0).read_link(&inode).map_or(Above::Other, Above::Symlink)
        }
        Ok(Found::Object(..)) => Above::Other,
        Ok(Found::Directory(..) | Found::Nothing) | Err(_) => Above::Nothing,
    };
    let dangling = || Fault::DanglingLink(printable(target));
    let short = |layer: usize| u16::try_from(layer).map_err(|_| Fault::TooMany("layers"));
    let place = below.parent_of(target, above)?.ok_or_else(dangling)?;
    // Where only a lower symbolic link shows the way, it may lead back into this layer.
    if let Found::Object(inode, _) = own.look(&place)? {
        return Ok(Some((short(number)?, inode.nid, inode.file_type())));
    }
    let found = below.look(&place)?;
    let at = match &found {
        Found::Object(_, layer) | Found::Directory(_, layer) => Some(*layer),
        Found::Nothing => None,
    };
    let link = made.get(&place).and_then(|links| links.last());
    Ok(match (found, link) {
        (_, Some((layer, link))) if at.is_none_or(|at| at <= *layer) => Some(*link),
        (Found::Object(inode, layer), _) => Some((short(layer)?, inode.nid, inode.file_type())),
        (Found::Directory(..), _) => return Err(Fault::LinkToDirectory(printable(target))),
        (Found::Nothing, _) if below.lets_through(&place)? => None,
        (Found::Nothing, _) => return Err(dangling()),
    })
}
