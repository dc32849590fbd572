//! The layers of a disk, stacked.

pub mod spec;

use crate::backend::{FileSource, Gzip, ReadError, Source};
use crate::format::lsmt::SECTOR;
use crate::index::{IndexError, Kind, Stack};
use crate::layer::Layer;
use spec::{ImageSpec, SpecError, Target};
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

/// A disk of layers, for reading.
#[derive(Debug, Clone)]
pub struct Image {
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
        if layers.is_empty() {
            return Err(ImageError::Empty);
        }
        let stack = Stack::of(layers.iter().map(|layer| Arc::clone(layer.index())))?;
        // The topmost that says.
        let size = layers.iter().rev().map(|layer| layer.virtual_size()).find(|&size| size > 0);
        let size = size.ok_or(ImageError::NoSize)?;
        Ok(Self { layers, stack: Arc::new(stack), size })
    }

    /// Opens the disk that the configuration at `config` describes, for reading: all its layers from local files, and its
    /// writable layer as it is.
    ///
    /// # Errors
    /// A key is wrong, a layer is not here, or cannot be read.
    pub fn open_config(config: &Path) -> Result<Self, ImageError> {
        let spec = ImageSpec::read(config)?;
        let what = config.display().to_string();
        let mut layers = Vec::with_capacity(spec.lowers.len() + 1);
        for (number, lower) in spec.lowers.iter().enumerate() {
            let file = lower.local_file(&what, number)?;
            layers.push(Arc::new(match &lower.target {
                None => Layer::open_file(&file)?,
                Some(target) => {
                    let target = open_target(target).map_err(|error| error.of(&what, number))?;
                    Layer::open_turbo(Arc::new(FileSource::open(&file)?), target, file.display().to_string())?
                }
            }));
        }
        if let Some(upper) = &spec.upper {
            if upper.target.is_some() {
                let why = "writable layers of TurboOCI are not read".to_owned();
                return Err(SpecError::Key { what, key: "upper.target".to_owned(), why }.into());
            }
            layers.push(Arc::new(Layer::open_pair(&upper.data, Some(&upper.index))?));
        }
        Self::new(layers)
    }

    /// The layers, the bottom one first: a data piece's layer is its number here.
    #[must_use]
    pub fn layers(&self) -> &[Arc<Layer>] {
        &self.layers
    }

    /// Which layer holds what.
    #[must_use]
    pub fn stack(&self) -> &Arc<Stack> {
        &self.stack
    }

    /// Sectors of the disk; the last may be cut short.
    #[must_use]
    pub fn sectors(&self) -> u64 {
        self.size.div_ceil(SECTOR)
    }

    fn read(&self, buf: &mut [u8], offset: u64, wait: bool) -> Result<bool, ReadError> {
        crate::backend::check_range(&"the disk", self.size, buf.len(), offset)?;
        let end = offset + buf.len() as u64;
        let mut rest = buf;
        let mut at = offset;
        for piece in self.stack.lookup(offset / SECTOR..end.div_ceil(SECTOR)) {
            let piece_end = end.min(piece.end() * SECTOR);
            let (now, after) = rest.split_at_mut(usize::try_from(piece_end - at).unwrap_or(usize::MAX));
            match piece.kind {
                Some(Kind::Data { layer, moffset }) => {
                    let from = moffset * SECTOR + (at - piece.start * SECTOR);
                    let data = self.layers[usize::from(layer)].data();
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

/// Why a target is not read.
enum TargetError {
    Read(ReadError),
    Key(&'static str, &'static str),
}

impl From<ReadError> for TargetError {
    fn from(error: ReadError) -> Self {
        Self::Read(error)
    }
}

impl TargetError {
    fn of(self, what: &str, number: usize) -> ImageError {
        match self {
            Self::Read(error) => error.into(),
            Self::Key(key, why) => {
                let (what, key) = (what.to_owned(), format!("lowers[{number}].{key}"));
                SpecError::Key { what, key, why: why.to_owned() }.into()
            }
        }
    }
}

/// The tar that a TurboOCI layer refers to, whatever it is compressed with.
fn open_target(target: &Target) -> Result<Arc<dyn Source>, TargetError> {
    let Some(file) = &target.file else {
        return Err(TargetError::Key("targetFile", "is empty, and nothing is fetched"));
    };
    let source = FileSource::open(file)?;
    let mut magic = [0; 2];
    let is_gzip = source.size() >= 2 && {
        source.read_exact_at(&mut magic, 0)?;
        magic == [0x1F, 0x8B]
    };
    match (is_gzip, &target.gzip_index) {
        (false, None) => Ok(Arc::new(source)),
        (true, Some(index)) => {
            let index = FileSource::open(index)?;
            Ok(Arc::new(Gzip::open(Arc::new(source), Arc::new(index), file.display().to_string())?))
        }
        (true, None) => Err(TargetError::Key("gzipIndex", "is empty, and targetFile is compressed with gzip")),
        (false, Some(_)) => Err(TargetError::Key("gzipIndex", "is given, and targetFile is not compressed with gzip")),
    }
}

/// The disk's bytes.
impl Source for Image {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), ReadError> {
        self.read(buf, offset, true).map(drop)
    }

    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> Result<bool, ReadError> {
        self.read(buf, offset, false)
    }
}
