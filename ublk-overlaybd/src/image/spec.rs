//! `config.v1.json`: which layers a disk has, as overlaybd's snapshotter writes it.
//!
//! Every key is honoured or refused by its name. There an empty string is "none"; here that ends with the parsing.

use serde::Deserialize;
use std::path::{Path, PathBuf};

/// A file's name in a layer's directory, in the order in which they are looked for.
const IN_DIR: [&str; 3] = ["overlaybd.commit", ".commit", "overlaybd.sealed"];

/// Why a configuration is none.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// It is not JSON, or has a key that nobody knows.
    #[error("{what}: {source}")]
    Json {
        /// Which file.
        what: String,
        /// Where and why; names the key.
        source: serde_json::Error,
    },
    /// It cannot be read.
    #[error("{what}: cannot read")]
    Io {
        /// Which file.
        what: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// A key's value cannot be.
    #[error("{what}: {key}: {why}")]
    Key {
        /// Which file.
        what: String,
        /// Which key.
        key: String,
        /// What is wrong with it.
        why: String,
    },
}

/// Where a lower layer is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// In this file.
    File(PathBuf),
    /// In this directory, under one of the names that its tools use, or not there yet.
    Dir(PathBuf),
    /// In the registry only.
    Registry,
}

/// The OCI layer that a TurboOCI layer refers to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The tar or tar.gz, where it is local.
    pub file: Option<PathBuf>,
    /// Its digest.
    pub digest: Option<String>,
    /// The index into a tar.gz.
    pub gzip_index: Option<PathBuf>,
}

/// A lower layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lower {
    /// Where it is.
    pub place: Place,
    /// `sha256:…` of the blob.
    pub digest: Option<String>,
    /// Bytes of the blob.
    pub size: Option<u64>,
    /// What it refers to, if it is of TurboOCI.
    pub target: Option<Target>,
}

/// The writable layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upper {
    /// Its data file.
    pub data: PathBuf,
    /// Its index file.
    pub index: PathBuf,
    /// What it refers to, if it is of TurboOCI.
    pub target: Option<Target>,
}

/// How layers are fetched in the background.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Download {
    /// Whether they are.
    pub enable: bool,
    /// After how many seconds.
    pub delay: u64,
    /// And up to how many more.
    pub delay_extra: u64,
    /// At most so many megabytes a second.
    pub max_mbps: u64,
    /// How often it is tried.
    pub tries: u64,
    /// Bytes that are asked for at a time.
    pub block_size: u64,
}

impl Default for Download {
    fn default() -> Self {
        Self { enable: false, delay: 300, delay_extra: 30, max_mbps: 100, tries: 5, block_size: 262_144 }
    }
}

/// A disk's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageSpec {
    /// Where blobs are in a registry: the digest is put behind it.
    pub repo_blob_url: Option<String>,
    /// Lower layers, the bottom one first; without the acceleration layer.
    pub lowers: Vec<Lower>,
    /// The directory of the layer with a trace to replay.
    pub acceleration: Option<Lower>,
    /// The writable layer; without one the disk is read-only.
    pub upper: Option<Upper>,
    /// Where to say how opening it went.
    pub result_file: Option<PathBuf>,
    /// How layers are fetched in the background, if it says.
    pub download: Option<Download>,
    /// Where to record a trace.
    pub record_trace: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Wire {
    #[serde(default)]
    repo_blob_url: String,
    #[serde(default)]
    lowers: Vec<WireLower>,
    #[serde(default)]
    upper: WireUpper,
    #[serde(default)]
    result_file: String,
    download: Option<WireDownload>,
    #[serde(default)]
    acceleration_layer: bool,
    #[serde(default)]
    record_trace_path: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct WireLower {
    #[serde(default)]
    file: String,
    #[serde(default)]
    dir: String,
    #[serde(default)]
    digest: String,
    #[serde(default)]
    size: u64,
    #[serde(default)]
    target_file: String,
    #[serde(default)]
    target_digest: String,
    #[serde(default)]
    gzip_index: String,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct WireUpper {
    #[serde(default)]
    index: String,
    #[serde(default)]
    data: String,
    #[serde(default)]
    target: String,
    #[serde(default)]
    gzip_index: String,
    /// The snapshotter writes it, and nobody reads it: the layer's header counts.
    #[serde(default, rename = "vsize")]
    _vsize: serde::de::IgnoredAny,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct WireDownload {
    enable: Option<bool>,
    delay: Option<u64>,
    delay_extra: Option<u64>,
    #[serde(rename = "maxMBps")]
    max_mbps: Option<u64>,
    try_cnt: Option<u64>,
    block_size: Option<u64>,
}

fn text(value: String) -> Option<String> {
    (!value.is_empty()).then_some(value)
}

impl ImageSpec {
    /// Reads the file at `path`; relative paths in it are taken from its directory.
    ///
    /// # Errors
    /// Names the key that is wrong.
    pub fn read(path: &Path) -> Result<Self, SpecError> {
        let what = path.display().to_string();
        let bytes = std::fs::read(path).map_err(|source| SpecError::Io { what: what.clone(), source })?;
        Self::parse(&bytes, &what, path.parent().unwrap_or(Path::new("")))
    }

    /// Parses the JSON of the file called `what`; relative paths in it are taken from `base`.
    ///
    /// # Errors
    /// Names the key that is wrong.
    pub fn parse(json: &[u8], what: &str, base: &Path) -> Result<Self, SpecError> {
        let wire: Wire =
            serde_json::from_slice(json).map_err(|source| SpecError::Json { what: what.to_owned(), source })?;
        let wrong = |key: String, why: &str| Err(SpecError::Key { what: what.to_owned(), key, why: why.to_owned() });
        let path = |value: String| text(value).map(|path| base.join(path));
        let mut lowers = Vec::with_capacity(wire.lowers.len());
        for (number, lower) in wire.lowers.into_iter().enumerate() {
            let digest = text(lower.digest);
            if let Some(digest) = &digest
                && digest.parse::<fs3_client::Digest>().is_err()
            {
                return wrong(
                    format!("lowers[{number}].digest"),
                    "neither empty nor `sha256:` and 64 hexadecimal digits",
                );
            }
            let place = match (path(lower.file), path(lower.dir)) {
                (Some(file), _) => Place::File(file),
                (None, Some(dir)) => Place::Dir(dir),
                (None, None) if digest.is_some() => Place::Registry,
                (None, None) => return wrong(format!("lowers[{number}]"), "has neither file, nor dir, nor digest"),
            };
            let target = target(path(lower.target_file), text(lower.target_digest), path(lower.gzip_index));
            let Ok(target) = target else {
                return wrong(
                    format!("lowers[{number}].gzipIndex"),
                    "there is no targetFile or targetDigest that it is of",
                );
            };
            lowers.push(Lower { place, digest, size: Some(lower.size).filter(|&size| size > 0), target });
        }
        let acceleration = if wire.acceleration_layer {
            let Some(last) = lowers.pop() else {
                return wrong("accelerationLayer".to_owned(), "is true, and there are no lowers");
            };
            Some(last)
        } else {
            None
        };
        let upper = match (path(wire.upper.data), path(wire.upper.index)) {
            (Some(data), Some(index)) => {
                let Ok(target) = target(path(wire.upper.target), None, path(wire.upper.gzip_index)) else {
                    return wrong("upper.gzipIndex".to_owned(), "there is no upper.target that it is of");
                };
                Some(Upper { data, index, target })
            }
            (None, None) => None,
            // Theirs takes this for read-only; then writes would be lost without a word.
            (Some(_), None) => return wrong("upper.index".to_owned(), "is empty, and upper.data is not"),
            (None, Some(_)) => return wrong("upper.data".to_owned(), "is empty, and upper.index is not"),
        };
        let download = wire.download.map(|given| {
            let usual = Download::default();
            Download {
                enable: given.enable.unwrap_or(usual.enable),
                delay: given.delay.unwrap_or(usual.delay),
                delay_extra: given.delay_extra.unwrap_or(usual.delay_extra),
                max_mbps: given.max_mbps.unwrap_or(usual.max_mbps),
                tries: given.try_cnt.unwrap_or(usual.tries),
                block_size: given.block_size.unwrap_or(usual.block_size),
            }
        });
        if download.is_some_and(|download| download.block_size == 0) {
            return wrong("download.blockSize".to_owned(), "is 0");
        }
        if lowers.is_empty() && upper.is_none() {
            return wrong("lowers".to_owned(), "is empty, and there is no upper");
        }
        Ok(Self {
            repo_blob_url: text(wire.repo_blob_url),
            lowers,
            acceleration,
            upper,
            result_file: path(wire.result_file),
            download,
            record_trace: path(wire.record_trace_path),
        })
    }
}

fn target(file: Option<PathBuf>, digest: Option<String>, gzip_index: Option<PathBuf>) -> Result<Option<Target>, ()> {
    match (file, digest, gzip_index) {
        (None, None, None) => Ok(None),
        (None, None, Some(_)) => Err(()),
        (file, digest, gzip_index) => Ok(Some(Target { file, digest, gzip_index })),
    }
}

impl Lower {
    /// The local file of this layer, which messages call `lowers[number]`.
    ///
    /// # Errors
    /// It is not here.
    pub fn local_file(&self, what: &str, number: usize) -> Result<PathBuf, SpecError> {
        let missing = |key: &str, why: String| SpecError::Key { what: what.to_owned(), key: key.to_owned(), why };
        match &self.place {
            Place::File(file) => Ok(file.clone()),
            Place::Dir(dir) => {
                let found = IN_DIR.iter().map(|name| dir.join(name)).find(|file| file.is_file());
                found.ok_or_else(|| {
                    let why = format!("none of {} is in {}", IN_DIR.join(", "), dir.display());
                    missing(&format!("lowers[{number}].dir"), why)
                })
            }
            Place::Registry => Err(missing(&format!("lowers[{number}]"), "has no local file or dir".to_owned())),
        }
    }

    /// The trace in the directory of an acceleration layer.
    ///
    /// # Errors
    /// It has no directory.
    pub fn trace(&self, what: &str) -> Result<PathBuf, SpecError> {
        if let Place::Dir(dir) = &self.place {
            return Ok(dir.join("trace"));
        }
        let why = "is true, and the last of lowers, whose trace it is about, has no dir".to_owned();
        Err(SpecError::Key { what: what.to_owned(), key: "accelerationLayer".to_owned(), why })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<ImageSpec, SpecError> {
        ImageSpec::parse(json.as_bytes(), "config.v1.json", Path::new("/base"))
    }

    #[test]
    fn every_key() {
        let digest = format!("sha256:{}", "ab".repeat(32));
        let spec = parse(&format!(
            r#"{{"repoBlobUrl": "https://registry.example/v2/a/blobs",
            "lowers": [
                {{"file": "l0", "dir": "/d", "digest": "{digest}", "size": 5}},
                {{"dir": "/d1", "targetFile": "/t.tar.gz", "targetDigest": "{digest}", "gzipIndex": "g"}},
                {{"digest": "{digest}"}},
                {{"dir": "/trace"}}],
            "upper": {{"index": "i", "data": "d", "target": "", "gzipIndex": "", "vsize": 64}},
            "resultFile": "r", "accelerationLayer": true, "recordTracePath": "",
            "download": {{"enable": true, "delay": 1, "delayExtra": 2, "maxMBps": 3, "tryCnt": 4}}}}"#
        ))
        .unwrap();
        assert_eq!(spec.lowers.len(), 3);
        assert_eq!(spec.lowers[0].place, Place::File("/base/l0".into()));
        assert_eq!(spec.lowers[0].size, Some(5));
        assert_eq!(spec.lowers[1].target.as_ref().unwrap().gzip_index, Some("/base/g".into()));
        assert_eq!(spec.lowers[2].place, Place::Registry);
        assert_eq!(spec.acceleration.unwrap().place, Place::Dir("/trace".into()));
        assert_eq!(spec.upper.unwrap().index, Path::new("/base/i"));
        assert_eq!(spec.record_trace, None);
        let download = Download { enable: true, delay: 1, delay_extra: 2, max_mbps: 3, tries: 4, block_size: 262_144 };
        assert_eq!(spec.download, Some(download));
        let error = spec.lowers[2].local_file("c", 2).unwrap_err().to_string();
        assert!(error.contains("lowers[2]"), "{error}");
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (json, key) in [
            (r#"{"lowers": [{"file": "a"}], "lowerz": 1}"#, "lowerz"),
            (r#"{"lowers": [{"file": "a", "sha": ""}]}"#, "sha"),
            (r#"{"lowers": [{"size": 3}]}"#, "lowers[0]"),
            (r#"{"lowers": [{"file": "a"}, {"digest": "sha256:12"}]}"#, "lowers[1].digest"),
            (r#"{"lowers": [{"file": "a", "gzipIndex": "g"}]}"#, "lowers[0].gzipIndex"),
            (r#"{"lowers": [{"file": "a"}], "upper": {"data": "d"}}"#, "upper.index"),
            (r#"{"lowers": [{"file": "a"}], "upper": {"index": "d"}}"#, "upper.data"),
            (r#"{"lowers": [{"file": "a"}], "download": {"blockSize": 0}}"#, "download.blockSize"),
            (r#"{"lowers": []}"#, "lowers"),
            (r#"{"accelerationLayer": true}"#, "accelerationLayer"),
            ("{", "line 1"),
        ] {
            let error = parse(json).unwrap_err().to_string();
            assert!(error.contains(key), "{json}: {error}");
        }
    }

    #[test]
    fn read_only() {
        let spec = parse(r#"{"lowers": [{"file": "a"}], "upper": {"index": "", "data": ""}}"#).unwrap();
        assert_eq!(spec.upper, None);
    }
}
