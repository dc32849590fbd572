//! Which layers a command is about.

use super::Usage;
#[cfg(feature = "cache")]
pub(super) use super::blobs::BlobArgs as Blobs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use ublk_overlaybd::image::Image;
use ublk_overlaybd::layer::Layer;

/// A disk: by its configuration, or by its layers.
#[derive(Debug, clap::Args)]
pub(super) struct DiskArgs {
    /// Take the layers, and the writable one, from overlaybd's JSON
    #[arg(long, value_name = "config.v1.json")]
    config: Option<PathBuf>,
    /// Put this writable layer on top: its data file, and its index file or `-` where a sparse layer has none
    #[arg(long, num_args = 2, value_names = ["DATA", "INDEX|-"])]
    upper: Option<Vec<PathBuf>>,
    #[command(flatten)]
    blobs: Blobs,
}

/// Without a cache nothing is fetched.
#[cfg(not(feature = "cache"))]
#[derive(Debug, clap::Args)]
pub(super) struct Blobs {}

#[cfg(not(feature = "cache"))]
impl Blobs {
    #[expect(clippy::unnecessary_wraps, clippy::unused_self, reason = "with the feature there is more to it")]
    pub(super) fn open(&self) -> anyhow::Result<Option<Box<dyn ublk_overlaybd::backend::Blobs>>> {
        Ok(None)
    }
}

impl DiskArgs {
    /// The layers, of which `files` are those named on the command line, the bottom one first.
    pub(super) fn layers(&self, files: &[PathBuf]) -> anyhow::Result<Vec<Arc<Layer>>> {
        let mut layers = match (&self.config, files) {
            (Some(config), []) => Image::open_config(config, self.blobs.open()?.as_deref())?.layers().to_vec(),
            (Some(_), [file, ..]) => {
                let what = format!("{}: give --config or layers, not both", file.display());
                return Err(Usage(what).into());
            }
            (None, files) => {
                let layers = files.iter().map(|file| Ok(Arc::new(Layer::open_file(file)?)));
                layers.collect::<anyhow::Result<_>>()?
            }
        };
        if let Some([data, index]) = self.upper.as_deref() {
            layers.push(Arc::new(open_pair(data, index)?));
        }
        if layers.is_empty() {
            return Err(Usage("give --config, or at least one layer, or --upper".to_owned()).into());
        }
        Ok(layers)
    }

    /// The disk.
    pub(super) fn image(&self, files: &[PathBuf]) -> anyhow::Result<Image> {
        Ok(Image::new(self.layers(files)?)?)
    }

    /// The index file of the writable layer, where one was named.
    pub(super) fn upper_index(&self) -> Option<&Path> {
        self.upper.as_ref().and_then(|pair| index(pair.get(1)?))
    }
}

/// `-` is none.
pub(super) fn index(path: &Path) -> Option<&Path> {
    (path != Path::new("-")).then_some(path)
}

/// A writable layer for reading.
pub(super) fn open_pair(data: &Path, index_path: &Path) -> anyhow::Result<Layer> {
    Ok(Layer::open_pair(data, index(index_path))?)
}

/// As many as the machine has cores, unless it was said otherwise.
pub(super) fn threads(asked: Option<u16>) -> usize {
    asked.map_or_else(|| std::thread::available_parallelism().map_or(1, usize::from), |n| usize::from(n.max(1)))
}

/// The last of `files` is where the result goes.
pub(super) fn split_out(files: &[PathBuf]) -> anyhow::Result<(&[PathBuf], &Path)> {
    let Some((out, layers)) = files.split_last() else {
        return Err(Usage("the file to write is missing".to_owned()).into());
    };
    Ok((layers, out))
}

/// A path that means the same wherever it is used.
#[cfg(feature = "ublk")]
pub(super) fn absolute(path: impl AsRef<Path>) -> anyhow::Result<PathBuf> {
    Ok(std::path::absolute(path)?)
}
