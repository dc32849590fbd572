//! The layers that a configuration names, opened.

use super::ImageError;
use super::spec::{ImageSpec, Lower, Place, SpecError, Target};
use crate::backend::{Blobs, FileSource, Gzip, ReadError, Source};
use crate::layer::Layer;
use crate::write::WriteError;
use crate::write::publish::NewFile;
use fs3_client::Digest;
use std::path::PathBuf;
use std::sync::Arc;

/// How often a layer is fetched anew whose headers, tables or index prove wrong.
const RETRIES: usize = 3;

/// Opens the lower layers of the configuration that messages call `what`, the bottom one first: from local files, and where
/// there are none from `blobs`.
///
/// # Errors
/// A key is wrong, a layer is not to be had, or cannot be read.
pub fn lowers(spec: &ImageSpec, what: &str, blobs: Option<&dyn Blobs>) -> Result<Vec<Arc<Layer>>, ImageError> {
    refuse_turbo_upper(spec, what)?;
    spec.lowers
        .iter()
        .enumerate()
        .map(|(number, lower)| Ok(Arc::new(open(spec, what, number, lower, blobs)?)))
        .collect()
}

/// Writes `success`, or `failed:` and why, to the configuration's `resultFile`, where it names one: whoever wrote the
/// configuration waits for that.
///
/// # Errors
/// It cannot be written.
pub fn tell(spec: &ImageSpec, failure: Option<&str>) -> Result<(), WriteError> {
    let Some(path) = &spec.result_file else { return Ok(()) };
    let text = failure.map_or("success".to_owned(), |why| format!("failed:{why}"));
    let new = NewFile::create(path, true)?;
    fs3_client::Medium::write_all_at(new.file(), text.as_bytes(), 0).map_err(new.error("write"))?;
    new.publish()
}

pub(super) fn refuse_turbo_upper(spec: &ImageSpec, what: &str) -> Result<(), SpecError> {
    if spec.upper.as_ref().is_some_and(|upper| upper.target.is_some()) {
        return Err(key(what, "upper.target".to_owned(), "writable layers of TurboOCI are not read"));
    }
    Ok(())
}

fn key(what: &str, key: String, why: &str) -> SpecError {
    SpecError::Key { what: what.to_owned(), key, why: why.to_owned() }
}

/// Where a layer's bytes are.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Where {
    File(PathBuf),
    Blob(Digest, u64),
}

/// Finds lower layer `number`: a local file, or else a blob, if there is somebody to ask for it.
pub(super) fn find(what: &str, number: usize, lower: &Lower, can_fetch: bool) -> Result<Where, SpecError> {
    let local = lower.local_file(what, number);
    let (Err(missing), Some(digest)) = (&local, &lower.digest) else { return local.map(Where::File) };
    if !can_fetch {
        return match lower.place {
            Place::Registry => {
                let why = "has no local file or dir, and without a cache nothing is fetched";
                Err(key(what, format!("lowers[{number}]"), why))
            }
            _ => local.map(Where::File),
        };
    }
    let wrong = |error: fs3_client::DigestError| key(what, format!("lowers[{number}].digest"), &error.to_string());
    let digest = digest.parse().map_err(wrong)?;
    let Some(size) = lower.size else {
        // Never from whoever has it: that is how wrong sizes get in.
        let why = format!("is 0 or missing, and the layer is not here ({missing})");
        return Err(key(what, format!("lowers[{number}].size"), &why));
    };
    Ok(Where::Blob(digest, size))
}

pub(super) fn open(
    spec: &ImageSpec,
    what: &str,
    number: usize,
    lower: &Lower,
    blobs: Option<&dyn Blobs>,
) -> Result<Layer, ImageError> {
    let (stored, name): (Arc<dyn Source>, String) = match (find(what, number, lower, blobs.is_some())?, blobs) {
        (Where::File(file), _) => (Arc::new(FileSource::open(&file)?), file.display().to_string()),
        (Where::Blob(digest, size), Some(blobs)) => {
            (blobs.open(&digest, size, spec.repo_blob_url.as_deref())?, digest.to_string())
        }
        // `find` gives none then.
        (Where::Blob(digest, _), None) => {
            return Err(key(what, format!("lowers[{number}]"), &format!("{digest} is not here")).into());
        }
    };
    let target = lower.target.as_ref().map(open_target).transpose().map_err(|error| error.of(what, number))?;
    let mut tries = 0;
    loop {
        let (source, name) = (Arc::clone(&stored), name.as_str());
        let opened = match &target {
            None => Layer::open(source, name),
            Some(target) => Layer::open_turbo(source, Arc::clone(target), name),
        };
        match opened {
            // Perhaps only the copy at hand is wrong. Little of it was fetched so far.
            Err(error) if error.is_corrupt() && tries < RETRIES && stored.drop_cached(0..stored.size()) => {
                tracing::warn!(%error, "a layer is wrong, and is fetched anew");
                tries += 1;
            }
            opened => return Ok(opened?),
        }
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
            Self::Key(name, why) => key(what, format!("lowers[{number}].{name}"), why).into(),
        }
    }
}

/// The tar that a TurboOCI layer refers to, whatever it is compressed with.
fn open_target(target: &Target) -> Result<Arc<dyn Source>, TargetError> {
    let Some(file) = &target.file else {
        let why = "is empty, and what targetDigest names is not fetched, as nothing says how large it is";
        return Err(TargetError::Key("targetFile", why));
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
