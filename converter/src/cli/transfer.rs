//! `dsec-convert push`, `pull` and `export`.

use super::registry::RegistryArgs;
use super::{find_image, kept, open_store, output, store_parser};
use converter::manifest;
use converter::source::{Platform, SourceRef, resolve_artifact};
use converter::transfer::{self, Event, Moved, OnEvent};
use fs3_client::registry::ImageRef;
use fs3_client::{Digest, RefName, Store, StoreLocation, StoreOptions};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Blobs moved at a time; a registry's connections are slow one by one.
const JOBS: u16 = 4;

/// Arguments of `push`.
#[derive(Debug, clap::Args)]
pub(super) struct PushArgs {
    /// The store: a directory, 3fs:PATH, or s3://BUCKET/PREFIX
    #[arg(value_parser = store_parser())]
    store: StoreLocation,
    /// The image
    #[arg(value_name = "NAME:TAG")]
    name: String,
    // As `help`, since rustdoc takes the brackets for links.
    #[arg(
        value_name = "TARGET",
        value_parser = parse_target,
        help = "Where to: docker://HOST/REPOSITORY[:TAG], TAG being the image's if none is given"
    )]
    target: Target,
    #[command(flatten)]
    how: HowArgs,
    #[command(flatten)]
    registry: RegistryArgs,
}

/// Arguments of `pull`.
#[derive(Debug, clap::Args)]
pub(super) struct PullArgs {
    #[arg(help = "Where the converted image is: docker://HOST/REPOSITORY[:TAG|@DIGEST], oci:DIR[:TAG] or \
                oci-archive:FILE[:TAG]")]
    source: SourceRef,
    /// The store to put it in, made if it is not there: a directory, 3fs:PATH, or s3://BUCKET/PREFIX
    #[arg(value_parser = store_parser())]
    store: StoreLocation,
    /// What the image is called there; `:latest` if no tag is given
    #[arg(long, value_name = "NAME:TAG")]
    name: RefName,
    /// Which image of a multi-platform one
    #[arg(long, value_name = "OS/ARCH[/VARIANT]", default_value_t = Platform::host())]
    platform: Platform,
    #[command(flatten)]
    how: HowArgs,
    #[command(flatten)]
    registry: RegistryArgs,
}

/// Arguments of `export`.
#[derive(Debug, clap::Args)]
pub(super) struct ExportArgs {
    /// The store: a directory, 3fs:PATH, or s3://BUCKET/PREFIX
    #[arg(value_parser = store_parser())]
    store: StoreLocation,
    /// The image
    #[arg(value_name = "NAME:TAG")]
    name: RefName,
    #[arg(
        value_name = "oci:DIR[:TAG]",
        value_parser = parse_layout,
        help = "Where to: oci:DIR[:TAG], TAG being the image's if none is given. A layout that is there keeps its \
                other images"
    )]
    layout: LayoutTarget,
    /// Share files with the store by hard links, where both are on one file system: takes no space, but what changes a
    /// file of the layout in its place then damages the store
    #[arg(long)]
    link: bool,
    /// Print one JSON document that says what was done
    #[arg(long)]
    json: bool,
    /// Print nothing but errors
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
}

#[derive(Debug, clap::Args)]
struct HowArgs {
    /// Blobs at a time
    #[arg(long, value_name = "N", default_value_t = JOBS, value_parser = clap::value_parser!(u16).range(1..=64))]
    jobs: u16,
    /// Print one JSON document that says what was done
    #[arg(long)]
    json: bool,
    /// Print nothing but errors
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
}

/// Where `push` goes to, as it was typed.
#[derive(Debug, Clone)]
struct Target {
    text: String,
    has_tag: bool,
}

fn parse_target(text: &str) -> Result<Target, String> {
    let Some(name) = text.strip_prefix("docker://") else {
        return Err("an image is pushed to a registry: docker://HOST/REPOSITORY[:TAG]".to_owned());
    };
    name.parse::<ImageRef>().map_err(|e| e.to_string())?;
    if name.contains('@') {
        return Err("an image is pushed to a tag, not to a digest".to_owned());
    }
    let has_tag = name.rsplit('/').next().is_some_and(|last| last.contains(':'));
    Ok(Target { text: name.to_owned(), has_tag })
}

#[derive(Debug, Clone)]
struct LayoutTarget {
    dir: PathBuf,
    tag: Option<String>,
}

fn parse_layout(text: &str) -> Result<LayoutTarget, String> {
    match text.parse::<SourceRef>().map_err(|e| e.to_string())? {
        SourceRef::Oci { dir, tag } => Ok(LayoutTarget { dir, tag }),
        _ => Err("an image is exported to an OCI layout: oci:DIR[:TAG]".to_owned()),
    }
}

pub(super) fn push(args: &PushArgs) -> anyhow::Result<()> {
    let began = Instant::now();
    let store = open_store(&args.store)?;
    let found = find_image(&store, &args.name)?;
    let store = kept(&store, &found, "push")?;
    let target = match (args.target.has_tag, args.name.parse::<RefName>()?) {
        (true, _) => args.target.text.clone(),
        (false, name) => format!("{}:{}", args.target.text, name.tag()),
    };
    let target: ImageRef = target.parse()?;
    let manifest = (found.digest, found.size);
    let (options, jobs) = (args.registry.options(), args.how.jobs.into());
    let bar = Bar::new(args.how.json || args.how.quiet);
    let pushed = transfer::push(&store, &found.manifest, manifest, &target, &options, jobs, &bar.on_event());
    bar.clear();
    let to = format!("docker://{target}");
    Report::new(args.name.clone(), to, found.digest, pushed?.moved, began).print("sent", args.how.json, args.how.quiet)
}

pub(super) fn pull(args: &PullArgs) -> anyhow::Result<()> {
    let began = Instant::now();
    let store = Store::create_at(&args.store, &StoreOptions::from_env(&args.store.to_string()))?;
    store.sweep()?;
    let artifact = resolve_artifact(&args.source, &args.platform, &store.scratch(), &args.registry.options())?;
    let source = args.source.to_string();
    let bar = Bar::new(args.how.json || args.how.quiet);
    let pulled = transfer::pull(&artifact, &source, &store, &args.name, args.how.jobs.into(), &bar.on_event());
    bar.clear();
    let pulled = pulled?;
    let digest = manifest::digest_of(&pulled.manifest)?;
    let report = Report::new(source, args.name.to_string(), digest, pulled.moved, began);
    report.print("brought", args.how.json, args.how.quiet)
}

pub(super) fn export(args: &ExportArgs) -> anyhow::Result<()> {
    let began = Instant::now();
    let store = open_store(&args.store)?;
    let found = find_image(&store, &args.name.to_string())?;
    let store = kept(&store, &found, "export")?;
    let LayoutTarget { dir, tag } = &args.layout;
    let tag = tag.as_deref().unwrap_or_else(|| args.name.tag());
    let bar = Bar::new(args.json || args.quiet);
    let manifest = (found.digest, found.size);
    let exported = transfer::export(&store, &found.manifest, manifest, dir, tag, args.link, &bar.on_event());
    bar.clear();
    let to = format!("oci:{}:{tag}", dir.display());
    Report::new(args.name.to_string(), to, found.digest, exported?.moved, began).print("written", args.json, args.quiet)
}

#[derive(Serialize)]
struct Report {
    source: String,
    target: String,
    manifest: Digest,
    #[serde(flatten)]
    moved: Moved,
    seconds: f64,
}

impl Report {
    fn new(source: String, target: String, manifest: Digest, moved: Moved, began: Instant) -> Self {
        Self { source, target, manifest, moved, seconds: began.elapsed().as_secs_f64() }
    }

    /// Prints it; `verb` is what happened to blobs that were moved.
    fn print(&self, verb: &str, json: bool, quiet: bool) -> anyhow::Result<()> {
        if quiet {
            return Ok(());
        }
        let Moved { blobs, bytes, blobs_there, bytes_there } = self.moved;
        output::print(|out| {
            if json {
                return output::json(out, self);
            }
            writeln!(
                out,
                "{} {}: {blobs} blobs of {} {verb}, {blobs_there} of {} were there, in {:.2} s",
                self.target,
                self.manifest,
                output::size(bytes),
                output::size(bytes_there),
                self.seconds
            )
        })
    }
}

/// One bar for all bytes; nothing where there is no terminal.
struct Bar {
    bar: ProgressBar,
}

impl Bar {
    fn new(hidden: bool) -> Self {
        if hidden {
            return Self { bar: ProgressBar::hidden() };
        }
        let style = ProgressStyle::with_template("{bytes:>10} of {total_bytes} {wide_bar} {bytes_per_sec}, {eta} left");
        let bar = ProgressBar::new(0);
        Self { bar: bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())) }
    }

    fn on_event(&self) -> OnEvent {
        let bar = self.bar.clone();
        Arc::new(move |event| match event {
            Event::Total(bytes) => bar.set_length(bytes),
            Event::Bytes(bytes) | Event::There(bytes) => bar.inc(bytes),
        })
    }

    fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets() {
        for (text, has_tag) in
            [("docker://a.b/c", false), ("docker://localhost:5000/c", false), ("docker://a.b:1/c:2", true)]
        {
            assert_eq!(parse_target(text).unwrap().has_tag, has_tag, "{text}");
        }
        for bad in ["a.b/c", "oci:x", "docker://", "docker://UPPER", &format!("docker://a.b/c@{}", Digest::of(b""))] {
            assert!(parse_target(bad).is_err(), "{bad}");
        }
        let layout = parse_layout("oci:dir:a:b").unwrap();
        assert_eq!((layout.dir.to_str(), layout.tag.as_deref()), (Some("dir"), Some("a:b")));
        assert!(parse_layout("oci-archive:x").is_err() && parse_layout("oci:").is_err());
    }
}
