//! `dsec-convert merge`.

use super::output;
use super::{STORE_HELP, find_image, open_store, store_parser};
use converter::layer::{BlobRef, Counts};
use converter::manifest::{self, Layer, MANIFEST_MEDIA_TYPE};
use converter::merge::{ImageRequest, MergedImage, Options, Part, Under, merge_images};
use converter::progress::Silent;
use fs3_client::{Digest, RefName, StoreLocation};
use serde::Serialize;
use std::io::{self, Write};
use std::time::{Duration, Instant};

/// Arguments of `merge`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The store.
    #[arg(help = STORE_HELP, value_parser = store_parser())]
    store: StoreLocation,
    /// The images to merge; several are stacked on one another in this order, the first at the bottom
    #[arg(value_name = "NAME:TAG", required = true)]
    images: Vec<String>,
    /// What the result is called; `:latest` if no tag is given
    #[arg(long, value_name = "NAME:TAG")]
    name: RefName,
    /// Merge runs of consecutive layers that stay under this size together (metadata and data, a blob that several
    /// refer to counted once): a size such as 512MiB, `all` or `none`
    #[arg(long, value_name = "SIZE|all|none", default_value_t = Under::default())]
    merge_under: Under,
    /// Nothing will ever lie below: leave out whiteouts and opaque directories of the lowest layers
    #[arg(long)]
    bottom: bool,
    /// Copy the data in use into one new blob for each merged layer, instead of linking the layers' blobs
    #[arg(long)]
    pack: bool,
    /// Print one JSON document that says what was done
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let began = Instant::now();
    // A writer's from before the images are looked for until what is made of them has its name.
    let store = open_store(&args.store)?.writing("merge")?;
    store.sweep()?;
    // From before anything is found that the image will rely on, until its name says so.
    let lease = store.lease("merge")?;
    let mut images = Vec::with_capacity(args.images.len());
    for name in &args.images {
        images.push((name.clone(), find_image(&store, name)?.manifest));
    }
    let options = Options { bottom: args.bottom, pack: args.pack };
    let request = ImageRequest { under: args.merge_under, options };
    let merged = merge_images(&images, &request, &store, &Silent)?;
    lease.check()?;
    let descriptor = manifest::descriptor(MANIFEST_MEDIA_TYPE, merged.manifest, merged.manifest_size, &[]);
    store.write_ref(&args.name, &descriptor)?;
    let report = Report::new(&args.name, &images, &merged, began.elapsed())?;
    output::print(|out| if args.json { output::json(out, &report) } else { report.print(out) })
}

#[derive(Serialize)]
struct Report {
    image: String,
    manifest: Digest,
    config: String,
    from: Vec<String>,
    layers_before: usize,
    layers: Vec<LayerReport>,
    seconds: f64,
}

/// A layer of an image whose layers may have been merged.
#[derive(Serialize)]
pub(super) struct LayerReport {
    /// Positions in the stack of the layers that it is made of.
    from: Vec<usize>,
    metadata: BlobRef,
    data: Vec<BlobRef>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(flatten)]
    counts: Option<Counts>,
    reused: bool,
}

impl LayerReport {
    pub(super) fn all(image: &manifest::Image, parts: &[Part]) -> anyhow::Result<Vec<Self>> {
        image.layers.iter().zip(parts).map(|(layer, part)| Self::of(layer, part)).collect()
    }

    fn of(layer: &Layer, part: &Part) -> anyhow::Result<Self> {
        Ok(Self {
            from: part.from.clone().collect(),
            metadata: BlobRef::of(&layer.metadata)?,
            data: layer.data.iter().map(BlobRef::of).collect::<Result<_, _>>()?,
            counts: part.merged.as_ref().map(|record| record.counts),
            reused: part.reused,
        })
    }

    /// `3` or `3-7`.
    fn from(&self) -> String {
        match (self.from.first(), self.from.last()) {
            (Some(first), Some(last)) if first != last => format!("{first}-{last}"),
            (Some(first), _) => first.to_string(),
            _ => String::new(),
        }
    }

    pub(super) fn row(&self) -> Vec<String> {
        let data: u64 = self.data.iter().map(|blob| blob.size).sum();
        let count =
            |count: &dyn Fn(&Counts) -> u64| self.counts.as_ref().map_or("-".to_owned(), |c| count(c).to_string());
        let state = match (self.reused, self.from.len()) {
            (true, _) => "reused",
            (false, 1) if self.counts.is_none() => "as it was",
            _ => "merged",
        };
        vec![
            self.from(),
            output::size(self.metadata.size),
            self.data.len().to_string(),
            output::size(data),
            count(&|c| c.inodes),
            count(&|c| c.whiteouts),
            count(&|c| c.opaques),
            state.to_owned(),
        ]
    }
}

/// The columns of [`LayerReport::row`].
pub(super) const COLUMNS: [&str; 8] =
    ["FROM LAYERS", ">METADATA", ">BLOBS", ">DATA", ">INODES", ">WHITEOUTS", ">OPAQUE", "STATE"];

impl Report {
    fn new(
        name: &RefName,
        images: &[(String, manifest::Image)],
        merged: &MergedImage,
        took: Duration,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            image: name.to_string(),
            manifest: merged.manifest,
            config: merged.image.config.digest().to_string(),
            from: images.iter().map(|(name, _)| name.clone()).collect(),
            layers_before: images.iter().map(|(_, image)| image.layers.len()).sum(),
            layers: LayerReport::all(&merged.image, &merged.layers)?,
            seconds: took.as_secs_f64(),
        })
    }

    fn print(&self, out: &mut impl Write) -> io::Result<()> {
        let rows: Vec<Vec<String>> = self.layers.iter().map(LayerReport::row).collect();
        output::table(out, &COLUMNS, &rows)?;
        writeln!(
            out,
            "{}: {} layers of {} became {} in {:.2} s, manifest {}",
            self.image,
            self.layers_before,
            self.from.join(", "),
            self.layers.len(),
            self.seconds,
            self.manifest,
        )
    }
}
