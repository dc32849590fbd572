//! From what was asked for to a disk that a device serves.

use super::protocol::{DiskSpec, LayerSource, UpperInfo};
use crate::backend::{Blobs, FileSource, ReadError, Source};
use crate::engine::{Device, EngineError};
use crate::image::spec::{ImageSpec, Lower, Place, SpecError};
use crate::image::{Image, ImageError, Shelf};
use crate::seal::{Chain, SealError};
use crate::ublk::disk::{Disk, Operation};
use crate::upper::{Limits, Upper, UpperError};
use fs3_client::Digest;
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};
use std::collections::HashMap;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Why there is no disk.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It was asked for wrongly.
    #[error("{0}")]
    Asked(String),
    /// A file has other bytes than its digest says.
    #[error("{file}: its bytes are not those of {expected}, but of {found}")]
    Digest {
        /// Which file.
        file: PathBuf,
        /// What was asked for.
        expected: Digest,
        /// What is there.
        found: Digest,
    },
    /// A file cannot be read.
    #[error("{file}: cannot read")]
    Io {
        /// Which file.
        file: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Layers cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A configuration is wrong, or layers are no disk.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A configuration is wrong.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// A chain cannot be opened.
    #[error(transparent)]
    Chain(#[from] SealError),
    /// A writable layer cannot be opened.
    #[error(transparent)]
    Upper(#[from] UpperError),
    /// There is no engine for it.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl OpenError {
    /// Whether bytes are wrong, so that trying again is no use.
    #[must_use]
    pub fn is_corrupt(&self) -> bool {
        match self {
            Self::Digest { .. } => true,
            Self::Read(error) | Self::Chain(SealError::Read(error)) => error.is_corrupt(),
            Self::Image(error) => error.is_corrupt(),
            _ => false,
        }
    }

    /// Whether it was asked for wrongly, so that trying again is no use.
    #[must_use]
    pub fn is_asked(&self) -> bool {
        matches!(self, Self::Asked(_) | Self::Spec(_) | Self::Image(ImageError::Spec(_)))
    }
}

fn asked(why: impl Into<String>) -> OpenError {
    OpenError::Asked(why.into())
}

/// A disk that is open.
#[derive(Debug)]
pub struct Open {
    /// What a device serves.
    pub disk: Arc<dyn Disk>,
    /// The engine behind it, if it has one.
    pub engine: Option<Arc<Device>>,
    /// The chain that its writable layer is of.
    pub chain: Option<Chain>,
}

/// A file, and whether it was changed.
type FileKey = (u64, u64, u64, i64, i64);

fn key(meta: &std::fs::Metadata) -> FileKey {
    (meta.dev(), meta.ino(), meta.size(), meta.mtime(), meta.mtime_nsec())
}

/// Opens disks. Layers that several have are open once, and their files are digested once.
#[derive(Debug, Default)]
pub struct Opener {
    shelf: Shelf,
    /// For what is in no file.
    blobs: Option<Box<dyn Blobs>>,
    digests: Mutex<HashMap<FileKey, Digest>>,
}

/// Bytes of the file system that a writable layer leaves alone, where nothing is said.
const RESERVE: u64 = 64 << 20;
/// Digests that are remembered; each is some bytes.
const REMEMBERED: usize = 1 << 16;

impl Opener {
    /// Gets what is in no file from `blobs`.
    #[must_use]
    pub fn new(blobs: Option<Box<dyn Blobs>>) -> Self {
        Self { blobs, ..Self::default() }
    }

    /// Checks what was asked for, as far as that needs no file.
    ///
    /// # Errors
    /// Says what is wrong.
    pub fn check(spec: &DiskSpec) -> Result<(), OpenError> {
        let bases = [!spec.layers.is_empty(), spec.config.is_some(), spec.raw.is_some()];
        if bases.iter().filter(|given| **given).count() > 1 {
            return Err(asked("disk: `layers`, `config` and `raw` exclude one another"));
        }
        let writable = spec.chain.is_some() || spec.upper.is_some();
        if spec.chain.is_some() && spec.upper.is_some() {
            return Err(asked("disk: `chain` and `upper` exclude one another"));
        }
        if spec.raw.is_some() && writable {
            return Err(asked("disk.raw: a raw file is read-only, and a `chain` or `upper` cannot be over it"));
        }
        if spec.read_only && writable {
            return Err(asked("disk.read_only: there is a `chain` or `upper`, which is written to"));
        }
        if spec.size.is_some() && spec.chain.is_none() {
            return Err(asked("disk.size: only a `chain` that is made has a size of its own"));
        }
        if !bases.contains(&true) && !writable {
            return Err(asked("disk: one of `layers`, `config`, `raw`, `chain` and `upper` is needed"));
        }
        let files = spec.layers.iter().chain(&spec.raw).filter_map(|layer| layer.file.as_ref());
        let files = files.chain(&spec.config).chain(&spec.chain);
        let upper = spec.upper.iter().flat_map(|upper| [&upper.data, &upper.index]);
        if let Some(relative) = files.chain(upper).find(|file| !file.is_absolute()) {
            return Err(asked(format!("{}: paths must be absolute", relative.display())));
        }
        for LayerSource { file, digest, size } in spec.layers.iter().chain(&spec.raw) {
            if let Some(digest) = digest
                && digest.parse::<Digest>().is_err()
            {
                return Err(asked(format!("{digest}: no digest; `sha256:` and 64 hexadecimal digits are one")));
            }
            if file.is_none() && (digest.is_none() || size.is_none()) {
                return Err(asked("disk: a layer needs a `file`, or a `digest` and a `size`"));
            }
        }
        Ok(())
    }

    /// Opens a disk. `checks` says whether files are read to see that their digests are right; a daemon that takes its
    /// own devices over knows by other means that they are the same files.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(&self, spec: &DiskSpec, checks: bool) -> Result<Open, OpenError> {
        Self::check(spec)?;
        if let Some(raw) = &spec.raw {
            let disk = Arc::new(RawDisk { bytes: self.raw(raw, checks)? });
            return Ok(Open { disk, engine: None, chain: None });
        }
        let limits = Limits { quota: spec.quota, reserve: spec.reserve.unwrap_or(RESERVE) };
        let (image, what) = match &spec.config {
            Some(config) => (ImageSpec::read(config)?, config.display().to_string()),
            None => (of_layers(&spec.layers), "disk".to_owned()),
        };
        self.check_files(&image, &what, checks)?;
        let mut named = image.upper.as_ref().map(|upper| (upper.data.clone(), upper.index.clone()));
        if let (Some((data, _)), true) = (&named, spec.chain.is_some() || spec.upper.is_some()) {
            let data = data.display();
            return Err(asked(format!("{what} names the writable layer {data}, and another one was asked for")));
        }
        named = named.filter(|_| !spec.read_only);
        let lowers = self.shelf.open(&image, &what, self.blobs.as_deref())?;
        let Some(path) = &spec.chain else {
            let files = spec.upper.as_ref().map(|upper| (upper.data.clone(), upper.index.clone()));
            let upper = files.or(named).map(|(data, index)| Upper::open_pair(&data, &index, limits)).transpose()?;
            return engine(&lowers, upper, None);
        };
        if !path.exists() {
            if lowers.size() == 0 && spec.size.is_none() {
                return Err(asked("disk.size: no layer says how large the disk of a new `chain` is"));
            }
            let (chain, upper) = Chain::create(path, spec.size.unwrap_or(lowers.size()), limits)?;
            return engine(&lowers, Some(upper), Some(chain));
        }
        let (chain, sealed, upper) = Chain::open(path, limits)?;
        if sealed.is_empty() {
            return engine(&lowers, Some(upper), Some(chain));
        }
        let all = lowers.layers().iter().cloned().chain(sealed).collect();
        engine(&Image::sized_or_not(all)?, Some(upper), Some(chain))
    }

    /// Sizes and digests of the layers that are files.
    fn check_files(&self, image: &ImageSpec, what: &str, checks: bool) -> Result<(), OpenError> {
        for (number, lower) in image.lowers.iter().enumerate() {
            let Ok(file) = lower.local_file(what, number) else { continue };
            let size = std::fs::metadata(&file).map_err(|source| OpenError::Io { file: file.clone(), source })?.size();
            if let Some(expected) = lower.size.filter(|expected| *expected != size) {
                let why = format!("is {expected}, and {} has {size} bytes", file.display());
                return Err(SpecError::Key { what: what.to_owned(), key: format!("lowers[{number}].size"), why }.into());
            }
            self.verify(&file, lower.digest.as_deref(), checks)?;
        }
        Ok(())
    }

    /// The bytes of a disk that is no layer.
    fn raw(&self, raw: &LayerSource, checks: bool) -> Result<Arc<dyn Source>, OpenError> {
        if let Some(file) = &raw.file {
            self.verify(file, raw.digest.as_deref(), checks)?;
            return Ok(Arc::new(FileSource::open(file)?));
        }
        let digest = raw.digest.as_deref().and_then(|digest| digest.parse().ok());
        let (Some(digest), Some(size)) = (digest, raw.size) else {
            return Err(asked("disk.raw: it needs a `file`, or a `digest` and a `size`"));
        };
        let Some(blobs) = &self.blobs else {
            return Err(asked(format!("disk.raw: {digest} is in no file, and the daemon has no `cache`")));
        };
        Ok(blobs.open(&digest, size, None)?)
    }

    fn verify(&self, path: &Path, expected: Option<&str>, checks: bool) -> Result<(), OpenError> {
        let io = |source| OpenError::Io { file: path.to_owned(), source };
        let Some(expected) = expected.filter(|_| checks) else { return Ok(()) };
        let expected: Digest = expected.parse().map_err(|_| asked(format!("{expected}: no digest")))?;
        let file = File::open(path).map_err(io)?;
        let key = key(&file.metadata().map_err(io)?);
        let known = self.digests.lock().unwrap_or_else(PoisonError::into_inner).get(&key).copied();
        let found = match known {
            Some(found) => found,
            None => digest(&file).map_err(io)?,
        };
        if found != expected {
            return Err(OpenError::Digest { file: path.to_owned(), expected, found });
        }
        let mut known = self.digests.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= REMEMBERED {
            known.clear();
        }
        known.insert(key, found);
        Ok(())
    }
}

/// Layers as a configuration would name them.
fn of_layers(layers: &[LayerSource]) -> ImageSpec {
    let lowers = layers.iter().map(|layer| Lower {
        place: layer.file.clone().map_or(Place::Registry, Place::File),
        digest: layer.digest.clone(),
        size: layer.size,
        target: None,
    });
    ImageSpec {
        repo_blob_url: None,
        lowers: lowers.collect(),
        acceleration: None,
        upper: None,
        result_file: None,
        download: None,
        record_trace: None,
    }
}

fn digest(mut file: &File) -> std::io::Result<Digest> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(Digest::from_bytes(hash.finalize().into())),
            len => hash.update(&buffer[..len]),
        }
    }
}

fn engine(lowers: &Image, upper: Option<Upper>, chain: Option<Chain>) -> Result<Open, OpenError> {
    let engine = Arc::new(Device::over(lowers, upper)?);
    let disk = Arc::new(EngineDisk { engine: Arc::clone(&engine) });
    Ok(Open { disk, engine: Some(engine), chain })
}

/// What a device's status shows of its writable layer.
#[must_use]
pub fn upper_info(engine: &Device) -> Option<UpperInfo> {
    let stat = engine.stat()?;
    Some(UpperInfo {
        mappings: stat.mappings,
        slots: stat.slots,
        pending: stat.pending,
        log: stat.log,
        allocated: stat.allocated,
    })
}

/// Layers, and perhaps a writable one.
#[derive(Debug)]
struct EngineDisk {
    engine: Arc<Device>,
}

fn errno(error: &EngineError) -> Errno {
    tracing::warn!("a request failed: {}", sentence(error));
    Errno::from_raw_os_error(error.errno())
}

/// An error with its causes.
pub(super) fn sentence(error: &(dyn std::error::Error + 'static)) -> String {
    let mut told = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !told.contains(&text) {
            told = format!("{told}: {text}");
        }
        cause = error.source();
    }
    told
}

impl Disk for EngineDisk {
    fn size(&self) -> u64 {
        self.engine.size()
    }

    fn is_read_only(&self) -> bool {
        self.engine.is_read_only()
    }

    fn attempt(&self, operation: &mut Operation<'_>) -> Option<Result<(), Errno>> {
        match operation {
            // What fails may do better with a fresh copy, for which one must wait.
            Operation::Read { at, into } => self.engine.try_read(into, *at).unwrap_or(false).then_some(Ok(())),
            Operation::Write { at, from, durable: false } if !self.engine.is_write_slow() => {
                Some(self.engine.write(from, *at, false).map_err(|error| errno(&error)))
            }
            _ => None,
        }
    }

    fn perform(&self, operation: &mut Operation<'_>) -> Result<(), Errno> {
        let done = match operation {
            Operation::Read { at, into } => self.engine.read(into, *at),
            Operation::Write { at, from, durable } => self.engine.write(from, *at, *durable),
            Operation::Flush => self.engine.flush(),
            Operation::Discard { at, len } => self.engine.discard(*at, *len),
            // The log has no space of a sector's own that could be kept.
            Operation::WriteZeroes { at, len, durable, .. } => self.engine.write_zeroes(*at, *len, *durable),
        };
        done.map_err(|error| errno(&error))
    }
}

/// Bytes as they are.
#[derive(Debug)]
struct RawDisk {
    bytes: Arc<dyn Source>,
}

const SECTOR: u64 = 512;

impl RawDisk {
    fn read(&self, at: u64, into: &mut [u8], wait: bool) -> Result<bool, ReadError> {
        let there = self.bytes.size().saturating_sub(at).min(into.len() as u64);
        // At most the buffer's length.
        let (bytes, beyond) = into.split_at_mut(usize::try_from(there).unwrap_or(usize::MAX));
        beyond.fill(0);
        if wait {
            return self.bytes.read_exact_at(bytes, at).map(|()| true);
        }
        self.bytes.try_read_at(bytes, at)
    }
}

impl Disk for RawDisk {
    fn size(&self) -> u64 {
        self.bytes.size().next_multiple_of(SECTOR)
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn attempt(&self, operation: &mut Operation<'_>) -> Option<Result<(), Errno>> {
        match operation {
            Operation::Read { at, into } => self.read(*at, into, false).unwrap_or(false).then_some(Ok(())),
            _ => None,
        }
    }

    fn perform(&self, operation: &mut Operation<'_>) -> Result<(), Errno> {
        match operation {
            Operation::Read { at, into } => self.read(*at, into, true).map(drop).map_err(|error| {
                tracing::warn!("a request failed: {}", sentence(&error));
                Errno::IO
            }),
            Operation::Flush => Ok(()),
            _ => Err(Errno::ROFS),
        }
    }
}
