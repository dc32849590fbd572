//! What a disk is made of, so that a device is never continued with something else.
//!
//! The kernel keeps pages of a device that outlives its daemon. They are of the layers that the device had; if a file
//! is another by then, pages and disk would disagree, and nobody would notice.

use crate::daemon::protocol::DiskSpec;
use crate::image::spec::ImageSpec;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// A file, so that another in its place is noticed, and one that was changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileIdentity {
    path: PathBuf,
    device: u64,
    inode: u64,
    /// Of what does not change: bytes, and nanoseconds since 1970 of the last change. Not of writable layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    unchanged: Option<(u64, i128)>,
}

/// All files of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    files: Vec<FileIdentity>,
}

fn of_file(path: &Path, changes: bool) -> io::Result<FileIdentity> {
    let meta = fs::metadata(path)?;
    let modified = i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec());
    let unchanged = (!changes).then_some((meta.size(), modified));
    Ok(FileIdentity { path: path.to_owned(), device: meta.dev(), inode: meta.ino(), unchanged })
}

impl Identity {
    /// Of the disk that `spec` names, whose files are all there.
    ///
    /// # Errors
    /// When a file cannot be looked at.
    pub fn of(spec: &DiskSpec) -> io::Result<Self> {
        let mut files = Vec::new();
        // What has a digest and no file is known by that.
        for file in spec.layers.iter().chain(&spec.raw).filter_map(|layer| layer.file.as_ref()) {
            files.push(of_file(file, false)?);
        }
        let mut upper = spec.upper.as_ref().map(|upper| upper.data.clone());
        if let Some(path) = &spec.config {
            let config = ImageSpec::read(path).map_err(io::Error::other)?;
            for (number, lower) in config.lowers.iter().enumerate() {
                if let Ok(file) = lower.local_file("", number) {
                    files.push(of_file(&file, false)?);
                }
            }
            if !spec.read_only && upper.is_none() {
                upper = config.upper.map(|upper| upper.data);
            }
        }
        if let Some(upper) = &upper {
            files.push(of_file(upper, true)?);
        }
        // Its file is replaced at each seal, but never its directory.
        if let Some(dir) = spec.chain.as_ref().and_then(|chain| chain.parent()) {
            files.push(of_file(dir, true)?);
        }
        Ok(Self { files })
    }

    /// The first file that is not what it was, or that only one of the two has.
    #[must_use]
    pub fn difference(&self, now: &Self) -> Option<PathBuf> {
        let most = self.files.len().max(now.files.len());
        let different = (0..most).find(|&number| self.files.get(number) != now.files.get(number))?;
        let file = self.files.get(different).or_else(|| now.files.get(different));
        file.map(|file| file.path.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::protocol::{LayerSource, UpperFiles};

    #[test]
    fn another_file_and_a_changed_one_are_noticed_and_a_written_upper_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["base", "data", "index"] {
            fs::write(path(name), name).unwrap();
        }
        let spec = DiskSpec {
            layers: vec![LayerSource { file: Some(path("base")), ..LayerSource::default() }],
            upper: Some(UpperFiles { data: path("data"), index: path("index") }),
            ..DiskSpec::default()
        };
        let before = Identity::of(&spec).unwrap();
        fs::write(path("data"), "much more").unwrap();
        assert_eq!(before.difference(&Identity::of(&spec).unwrap()), None);
        fs::write(path("base"), "BASE, changed in place").unwrap();
        let now = Identity::of(&spec).unwrap();
        assert_eq!(before.difference(&now), Some(path("base")));
        // A copy in its place, even of the same bytes and times, is another file.
        fs::copy(path("data"), path("copy")).unwrap();
        fs::rename(path("copy"), path("data")).unwrap();
        assert_eq!(now.difference(&Identity::of(&spec).unwrap()), Some(path("data")));
        let alone = DiskSpec { upper: None, ..spec };
        assert_eq!(now.difference(&Identity::of(&alone).unwrap()), Some(path("data")));
    }
}
