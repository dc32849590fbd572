//! Several layers as one.
//!
//! [`plan()`] says what the merged layer is, from the layers' metadata images alone; this module opens these, checks
//! their digests, writes the merged image and publishes it. Data blobs are linked: the merged image has as many devices
//! as its files need blobs, and copies nothing of them, so that the cost follows the number of inodes and the bytes of
//! small files, not those of the data. On request the chunks in use are packed into one new blob.

mod image;
mod links;
mod pack;
mod plan;
mod runs;
mod source;

pub use image::{ImageRequest, MergedImage, Part, merge_images};
pub(crate) use image::{merge_stack, publish as publish_stack};
pub use plan::{Fault, How, Layer, Merged, PlanError, plan};
pub use runs::{BadSize, Under, Weight, runs};

use crate::chunk_table::ChunkTableError;
use crate::convert::FORMAT_VERSION;
use crate::erofs::format::BLOCK_SIZE;
use crate::erofs::read::{Image, ReadError};
use crate::erofs::write::{Contents, Device, WriteError, write_ordered};
use crate::hash::Hashers;
use crate::layer::{BlobRef, Origin, Record, TableRef, count};
use crate::manifest::{self, ManifestError, OverlayXattrs, Unresolved};
use crate::read_at::ReadAt;
use fs3_client::{Digest, Store, StoreError};
use std::collections::HashMap;
use std::fs::File;
use std::io;

/// Bytes of all images that are kept in memory while they are merged.
const CACHE: usize = 16 << 20;
/// Bytes of a page of that cache.
const PAGE: usize = 16 << 10;
/// Bytes of an image that are hashed at once.
const HASH_PIECE: usize = 256 << 10;

/// How layers are merged into one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Options {
    /// Nothing will ever be below: leave out whiteouts and opaque directories.
    pub bottom: bool,
    /// Copy the chunks in use into one data blob.
    pub pack: bool,
}

/// Why layers were not merged.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    /// A layer's image is at fault.
    #[error("layer {layer} ({digest}): {error}")]
    Layer {
        /// Its position in the whole stack.
        layer: usize,
        /// Its metadata image.
        digest: Digest,
        /// What is wrong, and where.
        error: Box<PlanError>,
    },
    /// A layer's image cannot be opened.
    #[error("layer {layer} ({digest}): {error}")]
    Open {
        /// Its position in the whole stack.
        layer: usize,
        /// Its metadata image.
        digest: Digest,
        /// What is wrong.
        error: Box<ReadError>,
    },
    /// A blob is not what its name says, or not what its chunk table says.
    #[error("layer {layer}: blob {digest} is corrupt: {what}")]
    Corrupt {
        /// Position of the layer in the whole stack.
        layer: usize,
        /// The blob.
        digest: Digest,
        /// How that shows.
        what: String,
    },
    /// A chunk table cannot be read.
    #[error("layer {layer}: chunk table {digest}: {error}")]
    Table {
        /// Position of the layer in the whole stack.
        layer: usize,
        /// The table.
        digest: Digest,
        /// What is wrong.
        error: ChunkTableError,
    },
    /// Layers of two kinds.
    #[error("layer {layer} marks whiteouts with `{found}*`, those below it with `{expected}*`: they cannot be merged")]
    Namespaces {
        /// Position of the layer in the whole stack.
        layer: usize,
        /// Its prefix.
        found: &'static str,
        /// That of the layers below.
        expected: &'static str,
    },
    /// A manifest cannot be read.
    #[error("{name}: {error}")]
    Manifest {
        /// The image.
        name: String,
        /// What is wrong.
        error: ManifestError,
    },
    /// A config cannot be read.
    #[error("{name}: its config {digest}: {what}")]
    Config {
        /// The image.
        name: String,
        /// The config.
        digest: String,
        /// What is wrong.
        what: String,
    },
    /// Packing found chunks that no blob of ours has.
    #[error("the layers have chunks of more than 1 MiB, which are not packed")]
    LongChunks,
    /// Packing found a compressed layer that nothing says where to cut.
    #[error("blob {digest} has no chunk table, and compressed layers are packed by that: leave `--pack` out")]
    NoTable {
        /// The blob.
        digest: Digest,
    },
    /// The packed blob would be too large.
    #[error(transparent)]
    TooLarge(#[from] crate::blob::BlobTooLarge),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The merged image cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The packed blob's chunk table cannot be written.
    #[error(transparent)]
    NewTable(#[from] ChunkTableError),
    /// A scratch file failed.
    #[error("cannot write to the store's scratch space: {0}")]
    Scratch(#[source] io::Error),
}

impl MergeError {
    /// Whether bytes of the store are not what they should be.
    #[must_use]
    pub fn is_corrupt(&self) -> bool {
        match self {
            Self::Layer { error, .. } => error.fault.is_corruption(),
            Self::Open { error, .. } => error.is_corruption(),
            Self::Corrupt { .. } => true,
            Self::Table { error, .. } => !matches!(error, ChunkTableError::Io(_)),
            Self::Manifest { error, .. } => matches!(error, ManifestError::Layer { .. }),
            Self::Store(e) => e.is_corrupt(),
            _ => false,
        }
    }
}

/// A blob of several layers, with its chunk table where one is known.
#[derive(Debug, Clone)]
struct Blob {
    blob: BlobRef,
    table: Option<BlobRef>,
    /// A layer that has it.
    layer: usize,
}

/// The layers of one run, their blobs numbered.
struct Run {
    metadata: Vec<BlobRef>,
    unresolved: Vec<Unresolved>,
    origins: Vec<Origin>,
    overlay: OverlayXattrs,
    blobs: Vec<Blob>,
    /// By layer and device: position in `blobs`.
    devices: Vec<Vec<u32>>,
    /// Position in the whole stack of the first layer.
    first: usize,
}

/// Merges `layers`, which lie on one another from the bottom, into one, and publishes it; `first` is the position of the
/// lowest in its stack, for messages. Returns its record, and whether an earlier run had made it.
///
/// # Errors
/// When a layer is broken, is of another kind than the others, or cannot be read, or the result cannot be written.
/// Nothing names what was published before then.
pub fn merge_layers(
    layers: &[manifest::Layer],
    first: usize,
    options: Options,
    store: &Store,
) -> Result<(Record, bool), MergeError> {
    let run = Run::of(layers, first)?;
    let key = run.key(options);
    if let Some(mut record) = Record::recall(store, &key)? {
        // The same images may come from other sources.
        record.parts.clone_from(&run.origins);
        return Ok((record, true));
    }
    let record = run.merge(options, store)?;
    record.remember(store, &key)?;
    Ok((record, false))
}

impl Run {
    fn of(layers: &[manifest::Layer], first: usize) -> Result<Self, MergeError> {
        let overlay = layers.first().map_or_else(OverlayXattrs::default, |layer| layer.overlay_xattrs);
        let mut run = Self {
            metadata: Vec::new(),
            unresolved: Vec::new(),
            origins: Vec::new(),
            overlay,
            blobs: Vec::new(),
            devices: Vec::new(),
            first,
        };
        let mut numbers: HashMap<Digest, u32> = HashMap::new();
        for (number, layer) in layers.iter().enumerate() {
            if layer.overlay_xattrs != overlay {
                let (found, expected) = (layer.overlay_xattrs.prefix(), overlay.prefix());
                return Err(MergeError::Namespaces { layer: first + number, found, expected });
            }
            run.add(layer, &mut numbers).map_err(|error| {
                let name = format!("layer {}", first + number);
                MergeError::Manifest { name, error }
            })?;
        }
        Ok(run)
    }

    fn add(&mut self, layer: &manifest::Layer, numbers: &mut HashMap<Digest, u32>) -> Result<(), ManifestError> {
        let position = self.first + self.metadata.len();
        self.metadata.push(BlobRef::of(&layer.metadata)?);
        self.unresolved.push(layer.unresolved()?);
        self.origins.extend(Origin::of(layer));
        let mut tables: HashMap<Digest, BlobRef> = HashMap::new();
        for table in layer.tables()? {
            tables.insert(table.of, table.blob);
        }
        let mut devices = Vec::with_capacity(layer.data.len());
        for data in &layer.data {
            let blob = BlobRef::of(data)?;
            let table = tables.get(&blob.digest).copied();
            let number = *numbers.entry(blob.digest).or_insert_with(|| {
                self.blobs.push(Blob { blob, table: None, layer: position });
                u32::try_from(self.blobs.len() - 1).unwrap_or(u32::MAX)
            });
            let known = &mut self.blobs[number as usize];
            known.table = known.table.or(table);
            devices.push(number);
        }
        self.devices.push(devices);
        Ok(())
    }

    /// What decides the merged layer's bytes.
    fn key(&self, options: Options) -> String {
        let parts: Vec<_> = self
            .metadata
            .iter()
            .zip(&self.unresolved)
            .zip(&self.devices)
            .map(|((metadata, unresolved), devices)| {
                let blobs: Vec<Digest> = devices.iter().map(|n| self.blobs[*n as usize].blob.digest).collect();
                serde_json::json!({ "metadata": metadata.digest, "data": blobs, "unresolved": unresolved })
            })
            .collect();
        let text = serde_json::json!({
            "version": FORMAT_VERSION,
            "merge": parts,
            "overlay": self.overlay,
            "bottom": options.bottom,
            "pack": options.pack,
        });
        Digest::of(text.to_string().as_bytes()).hex()
    }

    fn merge(&self, options: Options, store: &Store) -> Result<Record, MergeError> {
        let open = |blob: &BlobRef| store.open_blob(&blob.digest, blob.size);
        let files: Vec<File> = self.metadata.iter().map(open).collect::<Result<_, _>>()?;
        // The images are hashed while they are merged; nothing is published before both are done.
        std::thread::scope(|scope| {
            let digests = scope.spawn(|| self.check_digests(&files));
            self.write(&files, options, store, || {
                digests.join().unwrap_or_else(|_| Err(MergeError::Scratch(io::Error::other("hashing panicked"))))
            })
        })
    }

    /// Compares the images with their digests, two at a time: a second stream of SHA-256 is nearly free.
    fn check_digests(&self, files: &[File]) -> Result<(), MergeError> {
        let mut by_size: Vec<usize> = (0..files.len()).collect();
        by_size.sort_unstable_by_key(|n| self.metadata[*n].size);
        let mut buffers = [vec![0; HASH_PIECE], vec![0; HASH_PIECE]];
        for two in by_size.chunks(2) {
            let (first, second) = (two[0], two.get(1).copied());
            let mut hashers = Hashers::<2>::default();
            loop {
                let at = hashers.lens();
                let [a, b] = &mut buffers;
                let a = self.read_piece(files, Some(first), at[0], a)?;
                let b = self.read_piece(files, second, at[1], b)?;
                if a.is_empty() && b.is_empty() {
                    break;
                }
                hashers.update([&[a], &[b]]);
            }
            for (number, found) in two.iter().zip(hashers.finish()) {
                if found != self.metadata[*number].digest {
                    return Err(self.corrupt(*number, format!("its contents have {found}")));
                }
            }
        }
        Ok(())
    }

    fn read_piece<'b>(
        &self,
        files: &[File],
        number: Option<usize>,
        at: u64,
        buffer: &'b mut [u8],
    ) -> Result<&'b [u8], MergeError> {
        let Some(number) = number else { return Ok(&[]) };
        let left = self.metadata[number].size - at;
        let want = usize::try_from(left).map_or(buffer.len(), |left| left.min(buffer.len()));
        let read = files[number].read_exact_at(&mut buffer[..want], at);
        read.map_err(|e| self.corrupt(number, format!("cannot read {want} bytes at offset {at}: {e}")))?;
        Ok(&buffer[..want])
    }

    fn corrupt(&self, number: usize, what: String) -> MergeError {
        MergeError::Corrupt { layer: self.first + number, digest: self.metadata[number].digest, what }
    }

    fn write(
        &self,
        files: &[File],
        options: Options,
        store: &Store,
        checked: impl FnOnce() -> Result<(), MergeError>,
    ) -> Result<Record, MergeError> {
        let pages = (CACHE / PAGE / files.len().max(1)).clamp(8, 128);
        let mut images = Vec::with_capacity(files.len());
        for ((file, blob), layer) in files.iter().zip(&self.metadata).zip(self.first..) {
            let image = Image::open_with_cache(file, pages);
            let image =
                image.map_err(|error| MergeError::Open { layer, digest: blob.digest, error: Box::new(error) })?;
            self.check_devices(images.len(), &image)?;
            images.push(image);
        }
        let layers: Vec<Layer<'_, &File>> = images
            .iter()
            .zip(&self.devices)
            .zip(&self.unresolved)
            .map(|((image, devices), unresolved)| Layer { image, devices, unresolved })
            .collect();
        let merged = plan(&layers, How { overlay: self.overlay, bottom: options.bottom });
        let mut merged = match merged {
            Ok(merged) => merged,
            Err(error) => {
                // Where the blob is corrupt, that is what to say.
                checked()?;
                let (layer, digest) = (self.first + error.layer, self.metadata[error.layer].digest);
                return Err(MergeError::Layer { layer, digest, error: Box::new(error) });
            }
        };
        checked()?;
        let order = merged.tree.order();
        let used: Vec<&Blob> = merged.devices.iter().map(|n| &self.blobs[*n as usize]).collect();
        let mut counts = count(&merged.tree, &order, self.overlay);
        let (data, chunk_tables) = if options.pack && !used.is_empty() {
            let packed = pack::pack(&mut merged, &order, &used, store)?;
            counts.deduplicated_bytes = packed.deduplicated;
            (vec![packed.blob], vec![TableRef { of: packed.blob.digest, blob: packed.table }])
        } else {
            for blob in &used {
                // Opening tells what is wrong with it; where nothing is, a blob that is far away stays there.
                if store.blob_size(&blob.blob.digest)? != Some(blob.blob.size) {
                    drop(open_data(store, blob)?);
                }
                store.renew(&blob.blob.digest)?;
            }
            for (blob, table) in used.iter().filter_map(|blob| Some((blob, blob.table?))) {
                if store.blob_size(&table.digest)? != Some(table.size) {
                    let what = format!("its chunk table {} is not in the store, or not in its length", table.digest);
                    return Err(MergeError::Corrupt { layer: blob.layer, digest: blob.blob.digest, what });
                }
                store.renew(&table.digest)?;
            }
            let table = |b: &&Blob| Some(TableRef { of: b.blob.digest, blob: b.table? });
            (used.iter().map(|b| b.blob).collect(), used.iter().filter_map(table).collect())
        };
        let devices: Vec<Device> = data
            .iter()
            .map(|blob: &BlobRef| Device {
                digest: blob.digest,
                // Blobs are whole blocks and at most 2^32 of them.
                blocks: u32::try_from(blob.size / u64::from(BLOCK_SIZE)).unwrap_or(u32::MAX),
            })
            .collect();
        let contents: Vec<RawImage<'_>> = images.iter().map(RawImage).collect();
        let contents: Vec<&dyn ReadAt> = contents.iter().map(|image| image as &dyn ReadAt).collect();
        let staged = store.stage("metadata")?;
        let contents = Contents::Images(&contents);
        let written = write_ordered(&merged.tree, &order, &merged.runs, contents, &devices, &staged)?;
        staged.publish(&written.digest, written.size)?;
        counts.inodes = written.inodes;
        Ok(Record {
            source: None,
            compression: None,
            diff_id: None,
            parts: self.origins.clone(),
            metadata: BlobRef { digest: written.digest, size: written.size },
            data,
            chunk_tables,
            algorithms: written.compressed.iter().collect(),
            overlay: self.overlay,
            counts,
            unresolved: merged.unresolved,
            warnings: Vec::new(),
        })
    }

    /// The manifest's data blobs must be the devices that the image means.
    fn check_devices(&self, layer: usize, image: &Image<&File>) -> Result<(), MergeError> {
        for ((slot, number), id) in image.devices().iter().zip(&self.devices[layer]).zip(1u32..) {
            let blob = &self.blobs[*number as usize].blob;
            let named = slot.tag.is_empty() || slot.tag == blob.digest.hex().as_bytes();
            let what = if !named {
                format!(
                    "device {id} is tagged `{}`, the manifest has {}",
                    crate::entry::printable(&slot.tag),
                    blob.digest
                )
            } else if slot.blocks > blob.size / u64::from(BLOCK_SIZE) {
                format!("device {id} has {} blocks, its blob {} bytes", slot.blocks, blob.size)
            } else {
                continue;
            };
            return Err(self.corrupt(layer, what));
        }
        Ok(())
    }
}

fn open_data(store: &Store, blob: &Blob) -> Result<File, StoreError> {
    store.open_blob(&blob.blob.digest, blob.blob.size)
}

/// An image's bytes, through its cache.
struct RawImage<'i>(&'i Image<&'i File>);

impl ReadAt for RawImage<'_> {
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.0.read_raw(buf, offset).map_err(|e| match e {
            ReadError::Io { source, .. } => source,
            other => io::Error::other(other.to_string()),
        })
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.0.size())
    }
}
