//! Hard links whose target only a lower layer has: those that can be made once that layer is merged in.
//!
//! A layer that was converted alone lists them in the manifest ([`Unresolved`]) and lacks their names. Where a layer
//! below it in the merge has the target, the name becomes one more name of that inode. Where none has, and none hides
//! it, the link stays on the list: layers further down may have it. By then, what the merged layer has under the name
//! of the target may be another file, which came later; so the list says which links look below only.

use super::plan::{Fault, How, Layer, PlanError};
use crate::entry::printable;
use crate::erofs::format::FileType;
use crate::erofs::read::Image;
use crate::read_at::ReadAt;
use crate::stack::below::{Above, Below, Found};
use hashbrown::HashMap;
use std::cell::Cell;
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

/// A link that stays open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OpenLink {
    /// Path and target, in hex.
    pub(super) names: (String, String),
    /// Whether only layers below the merged one can have the target.
    pub(super) beneath: bool,
}

/// All links of all layers.
#[derive(Debug, Default)]
pub(super) struct Links {
    /// By layer and position in its list: those that stay open.
    open: HashMap<(usize, usize), OpenLink>,
    /// By layer and directory: names and what they lead to.
    names: HashMap<(usize, u64), Vec<Name>>,
    /// Inodes that got names.
    targets: HashSet<(u16, u64)>,
}

impl Links {
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

    /// A link of a layer's list that stays open.
    pub(super) fn open(&self, layer: usize, position: usize) -> OpenLink {
        self.open[&(layer, position)].clone()
    }
}

type Own<'i, R> = Below<&'i Image<R>>;

/// What paths lead to that links of the layers so far have made, by path, the topmost last.
type Paths = HashMap<Vec<u8>, Vec<(usize, Leads)>>;

/// What a link leads to.
#[derive(Debug, Clone)]
enum Leads {
    /// An inode of a layer.
    To(Target),
    /// What only a layer below the run can have: its path.
    Below(Vec<u8>),
}

/// Looks for the targets of all links.
pub(super) fn resolve<R: ReadAt>(layers: &[Layer<'_, R>], how: How) -> Result<Links, PlanError> {
    let mut links = Links::default();
    let mut made = Paths::new();
    for (number, layer) in layers.iter().enumerate() {
        if layer.unresolved.links.is_empty() {
            continue;
        }
        let about = |path: &[u8]| {
            let path = printable(path);
            move |fault: Fault| PlanError { layer: number, path, fault }
        };
        let images = |range: std::ops::Range<usize>| -> Result<Own<'_, R>, Fault> {
            Ok(Below::new(layers[range].iter().map(|layer| layer.image).collect(), how.overlay)?)
        };
        let own = images(number..number + 1).map_err(about(b""))?;
        let below = images(0..number).map_err(about(b""))?;
        let is_top = number + 1 == layers.len();
        for (position, (path, target)) in layer.unresolved.links.iter().enumerate() {
            let bytes = |text: &str| {
                let bytes = hex::decode(text).ok().filter(|bytes| !bytes.is_empty());
                bytes.ok_or_else(|| about(b"")(Fault::Unresolved(format!("`{text}` is not a path in hex"))))
            };
            let (path, target) = (bytes(path)?, bytes(target)?);
            let beneath = u32::try_from(position).is_ok_and(|at| layer.unresolved.beneath.binary_search(&at).is_ok());
            let shows = |above: usize, path: &[u8]| Ok(images(above + 1..number)?.lets_through(path)?);
            let (own, below) = (&own, &below);
            let question = Question { number, own, below, made: &made, shows: &shows, target: &target, beneath };
            let found = question.answer().and_then(|found| {
                let (directory, name) = place(own, &path)?;
                Ok((found, directory, name))
            });
            let (found, directory, name) = found.map_err(about(&path))?;
            let injected = match &found {
                Leads::To(target) => {
                    links.targets.insert((target.0, target.1));
                    Injected::Resolved(target.0, target.1, target.2)
                }
                Leads::Below(target) if how.bottom => return Err(about(&path)(Fault::DanglingLink(printable(target)))),
                Leads::Below(through) => {
                    // What another link leads to was meant as it was below that.
                    let beneath = beneath || !is_top || *through != target;
                    let names = (hex::encode(&path), hex::encode(through));
                    links.open.insert((number, position), OpenLink { names, beneath });
                    Injected::Open(position)
                }
            };
            made.entry(path).or_default().push((number, found));
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
type Shows<'q> = dyn Fn(usize, &[u8]) -> Result<bool, Fault> + 'q;

/// One link.
struct Question<'q, 'i, R> {
    /// Its layer.
    number: usize,
    own: &'q Own<'i, R>,
    below: &'q Own<'i, R>,
    made: &'q Paths,
    /// Whether what a layer has under a path shows through those between it and this one.
    shows: &'q Shows<'q>,
    target: &'q [u8],
    /// Whether what the layer itself has does not count.
    beneath: bool,
}

impl<R: ReadAt> Question<'_, '_, R> {
    fn answer(&self) -> Result<Leads, Fault> {
        let Self { number, own, below, target, beneath, .. } = *self;
        let through_own = Cell::new(false);
        // A failure inside the question is told by what is asked next.
        let above = |path: &[u8]| {
            let found = match own.look(path) {
                Ok(Found::Object(inode, _)) if inode.file_type() == FileType::Symlink => {
                    own.layer(0).read_link(&inode).map_or(Above::Other, Above::Symlink)
                }
                Ok(Found::Object(..)) => Above::Other,
                Ok(Found::Directory(..) | Found::Nothing) | Err(_) => Above::Nothing,
            };
            through_own.set(through_own.get() || !matches!(found, Above::Nothing));
            found
        };
        let dangling = || Fault::DanglingLink(printable(target));
        let buried = || Fault::Buried(printable(target));
        let short = |layer: usize| u16::try_from(layer).map_err(|_| Fault::TooMany("layers"));
        let place = below.parent_of(target, above)?;
        if beneath && through_own.get() {
            // It may have come before the link or after it.
            return Err(buried());
        }
        let place = place.ok_or_else(dangling)?;
        // Where only a lower symbolic link shows the way, it may lead back into this layer.
        if let Found::Object(inode, _) = own.look(&place)? {
            if !beneath {
                return Ok(Leads::To((short(number)?, inode.nid, inode.file_type())));
            }
            if place != target {
                return Err(buried());
            }
        }
        let found = below.look(&place)?;
        let at = match &found {
            Found::Object(_, layer) | Found::Directory(_, layer) => Some(*layer),
            Found::Nothing => None,
        };
        let link = self.made.get(&place).and_then(|links| links.iter().rfind(|(layer, _)| !beneath || *layer < number));
        let link = match link {
            Some((layer, leads)) if at.is_none_or(|at| at <= *layer) => {
                (*layer == number || (self.shows)(*layer, &place)?).then_some(leads)
            }
            _ => None,
        };
        Ok(match (found, link) {
            (_, Some(leads)) => leads.clone(),
            (Found::Object(inode, layer), _) => Leads::To((short(layer)?, inode.nid, inode.file_type())),
            (Found::Directory(..), _) => return Err(Fault::LinkToDirectory(printable(target))),
            (Found::Nothing, _) if below.lets_through(&place)? => Leads::Below(target.to_vec()),
            (Found::Nothing, _) => return Err(dangling()),
        })
    }
}
