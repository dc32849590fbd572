//! The layers of a disk, stacked.

pub mod ahead;
mod open;
mod shelf;
pub mod spec;

pub use open::{lowers, tell};
pub use shelf::Shelf;

use crate::backend::{Blobs, ReadError, Source};
use crate::format::lsmt::SECTOR;
use crate::index::{IndexError, Kind, Stack};
use crate::layer::Layer;
use spec::{ImageSpec, SpecError};
use std::path::Path;
use std::sync::Arc;

/// Why layers are no disk.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// There is nothing to stack.
    #[error("an image needs at least one layer")]
    Empty,
    /// Nobody says how large it is.
    #[error("virtual_size is 0 in every layer, so the disk has no size")]
    NoSize,
    /// Too many layers.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// A layer cannot be opened.
    #[error(transparent)]
    Layer(#[from] ReadError),
    /// The configuration is wrong, or names what is not here.
    #[error(transparent)]
    Spec(#[from] SpecError),
}

impl ImageError {
    /// Whether the bytes themselves are wrong.
    #[must_use]
    pub fn is_corrupt(&self) -> bool {
        matches!(self, Self::Layer(error) if error.is_corrupt())
    }
}

/// A disk of layers, for reading. Clones share everything.
#[derive(Debug, Clone)]
pub struct Image {
    shared: Arc<Shared>,
}

/// What all disks over the same layers have in common.
#[derive(Debug)]
struct Shared {
    layers: Vec<Arc<Layer>>,
    stack: Arc<Stack>,
    size: u64,
}

impl Image {
    /// Stacks `layers`, the bottom one first.
    ///
    /// # Errors
    /// None, too many, or none with a size.
    pub fn new(layers: Vec<Arc<Layer>>) -> Result<Self, ImageError> {
        let image = Self::sized_or_not(layers)?;
        match (image.shared.layers.is_empty(), image.shared.size) {
            (true, _) => Err(ImageError::Empty),
            (false, 0) => Err(ImageError::NoSize),
            _ => Ok(image),
        }
    }

    /// The same without a size, too: of layers that are to have a writable one over them, which says.
    ///
    /// # Errors
    /// There are too many.
    pub fn sized_or_not(layers: Vec<Arc<Layer>>) -> Result<Self, ImageError> {
        let stack = Stack::of(layers.iter().map(|layer| Arc::clone(layer.index())))?;
        // The topmost that says.
        let size = layers.iter().rev().map(|layer| layer.virtual_size()).find(|&size| size > 0).unwrap_or(0);
        Ok(Self { shared: Arc::new(Shared { layers, stack: Arc::new(stack), size }) })
    }

    /// Opens the disk that the configuration at `config` describes, for reading: its layers from local files, or from
    /// `blobs`, and its writable layer as it is.
    ///
    /// # Errors
    /// A key is wrong, a layer is not here, or cannot be read.
    pub fn open_config(config: &Path, blobs: Option<&dyn Blobs>) -> Result<Self, ImageError> {
        let spec = ImageSpec::read(config)?;
        let mut layers = open::lowers(&spec, &config.display().to_string(), blobs)?;
        if let Some(upper) = &spec.upper {
            layers.push(Arc::new(Layer::open_pair(&upper.data, Some(&upper.index))?));
        }
        Self::new(layers)
    }

    /// The layers, the bottom one first: a data piece's layer is its number here.
    #[must_use]
    pub fn layers(&self) -> &[Arc<Layer>] {
        &self.shared.layers
    }

    /// Which layer holds what.
    #[must_use]
    pub fn stack(&self) -> &Arc<Stack> {
        &self.shared.stack
    }

    /// Bytes of the disk; 0 where no layer says.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.shared.size
    }

    /// Sectors of the disk; the last may be cut short.
    #[must_use]
    pub fn sectors(&self) -> u64 {
        self.shared.size.div_ceil(SECTOR)
    }

    fn read(&self, buf: &mut [u8], offset: u64, wait: bool) -> Result<bool, ReadError> {
        crate::backend::check_range(&"the disk", self.shared.size, buf.len(), offset)?;
        let end = offset + buf.len() as u64;
        let mut rest = buf;
        let mut at = offset;
        for piece in self.shared.stack.lookup(offset / SECTOR..end.div_ceil(SECTOR)) {
            let piece_end = end.min(piece.end() * SECTOR);
            let (now, after) = rest.split_at_mut(usize::try_from(piece_end - at).unwrap_or(usize::MAX));
            match piece.kind {
                Some(Kind::Data { layer, moffset }) => {
                    let from = moffset * SECTOR + (at - piece.start * SECTOR);
                    let data = self.shared.layers[usize::from(layer)].data();
                    if wait {
                        data.read_exact_at(now, from)?;
                    } else if !data.try_read_at(now, from)? {
                        return Ok(false);
                    }
                }
                Some(Kind::Zero) | None => now.fill(0),
            }
            (rest, at) = (after, piece_end);
        }
        Ok(true)
    }
}

/// The disk's bytes.
impl Source for Image {
    fn size(&self) -> u64 {
        self.shared.size
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), ReadError> {
        self.read(buf, offset, true).map(drop)
    }

    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> Result<bool, ReadError> {
        self.read(buf, offset, false)
    }
}
