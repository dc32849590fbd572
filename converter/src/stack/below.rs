//! The lower layers of a stack as one merged tree, the way overlayfs merges them.

use crate::erofs::format::{DataLayout, FileType};
use crate::erofs::read::{Image, Inode, ReadError};
use crate::layer::{Existing, LayerError, Record};
use crate::manifest::OverlayXattrs;
use crate::read_at::ReadAt;
use crate::stack::fold::{Fold, InLayer, Outcome};
use fs3_client::Store;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Deref;

/// Most symbolic links followed for one path.
const FOLLOW_MAX: usize = 40;

/// One lower layer of a store.
pub(super) struct Lower {
    image: Image<File>,
    data: Vec<Existing>,
}

impl Deref for Lower {
    type Target = Image<File>;

    fn deref(&self) -> &Image<File> {
        &self.image
    }
}

impl Lower {
    pub(super) fn open_all(records: &[Record], store: &Store) -> Result<Vec<Self>, LayerError> {
        let layers = records.iter().map(|record| {
            let file = store.open_blob(&record.metadata.digest, record.metadata.size)?;
            Ok(Self { image: Image::open(file)?, data: record.existing().collect() })
        });
        layers.collect()
    }

    /// The blob behind device `device`.
    pub(super) fn blob(&self, device: u16) -> Result<&Existing, ReadError> {
        self.data.get(usize::from(device).wrapping_sub(1)).ok_or_else(|| ReadError::Superblock {
            field: "extra_devices",
            what: format!("device {device} has no blob"),
        })
    }

    /// log2 of a chunked file's chunk size; `None` for other layouts.
    pub(super) fn chunk_bits(&self, inode: &Inode) -> Result<Option<u8>, ReadError> {
        if inode.layout != DataLayout::ChunkBased {
            return Ok(None);
        }
        self.image.chunk_bits(inode).map(Some)
    }
}

/// What is at a path, and in which layer.
pub(crate) enum Found {
    Nothing,
    /// A directory: the topmost of those merged there.
    Directory(Inode, usize),
    /// Anything else.
    Object(Inode, usize),
}

/// What the layer on top has at a path.
pub(crate) enum Above {
    Nothing,
    Symlink(Vec<u8>),
    Other,
}

/// Lower layers, bottom first.
pub(crate) struct Below<L> {
    layers: Vec<L>,
    overlay: OverlayXattrs,
    root: Merged,
    /// From the root to the last directory that was looked at.
    way: RefCell<Way>,
}

/// A path of directories, and what is merged at each of its levels.
#[derive(Default)]
struct Way {
    path: Vec<u8>,
    /// By level: length of its path, and what is there.
    levels: Vec<(usize, Merged)>,
}

impl Way {
    /// Goes up as far as `path` is another; returns how much of `path` is left of the way.
    fn turn_to(&mut self, path: &[u8]) -> usize {
        let common = if path.starts_with(&self.path) {
            self.path.len()
        } else {
            self.path.iter().zip(path).take_while(|(a, b)| a == b).count()
        };
        let mut keep = self.levels.partition_point(|(end, _)| *end <= common);
        // The last may be but the beginning of a name.
        if keep > 0 && path.get(self.levels[keep - 1].0).is_some_and(|next| *next != b'/') {
            keep -= 1;
        }
        self.levels.truncate(keep);
        let end = self.levels.last().map_or(0, |(end, _)| *end);
        self.path.truncate(end);
        end
    }

    fn push(&mut self, name: &[u8], merged: Merged) {
        if !self.path.is_empty() {
            self.path.push(b'/');
        }
        self.path.extend_from_slice(name);
        self.levels.push((self.path.len(), merged));
    }
}

/// The directories that are merged at one path, topmost first.
#[derive(Default)]
struct Merged {
    layers: Vec<InLayer>,
    /// They hide what may be further down.
    opaque: bool,
}

impl<R: ReadAt, L: Deref<Target = Image<R>>> Below<L> {
    pub(crate) fn new(layers: Vec<L>, overlay: OverlayXattrs) -> Result<Self, ReadError> {
        let mut below = Self { layers, overlay, root: Merged::default(), way: RefCell::default() };
        for (layer, lower) in below.layers.iter().enumerate().rev() {
            let root = lower.root()?;
            let opaque = is_opaque(&**lower, &root, overlay)?;
            below.root.layers.push((layer, root));
            if opaque {
                below.root.opaque = true;
                break;
            }
        }
        Ok(below)
    }

    /// The layer at a position that was found.
    pub(crate) fn layer(&self, index: usize) -> &L {
        &self.layers[index]
    }

    /// What is at `path`, its own parents taken as they are (no symbolic link is followed).
    ///
    /// The way to the last path is kept, since paths come in tree order: a deep tree is not walked from its root for
    /// every directory.
    pub(crate) fn look(&self, path: &[u8]) -> Result<Found, ReadError> {
        Ok(self.find(path)?.0)
    }

    /// Whether what is at `path` in layers further down would show: these have nothing there, and do not hide it.
    pub(crate) fn lets_through(&self, path: &[u8]) -> Result<bool, ReadError> {
        Ok(self.find(path)?.1)
    }

    /// What is at `path`, and whether layers further down count there.
    fn find(&self, path: &[u8]) -> Result<(Found, bool), ReadError> {
        let mut way = self.way.borrow_mut();
        let walked = way.turn_to(path);
        let mut components = path[walked..].split(|b| *b == b'/').filter(|c| !c.is_empty()).peekable();
        while let Some(component) = components.next() {
            let merged = way.levels.last().map_or(&self.root, |(_, merged)| merged);
            match self.step(&merged.layers, component)? {
                Outcome::Directory { layers, opaque } => {
                    // What is below an opaque directory is hidden as well.
                    let opaque = opaque || merged.opaque;
                    way.push(component, Merged { layers, opaque });
                }
                Outcome::Object((layer, inode)) if components.peek().is_none() => {
                    return Ok((Found::Object(inode, layer), false));
                }
                Outcome::Object(..) | Outcome::Whiteout => return Ok((Found::Nothing, false)),
                Outcome::Nothing => return Ok((Found::Nothing, !merged.opaque)),
            }
        }
        let merged = way.levels.last().map_or(&self.root, |(_, merged)| merged);
        Ok(match merged.layers.first() {
            Some((layer, inode)) => (Found::Directory(inode.clone(), *layer), !merged.opaque),
            None => (Found::Nothing, true),
        })
    }

    /// The names in the root that no whiteout of these layers hides; each once, sorted.
    pub(crate) fn root_names(&self) -> Result<BTreeSet<Vec<u8>>, ReadError> {
        let mut names = BTreeSet::new();
        for (layer, root) in &self.root.layers {
            for entry in self.layers[*layer].dir(root)? {
                let entry = entry?;
                if !entry.is_dot() && !names.contains(&entry.name) && !matches!(self.look(&entry.name)?, Found::Nothing)
                {
                    names.insert(entry.name);
                }
            }
        }
        Ok(names)
    }

    /// Where `path` leads when every symbolic link in it is followed inside the root, the last one too. What does not
    /// exist is kept as it is. `None` when there are too many, as in a circle.
    pub(crate) fn follow(&self, path: &[u8]) -> Result<Option<Vec<Vec<u8>>>, ReadError> {
        self.follow_over(path, |_| Above::Nothing)
    }

    /// As [`Below::follow`], with a layer on top, asked for what it has at a path.
    pub(crate) fn follow_over(
        &self,
        path: &[u8],
        above: impl Fn(&[u8]) -> Above,
    ) -> Result<Option<Vec<Vec<u8>>>, ReadError> {
        let mut todo: Vec<Vec<u8>> =
            path.split(|b| *b == b'/').filter(|c| !c.is_empty()).rev().map(<[u8]>::to_vec).collect();
        let mut real: Vec<Vec<u8>> = Vec::new();
        let mut followed = 0;
        while let Some(component) = todo.pop() {
            if component == b"." {
                continue;
            }
            if component == b".." {
                real.pop();
                continue;
            }
            real.push(component);
            let here = real.join(&b'/');
            let target = match above(&here) {
                Above::Symlink(target) => target,
                Above::Other => continue,
                Above::Nothing => match self.look(&here)? {
                    Found::Object(inode, layer) if inode.file_type() == FileType::Symlink => {
                        self.layers[layer].read_link(&inode)?
                    }
                    _ => continue,
                },
            };
            if followed == FOLLOW_MAX {
                return Ok(None);
            }
            followed += 1;
            if target.starts_with(b"/") {
                real.clear();
            } else {
                real.pop();
            }
            todo.extend(target.split(|b| *b == b'/').filter(|c| !c.is_empty()).rev().map(<[u8]>::to_vec));
        }
        Ok(Some(real))
    }

    /// `path` with its parents followed and its last component kept; `None` for the root, and where there is no end.
    pub(crate) fn parent_of(&self, path: &[u8], above: impl Fn(&[u8]) -> Above) -> Result<Option<Vec<u8>>, ReadError> {
        let mut components: Vec<&[u8]> = path.split(|b| *b == b'/').filter(|c| !c.is_empty()).collect();
        let Some(name) = components.pop() else { return Ok(None) };
        let Some(mut place) = self.follow_over(&components.join(&b'/'), above)? else { return Ok(None) };
        place.push(name.to_vec());
        Ok(Some(place.join(&b'/')))
    }

    fn step(&self, merged: &[InLayer], name: &[u8]) -> Result<Outcome, ReadError> {
        let mut fold = Fold::default();
        for (layer, directory) in merged {
            let lower = &self.layers[*layer];
            let Some(nid) = lower.lookup(directory, name)? else { continue };
            if fold.add(*layer, lower.inode(nid)?, |inode| is_opaque(&**lower, inode, self.overlay))? {
                break;
            }
        }
        Ok(fold.finish())
    }
}

fn is_opaque<R: ReadAt>(image: &Image<R>, directory: &Inode, overlay: OverlayXattrs) -> Result<bool, ReadError> {
    if directory.xattr_size == 0 {
        return Ok(false);
    }
    let name = format!("{}opaque", overlay.prefix());
    Ok(image.xattrs(directory)?.iter().any(|x| x.name == name.as_bytes() && x.value == b"y"))
}
