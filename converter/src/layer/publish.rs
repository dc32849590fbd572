//! The last step of a layer: its metadata image and chunk table are written, and all its blobs get their names.

use super::{Counts, LayerError, Options, ReadLayer};
use crate::chunk_table;
use crate::compress::Algorithm;
use crate::entry::{Warning, Xattr};
use crate::erofs::write::{Contents, Device, write_ordered};
use crate::extent::FileData;
use crate::manifest::{
    self, CHUNK_TABLE_MEDIA_TYPE, DATA_MEDIA_TYPE, METADATA_MEDIA_TYPE, OverlayXattrs, Unresolved, annotation,
};
use crate::tree::{InodeId, Kind, Tree};
use crate::unpack::Compression;
use fs3_client::{Digest, DigestError, Store, StoreError};
use oci_spec::image::Descriptor;
use serde::{Deserialize, Serialize};

/// A blob as a [`Record`] names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobRef {
    /// Its digest.
    pub digest: Digest,
    /// Its length in bytes.
    pub size: u64,
}

impl BlobRef {
    /// The blob that a manifest's descriptor names.
    ///
    /// # Errors
    /// When its digest is of another algorithm.
    pub fn of(descriptor: &Descriptor) -> Result<Self, DigestError> {
        Ok(Self { digest: manifest::digest_of(descriptor)?, size: descriptor.size() })
    }
}

/// A chunk table as a [`Record`] names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableRef {
    /// The data blob that it is about.
    pub of: Digest,
    /// The table itself.
    #[serde(flatten)]
    pub blob: BlobRef,
}

/// A data blob of a layer that exists already, with its chunk table where one is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Existing {
    /// The blob.
    pub blob: BlobRef,
    /// Its chunk table.
    pub table: Option<BlobRef>,
}

/// What a layer was converted from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Digest of the stored source bytes, where there were any.
    pub source: Option<Digest>,
    /// Digest of the plain tar, where there was one.
    pub diff_id: Option<Digest>,
}

/// Stands in a list of digests for one that there is not.
const NO_DIGEST: &str = "-";

impl Origin {
    /// What a layer of an image was converted from: several, bottom first, when it was merged.
    #[must_use]
    pub fn of(layer: &manifest::Layer) -> Vec<Self> {
        let list = |key: &str| -> Vec<Option<Digest>> {
            let annotations = layer.metadata.annotations().as_ref();
            let text = annotations.and_then(|all| all.get(key)).map_or(NO_DIGEST, String::as_str);
            text.split(',').map(|digest| digest.parse().ok()).collect()
        };
        let (sources, diff_ids) = (list(annotation::SOURCE_DIGEST), list(annotation::DIFF_ID));
        let at = |list: &[Option<Digest>], index: usize| list.get(index).copied().flatten();
        (0..sources.len().max(diff_ids.len()))
            .map(|index| Self { source: at(&sources, index), diff_id: at(&diff_ids, index) })
            .collect()
    }

    /// A list of them as annotations have it.
    fn join(parts: &[Self], digest: impl Fn(&Self) -> Option<Digest>) -> String {
        let texts = parts.iter().map(|part| digest(part).map_or_else(|| NO_DIGEST.to_owned(), |d| d.to_string()));
        texts.collect::<Vec<_>>().join(",")
    }
}

/// A finished layer: what a run reports, and what a later run needs to use it again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Digest of the stored source bytes, where there were any.
    pub source: Option<Digest>,
    /// How those were compressed.
    #[serde(default)]
    pub compression: Option<Compression>,
    /// Digest of the plain tar, where there was one.
    pub diff_id: Option<Digest>,
    /// What a merged layer's parts were converted from, bottom first; empty for others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Origin>,
    /// The metadata image.
    pub metadata: BlobRef,
    /// The data blobs in device order: the layer's own first, then those of lower layers that it links into.
    pub data: Vec<BlobRef>,
    /// The chunk tables of those, in the same order.
    pub chunk_tables: Vec<TableRef>,
    /// How the data of compressed files is compressed; empty when there are none.
    #[serde(default)]
    pub algorithms: Vec<Algorithm>,
    /// Namespace of overlayfs' attributes.
    pub overlay: OverlayXattrs,
    /// What the layer holds.
    pub counts: Counts,
    /// What it leaves to lower layers.
    #[serde(default)]
    pub unresolved: Unresolved,
    /// Oddities.
    #[serde(default)]
    pub warnings: Vec<Warning>,
}

/// Writes and publishes what is left of `layer`. `lower` names the blobs of lower layers that its files refer to, as
/// devices after its own.
///
/// # Errors
/// When writing fails. Blobs that were published before stay; they are whole.
pub fn publish(
    mut layer: ReadLayer,
    lower: &[Existing],
    unresolved: Unresolved,
    options: &Options,
    store: &Store,
) -> Result<Record, LayerError> {
    layer.tree.mark_for_overlay(options.overlay);
    let mut data = Vec::new();
    let mut chunk_tables = Vec::new();
    let own_bytes = layer.data.as_ref().map_or(0, |blob| blob.size);
    if let Some(blob) = layer.data.take() {
        let own = BlobRef { digest: blob.digest, size: blob.size };
        let table = chunk_table::to_bytes(&own.digest, layer.contents.blocks, &layer.contents.stored)?;
        // The blob before what refers to it, so that a crash between them leaves nothing dangling.
        blob.staged.publish(&own.digest, own.size)?;
        let table = store.publish_bytes(&table)?;
        let blob = BlobRef { digest: table.digest, size: table.size };
        chunk_tables.push(TableRef { of: own.digest, blob });
        data.push(own);
    }
    data.extend(lower.iter().map(|existing| existing.blob));
    chunk_tables.extend(lower.iter().filter_map(|e| Some(TableRef { of: e.blob.digest, blob: e.table? })));
    let block = u64::from(crate::erofs::format::BLOCK_SIZE);
    let devices: Vec<Device> = data
        .iter()
        .map(|blob| Device {
            digest: blob.digest,
            // Blobs are whole blocks and at most 2^32 of them.
            blocks: u32::try_from(blob.size / block).unwrap_or(u32::MAX),
        })
        .collect();
    let staged = store.stage("metadata")?;
    let order = layer.tree.order();
    let contents = Contents::Spool(&layer.spool);
    let written = write_ordered(&layer.tree, &order, &layer.contents.runs, contents, &devices, &staged)?;
    staged.publish(&written.digest, written.size)?;
    let mut counts = count(&layer.tree, &order, options.overlay);
    counts.inodes = written.inodes;
    counts.own_bytes = own_bytes;
    counts.deduplicated_bytes = layer.contents.deduplicated;
    for record in &layer.contents.stored {
        if let Some(input) = record.input.filter(|input| input.algorithm.is_some()) {
            counts.compressed_plain_bytes += u64::from(input.len);
            counts.compressed_stored_bytes += u64::from(record.blocks) * block;
        }
    }
    counts.referred_bytes = layer.referred.bytes;
    counts.referred_chunks = layer.referred.chunks;
    counts.referred_blobs = layer.foreign.len() as u64;
    counts.lookups = layer.referred.lookups;
    Ok(Record {
        source: layer.source.map(|(digest, _)| digest),
        compression: layer.compression,
        diff_id: layer.diff_id,
        parts: Vec::new(),
        metadata: BlobRef { digest: written.digest, size: written.size },
        data,
        chunk_tables,
        algorithms: written.compressed.iter().collect(),
        overlay: options.overlay,
        counts,
        unresolved,
        warnings: layer.warnings,
    })
}

/// Counts what a tree holds, in the order that [`Tree::order`] gave.
pub(crate) fn count(tree: &Tree, order: &[(InodeId, u32)], overlay: OverlayXattrs) -> Counts {
    let mut counts = Counts::default();
    let prefix = format!("{}overlay.", overlay.prefix());
    let escaped = |set: &[Xattr]| set.iter().any(|xattr| xattr.name.starts_with(prefix.as_bytes()));
    let escaped: Vec<bool> = tree.xattrs().all().map(escaped).collect();
    for (id, links) in order {
        counts.escaped += u64::from(escaped[tree.inode(*id).xattrs.index()]);
        match &tree.inode(*id).kind {
            Kind::Regular(data) => {
                counts.files += 1;
                counts.file_bytes += data.size();
                match data {
                    FileData::Inline { len, .. } => {
                        counts.inline_files += 1;
                        counts.inline_bytes += u64::from(*len);
                    }
                    FileData::Compressed(_) => counts.compressed_files += 1,
                    FileData::Empty | FileData::Chunked(_) => {}
                }
            }
            Kind::Directory(directory) => {
                counts.directories += 1;
                counts.opaques += u64::from(directory.opaque);
            }
            Kind::Symlink(_) => counts.symlinks += 1,
            _ if tree.whiteout() == Some(*id) => counts.whiteouts += u64::from(*links),
            _ => {}
        }
    }
    counts
}

impl Record {
    /// The layer as an image's manifest lists it.
    #[must_use]
    pub fn to_layer(&self) -> manifest::Layer {
        let algorithms: Vec<&str> = self.algorithms.iter().map(|algorithm| algorithm.name()).collect();
        let compression = if algorithms.is_empty() { "none".to_owned() } else { algorithms.join(",") };
        let mut source = vec![
            (annotation::BLOCK_SIZE, crate::erofs::format::BLOCK_SIZE.to_string()),
            (annotation::COMPRESSION, compression),
        ];
        if self.parts.is_empty() {
            source.extend(self.source.map(|digest| (annotation::SOURCE_DIGEST, digest.to_string())));
            source.extend(self.diff_id.map(|digest| (annotation::DIFF_ID, digest.to_string())));
        } else {
            source.push((annotation::SOURCE_DIGEST, Origin::join(&self.parts, |part| part.source)));
            source.push((annotation::DIFF_ID, Origin::join(&self.parts, |part| part.diff_id)));
        }
        if self.unresolved != Unresolved::default() {
            let json = serde_json::to_string(&self.unresolved).expect("strings always serialise");
            source.push((annotation::UNRESOLVED, json));
        }
        let describe = |media, blob: &BlobRef, extra: &[(&str, String)]| {
            manifest::descriptor(media, blob.digest, blob.size, extra)
        };
        manifest::Layer {
            metadata: describe(METADATA_MEDIA_TYPE, &self.metadata, &source),
            data: self.data.iter().map(|blob| describe(DATA_MEDIA_TYPE, blob, &[])).collect(),
            chunk_tables: self
                .chunk_tables
                .iter()
                .map(|t| describe(CHUNK_TABLE_MEDIA_TYPE, &t.blob, &[(annotation::CHUNK_TABLE_OF, t.of.to_string())]))
                .collect(),
            whiteouts: self.counts.whiteouts + self.counts.opaques + self.counts.escaped > 0,
            overlay_xattrs: self.overlay,
        }
    }

    /// Its data blobs, each with its chunk table.
    pub fn existing(&self) -> impl Iterator<Item = Existing> {
        self.data.iter().map(|blob| {
            let table = self.chunk_tables.iter().find(|table| table.of == blob.digest).map(|table| table.blob);
            Existing { blob: *blob, table }
        })
    }

    /// Whether all blobs are in `store`, with the lengths they had.
    #[must_use]
    pub fn is_in(&self, store: &Store) -> bool {
        let here = |blob: &BlobRef| store.blob_size(&blob.digest).is_ok_and(|size| size == Some(blob.size));
        self.blobs().all(here)
    }

    /// Makes the ages of all blobs start anew: they are relied upon from now.
    ///
    /// # Errors
    /// When the store cannot be asked.
    pub fn renew(&self, store: &Store) -> Result<(), StoreError> {
        for blob in self.blobs() {
            store.renew(&blob.digest)?;
        }
        Ok(())
    }

    /// All blobs that it needs.
    pub fn blobs(&self) -> impl Iterator<Item = &BlobRef> {
        std::iter::once(&self.metadata).chain(&self.data).chain(self.chunk_tables.iter().map(|table| &table.blob))
    }

    /// What an earlier run remembered under `key`, renewed, if all of it is still there.
    pub(crate) fn recall(store: &Store, key: &str) -> Result<Option<Self>, StoreError> {
        let found = Self::remembered(store, key)?;
        if let Some(record) = &found {
            record.renew(store)?;
        }
        Ok(found)
    }

    /// [`Record::recall`] for those who only want to know.
    pub(crate) fn remembered(store: &Store, key: &str) -> Result<Option<Self>, StoreError> {
        let bytes = match store.record(key) {
            Ok(Some(bytes)) => bytes,
            Ok(None) => return Ok(None),
            // It is only a note: what cannot be one is none.
            Err(e @ (StoreError::TooLarge { .. } | StoreError::Io { .. })) => {
                tracing::warn!("record {key} cannot be read, its layer is made again: {e}");
                return Ok(None);
            }
            Err(e) => return Err(e),
        };
        match serde_json::from_slice::<Self>(&bytes) {
            Ok(record) => Ok(record.is_in(store).then_some(record)),
            Err(e) => {
                tracing::warn!("record {key} cannot be read, its layer is made again: {e}");
                Ok(None)
            }
        }
    }

    /// Lets later runs [`Record::recall`] it.
    pub(crate) fn remember(&self, store: &Store, key: &str) -> Result<(), StoreError> {
        let json = serde_json::to_vec(self).expect("a record always serialises");
        store.write_record(key, &json)
    }
}
