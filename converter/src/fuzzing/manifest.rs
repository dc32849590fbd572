//! [`crate::source`]'s documents and archive index on any bytes.

use crate::source::archive_index::ArchiveIndex;
use crate::source::documents::{Config, Document, check_layer_type, media_type, native_type, parse_docker_manifest};

/// Reads `data` as each kind of document and as an archive. What an archive's index hands out lies inside the archive.
///
/// # Panics
/// When that does not hold.
pub fn manifest(data: &[u8]) {
    for media_type in ["application/vnd.oci.image.index.v1+json", "application/vnd.oci.image.manifest.v1+json"] {
        match Document::parse(data, media_type) {
            Ok(Document::Manifest(manifest)) => {
                for layer in &manifest.layers {
                    let _ = check_layer_type(&layer.media_type);
                    if let Some(native) = native_type(&layer.media_type) {
                        assert!(native.len() < layer.media_type.len(), "a type that is as foreign as before");
                    }
                }
            }
            Ok(Document::Index(entries)) => {
                for entry in &entries {
                    let _ = (entry.is_attestation(), entry.platform().map(|p| p.to_string()));
                }
            }
            Err(e) => drop(e.to_string()),
        }
    }
    let _ = Document::parse_index_json(data);
    let _ = Document::parse(data, &media_type("application/json", data));
    if let Ok(config) = Config::parse(data) {
        let _ = (config.diff_ids(), config.platform());
    }
    let _ = parse_docker_manifest(data);
    if let Ok(index) = ArchiveIndex::read(data) {
        for name in [&b"index.json"[..], b"manifest.json", b"a", b"../a"] {
            if let Ok(Some((offset, len))) = index.find(name) {
                assert!(offset + len <= data.len() as u64, "a member outside its archive");
            }
        }
    }
}
