//! Options of every command that converts: what shapes the layers, and what they may cost.

use super::dedup::DedupArgs;
use super::registry::RegistryArgs;
use clap::Args as ClapArgs;
use converter::compress::{Codec, Compress};
use converter::convert::Request;
use converter::dictionary::Dedup;
use converter::layer::Options;
use converter::manifest::OverlayXattrs;
use converter::merge::Under;
use converter::source::{Platform, SourceRef};

/// What `convert` and `batch` both understand. An option that changes the layers' bytes must have its part in
/// `convert::Stack::key` too, and one that changes the image's in the image's fingerprint.
#[derive(Debug, Clone, ClapArgs)]
pub(super) struct ConversionArgs {
    /// Which image of a multi-platform one
    #[arg(long, value_name = "OS/ARCH[/VARIANT]", default_value_t = Platform::host())]
    pub(super) platform: Platform,
    /// Merge runs of consecutive layers that stay under this size together (metadata and data, a blob that several
    /// refer to counted once): a size such as 512MiB, `all`, or `none`
    #[arg(long, value_name = "SIZE|all|none", default_value_t = Under::default())]
    pub(super) merge_under: Under,
    /// Keep files up to this many bytes in the metadata image, where they fit beside their inode
    #[arg(long, value_name = "BYTES", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(0..=4096))]
    inline_max: u32,
    /// Compress files that do not fit the metadata image: lz4 (fastest), lz4hc[:1-12] (smaller, read as fast) or
    /// zstd[:1-22] (smallest; nodes need Linux 6.10)
    #[arg(long, value_name = "CODEC[:LEVEL]")]
    compress: Option<Codec>,
    /// Bytes of a file that are compressed together: 64KiB or 128KiB (smaller blobs, slower random reads)
    #[arg(long, value_name = "SIZE", default_value = "128KiB", value_parser = cluster_bits, requires = "compress")]
    cluster: u8,
    /// Mark whiteouts and opaque directories with user.overlay.* rather than trusted.overlay.*, for mounts with the
    /// `userxattr` option
    #[arg(long)]
    userxattr: bool,
    /// Refuse a layer that unpacks to more bytes than this
    #[arg(long, value_name = "BYTES", default_value_t = Options::default().max_plain)]
    max_layer_size: u64,
    /// Refuse a layer with more files than this
    #[arg(long, value_name = "N", default_value_t = Options::default().max_inodes)]
    max_inodes: u32,
    #[command(flatten)]
    pub(super) dedup: DedupArgs,
    #[command(flatten)]
    registry: RegistryArgs,
}

/// log2 of a cluster size.
fn cluster_bits(text: &str) -> Result<u8, String> {
    match text {
        "64KiB" => Ok(16),
        "128KiB" => Ok(17),
        _ => Err("clusters have 64KiB or 128KiB".to_owned()),
    }
}

impl ConversionArgs {
    fn options(&self) -> Options {
        Options {
            inline_max: self.inline_max,
            overlay: if self.userxattr { OverlayXattrs::User } else { OverlayXattrs::Trusted },
            compress: self.compress.map(|codec| Compress { codec, cluster_bits: self.cluster }),
            max_inodes: self.max_inodes,
            max_plain: self.max_layer_size,
            ..Options::default()
        }
    }

    /// What is asked for `source`, with up to `jobs` layers at a time; `dedup` is what [`DedupArgs::open`] gave.
    pub(super) fn request(&self, source: SourceRef, jobs: usize, dedup: Option<Dedup>) -> Request {
        let (platform, registry) = (self.platform.clone(), self.registry.options());
        Request { source, platform, options: self.options(), jobs, registry, dedup }
    }
}

/// As many as the machine has cores, unless it was said otherwise.
pub(super) fn jobs(asked: Option<u16>) -> usize {
    asked.map_or_else(|| std::thread::available_parallelism().map_or(1, usize::from), usize::from)
}
