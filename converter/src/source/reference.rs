//! Names of sources: `transport:path[:image]`, as skopeo spells them.

use fs3_client::registry::ImageRef;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

const KNOWN: &str = "docker://HOST/REPOSITORY[:TAG], oci:DIR[:TAG], oci-archive:FILE[:TAG], docker-archive:FILE[:REF], tar:FILE (tar:- for standard input) and dir:PATH";

/// Where an image comes from.
///
/// Of `oci:a:b:c`, the first colon after the transport ends the path (skopeo's rule), so that a tag may hold colons.
/// Only if nothing of the right kind is there when the image is resolved, the longest prefix that exists is taken
/// instead, so that a directory named `a:b` can still be named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceRef {
    /// In a registry.
    Docker(ImageRef),
    /// An OCI layout in a directory.
    Oci {
        /// The directory with `index.json`.
        dir: PathBuf,
        /// Which image in it.
        tag: Option<String>,
    },
    /// An OCI layout in a tar.
    OciArchive {
        /// The tar, perhaps compressed.
        file: PathBuf,
        /// Which image in it.
        tag: Option<String>,
    },
    /// What `docker save` writes.
    DockerArchive {
        /// The tar, perhaps compressed.
        file: PathBuf,
        /// `name[:tag]` or `@index`.
        reference: Option<String>,
    },
    /// One layer as a tar, perhaps compressed.
    Tar(TarInput),
    /// One layer as a directory tree.
    Dir(PathBuf),
}

/// Where a single layer is read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TarInput {
    /// A file.
    File(PathBuf),
    /// Standard input.
    Stdin,
}

/// Why a string names no source.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ReferenceError {
    /// No `transport:` in front.
    #[error("`{0}` names no transport; there are {KNOWN}")]
    NoTransport(String),
    /// A transport of another tool, or none at all.
    #[error("transport `{0}` is not known; there are {KNOWN}")]
    UnknownTransport(String),
    /// No name of an image in a registry.
    #[error(transparent)]
    Image(#[from] fs3_client::registry::ReferenceError),
    /// `docker:` without the slashes.
    #[error("`{0}` names no registry; write docker://HOST/REPOSITORY[:TAG]")]
    NoSlashes(String),
    /// Nothing behind the transport.
    #[error("`{0}` names no path")]
    NoPath(String),
}

impl FromStr for SourceRef {
    type Err = ReferenceError;

    fn from_str(s: &str) -> Result<Self, ReferenceError> {
        let (transport, rest) = s.split_once(':').ok_or_else(|| ReferenceError::NoTransport(s.to_owned()))?;
        let (path, image) = match rest.split_once(':') {
            // `oci:dir:` is `oci:dir`, as in skopeo.
            Some((path, image)) => (path, Some(image.to_owned()).filter(|image| !image.is_empty())),
            None => (rest, None),
        };
        let reference = match transport {
            "oci" => Self::Oci { dir: path.into(), tag: image },
            "oci-archive" => Self::OciArchive { file: path.into(), tag: image },
            "docker-archive" => Self::DockerArchive { file: path.into(), reference: image },
            // One path and nothing else: colons belong to it.
            "tar" if rest == "-" => return Ok(Self::Tar(TarInput::Stdin)),
            "tar" if !rest.is_empty() => return Ok(Self::Tar(TarInput::File(rest.into()))),
            "dir" if !rest.is_empty() => return Ok(Self::Dir(rest.into())),
            "tar" | "dir" => return Err(ReferenceError::NoPath(s.to_owned())),
            "docker" => {
                let name = rest.strip_prefix("//").ok_or_else(|| ReferenceError::NoSlashes(s.to_owned()))?;
                return Ok(Self::Docker(name.parse()?));
            }
            // A path with a colon in it, or a name with a tag.
            other if other.contains('/') || other.is_empty() => {
                return Err(ReferenceError::NoTransport(s.to_owned()));
            }
            other => return Err(ReferenceError::UnknownTransport(other.to_owned())),
        };
        if path.is_empty() { Err(ReferenceError::NoPath(s.to_owned())) } else { Ok(reference) }
    }
}

impl fmt::Display for SourceRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (transport, path, image) = match self {
            Self::Docker(image) => return write!(f, "docker://{image}"),
            Self::Oci { dir, tag } => ("oci", dir, tag.as_ref()),
            Self::OciArchive { file, tag } => ("oci-archive", file, tag.as_ref()),
            Self::DockerArchive { file, reference } => ("docker-archive", file, reference.as_ref()),
            Self::Tar(TarInput::Stdin) => return f.write_str("tar:-"),
            Self::Tar(TarInput::File(file)) => ("tar", file, None),
            Self::Dir(path) => ("dir", path, None),
        };
        write!(f, "{transport}:{}", path.display())?;
        image.map_or(Ok(()), |image| write!(f, ":{image}"))
    }
}

/// The path and image that are meant: as parsed if `is_there` says so, else split at the last colon that leaves a path
/// that is there, else as parsed (and then the error names that).
pub(super) fn locate(path: &Path, image: Option<&str>, is_there: fn(&Path) -> bool) -> (PathBuf, Option<String>) {
    let as_parsed = (path.to_owned(), image.map(str::to_owned));
    let Some(image) = image else { return as_parsed };
    if is_there(path) {
        return as_parsed;
    }
    let longer = |tail: &str| {
        let mut whole = path.as_os_str().to_owned();
        whole.push(":");
        whole.push(tail);
        PathBuf::from(whole)
    };
    let whole = longer(image);
    if is_there(&whole) {
        return (whole, None);
    }
    for (at, _) in image.rmatch_indices(':') {
        let candidate = longer(&image[..at]);
        if is_there(&candidate) {
            return (candidate, Some(image[at + 1..].to_owned()).filter(|tag| !tag.is_empty()));
        }
    }
    as_parsed
}
