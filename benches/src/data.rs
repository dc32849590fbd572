//! The layers that the converter is measured on: real packages, built on first use and kept.
//!
//! Three layers of one image: a Debian base with a compiler, a scientific Python stack, and the dependencies of a
//! web application. Few large files, many middling ones, very many small ones: the three shapes that images have.
//! They stay in `$XDG_CACHE_HOME/dsec/bench` (or `~/.cache`); a changed recipe gets a new [`SERIES`].

mod debian;
mod layout;
mod node;
mod pack;
mod python;
pub(crate) mod related;

pub(crate) use pack::hex;

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

/// Names the recipes: raise it when one of them changes, so that old layers are not taken for new ones.
const SERIES: &str = "convert-1";

/// One gzip-compressed layer on disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Layer {
    /// `base`, `python` or `node`.
    pub(crate) name: String,
    /// SHA-256 of the compressed bytes, in hex.
    pub(crate) digest: String,
    /// Compressed bytes.
    pub(crate) size: u64,
    /// SHA-256 of the tar, in hex.
    pub(crate) diff_id: String,
    /// Bytes of the tar.
    pub(crate) plain_size: u64,
    /// The compressed layer.
    #[serde(skip)]
    pub(crate) blob: PathBuf,
}

/// The image that the layers make.
#[derive(Debug)]
pub(crate) struct Image {
    /// An OCI layout with the image under the tag `latest`.
    pub(crate) layout: PathBuf,
    /// Bottom layer first.
    pub(crate) layers: Vec<Layer>,
}

/// How one layer comes about.
struct Recipe {
    name: &'static str,
    /// Puts the layer's gzip-compressed tar at the given path; the directory is for work in progress.
    build: fn(work: &Path, out: &Path) -> Result<()>,
}

const RECIPES: [Recipe; 3] = [
    Recipe { name: "base", build: debian::build },
    Recipe { name: "python", build: python::build },
    Recipe { name: "node", build: node::build },
];

/// The image of all layers, or of those in `only` if that names any; what is not there yet is built.
pub(crate) fn image(only: &[String]) -> Result<Image> {
    for name in only {
        if !RECIPES.iter().any(|recipe| recipe.name == name) {
            bail!("no layer is called `{name}`: there are base, python and node");
        }
    }
    let dir = cache_dir()?.join(SERIES);
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let mut layers = Vec::new();
    for recipe in RECIPES.iter().filter(|recipe| only.is_empty() || only.iter().any(|name| name == recipe.name)) {
        let made = layer(&dir, recipe.name, &recipe.build);
        layers.push(made.with_context(|| format!("layer `{}` of the data set", recipe.name))?);
    }
    let names: Vec<&str> = layers.iter().map(|layer| layer.name.as_str()).collect();
    let layout = dir.join(format!("layout-{}", names.join("-")));
    layout::write(&layout, &layers)?;
    Ok(Image { layout, layers })
}

fn layer(dir: &Path, name: &str, build: &dyn Fn(&Path, &Path) -> Result<()>) -> Result<Layer> {
    let blob = dir.join(format!("{name}.tar.gz"));
    let facts = dir.join(format!("{name}.json"));
    if let Ok(json) = fs::read(&facts) {
        let layer: Layer = serde_json::from_slice(&json).with_context(|| format!("{}", facts.display()))?;
        if fs::metadata(&blob).is_ok_and(|meta| meta.len() == layer.size) {
            return Ok(Layer { blob, ..layer });
        }
    }
    crate::report::progress(&format!("building layer `{name}` once, for {}", blob.display()));
    let work = tempfile::Builder::new().prefix("building-").tempdir_in(dir)?;
    let new = work.path().join("layer.tar.gz");
    build(work.path(), &new)?;
    let layer = pack::inspect(name, &new)?;
    fs::rename(&new, &blob)?;
    let json = work.path().join("facts.json");
    fs::write(&json, serde_json::to_vec_pretty(&layer)?)?;
    fs::rename(&json, &facts)?;
    Ok(Layer { blob, ..layer })
}

fn cache_dir() -> Result<PathBuf> {
    let base = match std::env::var_os("XDG_CACHE_HOME").filter(|v| !v.is_empty()) {
        Some(dir) => PathBuf::from(dir),
        None => {
            PathBuf::from(std::env::var_os("HOME").context("neither XDG_CACHE_HOME nor HOME is set")?).join(".cache")
        }
    };
    Ok(base.join("dsec/bench"))
}

/// An OCI layout in `dir` of one layer with the entry `top` of `root`.
#[cfg(test)]
pub(crate) fn layout_of_tree(root: &Path, top: &str, dir: &Path) -> Result<PathBuf> {
    let blob = dir.join("layer.tar.gz");
    pack::tree(root, top, &blob)?;
    let layout = dir.join("layout");
    layout::write(&layout, &[pack::inspect("x", &blob)?])?;
    Ok(layout)
}
