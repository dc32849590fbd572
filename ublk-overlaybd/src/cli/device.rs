//! `add`, `list`, `stat`, `rm` and the other calls to the daemon.

use super::exit;
use super::layers::absolute;
use super::output::{self, parse_size};
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;
use ublk_overlaybd::client::{Client, ClientError};
use ublk_overlaybd::daemon::config::ConfigError;
use ublk_overlaybd::daemon::protocol::{DeviceInfo, DeviceSpec, DiskSpec, FailureCode, LayerSource, State, UpperFiles};
use ublk_overlaybd::ublk::device::Shape;

pub(super) const HELP: &str = "\
  ublk-overlaybd add vm1 base.layer tools.layer --chain /var/lib/vm1/chain   writable, on two layers
  ublk-overlaybd add vm2 --config config.v1.json                            as overlaybd's configuration says
  ublk-overlaybd add rootfs --raw rootfs.erofs                              a file as it is, read-only";

/// Where the daemon is.
#[derive(Debug, clap::Args)]
pub(super) struct Daemon {
    /// The daemon's socket
    #[arg(long, value_name = "PATH", default_value = "/run/ublk-overlaybd.sock")]
    socket: PathBuf,
}

#[derive(Debug, clap::Args)]
pub(super) struct AddArgs {
    #[command(flatten)]
    daemon: Daemon,
    /// What the device is called from now on
    name: String,
    /// Layers, the bottom one first; with `@sha256:…` behind it, a file with other bytes is refused
    layers: Vec<String>,
    /// Take the layers, and the writable one, from overlaybd's JSON
    #[arg(long, value_name = "config.v1.json", conflicts_with = "layers")]
    config: Option<PathBuf>,
    /// A file whose bytes are the disk's, read-only: an EROFS image, say
    #[arg(long, value_name = "FILE", conflicts_with_all = ["layers", "config", "chain", "upper"])]
    raw: Option<String>,
    /// Write to the newest layer of this chain, which is made where it does not exist
    #[arg(long, value_name = "FILE", conflicts_with = "upper")]
    chain: Option<PathBuf>,
    /// Write to this layer
    #[arg(long, num_args = 2, value_names = ["DATA", "INDEX"])]
    upper: Option<Vec<PathBuf>>,
    /// Size of the disk of a new chain, such as 64GiB; without it that of the layer below
    #[arg(long, value_parser = parse_size, requires = "chain")]
    size: Option<u64>,
    /// Leave out the writable layer that a config.v1.json names
    #[arg(long, requires = "config")]
    read_only: bool,
    /// Most bytes that the writable layer may take; then writes fail with ENOSPC
    #[arg(long, value_parser = parse_size, value_name = "SIZE")]
    quota: Option<u64>,
    /// Bytes of the file system that are left alone [default: 64MiB]
    #[arg(long, value_parser = parse_size, value_name = "SIZE")]
    reserve: Option<u64>,
    /// Hardware queues, each with a thread [default: the daemon's]
    #[arg(long)]
    queues: Option<u16>,
    /// Requests of a queue at a time [default: the daemon's]
    #[arg(long)]
    depth: Option<u16>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
pub(super) struct NameArgs {
    #[command(flatten)]
    daemon: Daemon,
    /// Which device
    name: String,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
pub(super) struct ListArgs {
    #[command(flatten)]
    daemon: Daemon,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
pub(super) struct RemoveArgs {
    #[command(flatten)]
    daemon: Daemon,
    /// Which devices
    #[arg(required_unless_present = "all")]
    names: Vec<String>,
    /// All of them
    #[arg(long, conflicts_with = "names")]
    all: bool,
    /// Even those that are mounted: who uses them gets errors
    #[arg(long)]
    force: bool,
}

#[derive(Debug, clap::Args)]
pub(super) struct GrowArgs {
    #[command(flatten)]
    of: NameArgs,
    /// The new size, such as 64GiB, not less than before
    #[arg(value_parser = parse_size)]
    size: u64,
}

#[derive(Debug, clap::Args)]
pub(super) struct QuiesceArgs {
    #[command(flatten)]
    of: NameArgs,
    /// Milliseconds after which requests are served again in any case
    #[arg(long, default_value_t = 5000)]
    hold_ms: u64,
}

#[derive(Debug, clap::Args)]
pub(super) struct EventsArgs {
    #[command(flatten)]
    daemon: Daemon,
    /// Go on with what happens from now on
    #[arg(long, short)]
    follow: bool,
    /// Only events with higher numbers
    #[arg(long, default_value_t = 0)]
    after: u64,
}

#[derive(Debug, clap::Args)]
pub(super) struct UpgradeArgs {
    #[command(flatten)]
    daemon: Daemon,
}

impl Daemon {
    fn call<T>(&self, call: impl AsyncFnOnce(&Client) -> anyhow::Result<T>) -> anyhow::Result<T> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async { call(&Client::new(&self.socket)).await })
    }
}

fn layer(text: &str) -> anyhow::Result<LayerSource> {
    let (file, digest) = match text.rsplit_once("@sha256:") {
        Some((file, hex)) => (file, Some(format!("sha256:{hex}"))),
        None => (text, None),
    };
    Ok(LayerSource { file: Some(absolute(file)?), digest, size: None })
}

impl AddArgs {
    fn spec(&self) -> anyhow::Result<DeviceSpec> {
        let upper = match self.upper.as_deref() {
            Some([data, index]) => Some(UpperFiles { data: absolute(data)?, index: absolute(index)? }),
            _ => None,
        };
        let disk = DiskSpec {
            layers: self.layers.iter().map(|text| layer(text)).collect::<anyhow::Result<_>>()?,
            config: self.config.as_ref().map(absolute).transpose()?,
            raw: self.raw.as_deref().map(layer).transpose()?,
            chain: self.chain.as_ref().map(absolute).transpose()?,
            upper,
            size: self.size,
            read_only: self.read_only,
            quota: self.quota,
            reserve: self.reserve,
        };
        let given = self.queues.is_some() || self.depth.is_some();
        let default = Shape::default();
        let shape = given.then(|| Shape {
            queues: self.queues.unwrap_or(default.queues),
            depth: self.depth.unwrap_or(default.depth),
            ..default
        });
        Ok(DeviceSpec { disk, shape })
    }
}

pub(super) fn add(args: &AddArgs) -> anyhow::Result<()> {
    let spec = args.spec()?;
    let device = args.daemon.call(async |client| Ok(client.add(&args.name, &spec).await?))?;
    show(&device, args.json, true)
}

pub(super) fn stat(args: &NameArgs) -> anyhow::Result<()> {
    let device = args.daemon.call(async |client| Ok(client.stat(&args.name).await?))?;
    show(&device, args.json, false)
}

pub(super) fn grow(args: &GrowArgs) -> anyhow::Result<()> {
    let device = args.of.daemon.call(async |client| Ok(client.resize(&args.of.name, args.size).await?))?;
    show(&device, args.of.json, false)
}

pub(super) fn quiesce(args: &QuiesceArgs) -> anyhow::Result<()> {
    let hold = Duration::from_millis(args.hold_ms);
    let device = args.of.daemon.call(async |client| Ok(client.quiesce(&args.of.name, hold).await?))?;
    show(&device, args.of.json, false)
}

pub(super) fn resume(args: &NameArgs) -> anyhow::Result<()> {
    let device = args.daemon.call(async |client| Ok(client.resume(&args.name).await?))?;
    show(&device, args.json, false)
}

pub(super) fn snapshot(args: &NameArgs) -> anyhow::Result<()> {
    let sealed = args.daemon.call(async |client| Ok(client.seal(&args.name).await?))?;
    output::print(|out| {
        if args.json {
            return output::json(out, &sealed);
        }
        writeln!(out, "{}", sealed.layer.display())
    })
}

pub(super) fn remove(args: &RemoveArgs) -> anyhow::Result<()> {
    args.daemon.call(async |client| {
        let names = if args.all {
            client.list().await?.into_iter().map(|device| device.name).collect()
        } else {
            args.names.clone()
        };
        for name in names {
            client.remove(&name, args.force).await?;
        }
        Ok(())
    })
}

pub(super) fn upgrade(args: &UpgradeArgs) -> anyhow::Result<()> {
    args.daemon.call(async |client| Ok(client.upgrade().await?))
}

pub(super) fn status(args: &ListArgs) -> anyhow::Result<()> {
    let status = args.daemon.call(async |client| Ok(client.status().await?))?;
    output::print(|out| {
        if args.json {
            return output::json(out, &status);
        }
        writeln!(out, "version    {}\nprocess    {}\nkernel     {}", status.version, status.pid, status.kernel)?;
        writeln!(out, "devices    {}", status.devices)?;
        writeln!(out, "recovered  {}\nlost       {}", status.recovered, status.lost)
    })
}

pub(super) fn events(args: &EventsArgs) -> anyhow::Result<()> {
    args.daemon.call(async |client| {
        let mut written = Ok(());
        let each = |event| {
            written = output::print(|out| output::json_line(out, &event));
            written.is_ok()
        };
        client.events(args.after, args.follow, each).await?;
        written
    })
}

pub(super) fn list(args: &ListArgs) -> anyhow::Result<()> {
    let devices = args.daemon.call(async |client| Ok(client.list().await?))?;
    output::print(|out| {
        if args.json {
            return output::json(out, &devices);
        }
        let rows: Vec<_> = devices.iter().map(row).collect();
        output::table(out, &["NAME", "STATE", "DEVICE", ">SIZE", "ACCESS", ">LAYERS", ">REQUESTS", ">FAILED"], &rows)
    })
}

fn word(state: State) -> &'static str {
    match state {
        State::Adding => "adding",
        State::Recovering => "recovering",
        State::Live => "live",
        State::Quiesced => "quiesced",
        State::Removing => "removing",
    }
}

fn row(device: &DeviceInfo) -> Vec<String> {
    let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    let access = device.read_only.map(|only| if only { "ro" } else { "rw" });
    vec![
        device.name.clone(),
        word(device.state).to_owned(),
        or_dash(device.path.as_ref().map(|path| path.display().to_string())),
        or_dash(device.size.map(output::size)),
        or_dash(access.map(str::to_owned)),
        or_dash(device.layers.map(|layers| layers.to_string())),
        or_dash(device.requests.map(|requests| requests.answered.to_string())),
        or_dash(device.requests.map(|requests| requests.failed.to_string())),
    ]
}

fn show(device: &DeviceInfo, json: bool, path_alone: bool) -> anyhow::Result<()> {
    output::print(|out| {
        if json {
            return output::json(out, device);
        }
        if let (true, Some(path)) = (path_alone, &device.path) {
            return writeln!(out, "{}", path.display());
        }
        let names = ["name", "state", "device", "size", "access", "layers", "requests", "failed"];
        for (name, value) in names.iter().zip(row(device)) {
            writeln!(out, "{name:<10} {value}")?;
        }
        if let Some(upper) = device.upper {
            writeln!(out, "written    {} ({} mappings)", output::size(upper.allocated), upper.mappings)?;
        }
        Ok(())
    })
}

/// The exit code that an error of the daemon, or of its file, asks for.
pub(super) fn exit_code(error: &(dyn std::error::Error + 'static)) -> Option<u8> {
    if error.is::<ConfigError>() {
        return Some(exit::USAGE);
    }
    match error.downcast_ref() {
        Some(ClientError::Refused(detail)) if detail.code == FailureCode::Corrupt => Some(exit::CORRUPT),
        Some(ClientError::Refused(detail)) if detail.code == FailureCode::Invalid => Some(exit::USAGE),
        _ => None,
    }
}

/// What may help, by the daemon or where there is none.
pub(super) fn hint(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    match error.downcast_ref()? {
        ClientError::Refused(detail) => detail.hint.clone(),
        ClientError::Unreachable { .. } => {
            Some("`ublk-overlaybd serve` is the daemon; --socket says where it listens".to_owned())
        }
        _ => None,
    }
}
