//! OCI layouts (image-spec, image-layout.md), in a directory or inside an archive.

use super::documents::{self, Descriptor, Document, MANIFEST_LIMIT};
use super::error::list;
use super::find::{Blobs, Root};
use super::{LayerOrigin, SourceError, docker_archive};
use crate::entry::printable;
use crate::read_at::ReadAt;
use fs3_client::Digest;
use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Where some bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// The file.
    pub path: PathBuf,
    /// First byte in it.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

/// Named byte ranges: the files of a directory or the members of an archive.
pub trait Members {
    /// What to call the whole in messages.
    fn place(&self) -> &Path;

    /// Finds a member by its path inside.
    ///
    /// # Errors
    /// When looking fails; a member that is not there is `None`.
    fn find(&self, name: &str) -> Result<Option<Location>, SourceError>;
}

/// A layout in a directory. Symbolic links in it are followed: it is the user's, and layouts that share blobs are
/// made that way.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
}

impl Directory {
    /// A directory, not looked at yet.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }
}

impl Members for Directory {
    fn place(&self) -> &Path {
        &self.path
    }

    fn find(&self, name: &str) -> Result<Option<Location>, SourceError> {
        let path = self.path.join(name);
        match std::fs::metadata(&path) {
            Ok(m) if m.is_file() => Ok(Some(Location { path, offset: 0, len: m.len() })),
            Ok(_) => Err(SourceError::NotA { path, what: "it is not a regular file" }),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(SourceError::io(&path, e)),
        }
    }
}

/// Reads a whole small member.
pub(super) fn read(location: &Location, what: &str, limit: u64) -> Result<Vec<u8>, SourceError> {
    let too_large = || SourceError::TooLarge { what: what.to_owned(), size: location.len, limit };
    let len = usize::try_from(location.len).ok().filter(|_| location.len <= limit).ok_or_else(too_large)?;
    let mut bytes = vec![0; len];
    let io = |e| SourceError::io(&location.path, e);
    File::open(&location.path).map_err(io)?.read_exact_at(&mut bytes, location.offset).map_err(io)?;
    Ok(bytes)
}

/// The entries of the layout's index that `tag` names, or all of them where they are one image.
pub(super) fn roots(members: &dyn Members, tag: Option<&str>) -> Result<Vec<Root>, SourceError> {
    let place = members.place();
    // A directory that is not there should not be "no layout".
    std::fs::metadata(place).map_err(|e| SourceError::io(place, e))?;
    let index = members.find("index.json")?;
    let index = index.ok_or(SourceError::NotA {
        path: place.to_owned(),
        what: "it is not an OCI layout (there is no index.json)",
    })?;
    let bytes = read(&index, "index.json", MANIFEST_LIMIT)?;
    let entries = Document::parse_index_json(&bytes)
        .map_err(|e| SourceError::Unusable { what: "index.json".to_owned(), why: e.to_string() })?;
    let roots = by_name(place, &entries, tag)?;
    Ok(roots.into_iter().map(|entry| Root { descriptor: entry.clone(), label: label(entry) }).collect())
}

/// The entries of `index.json` that `tag` names.
fn by_name<'a>(place: &Path, entries: &'a [Descriptor], tag: Option<&str>) -> Result<Vec<&'a Descriptor>, SourceError> {
    let images = || entries.iter().filter(|d| !d.is_attestation());
    let Some(tag) = tag else {
        let names: BTreeSet<Option<&str>> = images().map(name).collect();
        let digests: BTreeSet<&str> = images().map(|d| d.digest.as_str()).collect();
        if names.len() > 1 && digests.len() > 1 {
            return Err(SourceError::Ambiguous { place: place.to_owned(), available: list(images().map(label)) });
        }
        return Ok(images().collect());
    };
    let matches = |d: &&Descriptor| {
        d.annotation(documents::REF_NAME) == Some(tag)
            || d.annotation(documents::CONTAINERD_NAME)
                .is_some_and(|n| docker_archive::full_name(n) == docker_archive::full_name(tag))
    };
    let found: Vec<&Descriptor> = images().filter(matches).collect();
    if found.is_empty() {
        let available = list(images().map(label));
        return Err(SourceError::NoSuchImage { asked: printable(tag.as_bytes()), place: place.to_owned(), available });
    }
    Ok(found)
}

fn name(descriptor: &Descriptor) -> Option<&str> {
    descriptor.annotation(documents::REF_NAME).or_else(|| descriptor.annotation(documents::CONTAINERD_NAME))
}

/// What to call an entry in a list of choices.
fn label(descriptor: &Descriptor) -> String {
    match (name(descriptor), descriptor.platform()) {
        (Some(name), _) => name.to_owned(),
        (None, Some(platform)) => format!("{} ({platform}, no name)", descriptor.digest),
        (None, None) => format!("{} (no name)", descriptor.digest),
    }
}

/// The blobs of a layout.
pub(super) struct Layout<'m>(pub(super) &'m dyn Members);

impl Blobs for Layout<'_> {
    fn place(&self) -> &Path {
        self.0.place()
    }

    fn read(&self, what: &str, descriptor: &Descriptor, limit: u64) -> Result<Vec<u8>, SourceError> {
        let (digest, location) = self.find(what, descriptor)?;
        let bytes = read(&location, what, limit)?;
        let found = Digest::of(&bytes);
        if found == digest { Ok(bytes) } else { Err(SourceError::Digest { what: what.to_owned(), found }) }
    }

    fn origin(&self, what: &str, descriptor: &Descriptor) -> Result<(Digest, LayerOrigin), SourceError> {
        let (digest, Location { path, offset, len }) = self.find(what, descriptor)?;
        Ok((digest, LayerOrigin::Range { path, offset, len }))
    }
}

impl Layout<'_> {
    /// Where a blob is, its size checked.
    fn find(&self, what: &str, descriptor: &Descriptor) -> Result<(Digest, Location), SourceError> {
        let bad = |source| SourceError::BadDigest { what: what.to_owned(), source };
        let digest: Digest = descriptor.digest.parse().map_err(bad)?;
        let name = format!("blobs/sha256/{}", digest.hex());
        let location = self.0.find(&name)?.ok_or_else(|| SourceError::Missing {
            what: what.to_owned(),
            name,
            place: self.place().to_owned(),
        })?;
        if location.len != descriptor.size {
            return Err(SourceError::Size { what: what.to_owned(), expected: descriptor.size, found: location.len });
        }
        Ok((digest, location))
    }
}
