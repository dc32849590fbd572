//! What `docker save` writes: a tar with `manifest.json`, configs and layers.
//!
//! Layers are `<id>/layer.tar` (old; shared ones are links to another's), `blobs/sha256/<hex>` (since Docker 25) or
//! `<hex>.tar[.gz]` (other writers). All that counts is what `manifest.json` says.

use super::documents::{self, CONFIG_LIMIT, DockerImage, MANIFEST_LIMIT};
use super::error::list;
use super::layout::{Location, Members, read};
use super::{LayerOrigin, Platform, SourceError, SourceImage, SourceLayer};
use crate::entry::printable;
use fs3_client::Digest;

/// Finds the image called `reference` (`name[:tag]` or `@index`), or the only one.
///
/// # Errors
/// [`SourceError`].
pub fn resolve(
    archive: &dyn Members,
    reference: Option<&str>,
    platform: &Platform,
) -> Result<SourceImage, SourceError> {
    let manifest = archive.find("manifest.json")?.ok_or(SourceError::NotA {
        path: archive.place().to_owned(),
        what: "it is not a docker-archive (there is no manifest.json)",
    })?;
    let images = documents::parse_docker_manifest(&read(&manifest, "manifest.json", MANIFEST_LIMIT)?)?;
    let image = choose(archive, &images, reference)?;
    load(archive, image, platform)
}

fn choose<'a>(
    archive: &dyn Members,
    images: &'a [DockerImage],
    reference: Option<&str>,
) -> Result<&'a DockerImage, SourceError> {
    let place = || archive.place().to_owned();
    let available = || {
        list(images.iter().enumerate().map(|(i, image)| match image.names() {
            [] => format!("@{i} (no name)"),
            names => names.join(" = "),
        }))
    };
    let no_such = |asked: &str| SourceError::NoSuchImage {
        asked: printable(asked.as_bytes()),
        place: place(),
        available: available(),
    };
    match (reference, images) {
        (None, [image]) => Ok(image),
        (None, []) => {
            Err(SourceError::NotA { path: place(), what: "there is no image in it (manifest.json lists none)" })
        }
        (None, _) => Err(SourceError::Ambiguous { place: place(), available: available() }),
        (Some(asked), _) => match asked.strip_prefix('@') {
            Some(index) => index.parse().ok().and_then(|i: usize| images.get(i)).ok_or_else(|| no_such(asked)),
            None => {
                let full = full_name(asked);
                let named = |image: &&DockerImage| image.names().iter().any(|name| full_name(name) == full);
                images.iter().find(named).ok_or_else(|| no_such(asked))
            }
        },
    }
}

/// A Docker name with what it leaves out: `busybox` is `docker.io/library/busybox:latest`.
pub(super) fn full_name(name: &str) -> String {
    let (path, tag) = match name.rsplit_once(':') {
        Some((path, tag)) if !tag.contains('/') => (path, tag),
        _ => (name, "latest"),
    };
    let path = path.strip_prefix("index.docker.io/").or_else(|| path.strip_prefix("docker.io/")).unwrap_or(path);
    match path.split_once('/') {
        None => format!("docker.io/library/{path}:{tag}"),
        Some((host, _)) if host.contains(['.', ':']) || host == "localhost" => format!("{path}:{tag}"),
        Some(_) => format!("docker.io/{path}:{tag}"),
    }
}

fn find(archive: &dyn Members, what: &str, name: &str) -> Result<Location, SourceError> {
    if name.starts_with('/') || name.split('/').any(|part| part == "..") {
        let why = format!("its path `{}` leads out of the archive", printable(name.as_bytes()));
        return Err(SourceError::Unusable { what: what.to_owned(), why });
    }
    archive.find(name)?.ok_or_else(|| SourceError::Missing {
        what: what.to_owned(),
        name: printable(name.as_bytes()),
        place: archive.place().to_owned(),
    })
}

/// The digest that a member's name promises, if it does.
fn named_digest(name: &str) -> Option<Digest> {
    let hex = name.strip_prefix("blobs/sha256/").or_else(|| name.strip_prefix("sha256:"))?;
    format!("sha256:{hex}").parse().ok()
}

fn load(archive: &dyn Members, docker: &DockerImage, platform: &Platform) -> Result<SourceImage, SourceError> {
    let what = format!("image config {}", printable(docker.config.as_bytes()));
    let config = read(&find(archive, &what, &docker.config)?, &what, CONFIG_LIMIT)?;
    let found = Digest::of(&config);
    if named_digest(&docker.config).is_some_and(|named| named != found) {
        return Err(SourceError::Digest { what, found });
    }
    let mut layers = Vec::new();
    for (index, name) in docker.layers().iter().enumerate() {
        let what = format!("layer {index} ({})", printable(name.as_bytes()));
        let Location { path, offset, len } = find(archive, &what, name)?;
        layers.push(SourceLayer {
            // The archive names none, and its layers may well be compressed.
            media_type: String::new(),
            digest: named_digest(name),
            size: Some(len),
            diff_id: None,
            origin: LayerOrigin::Range { path, offset, len },
        });
    }
    let mut image = SourceImage::new(layers);
    // Old archives name the config by its digest too, but as a file name, which people edit.
    let old_name = docker.config.strip_suffix(".json").and_then(|hex| format!("sha256:{hex}").parse::<Digest>().ok());
    if old_name.is_some_and(|named| named != found) {
        image.warn(format!("the config {} was changed: its digest is {found}", printable(docker.config.as_bytes())));
    }
    image.apply_config(config, platform)?;
    for (index, layer) in image.layers.iter_mut().enumerate() {
        let diff_id = layer.diff_id.map(|d| d.to_string()).unwrap_or_default();
        let Some(source) = docker.layer_source(&diff_id) else { continue };
        documents::check_layer_type(&source.media_type).map_err(|why| SourceError::LayerType {
            index,
            digest: printable(source.digest.as_bytes()),
            media_type: printable(source.media_type.as_bytes()),
            why,
        })?;
        layer.media_type.clone_from(&source.media_type);
    }
    Ok(image)
}
