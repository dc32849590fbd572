//! Which names, inodes and data the merged layer has: pure, from the layers' images alone.
//!
//! The layers' trees are walked side by side, in tree order: at every directory that is in the result, the names of all
//! directories that are merged there are listed, each name's fate is folded ([`crate::stack::fold`], the rule that
//! look-ups in a stack follow too), and what comes of it is entered. A directory that only one layer has, which nearly
//! all are, is copied name by name. So every part of an image is read once, in about the order in which it lies there,
//! and the inodes of the result are numbered in tree order.

use super::links::{Injected, Links, OpenLink};
use super::source::{Devices, Marks, Source, permissions};
use crate::entry::printable;
use crate::erofs::format::FileType;
use crate::erofs::read::{Image, Inode, ReadError};
use crate::extent::Runs;
use crate::manifest::{OverlayXattrs, Unresolved};
use crate::read_at::ReadAt;
use crate::stack::fold::{Fold, InLayer, Outcome};
use crate::tree::assemble::{Assembler, TooMany, directory};
use crate::tree::{self, InodeId, ROOT, Tree};
use hashbrown::HashMap;
use std::ops::Range;

/// A layer to be merged.
#[derive(Debug)]
pub struct Layer<'i, R> {
    /// Its metadata image.
    pub image: &'i Image<R>,
    /// For each of its devices, a number that says which blob it is, the same in all layers.
    pub devices: &'i [u32],
    /// What it leaves to lower layers.
    pub unresolved: &'i Unresolved,
}

/// How to merge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct How {
    /// Namespace of overlayfs' attributes in all the layers.
    pub overlay: OverlayXattrs,
    /// Nothing will ever be below: whiteouts and opaque directories are left out.
    pub bottom: bool,
}

/// What the layers are together.
#[derive(Debug)]
pub struct Merged {
    /// The merged layer, its inodes numbered in tree order. Inline contents are in the images, by
    /// [`crate::extent::in_part`] with the layer's position.
    pub tree: Tree,
    /// Where the chunks of its files are.
    pub runs: Runs,
    /// The blobs in use, by the numbers that the layers gave them, in device order: that of their first use in tree
    /// order.
    pub devices: Vec<u32>,
    /// What is still left to lower layers.
    pub unresolved: Unresolved,
}

/// Why layers cannot be merged.
#[derive(Debug, thiserror::Error)]
#[error("{}{fault}", at(.path))]
pub struct PlanError {
    /// Position of the layer that is at fault.
    pub layer: usize,
    /// Where in it, printable; empty when it is not about an entry.
    pub path: String,
    /// What is wrong.
    #[source]
    pub fault: Fault,
}

fn at(path: &str) -> String {
    if path.is_empty() { String::new() } else { format!("`{path}`: ") }
}

/// What is wrong with a layer.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The image cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A name's type is not its inode's.
    #[error("the entry's type is not its inode's")]
    OtherType,
    /// Names that are not sorted.
    #[error("a directory's names are not in order")]
    OutOfOrder,
    /// A loop, or a hard link to a directory.
    #[error("a directory is reached twice")]
    EnteredTwice,
    /// Inodes or directories share bytes.
    #[error("inodes or directories overlap")]
    Overlap,
    /// A symbolic link with a NUL.
    #[error("the link's text has a NUL")]
    LinkText,
    /// Not as many blobs as devices.
    #[error("the device table has {table} devices, the manifest {given} data blobs")]
    Devices {
        /// In the image.
        table: usize,
        /// In the manifest.
        given: usize,
    },
    /// A part of the manifest that does not fit the image.
    #[error("the manifest's list of unresolved links: {0}")]
    Unresolved(String),
    /// A mark of overlayfs that a converter never leaves.
    #[error("it has `{0}`, which ties a layer to those that it was made on; such layers are not merged")]
    OverlayAttribute(String),
    /// A form that is not merged.
    #[error("{0}, which is not merged")]
    Unsupported(&'static str),
    /// A link whose target is nowhere, and can be nowhere.
    #[error("it is a hard link to `{0}`, which neither this layer nor one below it has")]
    DanglingLink(String),
    /// A link that cannot be followed any more.
    #[error(
        "it is a hard link to `{0}`, and which file that was is lost in an earlier merge: merge the layers at once"
    )]
    Buried(String),
    /// A link to a directory.
    #[error("it is a hard link to `{0}`, which is a directory")]
    LinkToDirectory(String),
    /// More blobs than an image can refer to.
    #[error("the merged layer would refer to more than 65,535 data blobs; `--pack` makes them one")]
    TooManyDevices,
    /// More than can be counted.
    #[error("the merged layer would have more {0} than an image can have")]
    TooMany(&'static str),
}

impl Fault {
    /// Whether the layer's bytes are at fault.
    #[must_use]
    pub const fn is_corruption(&self) -> bool {
        match self {
            Self::Read(e) => e.is_corruption(),
            Self::OtherType
            | Self::OutOfOrder
            | Self::EnteredTwice
            | Self::Overlap
            | Self::LinkText
            | Self::Devices { .. }
            | Self::Unresolved(_) => true,
            _ => false,
        }
    }
}

impl From<TooMany> for Fault {
    fn from(TooMany(what): TooMany) -> Self {
        Self::TooMany(what)
    }
}

/// Merges `layers`, bottom first.
///
/// # Errors
/// When a layer cannot be read or is broken, or has what is not merged.
pub fn plan<R: ReadAt>(layers: &[Layer<'_, R>], how: How) -> Result<Merged, PlanError> {
    let whole = |layer: usize| move |fault: Fault| PlanError { layer, path: String::new(), fault };
    let links = super::links::resolve(layers, how)?;
    let mut sources = Vec::with_capacity(layers.len());
    for (number, layer) in layers.iter().enumerate() {
        let fail = whole(number);
        let short = u16::try_from(number).map_err(|_| fail(Fault::TooMany("layers")))?;
        let implied = &layer.unresolved.implied;
        let source = Source::new(layer.image, short, how.overlay, layer.devices, implied).map_err(fail)?;
        sources.push(source);
    }
    // What superblocks say is checked against what there is room for.
    let inodes = |image: &Image<R>| image.superblock().inodes.min(image.size() / 32);
    let inodes: u64 = layers.iter().map(|layer| inodes(layer.image)).sum();
    let mut merger = Merger {
        sources,
        how,
        out: Assembler::new(usize::try_from(inodes).unwrap_or(0)),
        runs: Runs::default(),
        devices: Devices::default(),
        links,
        seen: HashMap::new(),
        implied: Vec::new(),
        open: Vec::new(),
        frames: Vec::new(),
        children: Vec::new(),
        layer: 0,
        listing: Listing::default(),
    };
    if let Err(fault) = merger.run() {
        return Err(PlanError { layer: merger.layer, path: merger.path(), fault });
    }
    let Merger { out, runs, devices, implied, open, .. } = merger;
    let (links, beneath): (Vec<_>, Vec<_>) = open.into_iter().map(|link| (link.names, link.beneath)).unzip();
    let beneath = (0u32..).zip(beneath).filter_map(|(position, beneath)| beneath.then_some(position)).collect();
    let mut tree = out.finish();
    tree.mark_layers(how.overlay);
    // Inode numbers count from 1 in tree order, as do the ids.
    let implied = implied.into_iter().map(|id| id + 1).collect();
    Ok(Merged { tree, runs, devices: devices.used, unresolved: Unresolved { links, beneath, implied } })
}

/// What a name of the result leads to.
enum Child {
    Whiteout,
    /// What one layer has there.
    Of {
        layer: u16,
        file_type: FileType,
        nid: u64,
    },
    /// A directory of several layers.
    Directory(Box<Folded>),
}

/// A directory of the result.
struct Folded {
    /// Those whose names it has, topmost first.
    layers: Vec<InLayer>,
    /// It hides what is below the merged layer.
    opaque: bool,
    /// Whose attributes it has: the topmost that an entry described.
    described: Described,
}

enum Described {
    By(usize, Inode),
    /// Nothing described it so far, lower layers may.
    NotYet,
    /// Nothing did, nor can.
    Never,
}

/// A directory of the result that is being entered.
struct Frame {
    directory: InodeId,
    /// Its first name.
    first: usize,
    /// Its names that are to come.
    edges: Range<usize>,
    /// Where their fates are in [`Merger::children`].
    children: usize,
    /// Nothing below the merged layer shows in it.
    hidden: bool,
}

/// The names of several directories, to be sorted.
#[derive(Default)]
struct Listing {
    names: Vec<u8>,
    entries: Vec<Entry>,
}

#[derive(Debug, Clone)]
struct Entry {
    name: Range<usize>,
    layer: usize,
    has: Has,
}

#[derive(Debug, Clone, Copy)]
enum Has {
    /// A name of the layer.
    Name(u64, FileType),
    /// A link that was resolved: what a layer has.
    Link(u16, u64, FileType),
    /// A link that was not, by its position in the layer's list.
    Open(usize),
    /// A name that an opaque root hides.
    HiddenByRoot,
}

struct Merger<'i, R> {
    sources: Vec<Source<'i, R>>,
    how: How,
    out: Assembler,
    runs: Runs,
    devices: Devices,
    links: Links,
    /// Inodes with several names, by layer and number.
    seen: HashMap<(u16, u64), InodeId>,
    implied: Vec<InodeId>,
    open: Vec<OpenLink>,
    frames: Vec<Frame>,
    children: Vec<Child>,
    /// The layer that is read, for messages.
    layer: usize,
    listing: Listing,
}

impl<R: ReadAt> Merger<'_, R> {
    fn run(&mut self) -> Result<(), Fault> {
        let root = self.root()?;
        // An opaque root hides nothing by itself.
        self.enter(ROOT, root, self.how.bottom)?;
        while let Some(frame) = self.frames.last_mut() {
            let Some(edge) = frame.edges.next() else {
                self.children.truncate(frame.children);
                self.frames.pop();
                continue;
            };
            let (parent, hidden) = (frame.directory, frame.hidden);
            let last = self.frames.last().map_or(0, |f| f.children + f.edges.len());
            // Fates lie in the reverse order of the names, so that the next one's place follows from how many are left.
            let child = std::mem::replace(&mut self.children[last], Child::Whiteout);
            let (id, folded) = match child {
                Child::Whiteout => (self.out.whiteout()?, None),
                Child::Of { layer, file_type: FileType::Directory, nid } => {
                    self.layer = usize::from(layer);
                    let source = &mut self.sources[self.layer];
                    let inode = source.inode(nid, FileType::Directory)?;
                    let opaque = source.marks(&inode, &mut self.out.xattrs)?.opaque;
                    let described = if source.is_implied(&inode) {
                        Described::NotYet
                    } else {
                        Described::By(self.layer, inode.clone())
                    };
                    self.directory(parent, Folded { layers: vec![(self.layer, inode)], opaque, described }, hidden)?
                }
                Child::Of { layer, file_type, nid } => (self.object(layer, nid, file_type)?, None),
                Child::Directory(folded) => self.directory(parent, *folded, hidden)?,
            };
            self.out.lead(edge, id);
            if let Some(folded) = folded {
                let hidden = hidden || folded.opaque;
                self.enter(id, folded, hidden)?;
            }
        }
        Ok(())
    }

    /// The root of the result. overlayfs knows no opaque roots, so one hides nothing here by itself: what it means is
    /// done name by name.
    fn root(&mut self) -> Result<Folded, Fault> {
        let mut layers = Vec::with_capacity(self.sources.len());
        let mut opaque = false;
        let mut described = Described::NotYet;
        for number in (0..self.sources.len()).rev() {
            self.layer = number;
            let source = &mut self.sources[number];
            let root = source.image.root()?;
            opaque |= source.marks(&root, &mut self.out.xattrs)?.opaque;
            if matches!(described, Described::NotYet) && !source.is_implied(&root) {
                described = Described::By(number, root.clone());
            }
            layers.push((number, root));
        }
        let opaque = opaque && !self.how.bottom;
        let root = Folded { layers, opaque, described };
        let (_, root) = self.directory(ROOT, root, self.how.bottom)?;
        root.ok_or(Fault::OtherType)
    }

    /// Makes a directory of the result.
    fn directory(
        &mut self,
        parent: InodeId,
        mut folded: Folded,
        hidden: bool,
    ) -> Result<(InodeId, Option<Folded>), Fault> {
        // Where nothing below shows, there is nothing to hide.
        folded.opaque &= !hidden;
        let kind = directory(parent, folded.opaque);
        let inode = match &folded.described {
            Described::By(layer, inode) => {
                self.layer = *layer;
                let marks = self.sources[*layer].marks(inode, &mut self.out.xattrs)?;
                describe(kind, inode, marks)
            }
            Described::NotYet | Described::Never => {
                // Its own attributes are those of nobody.
                let (layer, inode) = folded.layers.first().ok_or(Fault::OtherType)?;
                self.layer = *layer;
                let marks = self.sources[*layer].marks(inode, &mut self.out.xattrs)?;
                describe(kind, inode, marks)
            }
        };
        let id = self.out.add(inode)?;
        if matches!(folded.described, Described::NotYet) && !hidden {
            self.implied.push(id);
        }
        Ok((id, Some(folded)))
    }

    /// Makes something else of the result, or finds it under another name.
    fn object(&mut self, layer: u16, nid: u64, file_type: FileType) -> Result<InodeId, Fault> {
        self.layer = usize::from(layer);
        let source = &mut self.sources[self.layer];
        let inode = source.inode(nid, file_type)?;
        let several = inode.nlink != 1 || self.links.is_target(layer, nid);
        if several && let Some(id) = self.seen.get(&(layer, nid)) {
            return Ok(*id);
        }
        let marks = source.marks(&inode, &mut self.out.xattrs)?;
        let kind = source.kind(&inode, marks, &mut self.runs, &mut self.devices)?;
        let id = self.out.add(describe(kind, &inode, marks))?;
        if several {
            self.seen.insert((layer, nid), id);
        }
        Ok(id)
    }

    /// Lists the names of a directory, and makes it the one whose names come next.
    fn enter(&mut self, id: InodeId, folded: Folded, hidden: bool) -> Result<(), Fault> {
        let (edges, children) = (self.out.edges(), self.children.len());
        match folded.layers.as_slice() {
            [(layer, inode)] if !self.links.is_in(*layer, inode.nid) => self.list_one(id, *layer, inode, hidden)?,
            _ => self.list_several(id, &folded, hidden)?,
        }
        self.children[children..].reverse();
        let edges = edges..self.out.edges();
        self.out.list(id, &edges);
        self.frames.push(Frame { directory: id, first: edges.start, edges, children, hidden });
        Ok(())
    }

    fn list_one(&mut self, id: InodeId, layer: usize, inode: &Inode, hidden: bool) -> Result<(), Fault> {
        self.layer = layer;
        let short = u16::try_from(layer).unwrap_or(u16::MAX);
        let source = &mut self.sources[layer];
        let image = source.image;
        let (out, children) = (&mut self.out, &mut self.children);
        let mut whiteout = None;
        source.names(inode, |name, nid, file_type| {
            if file_type == FileType::CharDevice && (whiteout == Some(nid) || image.inode(nid)?.is_whiteout()) {
                // All of a layer's are usually one inode.
                whiteout = Some(nid);
                if !hidden {
                    out.name(id, name)?;
                    children.push(Child::Whiteout);
                }
                return Ok(());
            }
            out.name(id, name)?;
            children.push(Child::Of { layer: short, file_type, nid });
            Ok(())
        })
    }

    fn list_several(&mut self, id: InodeId, folded: &Folded, hidden: bool) -> Result<(), Fault> {
        let mut listing = std::mem::take(&mut self.listing);
        listing.names.clear();
        listing.entries.clear();
        let mut opaque_roots = Vec::new();
        for (layer, inode) in &folded.layers {
            self.layer = *layer;
            let source = &mut self.sources[*layer];
            let Listing { names, entries } = &mut listing;
            let mut add = |name: &[u8], has| {
                let start = names.len();
                names.extend_from_slice(name);
                entries.push(Entry { name: start..names.len(), layer: *layer, has });
            };
            for (name, link) in self.links.of(*layer, inode.nid) {
                add(
                    name,
                    match link {
                        Injected::Resolved(layer, nid, file_type) => Has::Link(*layer, *nid, *file_type),
                        Injected::Open(position) => Has::Open(*position),
                    },
                );
            }
            source.names(inode, |name, nid, file_type| {
                add(name, Has::Name(nid, file_type));
                Ok(())
            })?;
            if id == ROOT && source.marks(inode, &mut self.out.xattrs)?.opaque {
                opaque_roots.push(*layer);
            }
        }
        // Stable, and made for joining what is sorted already: of one name the topmost layer comes first, and in it the
        // links, which take the place of what the layer has.
        let names = &listing.names;
        listing.entries.sort_by(|a, b| names[a.name.clone()].cmp(&names[b.name.clone()]));
        for group in listing.entries.chunk_by(|a, b| names[a.name.clone()] == names[b.name.clone()]) {
            let name = &names[group[0].name.clone()];
            let with_root;
            let group = if opaque_roots.is_empty() {
                group
            } else {
                with_root = self.under_opaque_roots(group, &opaque_roots)?;
                &with_root
            };
            let Some(child) = self.fold(group)? else { continue };
            if !(hidden && matches!(child, Child::Whiteout)) {
                self.out.name(id, name)?;
                self.children.push(child);
            }
        }
        self.listing = listing;
        Ok(())
    }

    /// What an opaque root does to what is in lower roots under one name: a whiteout where its layer has nothing, and
    /// its own directory becomes opaque, which a whiteout below it does.
    fn under_opaque_roots(&mut self, group: &[Entry], opaque_roots: &[usize]) -> Result<Vec<Entry>, Fault> {
        let mut out: Vec<Entry> = Vec::new();
        let mut visible = false;
        let mut rest = group.iter().rev().peekable();
        for layer in 0..self.sources.len() {
            if visible && opaque_roots.contains(&layer) {
                out.push(Entry { name: group[0].name.clone(), layer, has: Has::HiddenByRoot });
                visible = false;
            }
            while let Some(entry) = rest.next_if(|entry| entry.layer == layer) {
                visible = match entry.has {
                    Has::Name(nid, FileType::CharDevice) => {
                        self.layer = layer;
                        !self.sources[layer].inode(nid, FileType::CharDevice)?.is_whiteout()
                    }
                    Has::Name(..) | Has::Link(..) => true,
                    Has::Open(_) | Has::HiddenByRoot => visible,
                };
                out.push(entry.clone());
            }
        }
        out.reverse();
        Ok(out)
    }

    /// What becomes of one name; `group` is what the layers have, topmost first.
    fn fold(&mut self, group: &[Entry]) -> Result<Option<Child>, Fault> {
        let mut rest = group.iter();
        let mut fold = Fold::default();
        let mut first = true;
        for entry in rest.by_ref() {
            self.layer = entry.layer;
            let (layer, nid, file_type) = match entry.has {
                Has::Open(position) => {
                    if std::mem::take(&mut first) {
                        self.open.push(self.links.open(entry.layer, position));
                    }
                    continue;
                }
                Has::HiddenByRoot if first => return Ok(Some(Child::Whiteout)),
                Has::HiddenByRoot => {
                    // Only directories were met.
                    return Ok(Some(match fold.finish() {
                        Outcome::Directory { layers, .. } => self.described(layers, true, None)?,
                        _ => Child::Whiteout,
                    }));
                }
                Has::Name(nid, file_type) => (entry.layer, nid, file_type),
                Has::Link(layer, nid, file_type) => (usize::from(layer), nid, file_type),
            };
            let short = u16::try_from(layer).unwrap_or(u16::MAX);
            // What is neither a directory nor perhaps a whiteout need not be looked at.
            let plain = !matches!(file_type, FileType::Directory | FileType::CharDevice);
            if first && (plain || group.len() == 1 && file_type == FileType::Directory) {
                return Ok(Some(Child::Of { layer: short, file_type, nid }));
            }
            first = false;
            self.layer = layer;
            let source = &mut self.sources[layer];
            let inode = source.inode(nid, file_type)?;
            let sets = &mut self.out.xattrs;
            if fold.add(layer, inode, |inode| source.marks(inode, sets).map(|marks| marks.opaque))? {
                return self.folded(fold, rest.as_slice(), Some(entry));
            }
        }
        self.folded(fold, &[], None)
    }

    /// The fate of a name whose fold is complete. `last` is what completed it, `below` what was not looked at.
    fn folded(&mut self, fold: Fold, below: &[Entry], last: Option<&Entry>) -> Result<Option<Child>, Fault> {
        Ok(match fold.finish() {
            Outcome::Nothing => None,
            Outcome::Whiteout => Some(Child::Whiteout),
            Outcome::Object((layer, inode)) => {
                let layer = u16::try_from(layer).unwrap_or(u16::MAX);
                Some(Child::Of { layer, file_type: inode.file_type(), nid: inode.nid })
            }
            Outcome::Directory { layers, opaque } => {
                // Closed by something that is not a directory, or by a directory of its own that is opaque?
                let over_other = opaque && last.is_some_and(|last| layers.last().is_none_or(|(l, _)| *l != last.layer));
                let below = if over_other { None } else { Some(below) };
                Some(self.described(layers, opaque, below)?)
            }
        })
    }

    /// Finds out whose attributes a directory has. `below` is what lower layers have of the name; nothing of it is
    /// merged, but it may describe an opaque directory that has no entry of its own. `None`: nothing can.
    fn described(&mut self, layers: Vec<InLayer>, opaque: bool, below: Option<&[Entry]>) -> Result<Child, Fault> {
        let sources = &self.sources;
        let own = layers.iter().find(|(layer, inode)| !sources[*layer].is_implied(inode));
        let mut described = match (own, below) {
            (Some((layer, inode)), _) => Described::By(*layer, inode.clone()),
            (None, None) => Described::Never,
            (None, Some(_)) => Described::NotYet,
        };
        if matches!(described, Described::NotYet) && opaque {
            for entry in below.unwrap_or_default() {
                let nid = match entry.has {
                    Has::Open(_) => continue,
                    Has::Name(nid, FileType::Directory) => nid,
                    Has::Name(..) | Has::Link(..) | Has::HiddenByRoot => {
                        described = Described::Never;
                        break;
                    }
                };
                self.layer = entry.layer;
                let source = &mut self.sources[entry.layer];
                let inode = source.inode(nid, FileType::Directory)?;
                if !source.is_implied(&inode) {
                    described = Described::By(entry.layer, inode);
                    break;
                }
            }
        }
        Ok(Child::Directory(Box::new(Folded { layers, opaque, described })))
    }

    /// Where in the result we are, printable.
    fn path(&self) -> String {
        let names = self.frames.iter().filter(|frame| frame.edges.start > frame.first);
        let mut path: Vec<u8> = Vec::new();
        for frame in names {
            if !path.is_empty() {
                path.push(b'/');
            }
            let edge = frame.edges.start - 1;
            path.extend_from_slice(self.out.name_at(edge));
        }
        printable(&path)
    }
}

fn describe(kind: tree::Kind, inode: &Inode, marks: Marks) -> tree::Inode {
    let Inode { uid, gid, mtime, .. } = *inode;
    tree::Inode { kind, mode: permissions(inode), uid, gid, mtime, xattrs: marks.set }
}
