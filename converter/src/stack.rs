//! What a layer takes from those below it.
//!
//! A tar layer need not describe its parents, may link to files of lower layers, and may put things behind a symbolic
//! link that a lower layer made. An extractor finds all that on disk. Here every layer stands alone, so, once the lower
//! ones are published, their metadata images are asked:
//!
//! - a directory without an entry gets mode, owner, time and attributes of the one it will be merged with (T10);
//! - where that is a symbolic link, the contents go to where it leads (T12, and every base with `/lib -> usr/lib`);
//! - where there is none, and it holds nothing but whiteouts, it is left out (W04, W05);
//! - an opaque root, which overlayfs knows nothing of, hides each name that lower roots have;
//! - a hard link to a lower file brings that file into this layer under both names (L02), as copying up would, its
//!   data still in the lower layer's blob.

pub(crate) mod below;
pub(crate) mod fold;

use crate::blob::spool::Spool;
use crate::compress::linked;
use crate::dictionary::Session;
use crate::entry::{Timestamp, Warning, Xattr, printable};
use crate::erofs::format::{BLOCK_BITS, FileType, encode_device};
use crate::erofs::read::{self, Data, ReadError};
use crate::extent::{Chunked, FileData, Runs};
use crate::layer::{Existing, LayerError, ReadLayer, Record};
use crate::manifest::{OverlayXattrs, Unresolved};
use crate::tree::{InodeId, Kind, ROOT, Tree};
use below::{Above, Found, Lower};

type Below = below::Below<Lower>;
use fs3_client::Store;
use std::collections::{HashMap, HashSet};

/// How often contents may move behind symbolic links that themselves lie behind others.
const ROUNDS: usize = 40;

/// For a layer whose lower layers are not known: directories keep what they have, links that lead out of the layer are
/// taken out and returned.
pub(crate) fn leave_open(layer: &mut ReadLayer) -> Unresolved {
    let mut unresolved = Unresolved::default();
    let mut warnings = Vec::new();
    if layer.tree.is_opaque(ROOT) {
        let message = "hides everything below it, which overlayfs does not do for the root of a layer; what is below \
                       will show until it is converted together with those layers";
        warnings.push(Warning::new(b"", message));
    }
    layer.tree.remove_names(|path, kind| match kind {
        Kind::PendingLink(target) => {
            unresolved.links.push((hex::encode(path), hex::encode(target)));
            let target = printable(target);
            warnings.push(Warning::new(
                path,
                format!("is a hard link to `{target}`, which this layer does not have; left out until it is converted together with the layer that has it"),
            ));
            true
        }
        _ => false,
    });
    layer.warnings.append(&mut warnings);
    // Inode numbers count from 1 in tree order.
    let implied = layer.tree.order().into_iter().zip(1u32..).filter(|((id, _), _)| layer.tree.is_implied(*id));
    unresolved.implied = implied.map(|(_, number)| number).collect();
    unresolved
}

/// Settles what `layer` left open against `below`, bottom first, and arranges its data. Returns the blobs of other layers
/// that its files now refer to, as devices behind its own: those with equal chunks, then those of files that it links
/// to.
///
/// # Errors
/// When a hard link leads nowhere, or a lower metadata image cannot be read.
pub(crate) fn settle(
    layer: &mut ReadLayer,
    below: &[Record],
    store: &Store,
    dedup: Option<&Session<'_>>,
    overlay: OverlayXattrs,
) -> Result<Vec<Existing>, LayerError> {
    let below = Below::new(Lower::open_all(below, store)?, overlay)?;
    if layer.tree.is_opaque(ROOT) {
        // overlayfs looks for no such mark on the roots of its layers.
        layer.tree.hide_in_root(&below.root_names()?);
    }
    for round in 0.. {
        let moves = describe_implied(layer, &below, overlay)?;
        if moves.is_empty() {
            if round > 0 {
                layer.tree.remove_idle_whiteouts();
            }
            break;
        }
        if round == ROUNDS {
            let path = printable(&moves[0].0);
            return Err(LayerError::Tree(crate::tree::build::TreeError::SymlinkLoop { path }));
        }
        for (from, to) in moves {
            let Some(taken) = layer.tree.move_contents(&from, &to) else {
                let (path, parent) = (printable(&from), printable(&to.join(&b'/')));
                return Err(LayerError::Tree(crate::tree::build::TreeError::ParentNotDirectory { path, parent }));
            };
            let from = printable(&from);
            let message =
                format!("has two entries, one of them through the symbolic link `{from}`; that one is left out");
            layer.warnings.extend(taken.iter().map(|path| Warning::new(path, message.clone())));
        }
        layer.tree.sort();
    }
    // Files have their places in tree order now.
    layer.arrange(store, dedup)?;
    let first_device = if layer.data.is_some() { 2 } else { 1 };
    let mut links = Links { devices: layer.foreign.clone(), first_device, below: &below, overlay };
    links.resolve(layer)?;
    Ok(links.devices)
}

/// What is to become of a directory without an entry of its own.
enum Fate {
    /// It is what the lower one is.
    Describe(InodeId, read::Inode, Vec<Xattr>),
    /// It is not there: what it holds is elsewhere.
    Move(Vec<u8>, Vec<Vec<u8>>),
    /// It would be where symbolic links lead that have no end.
    Endless(String),
    /// It is not there: nothing is in it.
    Drop(InodeId),
    /// It stays, oddly.
    Warn(Warning),
}

/// Gives directories without an entry what the ones below have, and takes out those that nothing needs; returns what
/// has to move: (directory, where to).
#[expect(clippy::type_complexity, reason = "named nowhere else")]
fn describe_implied(
    layer: &mut ReadLayer,
    below: &Below,
    overlay: OverlayXattrs,
) -> Result<Vec<(Vec<u8>, Vec<Vec<u8>>)>, LayerError> {
    let tree = &layer.tree;
    let hidden = tree.hidden_from_below();
    let whiteouts_only = tree.directories_of_whiteouts();
    let mut fates: Vec<Fate> = Vec::new();
    let mut failed = None;
    // Paths are not kept: in a deep tree they are far longer than the tree.
    let mut moving: Option<Vec<u8>> = None;
    tree.walk(|path, id| {
        let implied = matches!(&tree.inode(id).kind, Kind::Directory(d) if d.implied);
        // What is in a directory that moves is looked at again in its new place.
        let moves = moving.as_ref().is_some_and(|m| path.strip_prefix(&m[..]).is_some_and(|r| r.starts_with(b"/")));
        if !implied || moves || failed.is_some() {
            return;
        }
        let droppable = id != ROOT && whiteouts_only.contains(&id);
        let found = if hidden[id as usize] { Ok(Found::Nothing) } else { below.look(path) };
        match found.and_then(|found| fate(path, id, droppable, found, tree, below, overlay)) {
            Ok(Some(fate)) => {
                if let Fate::Move(from, _) = &fate {
                    moving = Some(from.clone());
                }
                fates.push(fate);
            }
            Ok(None) => {}
            Err(e) => failed = Some(e),
        }
    });
    if let Some(e) = failed {
        return Err(e.into());
    }
    let mut moves = Vec::new();
    let mut drop = HashSet::new();
    for fate in fates {
        match fate {
            Fate::Describe(id, inode, xattrs) => layer.tree.describe(id, &inode, xattrs),
            Fate::Move(from, to) => moves.push((from, to)),
            Fate::Endless(path) => return Err(LayerError::Tree(crate::tree::build::TreeError::SymlinkLoop { path })),
            Fate::Drop(id) => {
                drop.insert(id);
            }
            // Said once, however many rounds there are.
            Fate::Warn(warning) if layer.warnings.contains(&warning) => {}
            Fate::Warn(warning) => layer.warnings.push(warning),
        }
    }
    if !drop.is_empty() {
        layer.tree.remove_directories(&drop);
    }
    Ok(moves)
}

fn fate(
    path: &[u8],
    id: InodeId,
    droppable: bool,
    found: Found,
    tree: &Tree,
    below: &Below,
    overlay: OverlayXattrs,
) -> Result<Option<Fate>, ReadError> {
    Ok(match found {
        Found::Directory(inode, layer) => {
            let xattrs = without_marks(below.layer(layer).xattrs(&inode)?, overlay);
            Some(Fate::Describe(id, inode, xattrs))
        }
        Found::Object(inode, _) if inode.file_type() == FileType::Symlink => {
            // Whiteouts act before what their layer puts anywhere, its symbolic links included.
            let to =
                if droppable { below.follow(path)? } else { below.follow_over(path, |at| in_the_way(tree, at))? };
            Some(match to {
                None => Fate::Endless(printable(path)),
                Some(to) if droppable && is_replaced(tree, &to) => Fate::Drop(id),
                Some(to) => Fate::Move(path.to_vec(), to),
            })
        }
        Found::Object(..) if droppable => Some(Fate::Drop(id)),
        Found::Object(..) => Some(Fate::Warn(Warning::new(
            path,
            "is a directory without an entry of its own, but not a directory in a lower layer; it hides what is there",
        ))),
        Found::Nothing if droppable => Some(Fate::Drop(id)),
        Found::Nothing => None,
    })
}

/// What the layer has at a path through which its contents are to move.
fn in_the_way(tree: &Tree, path: &[u8]) -> Above {
    match tree.at(path).map(|id| &tree.inode(id).kind) {
        None => Above::Nothing,
        Some(Kind::Symlink(target)) => Above::Symlink(target.to_vec()),
        Some(Kind::Directory(d)) if d.implied => Above::Nothing,
        Some(_) => Above::Other,
    }
}

/// Whether the layer has something else than directories on the way to `place`, so that lower files do not show there.
fn is_replaced(tree: &Tree, place: &[Vec<u8>]) -> bool {
    let mut at = ROOT;
    for name in place {
        match tree.child(at, name) {
            Some(child) if matches!(tree.inode(child).kind, Kind::Directory(_)) => at = child,
            other => return other.is_some(),
        }
    }
    false
}

/// Attributes less those by which overlayfs rules the lower layer itself.
fn without_marks(xattrs: Vec<Xattr>, overlay: OverlayXattrs) -> Vec<Xattr> {
    let prefix = overlay.prefix().as_bytes();
    let own = |name: &[u8]| name.strip_prefix(prefix).is_some_and(|rest| !rest.starts_with(b"overlay."));
    xattrs.into_iter().filter(|x| !own(&x.name)).collect()
}

struct Links<'b> {
    devices: Vec<Existing>,
    first_device: usize,
    below: &'b Below,
    overlay: OverlayXattrs,
}

impl Links<'_> {
    fn resolve(&mut self, layer: &mut ReadLayer) -> Result<(), LayerError> {
        let open = layer.tree.open();
        let mut paths: HashMap<InodeId, String> = HashMap::new();
        layer.tree.walk(|path, id| {
            if matches!(layer.tree.inode(id).kind, Kind::PendingLink(_)) {
                paths.entry(id).or_insert_with(|| printable(path));
            }
        });
        let hidden = layer.tree.hidden_from_below();
        // Links to one file below are names of one inode here.
        let mut made: HashMap<Vec<u8>, InodeId> = HashMap::new();
        let mut same: HashMap<InodeId, InodeId> = HashMap::new();
        for (id, target) in open.links {
            let path = &paths[&id];
            let dangling = || LayerError::DanglingLink { path: path.clone(), target: printable(&target) };
            let above = |path: &[u8]| match layer.tree.at(path).map(|id| &layer.tree.inode(id).kind) {
                None => Above::Nothing,
                Some(Kind::Symlink(target)) => Above::Symlink(target.to_vec()),
                Some(Kind::Directory(_)) => Above::Nothing,
                Some(_) => Above::Other,
            };
            let place = self.below.parent_of(&target, above)?.ok_or_else(dangling)?;
            // Where only a lower symbolic link shows the way, it may lead back into this layer.
            let own = layer.tree.at(&place).filter(|own| {
                let kind = &layer.tree.inode(*own).kind;
                !matches!(kind, Kind::PendingLink(_) | Kind::Directory(_)) && Some(*own) != layer.tree.whiteout()
            });
            if let Some(first) = own.or_else(|| made.get(&place).copied()) {
                same.insert(id, first);
                continue;
            }
            match self.below.look(&place)? {
                Found::Object(inode, lower) => self.copy(layer, id, &inode, self.below.layer(lower))?,
                Found::Directory(..) => {
                    let (path, target) = (path.clone(), printable(&target));
                    return Err(LayerError::Tree(crate::tree::build::TreeError::LinkToDirectory { path, target }));
                }
                Found::Nothing => return Err(dangling()),
            }
            self.name_target(layer, &place, id, &hidden)?;
            made.insert(place, id);
        }
        layer.tree.replace_inodes(&same);
        layer.tree.sort();
        Ok(())
    }

    /// Makes the pending link `id` what `inode` of a lower layer is.
    fn copy(
        &mut self,
        layer: &mut ReadLayer,
        id: InodeId,
        inode: &read::Inode,
        image: &below::Lower,
    ) -> Result<(), LayerError> {
        let xattrs = without_marks(image.xattrs(inode)?, self.overlay);
        layer.tree.describe(id, inode, xattrs);
        let device = || {
            let (major, minor) = inode.device_number().unwrap_or_default();
            encode_device(major.into(), minor.into()).unwrap_or_default()
        };
        layer.tree.inode_mut(id).kind = match inode.file_type() {
            FileType::Symlink => Kind::Symlink(image.read_link(inode)?.into_boxed_slice()),
            FileType::CharDevice => Kind::CharDevice(device()),
            FileType::BlockDevice => Kind::BlockDevice(device()),
            FileType::Fifo => Kind::Fifo,
            FileType::Socket => Kind::Socket,
            _ => Kind::Regular(self.contents(inode, image, &mut layer.spool, &mut layer.contents.runs)?),
        };
        Ok(())
    }

    fn contents(
        &mut self,
        inode: &read::Inode,
        image: &below::Lower,
        spool: &mut Spool,
        runs: &mut Runs,
    ) -> Result<FileData, LayerError> {
        if inode.size == 0 {
            return Ok(FileData::Empty);
        }
        if inode.is_compressed() {
            return linked(image, inode, runs, |device| self.device(image, device));
        }
        let Some(chunk_bits) = image.chunk_bits(inode)? else {
            let len = u32::try_from(inode.size).map_err(|_| too_long(inode))?;
            if len > crate::erofs::format::BLOCK_SIZE {
                return Err(too_long(inode));
            }
            let mut bytes = vec![0; len as usize];
            image.read_file_at(inode, &[], 0, &mut bytes)?;
            let at = spool.append(&bytes).map_err(LayerError::Scratch)?;
            return Ok(FileData::Inline { at, len });
        };
        let first = runs.next();
        let blocks_a_chunk = 1u32 << (u32::from(chunk_bits) - BLOCK_BITS).min(31);
        for chunk in image.chunks(inode) {
            match chunk?.data {
                Data::Block { device, block } if device > 0 => {
                    let device = self.device(image, device)?;
                    let block = u32::try_from(block).map_err(|_| too_long(inode))?;
                    runs.push(first, device, block, blocks_a_chunk);
                }
                _ => runs.push_holes(first, 1),
            }
        }
        let count = runs.next() - first;
        Ok(FileData::Chunked(Chunked { size: inode.size, chunk_bits, first, count }))
    }

    /// The number that device `device` of a lower image has in this layer.
    fn device(&mut self, image: &below::Lower, device: u16) -> Result<u16, LayerError> {
        let blob = *image.blob(device)?;
        let index = self.devices.iter().position(|b| b.blob == blob.blob).unwrap_or_else(|| {
            self.devices.push(blob);
            self.devices.len() - 1
        });
        u16::try_from(self.first_device + index)
            .map_err(|_| LayerError::Write(crate::erofs::plan::PlanError::TooLarge("devices").into()))
    }

    /// Puts the inode under its lower name too, unless this layer has something there, a whiteout included.
    fn name_target(&self, layer: &mut ReadLayer, place: &[u8], id: InodeId, hidden: &[bool]) -> Result<(), LayerError> {
        let components: Vec<&[u8]> = place.split(|b| *b == b'/').collect();
        let Some((name, parents)) = components.split_last() else { return Ok(()) };
        let mut path = Vec::new();
        let mut directory = ROOT;
        for parent in parents {
            path.extend_from_slice(if path.is_empty() { b"" } else { b"/" });
            path.extend_from_slice(parent);
            directory = match layer.tree.child(directory, parent) {
                Some(child) => match &layer.tree.inode(child).kind {
                    Kind::Directory(d) if !d.opaque && !hidden.get(child as usize).is_some_and(|h| *h) => child,
                    _ => return Ok(()),
                },
                None => {
                    let made = layer.tree.add_directory(directory, parent);
                    if let Found::Directory(inode, lower) = self.below.look(&path)? {
                        let xattrs = without_marks(self.below.layer(lower).xattrs(&inode)?, self.overlay);
                        layer.tree.describe(made, &inode, xattrs);
                    }
                    made
                }
            };
        }
        if layer.tree.child(directory, name).is_none() {
            layer.tree.add_name(directory, name, id);
        }
        Ok(())
    }
}

fn too_long(inode: &read::Inode) -> LayerError {
    LayerError::Lower(ReadError::Unsupported { nid: inode.nid, what: "a file in a form that is not linked to" })
}

impl Tree {
    /// Gives `id` the attributes of an inode of a lower layer.
    fn describe(&mut self, id: InodeId, from: &read::Inode, xattrs: Vec<Xattr>) {
        let xattrs = self.intern(xattrs);
        let inode = self.inode_mut(id);
        inode.mode = from.mode & 0o7777;
        inode.uid = from.uid;
        inode.gid = from.gid;
        inode.mtime = Timestamp { secs: from.mtime.secs, nanos: from.mtime.nanos };
        inode.xattrs = xattrs;
    }
}

#[cfg(test)]
mod tests;
