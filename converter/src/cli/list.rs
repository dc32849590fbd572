//! `dsec-convert list`.

use super::output::{self, print};
use super::{STORE_HELP, load_manifest, open_store, store_parser};
use fs3_client::StoreLocation;
use oci_spec::image::Descriptor;

/// Arguments of `list`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The store.
    #[arg(help = STORE_HELP, value_parser = store_parser())]
    store: StoreLocation,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// One image of the store.
#[derive(serde::Serialize)]
struct Row {
    name: String,
    tag: String,
    digest: String,
    layers: usize,
    metadata_bytes: u64,
    data_bytes: u64,
    chunk_table_bytes: u64,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let store = open_store(&args.store)?;
    let mut rows = Vec::new();
    let mut broken = None;
    for (name, descriptor) in store.list_refs()? {
        match load_manifest(&store, &descriptor) {
            Ok(found) => {
                let layers = &found.manifest.layers;
                rows.push(Row {
                    name: name.name().to_owned(),
                    tag: name.tag().to_owned(),
                    digest: found.digest.to_string(),
                    layers: layers.len(),
                    metadata_bytes: layers.iter().map(|l| l.metadata.size()).sum(),
                    data_bytes: layers.iter().flat_map(|l| &l.data).map(Descriptor::size).sum(),
                    chunk_table_bytes: layers.iter().flat_map(|l| &l.chunk_tables).map(Descriptor::size).sum(),
                });
            }
            // One bad image does not hide the others.
            Err(e) => {
                let e = e.context(name.to_string());
                if let Some(first) = broken.replace(e) {
                    eprintln!("dsec-convert: {first:#}");
                }
            }
        }
    }
    print(|out| {
        if args.json {
            return output::json(out, &serde_json::json!({ "images": rows }));
        }
        let cells = |row: &Row| {
            vec![
                format!("{}:{}", row.name, row.tag),
                row.layers.to_string(),
                output::size(row.metadata_bytes),
                output::size(row.data_bytes),
                row.digest.clone(),
            ]
        };
        let rows: Vec<Vec<String>> = rows.iter().map(cells).collect();
        output::table(out, &["IMAGE", ">LAYERS", ">METADATA", ">DATA", "DIGEST"], &rows)
    })?;
    broken.map_or(Ok(()), Err)
}
