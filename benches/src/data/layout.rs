//! The layers as an OCI layout, blobs hard-linked.

use super::{Layer, pack};
use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::fs;
use std::path::Path;

/// Writes the layout at `dir`, replacing one that is there: it costs nothing, and the layers may be new.
pub(super) fn write(dir: &Path, layers: &[Layer]) -> Result<()> {
    write_all(dir, layers).with_context(|| format!("cannot write the OCI layout {}", dir.display()))
}

fn write_all(dir: &Path, layers: &[Layer]) -> Result<()> {
    let blobs = dir.join("blobs/sha256");
    if dir.exists() {
        fs::remove_dir_all(dir)?;
    }
    fs::create_dir_all(&blobs)?;
    for layer in layers {
        fs::hard_link(&layer.blob, blobs.join(&layer.digest))?;
    }
    let put = |value: &Value, media_type: &str| -> Result<Value> {
        let bytes = serde_json::to_vec(value)?;
        let digest = pack::hex(&Sha256::digest(&bytes));
        fs::write(blobs.join(&digest), &bytes)?;
        Ok(json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": bytes.len()}))
    };
    let diff_ids: Vec<String> = layers.iter().map(|layer| format!("sha256:{}", layer.diff_id)).collect();
    let config = put(
        &json!({
            "architecture": "amd64", "os": "linux", "config": {},
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        }),
        "application/vnd.oci.image.config.v1+json",
    )?;
    let descriptors: Vec<Value> = layers
        .iter()
        .map(|layer| {
            json!({
                "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
                "digest": format!("sha256:{}", layer.digest), "size": layer.size,
            })
        })
        .collect();
    let manifest_type = "application/vnd.oci.image.manifest.v1+json";
    let mut manifest = put(
        &json!({"schemaVersion": 2, "mediaType": manifest_type, "config": config, "layers": descriptors}),
        manifest_type,
    )?;
    manifest["annotations"] = json!({"org.opencontainers.image.ref.name": "latest"});
    fs::write(dir.join("index.json"), serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": [manifest]}))?)?;
    fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn another_tool_unpacks_it() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root/app");
        fs::create_dir_all(&root).unwrap();
        fs::write(root.join("file"), b"content").unwrap();
        let blob = dir.path().join("layer.tar.gz");
        pack::tree(&dir.path().join("root"), "app", &blob).unwrap();
        let layers = [pack::inspect("x", &blob).unwrap()];
        let layout = dir.path().join("layout");
        write(&layout, &layers).unwrap();
        write(&layout, &layers).expect("a second time");
        let bundle = dir.path().join("bundle");
        let image = format!("{}:latest", layout.display());
        let status = Command::new("umoci").args(["unpack", "--rootless", "--image", &image]).arg(&bundle).status();
        assert!(status.expect("package umoci").success());
        assert_eq!(fs::read(bundle.join("rootfs/app/file")).unwrap(), b"content");
    }
}
