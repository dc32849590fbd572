//! Arguments of commands that talk to registries.

use fs3_client::blob_store::retry::Policy;
use fs3_client::registry::{MirrorRule, Options};
use std::path::PathBuf;
use std::time::Duration;

/// How to talk to registries.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Registries")]
pub(super) struct RegistryArgs {
    /// The only file to take credentials from [default: podman's auth.json, then docker's config.json]
    #[arg(long, value_name = "FILE")]
    authfile: Option<PathBuf>,
    /// Ask these first for images of a registry or of a part of it, in this order; may be given several times. Counts
    /// before the mirrors of registries.conf
    #[arg(long, value_name = "HOST[/PATH]=MIRROR[,MIRROR…]")]
    mirror: Vec<MirrorRule>,
    /// Use HTTP without TLS. A registry on this machine that has no TLS needs no such word
    #[arg(long)]
    plain_http: bool,
    /// Trust the certificates in this file (PEM) beside the system's; may be given several times
    #[arg(long, value_name = "FILE")]
    ca_file: Vec<PathBuf>,
    /// Give a connection up after so many seconds of silence
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    connection_timeout: u64,
    /// Try so often in a row what may go better later (broken connections, 429, 5xx)
    #[arg(long, value_name = "N", default_value_t = Policy::default().attempts, value_parser = clap::value_parser!(u32).range(1..=100))]
    attempts: u32,
    /// Fetch so many ranges of one large blob (16 MiB or more) at a time, 4 MiB each. Helps where a registry limits the
    /// speed of each connection, and costs time where it does not
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=32))]
    ranges: u16,
}

impl RegistryArgs {
    pub(super) fn options(&self) -> Options {
        Options {
            auth_file: self.authfile.clone(),
            mirrors: self.mirror.clone(),
            plain_http: self.plain_http,
            ca_files: self.ca_file.clone(),
            timeout: Duration::from_secs(self.connection_timeout),
            retry: Policy { attempts: self.attempts, ..Policy::default() },
            ranges: self.ranges.into(),
        }
    }
}
