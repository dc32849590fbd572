//! OCI layouts (image-spec, image-layout.md), in a directory or inside an archive.

use super::documents::{self, CONFIG_LIMIT, Descriptor, Document, DocumentError, Kind, MANIFEST_LIMIT, Manifest};
use super::error::list;
use super::{LayerOrigin, Platform, SourceError, SourceImage, SourceLayer, docker_archive};
use crate::entry::printable;
use crate::read_at::ReadAt;
use fs3_client::Digest;
use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Most documents read while looking for an image, and most indexes inside one another.
const DOCUMENTS: usize = 1000;
const DEPTH: usize = 8;

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

/// Finds the image called `tag` (or the only one) for `platform`.
///
/// # Errors
/// [`SourceError`].
pub fn resolve(members: &dyn Members, tag: Option<&str>, platform: &Platform) -> Result<SourceImage, SourceError> {
    let place = members.place();
    // A directory that is not there should not be "no layout".
    std::fs::metadata(place).map_err(|e| SourceError::io(place, e))?;
    let index = members.find("index.json")?;
    let index = index.ok_or(SourceError::NotA {
        path: place.to_owned(),
        what: "it is not an OCI layout (there is no index.json)",
    })?;
    let bytes = read(&index, "index.json", MANIFEST_LIMIT)?;
    let entries = Document::parse_index_json(&bytes).map_err(|e| document_error("index.json".to_owned(), e))?;
    let roots = by_name(place, &entries, tag)?;
    let mut search = Search { members, platform, documents: 0, found: Vec::new(), others: Vec::new() };
    for (root, descriptor) in roots.iter().enumerate() {
        search.visit(descriptor, root, 0)?;
    }
    let descriptor = search.best()?;
    load(members, &descriptor, platform)
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

/// The search through indexes for the images that serve a platform.
struct Search<'a> {
    members: &'a dyn Members,
    platform: &'a Platform,
    documents: usize,
    /// Rank, which entry of `index.json` it is below, and the manifest.
    found: Vec<(u32, usize, Descriptor)>,
    /// What else there was.
    others: Vec<String>,
}

impl Search<'_> {
    fn visit(&mut self, descriptor: &Descriptor, root: usize, depth: usize) -> Result<(), SourceError> {
        if descriptor.is_attestation() {
            return Ok(());
        }
        let declared = descriptor.platform();
        match Kind::of(&descriptor.media_type) {
            // An index of one platform's images says nothing new about the others.
            Kind::Index if declared.as_ref().is_none_or(|p| self.platform.rank(p).is_some()) => {
                let what = format!("image index {}", printable(descriptor.digest.as_bytes()));
                if depth >= DEPTH {
                    return Err(SourceError::Unusable { what, why: "indexes are nested too deeply".to_owned() });
                }
                if let Document::Index(entries) = self.document(&what, descriptor)? {
                    for entry in &entries {
                        self.visit(entry, root, depth + 1)?;
                    }
                }
                return Ok(());
            }
            Kind::Manifest => {}
            _ => {
                let media_type = printable(descriptor.media_type.as_bytes());
                self.others.push(declared.map_or(media_type, |p| p.to_string()));
                return Ok(());
            }
        }
        let platform = match declared {
            Some(platform) => Some(platform),
            None => self.platform_of(descriptor)?,
        };
        match platform {
            None => self.found.push((0, root, descriptor.clone())),
            Some(platform) => match self.platform.rank(&platform) {
                Some(rank) => self.found.push((rank, root, descriptor.clone())),
                None => self.others.push(platform.to_string()),
            },
        }
        Ok(())
    }

    /// The platform of a manifest whose descriptor does not give it: its config's.
    fn platform_of(&mut self, descriptor: &Descriptor) -> Result<Option<Platform>, SourceError> {
        let what = format!("image manifest {}", printable(descriptor.digest.as_bytes()));
        match self.document(&what, descriptor)? {
            Document::Manifest(manifest) if documents::is_image_config(&manifest.config.media_type) => {
                let bytes = read_config(self.members, &manifest)?;
                Ok(documents::Config::parse(&bytes)?.platform())
            }
            _ => Ok(None),
        }
    }

    fn document(&mut self, what: &str, descriptor: &Descriptor) -> Result<Document, SourceError> {
        self.documents += 1;
        if self.documents > DOCUMENTS {
            let why = format!("over {DOCUMENTS} indexes and manifests were read without finding an image");
            return Err(SourceError::Unusable { what: what.to_owned(), why });
        }
        read_document(self.members, what, descriptor)
    }

    /// The best of what was found; inside one index the first of equals, as other tools choose.
    fn best(mut self) -> Result<Descriptor, SourceError> {
        let best = self.found.iter().map(|(rank, ..)| *rank).max();
        self.found.retain(|(rank, ..)| Some(*rank) == best);
        let roots: BTreeSet<usize> = self.found.iter().map(|(_, root, _)| *root).collect();
        let digests: BTreeSet<&str> = self.found.iter().map(|(.., d)| d.digest.as_str()).collect();
        if roots.len() > 1 && digests.len() > 1 {
            let available = list(self.found.iter().map(|(.., d)| label(d)));
            return Err(SourceError::Ambiguous { place: self.members.place().to_owned(), available });
        }
        match self.found.into_iter().next() {
            Some((_, _, descriptor)) => Ok(descriptor),
            None => Err(SourceError::NoPlatform { asked: self.platform.to_string(), available: list(self.others) }),
        }
    }
}

fn document_error(what: String, error: DocumentError) -> SourceError {
    SourceError::Unusable { what, why: error.to_string() }
}

fn read_document(members: &dyn Members, what: &str, descriptor: &Descriptor) -> Result<Document, SourceError> {
    let bytes = read_blob(members, what, descriptor, MANIFEST_LIMIT)?;
    Document::parse(&bytes, &descriptor.media_type).map_err(|e| document_error(what.to_owned(), e))
}

fn read_config(members: &dyn Members, manifest: &Manifest) -> Result<Vec<u8>, SourceError> {
    let what = format!("image config {}", printable(manifest.config.digest.as_bytes()));
    read_blob(members, &what, &manifest.config, CONFIG_LIMIT)
}

/// Reads a small blob and checks it against its descriptor.
fn read_blob(members: &dyn Members, what: &str, descriptor: &Descriptor, limit: u64) -> Result<Vec<u8>, SourceError> {
    let (digest, location) = find_blob(members, what, descriptor)?;
    let bytes = read(&location, what, limit)?;
    let found = Digest::of(&bytes);
    if found == digest { Ok(bytes) } else { Err(SourceError::Digest { what: what.to_owned(), found }) }
}

/// Where a blob is, its size checked.
fn find_blob(members: &dyn Members, what: &str, descriptor: &Descriptor) -> Result<(Digest, Location), SourceError> {
    let bad = |source| SourceError::BadDigest { what: what.to_owned(), source };
    let digest: Digest = descriptor.digest.parse().map_err(bad)?;
    let name = format!("blobs/sha256/{}", digest.hex());
    let location = members.find(&name)?.ok_or_else(|| SourceError::Missing {
        what: what.to_owned(),
        name,
        place: members.place().to_owned(),
    })?;
    if location.len != descriptor.size {
        return Err(SourceError::Size { what: what.to_owned(), expected: descriptor.size, found: location.len });
    }
    Ok((digest, location))
}

/// Reads a manifest and its config, and finds its layers.
fn load(members: &dyn Members, descriptor: &Descriptor, platform: &Platform) -> Result<SourceImage, SourceError> {
    let what = format!("image manifest {}", printable(descriptor.digest.as_bytes()));
    let Document::Manifest(manifest) = read_document(members, &what, descriptor)? else {
        return Err(SourceError::Unusable { what, why: "it is an index".to_owned() });
    };
    let mut layers = Vec::new();
    for (index, layer) in manifest.layers.iter().enumerate() {
        documents::check_layer_type(&layer.media_type).map_err(|why| SourceError::LayerType {
            index,
            digest: printable(layer.digest.as_bytes()),
            media_type: printable(layer.media_type.as_bytes()),
            why,
        })?;
        let what = format!("layer {index} ({})", printable(layer.digest.as_bytes()));
        let (digest, Location { path, offset, len }) = find_blob(members, &what, layer)?;
        layers.push(SourceLayer {
            media_type: layer.media_type.clone(),
            digest: Some(digest),
            size: Some(layer.size),
            diff_id: None,
            origin: LayerOrigin::Range { path, offset, len },
        });
    }
    let mut image = SourceImage::new(layers);
    image.manifest = descriptor.digest.parse().ok();
    if documents::is_image_config(&manifest.config.media_type) {
        image.apply_config(read_config(members, &manifest)?, platform)?;
    } else {
        let media_type = printable(manifest.config.media_type.as_bytes());
        image.warn(format!(
            "the config is not an image's (`{media_type}`), so there are no diff_ids to check the layers against"
        ));
    }
    Ok(image)
}
