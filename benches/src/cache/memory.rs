//! Memory: of many open blobs, and of a full cache's bookkeeping. Each is a child's, which reads its peak from the kernel
//! (`VmHWM`): what `wait4` says of a child begins with the memory of its parent.

use super::shaped::Shaped;
use crate::contenders::silent;
use crate::report::{self, Better, Metric, progress};
use anyhow::{Context as _, Result, bail};
use fs3_client::{CacheConfig, CachedBlob, ChunkCache, Digest};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

const BLOBS: u64 = 10_000;
/// Each blob's length: 64 MiB, and a last chunk that is short, so that little is written.
const BLOB: u64 = (64 << 20) + 4096;
/// A terabyte of chunks of 256 KiB has as many groups of 64.
const GROUPS: u64 = 65_536;
/// With chunks of this length, of which one in each group is cached: what is in memory is the same.
const CHUNK: u64 = 4096;
const GROUPS_OF_BLOB: u64 = 1024;

pub(super) fn measure(dir: &Path) -> Result<Vec<Metric>> {
    let mut resident = Vec::new();
    for what in ["empty", "blobs", "terabyte", "again"] {
        progress(&format!("memory: {what}"));
        let mut command = silent(&std::env::current_exe()?);
        let place = dir.join(if what == "again" { "terabyte" } else { what });
        command.args(["__child", "cache", "--what", what, "--dir"]).arg(place).stdout(Stdio::piped());
        let output = command.output()?;
        if !output.status.success() {
            bail!("{command:?}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
        }
        resident.push(String::from_utf8(output.stdout)?.trim().parse::<f64>()? / 1024.0);
    }
    let metric = |name, value, who: &str| Metric::new(name, value, "MiB", Better::Lower).peer(who);
    Ok(vec![
        metric("resident", resident[0], "an empty cache"),
        metric("resident", resident[1], "10,000 blobs open").goal(200.0),
        metric("resident_more", resident[2] - resident[0], "a terabyte of chunks"),
        metric("resident_more", resident[3] - resident[0], "the same after a restart"),
    ])
}

/// What a child does.
pub(crate) fn child(what: &str, dir: &Path) -> Result<()> {
    let store = Arc::new(Shaped::new(Duration::ZERO, 0));
    let mut config = CacheConfig { keep_free: 0, read_ahead: 0, ..CacheConfig::new(dir, 1 << 40) };
    if matches!(what, "terabyte" | "again") {
        (config.chunk, config.max_request) = (CHUNK, 16 * CHUNK);
    }
    let cache = ChunkCache::open(config, store)?;
    let mut held: Vec<CachedBlob> = Vec::new();
    let mut buffer = [0; 4096];
    match what {
        "blobs" => {
            for n in 0..BLOBS {
                let blob = cache.blob(Digest::of(&n.to_le_bytes()), BLOB, None)?;
                blob.read_at_blocking(BLOB - 4096, &mut buffer)?;
                held.push(blob);
            }
        }
        "terabyte" | "again" => {
            for n in 0..GROUPS / GROUPS_OF_BLOB {
                let blob = cache.blob(Digest::of(&n.to_le_bytes()), GROUPS_OF_BLOB * 64 * CHUNK, None)?;
                if what == "terabyte" {
                    for group in 0..GROUPS_OF_BLOB {
                        blob.read_at_blocking(group * 64 * CHUNK, &mut buffer)?;
                    }
                } else if blob.cached_bytes() != GROUPS_OF_BLOB * CHUNK {
                    bail!("only {} bytes are there again", blob.cached_bytes());
                }
            }
        }
        _ => {}
    }
    if !cache.sync() {
        bail!("the cache cannot be synced");
    }
    let status = std::fs::read_to_string("/proc/self/status")?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
    report::line(peak.context("the kernel does not tell the peak of this process")?);
    Ok(())
}
