//! `dsec-convert inspect`.

use super::output::{self, Out, print};
use super::{Found, find_image, open_store, store_parser, tree};
use anyhow::Context as _;
use clap::CommandFactory as _;
use clap::error::ErrorKind;
use converter::entry::printable;
use converter::erofs::read::Image;
use converter::layer::Origin;
use converter::manifest::{Layer, OverlayXattrs, annotation};
use converter::read_at::ReadAt;
use fs3_client::StoreLocation;
use oci_spec::image::Descriptor;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, Write as _};

/// Arguments of `inspect`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// A store (with NAME:TAG), or the file of an EROFS image
    #[arg(value_name = "STORE|FILE", value_parser = store_parser())]
    path: StoreLocation,
    /// The image in the store
    #[arg(value_name = "NAME:TAG")]
    name: Option<String>,
    /// Show every inode: type, mode, owner, size, time, links, xattrs, layout, and where its data is
    #[arg(long)]
    tree: bool,
    /// Print JSON: one document, and with --tree a line for each inode behind it
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    match &args.name {
        Some(name) => {
            let store = open_store(&args.path)?;
            let found = find_image(&store, name)?;
            print_image(args, name, &found)?;
            if args.tree {
                for (index, layer) in found.manifest.layers.iter().enumerate() {
                    let digest = converter::manifest::digest_of(&layer.metadata)?;
                    let file = store.open_blob(&digest, layer.metadata.size())?;
                    let image = Image::open(file).with_context(|| format!("layer {index}: {digest}"))?;
                    tree::print(&image, args.json, Some(index)).with_context(|| format!("layer {index}: {digest}"))?;
                }
            }
            Ok(())
        }
        None => {
            let (name, mut command) = (args.path.to_string(), super::Cli::command());
            let path = match &args.path {
                StoreLocation::Dir(path) if path.is_dir() => {
                    let what = format!("{name} is a directory: name the image in it as NAME:TAG");
                    command.error(ErrorKind::MissingRequiredArgument, what).exit()
                }
                StoreLocation::Dir(path) => path,
                _ => {
                    let what = format!("{name} is a store: name the image in it as NAME:TAG");
                    command.error(ErrorKind::MissingRequiredArgument, what).exit()
                }
            };
            let file = File::open(path).with_context(|| format!("cannot open {name}"))?;
            let image = Image::open(file).with_context(|| name.clone())?;
            let summary = Summary::of(&image).with_context(|| name.clone())?;
            print(
                |out| if args.json { json_file(out, args, &image, &summary) } else { text_file(out, &image, &summary) },
            )?;
            if args.tree { tree::print(&image, args.json, None).with_context(|| name) } else { Ok(()) }
        }
    }
}

fn print_image(args: &Args, name: &str, found: &Found) -> anyhow::Result<()> {
    print(|out| {
        let layers = &found.manifest.layers;
        if args.json {
            let document = json!({
                "image": name,
                "digest": found.digest,
                "manifest_bytes": found.size,
                "config": found.manifest.config.digest().to_string(),
                "layers": layers.iter().map(json_layer).collect::<Vec<_>>(),
            });
            return if args.tree { output::json_line(out, &document) } else { output::json(out, &document) };
        }
        writeln!(out, "image     {name}")?;
        writeln!(out, "manifest  {}  {}", found.digest, output::size(found.size))?;
        writeln!(out, "config    {}", found.manifest.config.digest())?;
        for (index, layer) in layers.iter().enumerate() {
            let kept = if layer.whiteouts { ", whiteouts kept" } else { "" };
            let parts = Origin::of(layer);
            let merged = if parts.len() > 1 { format!(", merged from {}", parts.len()) } else { String::new() };
            writeln!(out, "\nlayer {index}{kept}{merged}")?;
            for part in &parts {
                let diff_id = part.diff_id.map_or_else(|| "unknown".to_owned(), |digest| digest.to_string());
                writeln!(out, "  diffID       {diff_id}")?;
            }
            if let Some(compression) = annotated(&layer.metadata, annotation::COMPRESSION).filter(|c| *c != "none") {
                writeln!(out, "  compression  {compression}")?;
            }
            let blobs = std::iter::once(("metadata", &layer.metadata))
                .chain(layer.data.iter().map(|blob| ("data", blob)))
                .chain(layer.chunk_tables.iter().map(|blob| ("chunk table", blob)));
            for (role, blob) in blobs {
                writeln!(out, "  {role:<11}  {}  {}", blob.digest(), output::size(blob.size()))?;
            }
        }
        Ok(())
    })
}

fn annotated<'a>(descriptor: &'a Descriptor, key: &str) -> Option<&'a str> {
    descriptor.annotations().as_ref()?.get(key).map(String::as_str)
}

fn json_layer(layer: &Layer) -> Value {
    let blob = |d: &Descriptor| json!({ "digest": d.digest().to_string(), "size": d.size() });
    json!({
        "metadata": blob(&layer.metadata),
        "data": layer.data.iter().map(blob).collect::<Vec<_>>(),
        "chunk_tables": layer.chunk_tables.iter().map(blob).collect::<Vec<_>>(),
        "compression": annotated(&layer.metadata, annotation::COMPRESSION),
        "diff_id": annotated(&layer.metadata, annotation::DIFF_ID),
        "source": annotated(&layer.metadata, annotation::SOURCE_DIGEST),
        "parts": Origin::of(layer),
        "whiteouts": layer.whiteouts,
        "overlay_xattrs": match layer.overlay_xattrs {
            OverlayXattrs::Trusted => "trusted",
            OverlayXattrs::User => "user",
        },
    })
}

/// What is counted in an image's tree.
#[derive(Debug, Default, serde::Serialize)]
struct Summary {
    names: u64,
    inodes: u64,
    directories: u64,
    files: u64,
    symlinks: u64,
    others: u64,
    whiteouts: u64,
    /// Inodes of 32 bytes.
    compact: u64,
    /// Regular files whose last bytes stand beside the inode.
    inline_files: u64,
    compressed_files: u64,
    /// What those are when they are read, and as they are stored.
    compressed_plain_bytes: u64,
    compressed_stored_bytes: u64,
    file_bytes: u64,
}

impl Summary {
    fn of<R: ReadAt>(image: &Image<R>) -> anyhow::Result<Self> {
        use converter::erofs::format::{DataLayout, FileType};
        let mut sum = Self::default();
        let mut walk = image.walk();
        while let Some(visit) = walk.next() {
            let visit = visit?;
            sum.names += u64::from(visit.entry.is_some());
            if !visit.first {
                continue;
            }
            let inode = visit.inode;
            sum.inodes += 1;
            sum.compact += u64::from(inode.compact);
            sum.whiteouts += u64::from(inode.is_whiteout());
            match inode.file_type() {
                FileType::Directory => sum.directories += 1,
                FileType::Regular => {
                    sum.files += 1;
                    sum.file_bytes = sum.file_bytes.saturating_add(inode.size);
                    sum.inline_files += u64::from(inode.layout == DataLayout::FlatInline && inode.size > 0);
                    if let Some(stored) = inode.compressed_blocks() {
                        let stored = stored.saturating_mul(image.superblock().block_size().into());
                        sum.compressed_files += 1;
                        sum.compressed_plain_bytes = sum.compressed_plain_bytes.saturating_add(inode.size);
                        sum.compressed_stored_bytes = sum.compressed_stored_bytes.saturating_add(stored);
                    }
                }
                FileType::Symlink => sum.symlinks += 1,
                _ => sum.others += 1,
            }
        }
        Ok(sum)
    }
}

fn uuid(bytes: [u8; 16]) -> String {
    let mut text = String::new();
    for (index, byte) in bytes.iter().enumerate() {
        text += if matches!(index, 4 | 6 | 8 | 10) { "-" } else { "" };
        text += &format!("{byte:02x}");
    }
    text
}

fn json_file<R: ReadAt>(out: &mut Out, args: &Args, image: &Image<R>, summary: &Summary) -> io::Result<()> {
    let sb = image.superblock();
    let device = |d: &converter::erofs::read::Device| json!({ "tag": printable(&d.tag), "blocks": d.blocks, "unified_start": d.unified_start });
    let document = json!({
        "bytes": image.size(),
        "superblock": {
            "block_size": sb.block_size(), "blocks": sb.blocks, "root_nid": sb.root_nid, "inodes": sb.inodes,
            "epoch": sb.epoch, "epoch_nsec": sb.fixed_nsec, "meta_block": sb.meta_block, "xattr_block": sb.xattr_block,
            "uuid": uuid(sb.uuid), "volume": printable(&sb.volume_name),
            "checksum": sb.checksum, "device_table": sb.device_table,
            "feature_compat": sb.features.compat(), "feature_incompat": sb.features.incompat(),
        },
        "features": sb.features.names(),
        "algorithms": sb.features.algorithms(),
        "least_kernel": sb.features.least_kernel().to_string(),
        "devices": image.devices().iter().map(device).collect::<Vec<_>>(),
        "counts": summary,
    });
    if args.tree { output::json_line(out, &document) } else { output::json(out, &document) }
}

fn text_file<R: ReadAt>(out: &mut Out, image: &Image<R>, summary: &Summary) -> io::Result<()> {
    let sb = image.superblock();
    let checksum = sb.checksum.map_or("none".to_owned(), |crc| format!("{crc:#010x}, right"));
    writeln!(out, "size          {} ({} blocks of {})", output::size(image.size()), sb.blocks, sb.block_size())?;
    writeln!(out, "features      {}", sb.features.names().join(", "))?;
    writeln!(out, "least kernel  {}", sb.features.least_kernel())?;
    writeln!(out, "checksum      {checksum}")?;
    writeln!(out, "root          inode {}", sb.root_nid)?;
    writeln!(out, "epoch         {}.{:09}", sb.epoch, sb.fixed_nsec)?;
    writeln!(out, "metadata      from block {}, shared xattrs from block {}", sb.meta_block, sb.xattr_block)?;
    writeln!(out, "uuid          {}", uuid(sb.uuid))?;
    if !sb.volume_name.is_empty() {
        writeln!(out, "volume        {}", printable(&sb.volume_name))?;
    }
    for (device, id) in image.devices().iter().zip(1..) {
        let bytes = device.blocks.saturating_mul(u64::from(sb.block_size()));
        writeln!(out, "device {id:<6} {} ({} blocks)  {}", output::size(bytes), device.blocks, printable(&device.tag))?;
    }
    let s = summary;
    writeln!(out, "inodes        {} ({} compact), {} names", s.inodes, s.compact, s.names)?;
    writeln!(
        out,
        "contents      {} files of {} ({} inline), {} directories, {} symlinks, {} others, {} whiteouts",
        s.files,
        output::size(s.file_bytes),
        s.inline_files,
        s.directories,
        s.symlinks,
        s.others,
        s.whiteouts
    )?;
    if s.compressed_files > 0 {
        let (plain, stored) = (output::size(s.compressed_plain_bytes), output::size(s.compressed_stored_bytes));
        writeln!(out, "compressed    {} files of {plain} in {stored}", s.compressed_files)?;
    }
    Ok(())
}
