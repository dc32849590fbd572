//! Options of every command that writes a finished layer.

use super::layers::threads;
use super::output::{self, parse_size};
use sha2::{Digest as _, Sha256};
use std::io::Read as _;
use std::path::Path;
use ublk_overlaybd::format::zfile::Algorithm;
use ublk_overlaybd::write::commit::{Compression, Wrapping, Written};
use ublk_overlaybd::write::plan::Names;
use uuid::Uuid;

/// How the layer is stored.
#[derive(Debug, clap::Args)]
pub(super) struct WrappingArgs {
    /// Compress it into a ZFile
    #[arg(long, value_name = "lz4|zstd")]
    zfile: Option<Codec>,
    /// Bytes that are compressed together: 4KiB, 8KiB, 16KiB or 32KiB. 64KiB cannot be read by other tools
    #[arg(long, value_name = "SIZE", default_value = "4KiB", value_parser = block_size, requires = "zfile")]
    block_size: u32,
    /// Put it into a tar, as registries want layers
    #[arg(long)]
    tar: bool,
    /// Threads; the result is the same for any number [default: as many as there are cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: Option<u16>,
    /// Replace the file if it exists
    #[arg(long)]
    force: bool,
    /// Say the SHA-256 of the file: it is read once more
    #[arg(long)]
    digest: bool,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Codec {
    Lz4,
    Zstd,
}

fn block_size(text: &str) -> Result<u32, String> {
    let size = parse_size(text)?;
    match u32::try_from(size) {
        // Where others are asked for kilobytes.
        Ok(size @ (4 | 8 | 16 | 32)) => Ok(size << 10),
        Ok(size) if Compression::new(Algorithm::Lz4, size).is_ok() => Ok(size),
        _ => Err("blocks have 4KiB, 8KiB, 16KiB or 32KiB".to_owned()),
    }
}

impl WrappingArgs {
    pub(super) fn wrapping(&self) -> anyhow::Result<Wrapping> {
        let algorithm = self.zfile.map(|codec| match codec {
            Codec::Lz4 => Algorithm::Lz4,
            Codec::Zstd => Algorithm::Zstd,
        });
        let compression = algorithm.map(|algorithm| Compression::new(algorithm, self.block_size)).transpose()?;
        Ok(Wrapping { compression, tar: self.tar, threads: threads(self.threads), replace: self.force })
    }

    pub(super) fn report(&self, path: &Path, written: &Written, json: bool) -> anyhow::Result<()> {
        let digest = if self.digest { Some(sha256(path)?) } else { None };
        output::print(|out| {
            use std::io::Write as _;
            if json {
                let mut value = serde_json::to_value(written)?;
                value["file"] = path.display().to_string().into();
                if let Some(digest) = digest {
                    value["digest"] = digest.into();
                }
                return output::json(out, &value);
            }
            let (data, disk) = (output::size(written.data_bytes), output::size(written.virtual_size));
            let size = output::size(written.bytes);
            writeln!(
                out,
                "{}: {size}, {data} of data in {} mappings, disk of {disk}",
                path.display(),
                written.mappings
            )?;
            digest.map_or(Ok(()), |digest| writeln!(out, "{digest}"))
        })
    }
}

/// `sha256:…` of a file.
pub(super) fn sha256(path: &Path) -> anyhow::Result<String> {
    let mut file = std::fs::File::open(path)?;
    let (mut hasher, mut buf) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        let read = file.read(&mut buf)?;
        if read == 0 {
            return Ok(format!("sha256:{}", hex::encode(hasher.finalize())));
        }
        hasher.update(&buf[..read]);
    }
}

/// What a layer says of itself.
#[derive(Debug, clap::Args)]
pub(super) struct NameArgs {
    /// The layer's UUID
    #[arg(long)]
    uuid: Option<Uuid>,
    /// The UUID of the layer below
    #[arg(long, value_name = "UUID")]
    parent: Option<Uuid>,
    /// A message that the layer carries, 256 bytes at most
    #[arg(short, long, value_name = "TEXT", default_value = "")]
    message: String,
}

impl NameArgs {
    /// With `parent` where none was asked for.
    pub(super) fn names(&self, parent: Uuid) -> Names {
        Names {
            uuid: self.uuid.unwrap_or_default(),
            parent: self.parent.unwrap_or(parent),
            message: self.message.clone().into_bytes(),
        }
    }

    /// Whether a UUID was asked for.
    pub(super) fn uuid(&self) -> Option<Uuid> {
        self.uuid
    }
}
