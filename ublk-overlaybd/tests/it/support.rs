//! What several of these tests need.

use sha2::{Digest as _, Sha256};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use ublk_overlaybd::backend::Source;
use ublk_overlaybd::image::Image;
use ublk_overlaybd::layer::Layer;

/// Where the real files are.
pub(crate) fn samples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/overlaybd")
}

/// SHA-256 in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// All bytes of a source.
pub(crate) fn read_all(source: &dyn Source) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(source.size()).unwrap()];
    source.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// The disk of some layers, the bottom one first.
pub(crate) fn image(layers: impl IntoIterator<Item = Layer>) -> Image {
    Image::new(layers.into_iter().map(Arc::new).collect()).unwrap()
}

/// Runs the program.
pub(crate) fn run(args: &[&str]) -> std::process::Output {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ublk-overlaybd"));
    command.args(args).env_remove("RUST_LOG").output().unwrap()
}

/// Runs the program, which must succeed, and gives what it printed.
pub(crate) fn run_ok(args: &[&str]) -> Vec<u8> {
    let output = run(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}
