//! The JSON documents of an image: bytes in, structure out, no I/O.
//!
//! Own structures rather than oci-spec's: real documents leave out required fields (`mediaType`), hold `null` for lists
//! and use Docker's media types, and all that is needed of them is a few fields. Unknown fields are ignored; a field
//! that is there twice is an error, since readers differ in which of the two they take.

use super::Platform;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;

/// Most bytes of an index or manifest; what registries accept (distribution-spec, "Pushing Manifests": 4 MiB).
pub const MANIFEST_LIMIT: u64 = 4 << 20;
/// Most bytes of a config.
pub const CONFIG_LIMIT: u64 = 8 << 20;

/// The annotation that names an image in a layout (image-spec, annotations.md).
pub const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// containerd's and BuildKit's full name of it.
pub const CONTAINERD_NAME: &str = "io.containerd.image.name";

/// The empty descriptor's type (image-spec, manifest.md, "Guidance for an Empty Descriptor").
const EMPTY: &str = "application/vnd.oci.empty.v1+json";

/// A document that does not parse.
#[derive(Debug, thiserror::Error)]
#[error("the {what} is not valid: {source}")]
pub struct JsonError {
    what: &'static str,
    source: serde_json::Error,
}

fn parse<T: DeserializeOwned>(what: &'static str, bytes: &[u8]) -> Result<T, JsonError> {
    serde_json::from_slice(bytes).map_err(|source| JsonError { what, source })
}

/// What a media type says a document is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// An index (manifest list).
    Index,
    /// An image manifest.
    Manifest,
    /// Docker's schema 1, which has no config and no diffIDs.
    Schema1,
    /// Anything else.
    Other,
}

impl Kind {
    /// Judges a media type.
    #[must_use]
    pub fn of(media_type: &str) -> Self {
        match media_type {
            "application/vnd.oci.image.index.v1+json" | "application/vnd.docker.distribution.manifest.list.v2+json" => {
                Self::Index
            }
            "application/vnd.oci.image.manifest.v1+json" | "application/vnd.docker.distribution.manifest.v2+json" => {
                Self::Manifest
            }
            "application/vnd.docker.distribution.manifest.v1+json"
            | "application/vnd.docker.distribution.manifest.v1+prettyjws" => Self::Schema1,
            _ => Self::Other,
        }
    }
}

/// A reference to another blob.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// Its type; empty when left out.
    #[serde(default)]
    pub media_type: String,
    /// Its digest, unparsed.
    pub digest: String,
    /// Its size in bytes.
    pub size: u64,
    annotations: Option<BTreeMap<String, String>>,
    platform: Option<RawPlatform>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct RawPlatform {
    #[serde(default)]
    os: String,
    #[serde(default)]
    architecture: String,
    variant: Option<String>,
}

impl RawPlatform {
    fn platform(&self) -> Option<Platform> {
        if self.os.is_empty() || self.architecture.is_empty() {
            return None;
        }
        Some(Platform::new(&self.os, &self.architecture, self.variant.as_deref()))
    }
}

impl Descriptor {
    /// A descriptor of bytes that no other document describes.
    #[must_use]
    pub fn new(media_type: String, digest: String, size: u64) -> Self {
        Self { media_type, digest, size, annotations: None, platform: None }
    }

    /// An annotation's value.
    #[must_use]
    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.annotations.as_ref()?.get(key).map(String::as_str)
    }

    /// The platform, if it is given.
    #[must_use]
    pub fn platform(&self) -> Option<Platform> {
        self.platform.as_ref()?.platform()
    }

    /// Whether this is BuildKit's provenance or SBOM of another manifest of the index, not an image.
    #[must_use]
    pub fn is_attestation(&self) -> bool {
        self.annotation("vnd.docker.reference.type").is_some()
            || self.platform().is_some_and(|platform| platform.is_unknown())
    }
}

/// An index or a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Document {
    /// Several images.
    Index(Vec<Descriptor>),
    /// One image.
    Manifest(Manifest),
}

/// An image manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// The config.
    pub config: Descriptor,
    /// The layers, bottom first.
    pub layers: Vec<Descriptor>,
    /// What it is where it is no image.
    pub artifact_type: Option<String>,
}

/// Why the bytes are no [`Document`] of their type.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// No JSON, or fields missing.
    #[error(transparent)]
    Json(#[from] JsonError),
    /// JSON of something else.
    #[error("{0}")]
    Kind(String),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawDocument {
    media_type: Option<String>,
    artifact_type: Option<String>,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
    manifests: Option<Vec<Descriptor>>,
}

impl Document {
    /// Parses a document that its descriptor says is a `media_type`.
    ///
    /// A document that could be read as both, or calls itself the other, is refused: tools would disagree on what the
    /// image is (CVE-2021-41190). Docker's and OCI's names of the same thing are not told apart.
    ///
    /// # Errors
    /// [`DocumentError`].
    pub fn parse(bytes: &[u8], media_type: &str) -> Result<Self, DocumentError> {
        let kind = Kind::of(media_type);
        let refuse = |why: String| Err(DocumentError::Kind(why));
        match kind {
            Kind::Index | Kind::Manifest => {}
            Kind::Schema1 => {
                return refuse("Docker's schema 1 is not supported (`skopeo copy` converts it)".to_owned());
            }
            Kind::Other => {
                let name = crate::entry::printable(media_type.as_bytes());
                return refuse(format!("media type `{name}` is neither an image manifest nor an index"));
            }
        }
        let raw: RawDocument = parse(if kind == Kind::Index { "image index" } else { "image manifest" }, bytes)?;
        if let Some(own) = &raw.media_type
            && !own.is_empty()
            && Kind::of(own) != kind
        {
            let own = crate::entry::printable(own.as_bytes());
            return refuse(format!("it calls itself `{own}`, its descriptor `{media_type}`"));
        }
        match (kind, raw) {
            (_, RawDocument { manifests: Some(_), config, layers, .. }) if config.is_some() || layers.is_some() => {
                refuse("it is index and manifest at once".to_owned())
            }
            (Kind::Index, RawDocument { layers: None, config: None, manifests, .. }) => {
                Ok(Self::Index(manifests.unwrap_or_default()))
            }
            (Kind::Manifest, RawDocument { config: Some(config), layers, manifests: None, artifact_type, .. }) => {
                Ok(Self::Manifest(Manifest { config, layers: layers.unwrap_or_default(), artifact_type }))
            }
            (Kind::Index, _) => refuse("it is a manifest, its descriptor says index".to_owned()),
            (_, RawDocument { manifests: Some(_), .. }) => {
                refuse("it is an index, its descriptor says manifest".to_owned())
            }
            _ => refuse("it has no config".to_owned()),
        }
    }

    /// Parses a layout's `index.json`, which nothing describes.
    ///
    /// # Errors
    /// [`DocumentError`].
    pub fn parse_index_json(bytes: &[u8]) -> Result<Vec<Descriptor>, DocumentError> {
        let raw: RawDocument = parse("layout's index.json", bytes)?;
        match raw {
            RawDocument { layers: None, config: None, manifests, .. } => Ok(manifests.unwrap_or_default()),
            _ => Err(DocumentError::Kind("it is not an index".to_owned())),
        }
    }
}

/// Whether a config of this type is an image config, with a platform and diffIDs.
#[must_use]
pub fn is_image_config(media_type: &str) -> bool {
    matches!(
        media_type,
        "" | "application/vnd.oci.image.config.v1+json" | "application/vnd.docker.container.image.v1+json"
    )
}

/// The type of a document that came with `declared`: that, if it tells what it is, else what the document says of
/// itself. Some registries send everything as `application/json`.
#[must_use]
pub fn media_type(declared: &str, bytes: &[u8]) -> String {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Shape {
        schema_version: Option<u64>,
        media_type: Option<String>,
        manifests: Option<serde::de::IgnoredAny>,
    }
    if Kind::of(declared) != Kind::Other {
        return declared.to_owned();
    }
    let Ok(shape) = serde_json::from_slice::<Shape>(bytes) else { return declared.to_owned() };
    match shape {
        Shape { schema_version: Some(1), .. } => "application/vnd.docker.distribution.manifest.v1+json".to_owned(),
        Shape { media_type: Some(own), .. } if !own.is_empty() => own,
        Shape { manifests: Some(_), .. } => "application/vnd.oci.image.index.v1+json".to_owned(),
        Shape { .. } => "application/vnd.oci.image.manifest.v1+json".to_owned(),
    }
}

/// The type that a foreign layer would have if it were none; `None` for other types.
#[must_use]
pub fn native_type(media_type: &str) -> Option<String> {
    ["nondistributable.", "foreign."].iter().find_map(|word| {
        let (before, after) = media_type.split_once(word)?;
        Some(format!("{before}{after}"))
    })
}

/// Whether a layer of this type is a file system layer.
///
/// # Errors
/// Why not, to follow "layer … of type …".
pub fn check_layer_type(media_type: &str) -> Result<(), &'static str> {
    const OCI: &str = "application/vnd.oci.image.layer.v1.tar";
    const DOCKER: &str = "application/vnd.docker.image.rootfs.diff.tar";
    let is = |base: &str| {
        let compression = media_type.strip_prefix(base);
        compression.is_some_and(|c| matches!(c, "" | "+gzip" | "+zstd" | ".gzip" | ".zstd"))
    };
    if is(OCI) || is(DOCKER) {
        return Ok(());
    }
    Err(match media_type {
        EMPTY => "is an artifact's empty placeholder, not a filesystem layer",
        "" => "has no media type",
        m if m.contains("nondistributable") || m.contains(".foreign.") => {
            "is foreign: images do not carry its bytes, and it is not fetched from elsewhere"
        }
        m if m.ends_with("+encrypted") => "is encrypted, which is not supported",
        _ => "is not a filesystem layer",
    })
}

/// What is needed of an image config.
#[derive(Debug, Deserialize)]
pub struct Config {
    #[serde(flatten)]
    platform: RawConfigPlatform,
    rootfs: Option<RootFs>,
}

#[derive(Debug, Deserialize)]
struct RawConfigPlatform {
    os: Option<String>,
    architecture: Option<String>,
    variant: Option<String>,
}

#[derive(Debug, Deserialize)]
struct RootFs {
    diff_ids: Option<Vec<String>>,
}

impl Config {
    /// Parses an image config. Its history is not looked at: empty layers are in no list that matters here.
    ///
    /// # Errors
    /// When it is not JSON, or a field has another type.
    pub fn parse(bytes: &[u8]) -> Result<Self, JsonError> {
        parse("image config", bytes)
    }

    /// The layers' diffIDs as written, bottom first.
    #[must_use]
    pub fn diff_ids(&self) -> &[String] {
        self.rootfs.as_ref().and_then(|r| r.diff_ids.as_deref()).unwrap_or_default()
    }

    /// The platform, if the config gives one.
    #[must_use]
    pub fn platform(&self) -> Option<Platform> {
        let RawConfigPlatform { os, architecture, variant } = &self.platform;
        let raw = RawPlatform { os: os.clone()?, architecture: architecture.clone()?, variant: variant.clone() };
        raw.platform()
    }
}

/// One image of a docker-archive's `manifest.json`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct DockerImage {
    /// Member with the config.
    #[serde(rename = "Config")]
    pub config: String,
    /// Its names, `repository:tag`.
    #[serde(rename = "RepoTags")]
    repo_tags: Option<Vec<String>>,
    /// Members with the layers, bottom first.
    #[serde(rename = "Layers")]
    layers: Option<Vec<String>>,
    /// Newer archives: layers' descriptors by diffID.
    #[serde(rename = "LayerSources")]
    layer_sources: Option<BTreeMap<String, Descriptor>>,
}

impl DockerImage {
    /// The names.
    #[must_use]
    pub fn names(&self) -> &[String] {
        self.repo_tags.as_deref().unwrap_or_default()
    }

    /// The layers' members, bottom first.
    #[must_use]
    pub fn layers(&self) -> &[String] {
        self.layers.as_deref().unwrap_or_default()
    }

    /// What the archive says of the layer with this diffID.
    #[must_use]
    pub fn layer_source(&self, diff_id: &str) -> Option<&Descriptor> {
        self.layer_sources.as_ref()?.get(diff_id)
    }
}

/// Parses a docker-archive's `manifest.json`. `null`s, which some writers leave, are no images.
///
/// # Errors
/// When it is not a list of images.
pub fn parse_docker_manifest(bytes: &[u8]) -> Result<Vec<DockerImage>, JsonError> {
    let images: Option<Vec<Option<DockerImage>>> = parse("archive's manifest.json", bytes)?;
    Ok(images.unwrap_or_default().into_iter().flatten().collect())
}
