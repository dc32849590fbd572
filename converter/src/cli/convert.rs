//! `dsec-convert convert`.

use super::batch::{planned, tell_plan};
use super::options::{self, ConversionArgs};
use super::{merge, output, store_parser};
use clap::Args as ClapArgs;
use converter::compress::Algorithm;
use converter::convert::plan::plan;
use converter::convert::{Converted, Request, convert_merged_as};
use converter::entry::Warning;
use converter::layer::{BlobRef, Counts, TableRef};
use converter::progress::{Progress, Silent};
use converter::source::SourceRef;
use fs3_client::{Digest, RefName, Store, StoreError, StoreLocation, StoreOptions};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use serde::Serialize;
use std::collections::HashMap;
use std::io::{self, IsTerminal as _, Write};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Arguments of `convert`.
#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    /// Where the image is.
    // Not the comment above, whose brackets rustdoc takes for links.
    #[arg(
        help = "Where the image is: docker://HOST/REPOSITORY[:TAG|@DIGEST], oci:DIR[:TAG], oci-archive:FILE[:TAG], docker-archive:FILE[:REF], tar:FILE (one \
                  layer; `-` reads standard input), dir:PATH (one layer)"
    )]
    source: SourceRef,
    /// The store to put it in.
    #[arg(
        long,
        value_name = "STORE",
        help = "The store to put it in, made if it is not there: a directory, 3fs:PATH, or s3://BUCKET/PREFIX (the \
                  bucket is not made; its endpoint and keys come from AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, \
                  AWS_SECRET_ACCESS_KEY and so on)",
        value_parser = store_parser()
    )]
    store: StoreLocation,
    /// What the image is called there; `:latest` if no tag is given
    #[arg(long, value_name = "NAME:TAG")]
    name: RefName,
    /// Layers at a time [default: the number of cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    jobs: Option<u16>,
    #[command(flatten)]
    conversion: ConversionArgs,
    /// Only say what would be done; nothing is written
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON document that says what was done
    #[arg(long)]
    json: bool,
    /// Print nothing but errors
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
}

/// Runs `convert`.
pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let began = Instant::now();
    let request = |dedup| args.conversion.request(args.source.clone(), options::jobs(args.jobs), dedup);
    if args.dry_run {
        return dry_run(args, &request(args.conversion.dedup.dry()));
    }
    let store = Store::create_at(&args.store, &StoreOptions::from_env(&args.store.to_string()))?;
    store.sweep()?;
    let (dedup, mut notes) = args.conversion.dedup.open(&store)?;
    let request = request(dedup);
    let converted = if args.json || args.quiet {
        convert_merged_as(&args.name, &request, args.conversion.merge_under, &store, &Silent)
    } else if io::stderr().is_terminal() {
        let bars = Bars::default();
        let converted = convert_merged_as(&args.name, &request, args.conversion.merge_under, &store, &bars);
        bars.all.clear()?;
        converted
    } else {
        convert_merged_as(&args.name, &request, args.conversion.merge_under, &store, &Lines)
    };
    let mut converted = converted?;
    notes.append(&mut converted.warnings);
    converted.warnings = notes;
    let report = Report::new(&args.name, &converted, began.elapsed())?;
    if args.json {
        return output::print(|out| output::json(out, &report));
    }
    for (layer, warning) in report.warnings() {
        let entry = if warning.entry.is_empty() { String::new() } else { format!("`{}` ", warning.entry) };
        eprintln!("warning: {layer}{entry}{}", warning.message);
    }
    if args.quiet {
        return Ok(());
    }
    output::print(|out| report.print(out))
}

fn dry_run(args: &Args, request: &Request) -> anyhow::Result<()> {
    let store = match Store::open_at(&args.store, &StoreOptions::from_env(&args.store.to_string())) {
        Err(StoreError::NotAStore { .. }) => None,
        opened => Some(opened?),
    };
    let plan = plan(request, store.as_ref(), &std::env::temp_dir())?;
    output::print(|out| {
        if args.json {
            return output::json(out, &serde_json::json!({ "image": args.name.to_string(), "plan": plan }));
        }
        writeln!(out, "{} would be converted: {}", args.name, tell_plan(&planned(&plan)))
    })
}

#[derive(Serialize)]
struct Report {
    image: String,
    manifest: Digest,
    config: String,
    platform: Option<String>,
    layers: Vec<LayerReport>,
    /// The layers of the image, where some were merged.
    merged: Vec<merge::LayerReport>,
    totals: Totals,
    warnings: Vec<Warning>,
}

#[derive(Serialize)]
struct LayerReport {
    source: Option<Digest>,
    source_bytes: Option<u64>,
    diff_id: Option<Digest>,
    metadata: BlobRef,
    data: Vec<BlobRef>,
    chunk_tables: Vec<TableRef>,
    compression: Vec<Algorithm>,
    #[serde(flatten)]
    counts: Counts,
    reused: bool,
    seconds: f64,
    warnings: Vec<Warning>,
}

#[derive(Serialize)]
struct Totals {
    layers: usize,
    layers_reused: usize,
    source_bytes: u64,
    metadata_bytes: u64,
    data_bytes: u64,
    inodes: u64,
    files: u64,
    inline_files: u64,
    whiteouts: u64,
    opaques: u64,
    own_bytes: u64,
    deduplicated_bytes: u64,
    compressed_files: u64,
    compressed_plain_bytes: u64,
    compressed_stored_bytes: u64,
    referred_bytes: u64,
    referred_chunks: u64,
    /// By layer: a blob counts for each that refers to it.
    referred_blobs: u64,
    lookups: u64,
    seconds: f64,
}

impl Report {
    fn new(name: &RefName, converted: &Converted, took: Duration) -> anyhow::Result<Self> {
        let merged = if converted.parts.iter().any(|part| part.merged.is_some()) {
            merge::LayerReport::all(&converted.image, &converted.parts)?
        } else {
            Vec::new()
        };
        let layers: Vec<LayerReport> = converted
            .layers
            .iter()
            .map(|layer| LayerReport {
                source: layer.record.source,
                source_bytes: layer.source_size,
                diff_id: layer.record.diff_id,
                metadata: layer.record.metadata,
                data: layer.record.data.clone(),
                chunk_tables: layer.record.chunk_tables.clone(),
                compression: layer.record.algorithms.clone(),
                counts: layer.record.counts,
                reused: layer.reused,
                seconds: layer.took.as_secs_f64(),
                warnings: layer.record.warnings.clone(),
            })
            .collect();
        let sum = |f: &dyn Fn(&LayerReport) -> u64| layers.iter().map(f).sum();
        // A blob that several layers share is one blob.
        let data: HashMap<Digest, u64> =
            layers.iter().flat_map(|l| &l.data).map(|blob| (blob.digest, blob.size)).collect();
        let totals = Totals {
            layers: layers.len(),
            layers_reused: layers.iter().filter(|l| l.reused).count(),
            source_bytes: sum(&|l| l.source_bytes.unwrap_or(0)),
            metadata_bytes: sum(&|l| l.metadata.size),
            data_bytes: data.values().sum(),
            inodes: sum(&|l| l.counts.inodes),
            files: sum(&|l| l.counts.files),
            inline_files: sum(&|l| l.counts.inline_files),
            whiteouts: sum(&|l| l.counts.whiteouts),
            opaques: sum(&|l| l.counts.opaques),
            own_bytes: sum(&|l| l.counts.own_bytes),
            deduplicated_bytes: sum(&|l| l.counts.deduplicated_bytes),
            compressed_files: sum(&|l| l.counts.compressed_files),
            compressed_plain_bytes: sum(&|l| l.counts.compressed_plain_bytes),
            compressed_stored_bytes: sum(&|l| l.counts.compressed_stored_bytes),
            referred_bytes: sum(&|l| l.counts.referred_bytes),
            referred_chunks: sum(&|l| l.counts.referred_chunks),
            referred_blobs: sum(&|l| l.counts.referred_blobs),
            lookups: sum(&|l| l.counts.lookups),
            seconds: took.as_secs_f64(),
        };
        Ok(Self {
            image: name.to_string(),
            manifest: converted.manifest,
            config: converted.image.config.digest().to_string(),
            platform: converted.platform.as_ref().map(ToString::to_string),
            layers,
            merged,
            totals,
            warnings: converted.warnings.clone(),
        })
    }

    /// All warnings, with what stands before them.
    fn warnings(&self) -> impl Iterator<Item = (String, &Warning)> {
        let layers = self.layers.iter().enumerate();
        let of_layers = layers.flat_map(|(i, l)| l.warnings.iter().map(move |w| (format!("layer {i}: "), w)));
        self.warnings.iter().map(|w| (String::new(), w)).chain(of_layers)
    }

    fn print(&self, out: &mut impl Write) -> io::Result<()> {
        let compressed = self.layers.iter().any(|layer| !layer.compression.is_empty());
        let mut rows: Vec<Vec<String>> = self
            .layers
            .iter()
            .enumerate()
            .map(|(index, layer)| {
                vec![
                    index.to_string(),
                    layer.source_bytes.map_or_else(|| "-".to_owned(), output::size),
                    output::size(layer.metadata.size),
                    output::size(layer.counts.own_bytes),
                    layer.counts.files.to_string(),
                    layer.counts.inline_files.to_string(),
                    layer.counts.whiteouts.to_string(),
                    layer.counts.opaques.to_string(),
                    output::size(layer.counts.deduplicated_bytes),
                    output::size(layer.counts.referred_bytes),
                    layer.counts.referred_blobs.to_string(),
                    if layer.reused { "reused".to_owned() } else { format!("{:.2} s", layer.seconds) },
                ]
            })
            .collect();
        let mut head = vec![
            ">LAYER",
            ">SOURCE",
            ">METADATA",
            ">DATA",
            ">FILES",
            ">INLINE",
            ">WHITEOUTS",
            ">OPAQUE",
            ">DEDUP",
            ">ELSEWHERE",
            ">BLOBS",
            ">TIME",
        ];
        if compressed {
            // What the data would be without compression.
            head.insert(4, ">PLAIN");
            for (row, layer) in rows.iter_mut().zip(&self.layers) {
                let data: u64 = layer.data.iter().map(|blob| blob.size).sum();
                let saved = layer.counts.compressed_plain_bytes.saturating_sub(layer.counts.compressed_stored_bytes);
                row.insert(4, output::size(data + saved));
            }
        }
        output::table(out, &head, &rows)?;
        if !self.merged.is_empty() {
            let rows: Vec<Vec<String>> = self.merged.iter().map(merge::LayerReport::row).collect();
            writeln!(out)?;
            output::table(out, &merge::COLUMNS, &rows)?;
        }
        let t = &self.totals;
        writeln!(
            out,
            "{} {}: {} of source became {} of metadata and {} of data in {:.2} s",
            self.image,
            self.manifest,
            output::size(t.source_bytes),
            output::size(t.metadata_bytes),
            output::size(t.data_bytes),
            t.seconds
        )
    }
}

/// A bar for each layer that is being converted.
#[derive(Default)]
struct Bars {
    all: MultiProgress,
    bars: Mutex<HashMap<usize, ProgressBar>>,
}

impl Bars {
    fn bar(&self, index: usize) -> Option<ProgressBar> {
        self.bars.lock().ok()?.get(&index).cloned()
    }
}

impl Progress for Bars {
    fn layer_started(&self, index: usize, bytes: Option<u64>) {
        let bar = bytes.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
        let template = match bytes {
            Some(_) => "{prefix:>9} [{bar:40}] {bytes:>10} of {total_bytes:<10} {bytes_per_sec:>12}",
            None => "{prefix:>9} {spinner} {bytes:>10} {bytes_per_sec:>12}",
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(format!("layer {index}"));
        if let Ok(mut bars) = self.bars.lock() {
            bars.insert(index, self.all.add(bar));
        }
    }

    fn layer_read(&self, index: usize, bytes: u64) {
        if let Some(bar) = self.bar(index) {
            bar.inc(bytes);
        }
    }

    fn layer_finished(&self, index: usize, _reused: bool) {
        if let Some(bar) = self.bar(index) {
            bar.finish();
        }
    }
}

/// A line for each layer, for logs.
struct Lines;

impl Progress for Lines {
    fn layer_started(&self, index: usize, bytes: Option<u64>) {
        let bytes = bytes.map_or_else(String::new, |b| format!(" ({})", output::size(b)));
        eprintln!("layer {index}{bytes}: converting");
    }

    fn layer_finished(&self, index: usize, reused: bool) {
        eprintln!("layer {index}: {}", if reused { "was there already" } else { "done" });
    }

    fn merging(&self, range: std::ops::Range<usize>) {
        eprintln!("layers {} to {}: merging", range.start, range.end - 1);
    }
}
