//! `ublk-overlaybd fuse`.

use super::Usage;
use super::diff::is_json;
use super::layers::{Blobs, threads};
use super::output::{self, parse_size};
use anyhow::Context as _;
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use ublk_overlaybd::engine::{Background, Device};
use ublk_overlaybd::format::trace::Trace;
use ublk_overlaybd::fuse::{Exposed, Unmounter};
use ublk_overlaybd::image::spec::{Download, ImageSpec};
use ublk_overlaybd::image::{self, Image, ahead};
use ublk_overlaybd::layer::Layer;
use ublk_overlaybd::seal::{Chain, Step};
use ublk_overlaybd::upper::{Limits, Upper};

/// Shown after the options.
pub(super) const HELP: &str = "\
IMAGE is a config.v1.json, or the layers, the bottom one first; none where --upper or --chain is all there is.
FILE is made where it does not exist. It is a mount: SIGTERM or SIGINT takes it away once nobody has it open, the second
one at once. SIGUSR1 seals the writable layer of a --chain and goes on with a new one over it.

  ublk-overlaybd fuse config.v1.json /run/disk &
  losetup --direct-io=on --show -f /run/disk";

/// Arguments of `fuse`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The disk, and the file that it is shown as
    #[arg(value_name = "IMAGE… FILE", required = true)]
    paths: Vec<PathBuf>,
    /// Write to this pair: its data file and its index file
    #[arg(long, num_args = 2, value_names = ["DATA", "INDEX"], conflicts_with_all = ["chain", "read_only"])]
    upper: Option<Vec<PathBuf>>,
    /// Write to the pair that this file names, over the layers that were sealed before; made where it does not exist
    #[arg(long, value_name = "FILE", conflicts_with = "read_only")]
    chain: Option<PathBuf>,
    /// Size of the disk of a new chain, such as 64GiB; without it that of the layer below
    #[arg(long, value_parser = parse_size, requires = "chain")]
    size: Option<u64>,
    /// Leave out the writable layer that a config.v1.json names
    #[arg(long)]
    read_only: bool,
    /// Most bytes that the writable layer may take; then writes fail with ENOSPC
    #[arg(long, value_parser = parse_size, value_name = "SIZE")]
    quota: Option<u64>,
    /// Bytes of the file system that are left alone
    #[arg(long, value_parser = parse_size, value_name = "SIZE", default_value = "64MiB")]
    reserve: u64,
    /// Requests that are served at once [default: twice the cores, at least 4]
    #[arg(long)]
    threads: Option<u16>,
    #[command(flatten)]
    blobs: Blobs,
    /// Print one JSON document when the file is there
    #[arg(long)]
    json: bool,
}

/// The disk, and the chain that its writable layer is of.
struct Disk {
    device: Arc<Device>,
    chain: Option<Chain>,
    ahead: Option<Ahead>,
}

type Pair = (PathBuf, PathBuf);

impl Args {
    fn open(&self, image: &[PathBuf], spec: Option<&ImageSpec>) -> anyhow::Result<Disk> {
        let limits = Limits { quota: self.quota, reserve: self.reserve };
        let asked = self.upper.as_deref().and_then(|pair| Some((pair.first()?.clone(), pair.get(1)?.clone())));
        let named: Option<Pair> =
            spec.and_then(|spec| spec.upper.as_ref()).map(|upper| (upper.data.clone(), upper.index.clone()));
        if let Some((data, _)) = &named
            && (asked.is_some() || self.chain.is_some())
        {
            let what = format!("{} names a writable layer, {}", image[0].display(), data.display());
            return Err(Usage(format!("{what}: give no other, or take it out there")).into());
        }
        let mut ahead = None;
        let mut layers = match spec {
            None => {
                let layers = image.iter().map(|file| Ok(Arc::new(Layer::open_file(file)?)));
                layers.collect::<anyhow::Result<Vec<_>>>()?
            }
            Some(spec) => {
                let what = image[0].display().to_string();
                if let Some(path) = &spec.record_trace {
                    let why = format!("{what}: recordTracePath: traces are not recorded ({})", path.display());
                    return Err(Usage(why).into());
                }
                let layers = image::lowers(spec, &what, self.blobs.open()?.as_deref())?;
                ahead = Some(Ahead::new(spec, &what, layers.clone())?);
                layers
            }
        };
        let Some(path) = &self.chain else {
            let pair = if self.read_only { None } else { asked.or(named) };
            let upper = pair.map(|(data, index)| Upper::open_pair(&data, &index, limits)).transpose()?;
            return Ok(Disk { device: Arc::new(Device::new(&layers, upper)?), chain: None, ahead });
        };
        let (chain, upper) = if path.exists() {
            let (chain, sealed, upper) = Chain::open(path, limits)?;
            layers.extend(sealed);
            (chain, upper)
        } else {
            Chain::create(path, self.size_of_new(&layers)?, limits)?
        };
        Ok(Disk { device: Arc::new(Device::new(&layers, Some(upper))?), chain: Some(chain), ahead })
    }

    /// Of a new chain. Said before anything is made.
    fn size_of_new(&self, layers: &[Arc<Layer>]) -> anyhow::Result<u64> {
        match self.size {
            Some(size) => Ok(size),
            None if Image::sized_or_not(layers.to_vec())?.size() > 0 => Ok(0),
            None => Err(Usage("no layer says how large the disk is: give --size".to_owned()).into()),
        }
    }
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let (image, file) = super::layers::split_out(&args.paths)?;
    let spec = match image {
        [config] if is_json(config) => Some(ImageSpec::read(config)?),
        _ => None,
    };
    let opened = args.open(image, spec.as_ref());
    // Whoever wrote the configuration waits for that, and not for this program.
    let failure = opened.as_ref().err().map(super::sentence);
    let told = spec.as_ref().map_or(Ok(()), |spec| image::tell(spec, failure.as_deref()));
    let Disk { device, chain, ahead } = opened?;
    told?;
    if ublk_overlaybd::fuse::clear(file).with_context(|| format!("{}: cannot unmount it", file.display()))? {
        tracing::warn!("{}: a server that was killed had left it, and it is served anew", file.display());
    }
    let is_made = !file.exists();
    if is_made {
        File::create_new(file).with_context(|| format!("{}: cannot create it", file.display()))?;
    }
    let served = serve(args, &device, chain, ahead, file);
    if is_made {
        // Whatever happened: it is empty.
        let _ = std::fs::remove_file(file);
    }
    served?;
    if !device.is_read_only() {
        device.flush()?;
    }
    Ok(())
}

fn serve(
    args: &Args,
    device: &Arc<Device>,
    chain: Option<Chain>,
    ahead: Option<Ahead>,
    file: &Path,
) -> anyhow::Result<()> {
    // Before the mount is there, so that no signal finds it without anybody to take it away.
    let signals = Signals::new([SIGINT, SIGTERM, SIGUSR1])?;
    let handle = signals.handle();
    let threads = args.threads.map_or_else(|| (threads(None) * 2).max(4), |asked| threads(Some(asked)));
    let exposed = Exposed::new(Arc::clone(device), file, threads);
    let exposed = exposed.with_context(|| format!("{}: cannot mount the disk there", file.display()))?;
    let background = Background::of(Arc::clone(device));
    let reading = ahead.map(Ahead::begin);
    output::print(|out| {
        let (size, read_only) = (device.size(), device.is_read_only());
        if args.json {
            let document = json!({ "file": file.display().to_string(), "size": size, "read_only": read_only });
            return output::json_line(out, &document);
        }
        let access = if read_only { ", read-only" } else { "" };
        writeln!(out, "{}: a disk of {}{access}", file.display(), output::size(size))
    })?;
    let unmounter = exposed.unmounter();
    let watched = Arc::clone(device);
    let watcher = std::thread::spawn(move || watch(signals, &watched, chain, &unmounter));
    let ended = exposed.wait();
    handle.close();
    let _ = watcher.join();
    drop((background, reading));
    ended.with_context(|| format!("{}: cannot serve the disk", file.display()))
}

/// Does what signals ask for, until there are no more.
fn watch(mut signals: Signals, device: &Device, mut chain: Option<Chain>, unmounter: &Unmounter) {
    let mut asked = 0u32;
    while !signals.is_closed() {
        for signal in signals.pending() {
            match (signal, &mut chain) {
                (SIGUSR1, Some(chain)) => seal(chain, device),
                (SIGUSR1, None) => tracing::warn!("SIGUSR1 seals the writable layer of a --chain, and there is none"),
                _ => asked += 1,
            }
        }
        if asked > 0 {
            match unmounter.unmount(asked > 1) {
                Ok(true) => return,
                Ok(false) => tracing::debug!("somebody has the disk open"),
                Err(error) => tracing::warn!(%error, "cannot unmount the disk"),
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn seal(chain: &mut Chain, device: &Device) {
    // One that failed is finished first.
    let sealed = chain.finish(device, |_| ()).and_then(|()| {
        chain.seal(device, |step| {
            if step == Step::Switched {
                tracing::info!("a new layer takes the writes");
            }
        })
    });
    match sealed {
        Ok(()) => tracing::info!(layers = chain.layers().count(), "sealed"),
        Err(error) => tracing::error!(error = %super::sentence(&error.into()), "cannot seal"),
    }
}

/// What is read before anybody asks for it.
struct Ahead {
    layers: Vec<Arc<Layer>>,
    trace: Option<Trace>,
    download: Option<Download>,
}

impl Ahead {
    fn new(spec: &ImageSpec, what: &str, layers: Vec<Arc<Layer>>) -> anyhow::Result<Self> {
        let trace = spec.acceleration.as_ref().map(|layer| -> anyhow::Result<_> {
            let path = layer.trace(what)?;
            let bytes = std::fs::read(&path).with_context(|| format!("{}: cannot read", path.display()))?;
            Trace::parse(&bytes).with_context(|| path.display().to_string())
        });
        let download = spec.download.filter(|download| download.enable);
        Ok(Self { layers, trace: trace.transpose()?, download })
    }

    fn begin(self) -> Reading {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            match &self.trace {
                Some(Trace::Records(records)) => {
                    let bytes = ahead::replay(records, &self.layers, &stopped);
                    tracing::info!(bytes, "the trace was read ahead");
                }
                Some(Trace::Files(files)) => {
                    tracing::warn!(files = files.len(), "the trace is a list of files, which is not read ahead");
                }
                None => {}
            }
            let Some(how) = &self.download else { return };
            let due = Instant::now() + Duration::from_secs(how.delay.saturating_add(extra(how.delay_extra)));
            while Instant::now() < due {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
            match ahead::download(&self.layers, how, &stopped) {
                Ok(bytes) => tracing::info!(bytes, "the layers were fetched"),
                Err(error) => tracing::warn!(%error, "cannot fetch the layers in the background"),
            }
        });
        Reading { stop, thread: Some(thread) }
    }
}

/// Some number up to `most`, so that not all disks begin at once.
fn extra(most: u64) -> u64 {
    // Different in each process and at each call.
    let state = std::hash::RandomState::new();
    std::hash::BuildHasher::hash_one(&state, most) % most.saturating_add(1).max(1)
}

/// The thread that reads ahead, until it is dropped.
struct Reading {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
