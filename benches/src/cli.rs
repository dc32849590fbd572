//! The command line.

use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

/// Runs benchmarks, each against its goals and its peers.
#[derive(Debug, Parser)]
#[command(name = "benches", disable_help_subcommand = true)]
pub(crate) struct Cli {
    /// Print one JSON document instead of a table.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to run.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Name the benchmarks.
    List,
    /// What reads cost by each way to a blob: 3FS' stand-in by rings and by its mount, a disk by threads and io_uring.
    Backends {
        /// A directory on a disk.
        #[arg(long, default_value = "/var/tmp")]
        dir: PathBuf,
        /// How many times everything is read.
        #[arg(long, default_value_t = 5, value_parser = parse_count)]
        rounds: usize,
    },
    /// A family of images in one run, against a loop of single runs; and running it again.
    Batch(BatchArgs),
    /// The chunk cache: hits against plain reads of its file, misses against what the store allows, memory.
    Cache(CacheArgs),
    /// An image of three layers: our converter against the limit and its peers.
    Convert(ConvertArgs),
    /// Compressed layers: our converter against mkfs.erofs with the same codec, level and cluster.
    Compress(CompressArgs),
    /// What a converter cannot avoid: the processor time of each stage, one at a time.
    Limit(Setting),
    /// Two SHA-256 streams side by side against one after the other.
    Hash {
        /// How many times everything is measured.
        #[arg(long, default_value_t = 5, value_parser = parse_count)]
        rounds: usize,
    },
    /// How large a file's chunks should be: sizes and read speed for several limits.
    Chunks {
        /// Where to put the stores: a directory on a disk.
        #[arg(long)]
        dir: PathBuf,
        /// How many times everything is read.
        #[arg(long, default_value_t = 3, value_parser = parse_count)]
        rounds: usize,
    },
    /// Related images in one store: what deduplication saves, by chunking and by how many blobs a layer may refer to.
    Dedup {
        /// Where to put the stores: a directory on a disk.
        #[arg(long)]
        dir: PathBuf,
        /// How often the conversions are timed.
        #[arg(long, default_value_t = 1, value_parser = parse_count)]
        rounds: usize,
    },
    /// Merging layers of hundreds of thousands of inodes: ours against the limit and its peers.
    Merge(MergeArgs),
    /// OverlayBD layers: index lookups, reads of compressed blocks, writing.
    Overlaybd(crate::overlaybd::OverlaybdArgs),
    /// Build the data set and say where it is.
    Data,
    /// One contender that is this program itself.
    #[command(name = "__child", hide = true)]
    Child {
        #[command(subcommand)]
        child: Child,
    },
}

/// The names for [`Command::List`]: (name, what it measures).
pub(crate) const BENCHES: [(&str, &str); 11] = [
    (
        "backends",
        "what reads cost by each way to a blob: 3FS' stand-in by rings and by its mount, a disk by threads and io_uring",
    ),
    ("batch", "a family of images in one run against a loop of single runs; and running it again"),
    ("cache", "the chunk cache: hits against plain reads of its file, misses against what the store allows, memory"),
    ("chunks", "how large a file's chunks should be: sizes and read speed for several limits"),
    ("compress", "compressed layers: our converter against mkfs.erofs with the same codec, level and cluster"),
    ("convert", "an image of three layers: our converter against the limit and its peers"),
    ("dedup", "related images in one store: what deduplication saves, by chunking and devices"),
    ("hash", "two SHA-256 streams side by side against one after the other"),
    ("limit", "what a converter cannot avoid: the processor time of each stage"),
    ("merge", "layers of hundreds of thousands of inodes: ours against the limit and its peers"),
    ("overlaybd", "index lookups, compressed blocks against the decompressor, layers written against the limit"),
];

/// Where and how often.
#[derive(Debug, Args)]
pub(crate) struct Setting {
    /// Write the output here, on a real disk, instead of in memory.
    #[arg(long)]
    pub(crate) dir: Option<PathBuf>,
    /// How many times everything is measured.
    #[arg(long, default_value_t = 5, value_parser = parse_count)]
    pub(crate) rounds: usize,
    /// Only these layers of the data set: base, python, node.
    #[arg(long, value_delimiter = ',')]
    pub(crate) layers: Vec<String>,
}

/// Options of bench `batch`.
#[derive(Debug, Args)]
pub(crate) struct BatchArgs {
    /// Write sources and output here, on a real disk, instead of in memory.
    #[arg(long)]
    pub(crate) dir: Option<PathBuf>,
    /// How many times everything is measured.
    #[arg(long, default_value_t = 5, value_parser = parse_count)]
    pub(crate) rounds: usize,
    /// How many images; ten share a base.
    #[arg(long, default_value_t = 40, value_parser = parse_count)]
    pub(crate) images: usize,
    /// Images at a time in the batch, layers at a time in the loop.
    #[arg(long, default_value_t = 2, value_parser = parse_count)]
    pub(crate) jobs: usize,
}

/// Options of bench `cache`.
#[derive(Debug, Args)]
pub(crate) struct CacheArgs {
    /// Put the caches here: a directory on the kind of disk that a node's cache has.
    #[arg(long)]
    pub(crate) dir: Option<PathBuf>,
    /// How many times everything is measured.
    #[arg(long, default_value_t = 5, value_parser = parse_count)]
    pub(crate) rounds: usize,
}

/// Options of bench `convert`.
#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    #[command(flatten)]
    pub(crate) setting: Setting,
    /// How many layers are converted at a time.
    #[arg(long, default_value_t = 2, value_parser = parse_count)]
    pub(crate) jobs: usize,
    /// Only contenders whose name begins with one of these.
    #[arg(long, value_delimiter = ',')]
    pub(crate) only: Vec<String>,
    /// The `dsec-convert` to measure, instead of the one built from this tree.
    #[arg(long, value_parser = parse_program)]
    pub(crate) convert_bin: Option<PathBuf>,
    /// Another revision's `dsec-convert` to compare with, in the same rounds.
    #[arg(long, value_parser = parse_program)]
    pub(crate) against: Vec<PathBuf>,
    /// Chunk size of the mkfs.erofs image that our metadata is compared with, in bytes.
    #[arg(long, default_value_t = 1 << 20)]
    pub(crate) mkfs_chunk: u64,
}

/// Options of bench `merge`.
#[derive(Debug, Args)]
pub(crate) struct MergeArgs {
    /// Work here, on a real disk, instead of in memory.
    #[arg(long)]
    pub(crate) dir: Option<PathBuf>,
    /// How many times everything is measured.
    #[arg(long, default_value_t = 5, value_parser = parse_count)]
    pub(crate) rounds: usize,
    /// About how many inodes all layers have together.
    #[arg(long, default_value_t = 440_000)]
    pub(crate) inodes: u64,
    /// The `dsec-convert` to measure, instead of the one built from this tree.
    #[arg(long, value_parser = parse_program)]
    pub(crate) convert_bin: Option<PathBuf>,
    /// Another revision's `dsec-convert` to compare with, in the same rounds.
    #[arg(long, value_parser = parse_program)]
    pub(crate) against: Vec<PathBuf>,
}

/// Options of bench `compress`.
#[derive(Debug, Args)]
pub(crate) struct CompressArgs {
    #[command(flatten)]
    pub(crate) setting: Setting,
    /// How many layers are converted at a time.
    #[arg(long, default_value_t = 2, value_parser = parse_count)]
    pub(crate) jobs: usize,
    /// Codecs, with levels: lz4, lz4hc:9, zstd:3, …
    #[arg(long, value_delimiter = ',', default_value = "lz4,zstd:3", value_parser = crate::compress::parse_codec)]
    pub(crate) codecs: Vec<String>,
    /// Cluster sizes in KiB: 64, 128.
    #[arg(long, value_delimiter = ',', default_value = "64,128", value_parser = crate::compress::parse_cluster)]
    pub(crate) clusters: Vec<u32>,
    /// The `dsec-convert` to measure, instead of the one built from this tree.
    #[arg(long, value_parser = parse_program)]
    pub(crate) convert_bin: Option<PathBuf>,
}

/// What runs as a child.
#[derive(Debug, Subcommand)]
pub(crate) enum Child {
    /// The limit.
    Limit {
        #[arg(long)]
        layout: PathBuf,
        #[arg(long)]
        out: PathBuf,
        #[arg(long)]
        jobs: usize,
        #[arg(long)]
        fsync: bool,
    },
    /// The daemon of a mount of 3FS' stand-in.
    StandIn,
    /// A chunk cache whose memory is measured.
    Cache {
        #[arg(long)]
        what: String,
        #[arg(long)]
        dir: PathBuf,
    },
    /// The limit of merging.
    MergeLimit {
        #[arg(long)]
        out: PathBuf,
        images: Vec<PathBuf>,
    },
}

pub(crate) fn parse_count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count) if count > 0 => Ok(count),
        _ => Err("not a positive number".to_owned()),
    }
}

fn parse_program(text: &str) -> Result<PathBuf, String> {
    std::fs::canonicalize(text).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn every_listed_bench_is_a_command() {
        let cli = Cli::command();
        cli.clone().debug_assert();
        for (name, _) in BENCHES {
            assert!(cli.find_subcommand(name).is_some(), "{name}");
        }
        assert!(Cli::try_parse_from(["benches", "convert", "--rounds", "0"]).is_err());
        assert!(Cli::try_parse_from(["benches", "convert", "--json"]).unwrap().json);
    }
}
