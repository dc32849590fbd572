//! `ublk-overlaybd info`.

use super::layers::index;
use super::output::{self, Out};
use serde_json::{Value, json};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use ublk_overlaybd::backend::{FileSource, Source};
use ublk_overlaybd::format::lsmt::{HEADER_SIZE, Header, SECTOR};
use ublk_overlaybd::format::tar::Member;
use ublk_overlaybd::format::zfile::Geometry;
use ublk_overlaybd::index::Kind;
use ublk_overlaybd::layer::{Form, Layer, Unwrapped, unwrap};

/// Arguments of `info`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// A layer in any form, the data file or the index file of a writable layer, or a ZFile
    file: PathBuf,
    /// With a data file, its index file, or `-` where a sparse layer has none
    #[arg(value_name = "INDEX|-")]
    index: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let document = match &args.index {
        Some(index_path) => layer_document(&Layer::open_pair(&args.file, index(index_path))?),
        None => describe(&args.file)?,
    };
    output::print(|out| if args.json { output::json(out, &document) } else { text(out, &document) })
}

/// What a file is by itself.
pub(super) fn describe(path: &Path) -> anyhow::Result<Value> {
    let name: Arc<str> = path.display().to_string().into();
    let stored: Arc<dyn Source> = Arc::new(FileSource::open(path)?);
    let Unwrapped { tar, zfile, lsmt } = unwrap(&stored, &name)?;
    let mut block = [0; HEADER_SIZE];
    let is_lsmt = lsmt.size() >= HEADER_SIZE as u64 && {
        lsmt.read_exact_at(&mut block, 0)?;
        Header::has_magic(&block)
    };
    let geometry = zfile.as_ref().map(|zfile| *zfile.geometry());
    if !is_lsmt && (tar.is_some() || geometry.is_some()) {
        return Ok(wrappers(json!({ "file": &*name, "kind": "not an LSMT layer" }), stored.size(), tar, geometry));
    }
    if is_lsmt && tar.is_none() && geometry.is_none() {
        // Halves of writable layers are described by their header alone.
        let header = Header::parse(&block).map_err(|error| anyhow::anyhow!("{name}: LSMT header: {error}"))?;
        let flags = header.flags;
        if flags.is_header() && !flags.is_data() {
            let entries = (stored.size() - HEADER_SIZE as u64) / 16;
            let mut document = json!({ "file": &*name, "kind": "index of a writable layer", "entries": entries });
            put_header(&mut document, &header);
            return Ok(document);
        }
        if flags.is_sparse() {
            return Ok(layer_document(&Layer::open_pair(path, None)?));
        }
        if flags.is_header() && !flags.is_sealed() && !has_trailer(&*lsmt)? {
            let mut document = json!({ "file": &*name, "kind": "data of a writable layer", "bytes": stored.size() });
            put_header(&mut document, &header);
            return Ok(document);
        }
    }
    Ok(layer_document(&Layer::open(stored, name)?))
}

fn has_trailer(lsmt: &dyn Source) -> anyhow::Result<bool> {
    let Some(at) = lsmt.size().checked_sub(HEADER_SIZE as u64).filter(|&at| at > 0) else { return Ok(false) };
    let mut block = [0; HEADER_SIZE];
    lsmt.read_exact_at(&mut block, at)?;
    Ok(Header::has_magic(&block))
}

fn wrappers(mut document: Value, bytes: u64, tar: Option<Member>, zfile: Option<Geometry>) -> Value {
    document["bytes"] = bytes.into();
    document["tar"] = tar.map_or(Value::Null, |tar| json!({ "payload_at": tar.offset, "payload_bytes": tar.size }));
    document["zfile"] = zfile.map_or(Value::Null, |zfile| {
        json!({
            "algorithm": zfile.algorithm.name(), "block_size": zfile.block_size, "blocks": zfile.blocks,
            "original_bytes": zfile.original_size, "checksums": zfile.verify, "digest": zfile.digest,
            "values_in": if zfile.header_overwritten { "header" } else { "trailer" },
        })
    });
    document
}

fn put_header(document: &mut Value, header: &Header) {
    document["flags"] = header.flags.bits().into();
    document["virtual_size"] = header.virtual_size.into();
    document["uuid"] = header.uuid.to_string().to_uppercase().into();
    document["parent"] = header.parent.to_string().to_uppercase().into();
    document["message"] = String::from_utf8_lossy(&header.user_tag).into();
}

/// Everything about a layer.
pub(super) fn layer_document(layer: &Layer) -> Value {
    let about = layer.about();
    let kind = match about.form {
        Form::Committed => "committed layer",
        Form::Sealed => "sealed layer",
        Form::Writable if about.header.flags.is_sparse() => "sparse writable layer",
        Form::Writable => "writable layer",
    };
    let document = json!({ "file": layer.name(), "kind": kind });
    let mut document = wrappers(document, layer.stored().size(), about.tar, about.zfile);
    put_header(&mut document, about.authority());
    document["flags"] = about.header.flags.bits().into();
    document["entries"] = about.entries.into();
    document["padding"] = about.padding.into();
    document["tagged"] = about.tagged.into();
    let (mut data, mut zeros) = (0, 0);
    for extent in layer.index().iter() {
        match extent.kind {
            Kind::Zero => zeros += extent.len * SECTOR,
            Kind::Data { .. } => data += extent.len * SECTOR,
        }
    }
    document["mappings"] = layer.index().len().into();
    document["data_bytes"] = data.into();
    document["zero_bytes"] = zeros.into();
    if let Some(dropped) = about.replayed.as_ref().and_then(|replayed| replayed.dropped.as_ref()) {
        document["torn"] = json!({ "offset": dropped.offset, "bytes": dropped.bytes, "why": dropped.why });
    }
    document
}

fn text(out: &mut Out, document: &Value) -> io::Result<()> {
    let Value::Object(fields) = document else { return Ok(()) };
    // In the order in which one would ask.
    const ORDER: [&str; 18] = [
        "file",
        "kind",
        "bytes",
        "tar",
        "zfile",
        "virtual_size",
        "flags",
        "uuid",
        "parent",
        "message",
        "entries",
        "padding",
        "tagged",
        "mappings",
        "data_bytes",
        "zero_bytes",
        "torn",
        "values_in",
    ];
    for key in ORDER {
        let Some(value) = fields.get(key) else { continue };
        let shown = match (key, value) {
            (_, Value::Null) => continue,
            ("message", Value::String(text)) if text.is_empty() => continue,
            (_, Value::String(text)) => text.escape_debug().to_string(),
            ("flags", Value::Number(flags)) => format!("{:#x}", flags.as_u64().unwrap_or_default()),
            ("bytes" | "virtual_size" | "data_bytes" | "zero_bytes", Value::Number(bytes)) => {
                let bytes = bytes.as_u64().unwrap_or_default();
                format!("{bytes} ({})", output::size(bytes))
            }
            (_, Value::Object(fields)) => {
                let parts = fields.iter().map(|(key, value)| match value {
                    Value::String(text) => format!("{key} {text}"),
                    other => format!("{key} {other}"),
                });
                parts.collect::<Vec<_>>().join(", ").replace('_', " ")
            }
            (_, other) => other.to_string(),
        };
        writeln!(out, "{:<13} {shown}", key.replace('_', " "))?;
    }
    Ok(())
}
