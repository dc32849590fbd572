//! What any converter of compressed layers has to do, and nothing else.
//!
//! Read each blob, hash the compressed bytes, inflate, hash the plain bytes, write as many bytes out. A converter that
//! checks what it is given and keeps what it got cannot do less (it could write less where it finds the same content
//! twice, which real layers hardly have). Each layer has two threads, as in the converter: one reads, hashes and
//! inflates, the other hashes and writes; a bounded channel joins them and another takes the empty buffers back.
//! So the limit is a program with the same threads and buffers, measured as a child like every other contender.

use crate::data::hex;
use crate::inflate::Inflate;
use anyhow::{Context as _, Result, anyhow, bail};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

/// Compressed bytes read at a time.
pub(crate) const READ: usize = 256 << 10;
/// Plain bytes inflated at a time.
pub(crate) const BUFFER: usize = 256 << 10;
/// Plain buffers that may be under way in one layer.
const BUFFERS: usize = 6;
/// EROFS block: output is rounded up to it.
const BLOCK: u64 = 4096;

/// A layer to take in.
#[derive(Debug)]
pub(crate) struct Source {
    /// The compressed blob.
    pub(crate) blob: PathBuf,
    /// Its SHA-256 in hex.
    pub(crate) digest: String,
    /// SHA-256 of the plain bytes in hex.
    pub(crate) diff_id: String,
}

/// The layers of the first image in an OCI layout.
pub(crate) fn sources(layout: &Path) -> Result<Vec<Source>> {
    let json = |path: PathBuf| -> Result<Value> {
        let bytes = fs::read(&path).with_context(|| format!("{}", path.display()))?;
        serde_json::from_slice(&bytes).with_context(|| format!("{}", path.display()))
    };
    let digest = |value: &Value| -> Result<String> {
        let text = value.as_str().and_then(|text| text.strip_prefix("sha256:"));
        text.map(str::to_owned).with_context(|| format!("{}: no digest in {value}", layout.display()))
    };
    let blob = |digest: &str| layout.join("blobs/sha256").join(digest);
    let index = json(layout.join("index.json"))?;
    let manifest = json(blob(&digest(&index["manifests"][0]["digest"])?))?;
    let config = json(blob(&digest(&manifest["config"]["digest"])?))?;
    let (layers, diff_ids) = (&manifest["layers"], &config["rootfs"]["diff_ids"]);
    let layers = layers.as_array().context("the manifest has no layers")?;
    layers
        .iter()
        .enumerate()
        .map(|(n, layer)| {
            let compressed = digest(&layer["digest"])?;
            Ok(Source { blob: blob(&compressed), digest: compressed, diff_id: digest(&diff_ids[n])? })
        })
        .collect()
}

/// Takes the layers in, `jobs` of them at a time, and writes one file for each into `out`.
pub(crate) fn run(layers: &[Source], out: &Path, jobs: usize, fsync: bool) -> Result<()> {
    let queue = Mutex::new(layers.iter());
    thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs.min(layers.len()))
            .map(|_| {
                scope.spawn(|| {
                    loop {
                        let next = queue.lock().map_err(|_| anyhow!("another layer's thread panicked"))?.next();
                        let Some(layer) = next else { return Ok(()) };
                        take_in(layer, &out.join(&layer.diff_id), fsync)
                            .with_context(|| format!("{}", layer.blob.display()))?;
                    }
                })
            })
            .collect();
        workers.into_iter().try_for_each(|worker| worker.join().map_err(|_| anyhow!("a layer's thread panicked"))?)
    })
}

/// A buffer and how much of it is filled.
type Filled = (Vec<u8>, usize);

fn take_in(layer: &Source, out: &Path, fsync: bool) -> Result<()> {
    let (full_tx, full_rx) = sync_channel::<Filled>(BUFFERS);
    let (empty_tx, empty_rx) = sync_channel::<Vec<u8>>(BUFFERS);
    for _ in 0..BUFFERS {
        empty_tx.send(vec![0; BUFFER])?;
    }
    let (compressed, plain) = thread::scope(|scope| {
        let writer = scope.spawn(move || write(full_rx, empty_tx, out, fsync));
        let compressed = read(&layer.blob, &full_tx, &empty_rx);
        drop((full_tx, empty_rx));
        let plain = writer.join().map_err(|_| anyhow!("the writing thread panicked"))?;
        plain.and_then(|plain| Ok((compressed?, plain)))
    })?;
    if compressed != layer.digest || plain != layer.diff_id {
        bail!("digests differ: compressed {compressed}, plain {plain}");
    }
    Ok(())
}

/// Reads, hashes and inflates; gives the compressed digest.
fn read(blob: &Path, full: &SyncSender<Filled>, empty: &Receiver<Vec<u8>>) -> Result<String> {
    let mut file = File::open(blob)?;
    let (mut hash, mut inflate, mut input) = (Sha256::new(), Inflate::new(), vec![0; READ]);
    let (mut buffer, mut used, mut finished) = (empty.recv()?, 0, false);
    loop {
        let n = file.read(&mut input)?;
        if n == 0 {
            break;
        }
        hash.update(&input[..n]);
        let mut rest = &input[..n];
        loop {
            let step = inflate.step(rest, &mut buffer[used..])?;
            rest = &rest[step.consumed..];
            used += step.produced;
            finished = step.finished;
            if used == buffer.len() {
                full.send((buffer, used))?;
                (buffer, used) = (empty.recv()?, 0);
            } else if rest.is_empty() {
                break;
            }
        }
    }
    if !finished {
        bail!("the gzip stream ends early");
    }
    full.send((buffer, used))?;
    Ok(hex(&hash.finalize()))
}

/// Hashes and writes; gives the plain digest.
///
/// Owns its ends of the channels: when it fails, the reading thread must not wait for buffers any more.
fn write(full: Receiver<Filled>, empty: SyncSender<Vec<u8>>, out: &Path, fsync: bool) -> Result<String> {
    let mut file = File::create(out).with_context(|| format!("{}", out.display()))?;
    let (mut hash, mut written) = (Sha256::new(), 0_u64);
    for (buffer, used) in full {
        hash.update(&buffer[..used]);
        file.write_all(&buffer[..used])?;
        written += used as u64;
        // Nobody takes it back once the last compressed byte is read.
        drop(empty.try_send(buffer));
    }
    file.set_len(written.next_multiple_of(BLOCK))?;
    if fsync {
        file.sync_all()?;
    }
    Ok(hex(&hash.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data;

    /// A layer of three files, the last of them larger than all buffers together.
    fn layout(dir: &Path) -> PathBuf {
        let root = dir.join("root/app");
        fs::create_dir_all(&root).unwrap();
        fs::write(root.join("a"), b"a").unwrap();
        fs::write(root.join("b"), vec![b'b'; 5000]).unwrap();
        let large: Vec<u8> = (0..1_200_000_u32).flat_map(|n| (n.wrapping_mul(n) / 3).to_le_bytes()).collect();
        fs::write(root.join("c"), large).unwrap();
        data::layout_of_tree(&dir.join("root"), "app", dir).unwrap()
    }

    #[test]
    fn it_writes_every_plain_byte_rounded_to_blocks() {
        let dir = tempfile::tempdir().unwrap();
        let layers = sources(&layout(dir.path())).unwrap();
        run(&layers, dir.path(), 2, true).unwrap();
        let out = fs::read(dir.path().join(&layers[0].diff_id)).unwrap();
        assert_eq!(out.len() % 4096, 0);
        assert_eq!(&out[257..262], b"ustar");
        assert!(out.len() > 4_800_000);
    }

    #[test]
    fn it_checks_both_digests() {
        let dir = tempfile::tempdir().unwrap();
        let layout = layout(dir.path());
        for field in [0, 1] {
            let mut layers = sources(&layout).unwrap();
            let layer = &mut layers[0];
            *[&mut layer.digest, &mut layer.diff_id][field] = "0".repeat(64);
            let error = format!("{:#}", run(&layers, dir.path(), 1, false).unwrap_err());
            assert!(error.contains("digests differ"), "{error}");
        }
    }

    #[test]
    fn a_missing_or_broken_blob_ends_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut layers = sources(&layout(dir.path())).unwrap();
        assert!(run(&layers, &dir.path().join("nowhere"), 2, false).is_err());
        let bytes = fs::read(&layers[0].blob).unwrap();
        layers[0].blob = dir.path().join("cut");
        fs::write(&layers[0].blob, &bytes[..bytes.len() / 2]).unwrap();
        assert!(run(&layers, dir.path(), 2, false).is_err());
    }
}
