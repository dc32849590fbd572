//! Takes a layer's source apart.

use super::out::BlobOut;
use super::sink::Sink;
use super::{Existing, LayerError, Options, stream, walk};
use crate::blob::foreign::{self, Copied, Find, Limits, Referred};
use crate::blob::spool::Spool;
use crate::blob::{Contents, clusters, order};
use crate::dictionary::Session;
use crate::entry::Warning;
use crate::erofs::format::BLOCK_SIZE;
use crate::progress::Progress;
use crate::read_at::ReadAt;
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
    /// Blobs of other layers that its files refer to because of equal chunks, as devices behind its own, once
    /// `ReadLayer::arrange` has chosen them.
    pub foreign: Vec<Existing>,
    /// What it refers to in those.
    pub referred: Referred,
    /// Digest and length of the stored bytes that were read; `None` for a directory.
    pub source: Option<(Digest, u64)>,
    /// How those were compressed.
    pub compression: Option<Compression>,
    /// Digest of the plain tar; `None` for a directory.
    pub diff_id: Option<Digest>,
    /// Oddities, in the order of the source.
    pub warnings: Vec<Warning>,
    /// Compressed files that [`ReadLayer::arrange`] stores plain after all.
    pub(super) plain: HashSet<InodeId>,
    /// Whether [`ReadLayer::arrange`] was called.
    pub(super) arranged: bool,
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

/// Reads `layer` to its end, checks its digests, and writes its data blob under a temporary name, without the chunks
/// that `dedup` finds elsewhere. Its chunks are in the order of the source: see `ReadLayer::arrange`.
///
/// # Errors
/// When the source is not what it says, cannot be a file system, or reading or writing fails. Nothing is left then.
pub fn read(
    layer: &SourceLayer,
    index: usize,
    options: &Options,
    store: &Store,
    dedup: Option<&Session<'_>>,
    progress: &dyn Progress,
) -> Result<ReadLayer, LayerError> {
    let spool = Spool::new(&store.scratch()).map_err(LayerError::Scratch)?;
    let whiteouts = !matches!(layer.origin, LayerOrigin::Dir(_));
    let mut sink = Sink::new(options, whiteouts, spool, dedup.map(|session| session as &dyn Find));
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
    let [_, plain, blob] = out.hash.finish();
    let mut diff_id = None;
    if source.is_some() {
        if let Some(expected) = layer.diff_id.filter(|expected| *expected != plain) {
            return Err(LayerError::DiffId { expected, found: plain });
        }
        diff_id = Some(plain);
    }
    let size = u64::from(contents.blocks) * u64::from(BLOCK_SIZE);
    let data = out.staged.map(|staged| DataBlob { staged, digest: blob, size });
    let (foreign, referred) = (Vec::new(), Referred::default());
    Ok(ReadLayer {
        tree,
        open,
        contents,
        spool,
        data,
        foreign,
        referred,
        source,
        compression,
        diff_id,
        warnings,
        plain: stored_plain,
        arranged: false,
    })
}

impl ReadLayer {
    /// Decides which blobs of other layers become devices, and puts the chunks of the layer's own blob in tree order.
    /// Once, when the tree will not change any more, but for names that are added to files of lower layers.
    ///
    /// # Errors
    /// When the blob cannot be written again, or a chunk of another blob cannot be copied into it.
    pub(crate) fn arrange(&mut self, store: &Store, dedup: Option<&Session<'_>>) -> Result<(), LayerError> {
        if std::mem::replace(&mut self.arranged, true) {
            return Ok(());
        }
        let order = self.tree.order();
        let limits = dedup.map_or_else(Limits::default, |session| session.dedup().limits);
        let settled = foreign::settle(&mut self.tree, &order, &mut self.contents, &self.plain, limits);
        (self.foreign, self.referred) = (settled.devices, settled.referred);
        let old = self.data.take();
        if !settled.own {
            // What is in the blob is in no file that stayed, or other blobs have it.
            self.contents.stored.clear();
            self.contents.blocks = 0;
            return Ok(());
        }
        if self.plain.is_empty() && order::is_canonical(&self.tree, &order, &self.contents) {
            self.data = old;
            return Ok(());
        }
        tracing::debug!("chunks are not in tree order, or come from elsewhere: rewriting the data blob");
        let ordered = store.stage("data")?;
        let mut hasher = Hasher::default();
        let contents = std::mem::take(&mut self.contents);
        let own = old.as_ref().map(|blob| -> &dyn ReadAt { &*blob.staged });
        let read = |blob: &Existing, at: u64, len: usize| {
            store.read_range(&blob.blob.digest, at..at + len as u64).map_err(|e| e.to_string())
        };
        let old = Copied::new(own, contents.blocks, &settled.copied, read);
        self.contents = order::rewrite(&mut self.tree, &order, contents, &self.plain, &old, |segment| {
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
