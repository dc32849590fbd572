//! Merging in tests.

use crate::support::{Place, judge};
use converter::convert::Converted;
use converter::layer::Record;
use converter::manifest::Layer;
use converter::merge::{MergeError, Options, merge_layers};
use fixtures::mounts::{self, Mounted};
use fs3_client::Store;
use std::ops::Range;
use std::path::Path;

/// Nothing but whiteouts is left out.
pub(crate) const BOTTOM: Options = Options { bottom: true, pack: false };
/// One blob.
pub(crate) const PACK: Options = Options { bottom: false, pack: true };

/// The layers of a conversion as a manifest has them.
pub(crate) fn layers(converted: &Converted) -> Vec<Layer> {
    converted.layers.iter().map(|layer| layer.record.to_layer()).collect()
}

/// Merges, and judges the result by our checker and by fsck.erofs.
pub(crate) fn try_merge(store: &Store, layers: &[Layer], options: Options) -> Result<Record, MergeError> {
    let (record, _) = merge_layers(layers, 0, options, store)?;
    judge(store, &record);
    Ok(record)
}

#[track_caller]
pub(crate) fn merge(store: &Store, layers: &[Layer], options: Options) -> Record {
    try_merge(store, layers, options).unwrap_or_else(|e| panic!("{e}"))
}

/// What makes a merged layer what it is.
pub(crate) fn identity(record: &Record) -> impl PartialEq + std::fmt::Debug {
    (record.metadata, record.data.clone(), record.chunk_tables.clone(), record.to_layer())
}

/// Every way to merge a stack step by step gives the same bytes.
#[track_caller]
pub(crate) fn assert_associative(store: &Store, layers: &[Layer], options: Options) -> Record {
    let flat = merge(store, layers, options);
    for cut in 1..layers.len() {
        let (low, high) = layers.split_at(cut);
        let inner = Options { bottom: false, ..options };
        let high = if high.len() > 1 { merge(store, high, inner).to_layer() } else { high[0].clone() };
        let low = if low.len() > 1 { merge(store, low, options).to_layer() } else { low[0].clone() };
        let joined = merge(store, &[low, high], options);
        assert_eq!(identity(&joined), identity(&flat), "cut at {cut}");
    }
    flat
}

impl Place {
    /// Mounts these layers under one overlay; what is returned must live as long as that is looked at.
    pub(crate) fn mount_records(&self, records: &[&Record], more: &[&Path]) -> (Mounted, Vec<Mounted>) {
        let layers: Vec<Mounted> = records.iter().map(|record| self.mount(record)).collect();
        let lowers: Vec<&Path> = more.iter().copied().chain(layers.iter().map(Mounted::path)).collect();
        (mounts::overlay(&lowers, None).unwrap(), layers)
    }
}

/// All runs of at least two of `count` layers.
pub(crate) fn all_runs(count: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count).flat_map(move |start| (start + 2..=count).map(move |end| start..end))
}
