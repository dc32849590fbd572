//! `serve` and `supervise`: the daemon.

use super::Failed;
use std::path::PathBuf;
use std::process::Command;
use ublk_overlaybd::backend::Blobs;
use ublk_overlaybd::daemon::config::Config;
use ublk_overlaybd::daemon::serve::{Ended, serve};

pub(super) const HELP: &str = "\
SIGTERM ends the daemon and leaves its devices: requests wait until the next daemon has taken them over. SIGHUP, or
`ublk-overlaybd upgrade`, makes it the program that is at its path now. `ublk-overlaybd rm` removes devices.

The file, with its default values:
  state = \"/var/lib/ublk-overlaybd\"       where it keeps which devices there are
  socket = \"/run/ublk-overlaybd.sock\"     where it listens
  threads = 64                            for requests that wait: so many for reads, and as many for the rest
  max_devices = 4096
  queues = 1                              of a device, each with a thread
  depth = 64                              requests of a queue at a time
  request_bytes = 262144                  of the largest request
  request_deadline_ms = 30000             then a request is answered with EIO
  control_deadline_ms = 30000             for each call
  cache = \"/var/cache/ublk-overlaybd\"    keeps what is fetched of layers that are in no file; none by default
  cache_bytes = 17179869184
  store = \"s3://BUCKET/PREFIX\"          has them: a path, 3fs:PATH or s3://; besides, config.v1.json's repoBlobUrl
  [node]                                  who may open /dev/ublkbN; root where there is no such table
  user = 1000
  group = 1000
  mode = \"0660\"";

#[derive(Debug, Clone, clap::Args)]
pub(super) struct Args {
    /// The daemon's file; without it, the default values count
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Where it keeps which devices there are, instead of what the file says
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Where it listens, instead of what the file says
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

impl Args {
    fn config(&self) -> anyhow::Result<Config> {
        let mut config = self.config.as_deref().map_or_else(|| Ok(Config::built_in()), Config::read)?;
        let absolute = |path: &PathBuf| std::path::absolute(path);
        if let Some(state) = &self.state {
            config.state = absolute(state)?;
        }
        if let Some(socket) = &self.socket {
            config.socket = absolute(socket)?;
        }
        Ok(config)
    }

    fn words(&self) -> Vec<std::ffi::OsString> {
        let named = [("--config", &self.config), ("--state", &self.state), ("--socket", &self.socket)];
        let given = named.into_iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
        std::iter::once("serve".into()).chain(given.flat_map(|(n, v)| [n.into(), v.into()])).collect()
    }
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let config = args.config()?;
    match serve(&config, || blobs(&config))? {
        Ended::Told => Ok(()),
        Ended::NotUpgraded(error) => Err(anyhow::Error::new(error).context("the upgrade failed; the daemon ends")),
    }
}

pub(super) fn supervise(args: &Args) -> anyhow::Result<()> {
    // A file that is wrong is not tried again and again.
    args.config()?;
    let mut daemon = Command::new(std::env::current_exe()?);
    daemon.args(args.words());
    let status = ublk_overlaybd::daemon::supervise::supervise(&mut daemon)?;
    if status.success() { Ok(()) } else { Err(Failed(format!("the daemon ended: {status}")).into()) }
}

/// What has the layers that are in no file.
#[cfg(feature = "cache")]
fn blobs(config: &Config) -> anyhow::Result<Option<Box<dyn Blobs>>> {
    super::blobs::of(config)
}

#[cfg(not(feature = "cache"))]
fn blobs(config: &Config) -> anyhow::Result<Option<Box<dyn Blobs>>> {
    match config.cache {
        Some(_) => {
            Err(super::Usage("cache: this program was built without one (cargo feature `cache`)".to_owned()).into())
        }
        None => Ok(None),
    }
}
