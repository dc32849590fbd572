//! Takes a layer's source apart.

use super::out::BlobOut;
use super::sink::Sink;
use super::{LayerError, Options, stream, walk};
use crate::blob::spool::Spool;
use crate::blob::{Contents, clusters, order};
use crate::entry::Warning;
use crate::progress::Progress;
use crate::source::{LayerOrigin, SourceLayer};
use crate::tree::build::Open;
use crate::tree::{InodeId, Tree};
use crate::unpack::Compression;
use fs3_client::{Digest, Hasher, Staged, Store};
use std::collections::HashSet;
use std::io::{self, Write as _};

/// A layer in parts: all of it but the metadata image.
#[derive(Debug)]
pub struct ReadLayer {
    /// Its inodes and names.
    pub tree: Tree,
    /// What it leaves to the layers below.
    pub open: Open,
    /// What its data blob holds.
    pub contents: Contents,
    /// The contents of its small files.
    pub spool: Spool,
    /// The data blob, not published yet; `None` when no file needs one.
    pub data: Option<DataBlob>,
    /// Digest and length of the stored bytes that were read; `None` for a directory.
    pub source: Option<(Digest, u64)>,
    /// How those were compressed.
    pub compression: Option<Compression>,
    /// Digest of the plain tar; `None` for a directory.
    pub diff_id: Option<Digest>,
    /// Oddities, in the order of the source.
    pub warnings: Vec<Warning>,
}

/// A complete data blob under a temporary name.
#[derive(Debug)]
pub struct DataBlob {
    /// The file.
    pub staged: Staged,
    /// Of its bytes.
    pub digest: Digest,
    /// Length in bytes.
    pub size: u64,
}

/// Reads `layer` to its end, checks its digests, and writes its data blob under a temporary name.
///
/// # Errors
/// When the source is not what it says, cannot be a file system, or reading or writing fails. Nothing is left then.
pub fn read(
    layer: &SourceLayer,
    index: usize,
    options: &Options,
    store: &Store,
    progress: &dyn Progress,
) -> Result<ReadLayer, LayerError> {
    let spool = Spool::new(&store.scratch()).map_err(LayerError::Scratch)?;
    let whiteouts = !matches!(layer.origin, LayerOrigin::Dir(_));
    let mut sink = Sink::new(options, whiteouts, spool);
    let mut out = BlobOut::new(store);
    let mut warnings = Vec::new();
    let (source, compression) = match &layer.origin {
        LayerOrigin::Dir(path) => {
            walk::walk(path, &mut sink, &mut out, &mut |bytes| progress.layer_read(index, bytes), &mut warnings)?;
            (None, None)
        }
        LayerOrigin::Stdin | LayerOrigin::Range { .. } | LayerOrigin::Remote(_) => {
            let read = |bytes| {
                progress.layer_read(index, bytes);
                if progress.is_cancelled() { Err(io::ErrorKind::ConnectionAborted.into()) } else { Ok(()) }
            };
            let (source, compression) = stream::stream(layer, options, &mut sink, &mut out, &read, &mut warnings)?;
            (Some(source), Some(compression))
        }
    };
    warnings.append(&mut sink.take_warnings());
    let Sink { builder, blob, spool, .. } = sink;
    let (mut contents, segments) = blob.finish()?;
    out.finish(&segments)?;
    let (mut tree, open) = builder.finish();
    let stored_plain = clusters::settle(&mut tree, &mut contents);
    let mut layer_read =
        ReadLayer { tree, open, contents, spool, data: None, source, compression, diff_id: None, warnings };
    let [_, plain, blob] = out.hash.finish();
    if source.is_some() {
        if let Some(expected) = layer.diff_id.filter(|expected| *expected != plain) {
            return Err(LayerError::DiffId { expected, found: plain });
        }
        layer_read.diff_id = Some(plain);
    }
    if let Some(staged) = out.staged {
        layer_read.settle_order(staged, blob, &stored_plain, store)?;
    }
    Ok(layer_read)
}

impl ReadLayer {
    /// Puts the blob's chunks in tree order after the tree was changed.
    pub(crate) fn order_again(&mut self, store: &Store) -> Result<(), LayerError> {
        match self.data.take() {
            Some(blob) => self.settle_order(blob.staged, blob.digest, &HashSet::new(), store),
            None => Ok(()),
        }
    }

    /// Keeps the blob when its chunks are in tree order, and no file is to be plain after all; else writes one where
    /// they are.
    fn settle_order(
        &mut self,
        staged: Staged,
        digest: Digest,
        plain: &HashSet<InodeId>,
        store: &Store,
    ) -> Result<(), LayerError> {
        let order = self.tree.order();
        if plain.is_empty() && order::is_canonical(&self.tree, &order, &self.contents) {
            let size = u64::from(self.contents.blocks) * u64::from(crate::erofs::format::BLOCK_SIZE);
            self.data = Some(DataBlob { staged, digest, size });
            return Ok(());
        }
        tracing::debug!("entries are not in tree order: rewriting the data blob");
        let ordered = store.stage("data")?;
        let mut hasher = Hasher::default();
        let contents = std::mem::take(&mut self.contents);
        self.contents = order::rewrite(&mut self.tree, &order, contents, plain, &*staged, |segment| {
            hasher.update(segment);
            (&*ordered).write_all(segment)
        })?;
        let size = hasher.len();
        if size > 0 {
            self.data = Some(DataBlob { staged: ordered, digest: hasher.finish(), size });
        }
        Ok(())
    }
}
