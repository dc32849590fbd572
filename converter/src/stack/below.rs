//! The lower layers of a stack as one merged tree, the way overlayfs merges them.

use crate::erofs::format::{DataLayout, FileType};
use crate::erofs::read::{Image, Inode, ReadError};
use crate::layer::{Existing, LayerError, Record};
use crate::manifest::OverlayXattrs;
use fs3_client::Store;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Deref;

/// Most symbolic links followed for one path.
const FOLLOW_MAX: usize = 40;

/// One lower layer.
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

/// What is at a path.
pub(super) enum Found<'b> {
    Nothing,
    /// A directory: the topmost of those merged there.
    Directory(Inode, &'b Lower),
    /// Anything else.
    Object(Inode, &'b Lower),
}

/// What the layer on top has at a path.
pub(super) enum Above {
    Nothing,
    Symlink(Vec<u8>),
    Other,
}

/// Lower layers, bottom first.
pub(super) struct Below {
    layers: Vec<Lower>,
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

/// The directories that are merged at one path, topmost first: (layer, inode).
type Merged = Vec<(usize, Inode)>;

impl Below {
    pub(super) fn open(records: &[Record], store: &Store, overlay: OverlayXattrs) -> Result<Self, LayerError> {
        let layers = records.iter().map(|record| {
            let file = store.open_blob(&record.metadata.digest, record.metadata.size)?;
            Ok(Lower { image: Image::open(file)?, data: record.existing().collect() })
        });
        let layers: Vec<Lower> = layers.collect::<Result<_, LayerError>>()?;
        let mut below = Self { layers, overlay, root: Vec::new(), way: RefCell::default() };
        for (layer, lower) in below.layers.iter().enumerate().rev() {
            let root = lower.root()?;
            let opaque = below.is_opaque(lower, &root)?;
            below.root.push((layer, root));
            if opaque {
                break;
            }
        }
        Ok(below)
    }

    /// What is at `path`, its own parents taken as they are (no symbolic link is followed).
    ///
    /// The way to the last path is kept, since paths come in tree order: a deep tree is not walked from its root for
    /// every directory.
    pub(super) fn look(&self, path: &[u8]) -> Result<Found<'_>, ReadError> {
        let mut way = self.way.borrow_mut();
        let walked = way.turn_to(path);
        let mut components = path[walked..].split(|b| *b == b'/').filter(|c| !c.is_empty()).peekable();
        while let Some(component) = components.next() {
            let merged = way.levels.last().map_or(&self.root, |(_, merged)| merged);
            match self.step(merged, component)? {
                Step::Directory(below) => way.push(component, below),
                Step::Object(layer, inode) if components.peek().is_none() => {
                    return Ok(Found::Object(inode, &self.layers[layer]));
                }
                Step::Object(..) | Step::Nothing => return Ok(Found::Nothing),
            }
        }
        let merged = way.levels.last().map_or(&self.root, |(_, merged)| merged);
        Ok(match merged.first() {
            Some((layer, inode)) => Found::Directory(inode.clone(), &self.layers[*layer]),
            None => Found::Nothing,
        })
    }

    /// The names in the root that no whiteout of these layers hides; each once, sorted.
    pub(super) fn root_names(&self) -> Result<BTreeSet<Vec<u8>>, ReadError> {
        let mut names = BTreeSet::new();
        for (layer, root) in &self.root {
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
    pub(super) fn follow(&self, path: &[u8]) -> Result<Option<Vec<Vec<u8>>>, ReadError> {
        self.follow_over(path, |_| Above::Nothing)
    }

    /// As [`Below::follow`], with a layer on top, asked for what it has at a path.
    pub(super) fn follow_over(
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
                    Found::Object(inode, image) if inode.file_type() == FileType::Symlink => image.read_link(&inode)?,
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
    pub(super) fn parent_of(&self, path: &[u8], above: impl Fn(&[u8]) -> Above) -> Result<Option<Vec<u8>>, ReadError> {
        let mut components: Vec<&[u8]> = path.split(|b| *b == b'/').filter(|c| !c.is_empty()).collect();
        let Some(name) = components.pop() else { return Ok(None) };
        let Some(mut place) = self.follow_over(&components.join(&b'/'), above)? else { return Ok(None) };
        place.push(name.to_vec());
        Ok(Some(place.join(&b'/')))
    }

    fn step(&self, merged: &Merged, name: &[u8]) -> Result<Step, ReadError> {
        let mut below: Merged = Vec::new();
        for (layer, directory) in merged {
            let lower = &self.layers[*layer];
            let Some(nid) = lower.lookup(directory, name)? else { continue };
            let inode = lower.inode(nid)?;
            if inode.is_whiteout() {
                break;
            }
            if !inode.is_dir() {
                return Ok(if below.is_empty() { Step::Object(*layer, inode) } else { Step::Directory(below) });
            }
            let opaque = self.is_opaque(lower, &inode)?;
            below.push((*layer, inode));
            if opaque {
                break;
            }
        }
        Ok(if below.is_empty() { Step::Nothing } else { Step::Directory(below) })
    }

    fn is_opaque(&self, lower: &Lower, directory: &Inode) -> Result<bool, ReadError> {
        if directory.xattr_size == 0 {
            return Ok(false);
        }
        let name = format!("{}opaque", self.overlay.prefix());
        Ok(lower.xattrs(directory)?.iter().any(|x| x.name == name.as_bytes() && x.value == b"y"))
    }
}

enum Step {
    Nothing,
    Directory(Merged),
    Object(usize, Inode),
}
