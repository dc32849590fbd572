//! `dsec-convert batch`.

use super::options::{self, ConversionArgs};
use super::output::{json_line, size};
use super::{Told, duration, exit, exit_code, sentence, store_parser};
use anyhow::{Context as _, anyhow};
use clap::Args as ClapArgs;
use converter::batch::{self, Done, Failure, Item, Outcome, Place, Settings, Status, Totals, Work};
use converter::convert::plan::{Plan, existing, plan};
use converter::convert::{Request, convert_merged_as};
use converter::dictionary::Dedup;
use converter::progress::Progress;
use fs3_client::{Store, StoreError, StoreLocation, StoreOptions};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::collections::HashMap;
use std::fs;
use std::io::{self, IsTerminal as _, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// What `--help` says at its end.
pub(super) const HELP: &str = "\
A line of LIST is `SOURCE NAME:TAG`, or one JSON object {\"source\": …, \"name\": …, \"platform\": …}. Empty lines and \
what begins with # are passed over; a word with blanks is put in double quotes, in which \\\" and \\\\ stand for \" and \\.

For every image a line of JSON is printed when it ends, and one with totals at last. A failure does not end the batch. \
What was finished is not done again by another run: after an interruption, run the same command again.

Exit codes: 0 all is well; 1 an image failed; 3 an image failed because its data is corrupt; 2 the list is wrong, and \
nothing was begun; 130 or 143 interrupted by SIGINT or SIGTERM. A second signal ends the program at once.";

/// Arguments of `batch`.
#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    /// A file that names the images; `-` is standard input
    #[arg(value_name = "LIST")]
    list: PathBuf,
    /// The store to put them in, made if it is not there: a directory, 3fs:PATH, or s3://BUCKET/PREFIX
    #[arg(long, value_name = "STORE", value_parser = store_parser())]
    store: StoreLocation,
    /// Images at a time [default: the number of cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    jobs: Option<u16>,
    /// Layers at a time, over all images [default: the number of cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    layer_jobs: Option<u16>,
    /// Pass over images that are in the store already, made from the same source manifest with the same options
    #[arg(long)]
    skip_existing: bool,
    /// Give an image up after this long (90s, 10m, 2h)
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    timeout: Option<Duration>,
    /// End at the first failure
    #[arg(long)]
    fail_fast: bool,
    /// Only say what would be done; nothing is written
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    conversion: ConversionArgs,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let (stop, signals) = signals()?;
    let text = read_list(&args.list)?;
    let items = batch::parse(&text).map_err(|e| Told::usage(format!("{}: {e}", args.list.display())))?;
    let options = StoreOptions::from_env(&args.store.to_string());
    let store = if args.dry_run {
        match Store::open_at(&args.store, &options) {
            Err(StoreError::NotAStore { .. }) => None,
            opened => Some(opened?),
        }
    } else {
        let store = Store::create_at(&args.store, &options)?;
        store.sweep()?;
        Some(store)
    };
    let place = match &store {
        Some(store) if !args.dry_run => Place::Store(store),
        store => Place::DryRun(store.as_ref()),
    };
    let dedup = match &place {
        Place::Store(store) => {
            let (dedup, warnings) = args.conversion.dedup.open(store)?;
            warnings.iter().for_each(|warning| eprintln!("warning: {}", warning.message));
            dedup
        }
        Place::DryRun(_) => args.conversion.dedup.dry(),
    };
    let layers = options::jobs(args.layer_jobs);
    let work: Arc<dyn Work> = Arc::new(Images {
        conversion: args.conversion.clone(),
        dedup,
        layers,
        skip_existing: args.skip_existing,
        dry_run: args.dry_run,
    });
    let settings =
        Settings { images: options::jobs(args.jobs), layers, timeout: args.timeout, fail_fast: args.fail_fast };
    let mut watch = Report::new(items.len(), Arc::clone(&stop));
    let totals = batch::run(items, &settings, place, &work, &stop, &mut watch);
    watch.bars.clear()?;
    watch.line(&serde_json::json!({ "totals": totals }));
    if let Some(error) = watch.unwritten {
        // Not the error itself, which would pass for a reader that has seen enough.
        return Err(anyhow!("the report could not be written: {error}"));
    }
    verdict(&totals, signals.load(Ordering::Relaxed), args.dry_run)
}

/// What `stop` is set by: the first signal. The second ends the program. The number is that of the signal.
fn signals() -> anyhow::Result<(Arc<AtomicBool>, Arc<AtomicUsize>)> {
    let (stop, number) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    for (signal, value) in [(SIGINT, 2), (SIGTERM, 15)] {
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&stop))?;
        signal_hook::flag::register_usize(signal, Arc::clone(&number), value)?;
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    Ok((stop, number))
}

fn read_list(path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut text = Vec::new();
    if path == Path::new("-") {
        io::stdin().read_to_end(&mut text).context("cannot read the list from standard input")?;
    } else {
        text = fs::read(path).with_context(|| format!("cannot read the list {}", path.display()))?;
    }
    Ok(text)
}

/// How the batch went, on standard error, and as what the program ends with.
fn verdict(totals: &Totals, signal: usize, dry_run: bool) -> anyhow::Result<()> {
    let done = if dry_run { "would be converted" } else { "converted" };
    let mut told = format!("{} of {} images {done}, {} skipped", totals.ok, totals.images, totals.skipped);
    for (count, what) in [(totals.failed, "failed"), (totals.timeout, "took too long"), (totals.left, "left")] {
        if count > 0 {
            told += &format!(", {count} {what}");
        }
    }
    let code = match (signal, totals.failed + totals.timeout + totals.left) {
        (2 | 15, left) if totals.left > 0 || left > 0 => {
            told = format!("interrupted: {told}; the same command goes on from here");
            u8::try_from(128 + signal).unwrap_or(exit::FAILED)
        }
        (_, 0) => {
            eprintln!("{told}");
            return Ok(());
        }
        _ if totals.corrupt => exit::CORRUPT,
        _ => exit::FAILED,
    };
    Err(Told { sentence: told, code }.into())
}

/// The conversion of one image.
struct Images {
    conversion: ConversionArgs,
    /// One dictionary for all.
    dedup: Option<Dedup>,
    layers: usize,
    skip_existing: bool,
    dry_run: bool,
}

impl Images {
    fn request(&self, item: &Item) -> Request {
        let mut request = self.conversion.request(item.source.clone(), self.layers, self.dedup.clone());
        if let Some(platform) = &item.platform {
            request.platform = platform.clone();
        }
        request
    }

    fn one(&self, item: &Item, store: Option<&Store>, progress: &dyn Progress) -> anyhow::Result<Done> {
        let request = self.request(item);
        // In a dry run, what is unpacked to be looked at is not put into the store.
        let scratch = match store {
            Some(store) if !self.dry_run => store.scratch(),
            _ => std::env::temp_dir(),
        };
        if let (true, Some(store)) = (self.skip_existing, store)
            && let Some(found) = existing(&item.name, &request, self.conversion.merge_under, store, &scratch)?
        {
            let (manifest, layers) = (Some(found.manifest), found.layers);
            return Ok(Done { skipped: true, manifest, layers, layers_reused: layers, bytes: 0 });
        }
        if self.dry_run {
            return Ok(planned(&plan(&request, store, &scratch)?));
        }
        let store = store.context("a conversion needs a store")?;
        let converted = convert_merged_as(&item.name, &request, self.conversion.merge_under, store, progress)?;
        Ok(Done {
            skipped: false,
            manifest: Some(converted.manifest),
            bytes: converted.layers.iter().filter_map(|layer| layer.source_size).sum(),
            layers: converted.layers.len(),
            layers_reused: converted.layers.iter().filter(|layer| layer.reused).count(),
        })
    }
}

/// A plan as what it would come to.
pub(super) fn planned(plan: &Plan) -> Done {
    Done {
        skipped: false,
        manifest: None,
        bytes: plan.layers.iter().filter_map(|layer| layer.source_bytes).sum(),
        layers: plan.layers.len(),
        layers_reused: plan.layers.iter().filter(|layer| layer.reused).count(),
    }
}

impl Work for Images {
    fn convert(&self, item: &Item, store: Option<&Store>, progress: &dyn Progress) -> Result<Done, Failure> {
        self.one(item, store, progress).map_err(|e| Failure { error: sentence(&e), exit: exit_code(&e) })
    }

    fn corrupt(&self) -> u8 {
        exit::CORRUPT
    }
}

/// Lines on standard output, and bars on a terminal.
struct Report {
    bars: MultiProgress,
    all: ProgressBar,
    images: HashMap<usize, ProgressBar>,
    stop: Arc<AtomicBool>,
    unwritten: Option<io::Error>,
}

impl Report {
    fn new(images: usize, stop: Arc<AtomicBool>) -> Self {
        let target =
            if io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bars = MultiProgress::with_draw_target(target);
        let all = bars.add(ProgressBar::new(images as u64));
        if let Ok(style) = ProgressStyle::with_template("{pos} of {len} images [{bar:40}] {elapsed}, {eta} left") {
            all.set_style(style.progress_chars("=> "));
        }
        Self { bars, all, images: HashMap::new(), stop, unwritten: None }
    }

    /// Prints a line of JSON at once. A reader that is gone ends the batch: nobody would know what became of the rest.
    fn line(&mut self, value: &impl serde::Serialize) {
        let written = self.bars.suspend(|| {
            let mut out = io::stdout().lock();
            json_line(&mut out, value)?;
            out.flush()
        });
        if let Err(e) = written {
            self.stop.store(true, Ordering::Relaxed);
            self.unwritten.get_or_insert(e);
        }
    }
}

impl batch::Watch for Report {
    fn started(&mut self, item: &Item) -> Arc<dyn Progress + Send + Sync> {
        let bar = self.bars.insert_before(&self.all, ProgressBar::new(0));
        let template = "{prefix:30!} [{bar:30}] {bytes:>10} of {total_bytes:<10} {bytes_per_sec:>12}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(item.name.to_string());
        self.images.insert(item.line, bar.clone());
        Arc::new(Bar(bar))
    }

    fn finished(&mut self, outcome: &Outcome) {
        if let Some(bar) = self.images.remove(&outcome.line) {
            bar.finish_and_clear();
        }
        self.all.inc(1);
        if let (Status::Failed | Status::Timeout, Some(error)) = (outcome.status, &outcome.error) {
            let told = format!("{}: {error}", outcome.name);
            self.bars.suspend(|| eprintln!("error: {told}"));
        }
        self.line(outcome);
    }
}

/// The bar of an image: its layers together.
struct Bar(ProgressBar);

impl Progress for Bar {
    fn layer_started(&self, _: usize, bytes: Option<u64>) {
        self.0.inc_length(bytes.unwrap_or(0));
    }

    fn layer_read(&self, _: usize, bytes: u64) {
        self.0.inc(bytes);
    }
}

/// Bytes and layers of a plan, for people.
pub(super) fn tell_plan(done: &Done) -> String {
    format!("{} layers of {}, {} of them reused", done.layers, size(done.bytes), done.layers_reused)
}
