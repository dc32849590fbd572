//! One layer, whatever it is wrapped in: its data as an LSMT file has it, and its index.

mod lsmt;
mod pair;

pub use pair::{Dropped, Replayed};

use crate::backend::{FileSource, Part, ReadError, Source, ZFile};
use crate::format::lsmt::{HEADER_SIZE, Header};
use crate::format::tar::{Member, PROBE};
use crate::format::zfile::{Geometry, Head};
use crate::index::Index;
use std::path::Path;
use std::sync::Arc;

/// How a layer is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Committed: data in the order of the disk.
    Committed,
    /// A writable layer with index and trailer put after it.
    Sealed,
    /// A data file and an index file, or a sparse file.
    Writable,
}

/// What is known of a layer besides its data.
#[derive(Debug, Clone)]
pub struct About {
    /// How it is kept.
    pub form: Form,
    /// The tar member around it.
    pub tar: Option<Member>,
    /// Its compression.
    pub zfile: Option<Geometry>,
    /// Its header.
    pub header: Header,
    /// Its trailer; a writable layer has none.
    pub trailer: Option<Header>,
    /// Entries on disk that map something.
    pub entries: u64,
    /// Entries on disk that are padding.
    pub padding: u64,
    /// Whether entries have tags other than 0.
    pub tagged: bool,
    /// Where data ends in the LSMT file, in sectors.
    pub data_end: u64,
    /// What replaying a writable layer's index met.
    pub replayed: Option<Replayed>,
}

impl About {
    /// The trailer, or the header of what has none: where size and names are.
    #[must_use]
    pub fn authority(&self) -> &Header {
        self.trailer.as_ref().unwrap_or(&self.header)
    }
}

/// One layer, open for reading.
#[derive(Debug)]
pub struct Layer {
    name: Arc<str>,
    data: Arc<dyn Source>,
    index: Arc<Index>,
    about: About,
    stored: Arc<dyn Source>,
    zfile: Option<Arc<ZFile>>,
}

impl Layer {
    /// Opens a finished layer in the file at `path`.
    ///
    /// # Errors
    /// Names the field that is wrong, or says what the system said.
    pub fn open_file(path: &Path) -> Result<Self, ReadError> {
        Self::open(Arc::new(FileSource::open(path)?), path.display().to_string())
    }

    /// Opens a finished layer, which messages call `name`: tar, ZFile and LSMT are found by their magic.
    ///
    /// # Errors
    /// Names the field that is wrong, or says what the source said.
    pub fn open(stored: Arc<dyn Source>, name: impl Into<Arc<str>>) -> Result<Self, ReadError> {
        let name = name.into();
        let Unwrapped { tar, zfile, lsmt } = unwrap(&stored, &name)?;
        lsmt::open(name, stored, tar, zfile, lsmt, None)
    }

    /// Opens a TurboOCI layer: `stored` has the file system's structure, `target` is the tar with the contents of its
    /// files, which is read as it is.
    ///
    /// # Errors
    /// Names the field that is wrong, or says what the sources said.
    pub fn open_turbo(
        stored: Arc<dyn Source>,
        target: Arc<dyn Source>,
        name: impl Into<Arc<str>>,
    ) -> Result<Self, ReadError> {
        let name = name.into();
        let Unwrapped { tar, zfile, lsmt } = unwrap(&stored, &name)?;
        lsmt::open(name, stored, tar, zfile, lsmt, Some(target))
    }

    /// Opens a writable layer for reading: `data` and `index` as they are, or, where `index` is none, a sparse file whose
    /// holes are the index.
    ///
    /// The replay of the index stops at the first entry that cannot be; [`About::replayed`] says so. No disk can be opened
    /// over the pair as long as this is open, and this not while one is.
    ///
    /// # Errors
    /// Names the field that is wrong, or says what the system said.
    pub fn open_pair(data: &Path, index: Option<&Path>) -> Result<Self, ReadError> {
        pair::open(data, index)
    }

    /// What messages call it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The bytes that `moffset`s of the index are about, in sectors.
    #[must_use]
    pub fn data(&self) -> &Arc<dyn Source> {
        &self.data
    }

    /// What it maps; its data has layer number 0.
    #[must_use]
    pub fn index(&self) -> &Arc<Index> {
        &self.index
    }

    /// What else is known of it.
    #[must_use]
    pub fn about(&self) -> &About {
        &self.about
    }

    /// Size of the disk in bytes; 0 is that of the layer below.
    #[must_use]
    pub fn virtual_size(&self) -> u64 {
        self.about.authority().virtual_size
    }

    /// The file as it is stored, wrappers and all.
    #[must_use]
    pub fn stored(&self) -> &Arc<dyn Source> {
        &self.stored
    }

    /// The compressed file, where it is one.
    #[must_use]
    pub fn zfile(&self) -> Option<&Arc<ZFile>> {
        self.zfile.as_ref()
    }
}

/// A file with its wrappers taken off.
#[derive(Debug)]
pub struct Unwrapped {
    /// The tar member, where there is one.
    pub tar: Option<Member>,
    /// The compression, where there is one.
    pub zfile: Option<Arc<ZFile>>,
    /// What is inside.
    pub lsmt: Arc<dyn Source>,
}

/// Takes the tar member and the compression off `stored`, whichever there are.
///
/// # Errors
/// A wrapper is damaged, or the source cannot be read.
pub fn unwrap(stored: &Arc<dyn Source>, name: &Arc<str>) -> Result<Unwrapped, ReadError> {
    let corrupt = |why: String| ReadError::Corrupt { what: name.to_string(), offset: 0, why };
    let mut start = vec![0; usize::try_from(stored.size()).unwrap_or(PROBE).min(PROBE)];
    stored.read_exact_at(&mut start, 0)?;
    let tar = Member::find(&start).map_err(|error| corrupt(error.to_string()))?;
    let mut inner = Arc::clone(stored);
    if let Some(member) = tar {
        let part = Part::new(Arc::clone(stored), member.offset, member.size).ok_or_else(|| {
            let has = stored.size().saturating_sub(member.offset);
            corrupt(format!("tar: the member's size is {}, but only {has} bytes follow its header", member.size))
        })?;
        inner = Arc::new(part);
        start.truncate(usize::try_from(inner.size()).unwrap_or(PROBE).min(HEADER_SIZE));
        inner.read_exact_at(&mut start, 0)?;
    }
    let mut zfile = None;
    if Head::has_magic(&start) {
        let file = Arc::new(ZFile::open(inner, Arc::clone(name))?);
        zfile = Some(Arc::clone(&file));
        inner = file;
    }
    Ok(Unwrapped { tar, zfile, lsmt: inner })
}
