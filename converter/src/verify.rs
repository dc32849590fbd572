//! Whether a store still has an image, whole and unharmed.
//!
//! [`verify`] reads every blob of an image once: length and SHA-256 of all of them, the structure of each metadata image
//! ([`crate::erofs::read::check`]), each of its references into the data blobs, and the chunk tables. A deep run also hashes
//! each chunk against its table's record, and sees that the table covers every piece of every file.

use crate::chunk_table::{ChunkTable, ChunkTableError, Input, Record};
use crate::compress;
use crate::erofs::format::{BLOCK_SIZE, MAX_PLAIN_CLUSTER, MAX_STORED_CLUSTER};
use crate::erofs::read::Image;
use crate::erofs::read::check::{DeviceInfo, check_counting};
use crate::manifest::{self, Layer, annotation, digest_of};
use crate::read_at::ReadAt as _;
use fs3_client::{Digest, Hasher, Store};
use oci_spec::image::Descriptor;
use std::collections::{HashMap, HashSet};
use std::fs::File;

/// Bytes read at once.
const BUFFER: usize = 1 << 20;
/// Chunks whose problems are named; the rest are counted.
const NAMED_CHUNKS: u64 = 20;

/// What one finding is about.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Problem {
    /// Layer, 0 at the bottom; `None` for the config.
    pub layer: Option<usize>,
    /// The blob.
    pub blob: String,
    /// The entry in the layer, printable, where one is concerned.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// What is wrong, one sentence without a full stop.
    pub what: String,
}

/// What [`verify`] looked at and found.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Report {
    /// Whether chunks were checked too.
    pub deep: bool,
    /// Number of layers.
    pub layers: usize,
    /// Distinct blobs that were read.
    pub blobs: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Inodes in all layers.
    pub inodes: u64,
    /// Names in all layers.
    pub names: u64,
    /// Chunk table records in all layers.
    pub chunks: u64,
    /// What is wrong.
    pub problems: Vec<Problem>,
}

impl Report {
    /// Whether nothing is wrong.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.problems.is_empty()
    }
}

/// How far [`verify`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// All that will be read, known at the start: bytes.
    Total(u64),
    /// So many more bytes were read.
    Read(u64),
}

/// Checks every blob of `image`, and how they fit together.
pub fn verify(store: &Store, image: &manifest::Image, deep: bool, progress: &mut dyn FnMut(Progress)) -> Report {
    let report = Report { deep, layers: image.layers.len(), ..Report::default() };
    let mut verifier = Verifier {
        store,
        deep,
        progress,
        report,
        blobs: HashMap::new(),
        tables: HashMap::new(),
        plain: HashSet::new(),
        buffer: vec![0; BUFFER],
    };
    verifier.announce(image);
    verifier.blob(None, &image.config);
    for (index, layer) in image.layers.iter().enumerate() {
        verifier.layer(index, layer);
    }
    verifier.report
}

/// The blobs of an image, each with its layer.
fn descriptors(image: &manifest::Image) -> impl Iterator<Item = (Option<usize>, &Descriptor)> {
    let layers = image
        .layers
        .iter()
        .enumerate()
        .flat_map(|(index, layer)| layer.descriptors().map(move |blob| (Some(index), blob)));
    std::iter::once((None, &image.config)).chain(layers)
}

struct Verifier<'a> {
    store: &'a Store,
    deep: bool,
    progress: &'a mut dyn FnMut(Progress),
    report: Report,
    /// Blobs that were read: their length, and whether they are sound.
    blobs: HashMap<Digest, (u64, bool)>,
    /// Blobs that a chunk table is about, and the blocks it has records for (none when the table is broken).
    tables: HashMap<Digest, Option<Covered>>,
    /// Blobs of plain layers, as their chunk tables tell.
    plain: HashSet<Digest>,
    buffer: Vec<u8>,
}

impl Verifier<'_> {
    fn announce(&mut self, image: &manifest::Image) {
        let mut sizes: HashMap<String, u64> = HashMap::new();
        for (_, blob) in descriptors(image) {
            sizes.insert(blob.digest().to_string(), blob.size());
        }
        let data: HashMap<&str, u64> = image
            .layers
            .iter()
            .filter(|l| !l.chunk_tables.is_empty())
            .flat_map(|l| l.data.iter().map(|blob| (blob.digest().as_ref(), blob.size())))
            .collect();
        let data: u64 = data.values().sum();
        let total: u64 = sizes.values().sum();
        (self.progress)(Progress::Total(total + if self.deep { data } else { 0 }));
    }

    fn problem(&mut self, layer: Option<usize>, blob: &Descriptor, path: &str, what: impl Into<String>) {
        let blob = blob.digest().to_string();
        self.report.problems.push(Problem { layer, blob, path: path.to_owned(), what: what.into() });
    }

    fn open(&mut self, layer: Option<usize>, blob: &Descriptor) -> Option<(Digest, File)> {
        let opened = digest_of(blob).map_err(|e| e.to_string()).and_then(|digest| {
            self.store.open_blob(&digest, blob.size()).map(|f| (digest, f)).map_err(|e| e.to_string())
        });
        opened.map_err(|what| self.problem(layer, blob, "", what)).ok()
    }

    /// Reads a blob and compares its digest, once for each digest; `None` when it is not sound.
    fn blob(&mut self, layer: Option<usize>, blob: &Descriptor) -> Option<(Digest, File)> {
        let (digest, file) = self.open(layer, blob)?;
        if let Some((_, sound)) = self.blobs.get(&digest) {
            return sound.then_some((digest, file));
        }
        let mut hasher = Hasher::default();
        let mut at = 0;
        while at < blob.size() {
            let want = usize::try_from(blob.size() - at).map_or(BUFFER, |left| left.min(BUFFER));
            if let Err(e) = file.read_exact_at(&mut self.buffer[..want], at) {
                self.problem(layer, blob, "", format!("cannot read {want} bytes at offset {at}: {e}"));
                self.blobs.insert(digest, (blob.size(), false));
                return None;
            }
            hasher.update(&self.buffer[..want]);
            at += want as u64;
            (self.progress)(Progress::Read(want as u64));
        }
        let found = hasher.finish();
        let sound = found == digest;
        self.blobs.insert(digest, (blob.size(), sound));
        self.report.blobs += 1;
        self.report.bytes += blob.size();
        if !sound {
            self.problem(layer, blob, "", format!("the blob is corrupt: its contents have {found}"));
        }
        sound.then_some((digest, file))
    }

    fn layer(&mut self, index: usize, layer: &Layer) {
        let at = Some(index);
        let metadata = self.blob(at, &layer.metadata);
        let data: Vec<Option<(Digest, File)>> = layer.data.iter().map(|blob| self.blob(at, blob)).collect();
        let mut broken = false;
        for descriptor in &layer.chunk_tables {
            match self.blob(at, descriptor) {
                Some((_, file)) => {
                    let told = self.report.problems.len();
                    self.table(index, layer, descriptor, file, &data);
                    broken |= self.report.problems.len() > told;
                }
                None => broken = true,
            }
        }
        // In images of 0.1.0 a blob of a lower layer is described only there.
        for blob in &layer.data {
            if digest_of(blob).is_ok_and(|digest| !self.tables.contains_key(&digest)) && !broken {
                self.problem(at, blob, "", "no chunk table is about this blob");
            }
        }
        if let Some((_, file)) = metadata {
            self.metadata(index, layer, file);
        }
    }

    fn metadata(&mut self, index: usize, layer: &Layer, file: File) {
        let at = Some(index);
        let image = match Image::open(file) {
            Ok(image) => image,
            Err(e) => return self.problem(at, &layer.metadata, "", e.to_string()),
        };
        let block_size = image.superblock().block_size();
        if block_size != BLOCK_SIZE {
            let what = format!("a block size of {block_size}, where {BLOCK_SIZE} is ours");
            return self.problem(at, &layer.metadata, "", what);
        }
        let mut devices = Vec::new();
        for (blob, id) in layer.data.iter().zip(1usize..) {
            if blob.size() % u64::from(BLOCK_SIZE) != 0 {
                self.problem(at, blob, "", format!("its {} bytes are not a whole number of blocks", blob.size()));
            }
            let tag = image.devices().get(id - 1).map(|d| d.tag.as_slice()).unwrap_or_default();
            let named = digest_of(blob).is_ok_and(|digest| tag == digest.hex().as_bytes());
            if !tag.is_empty() && !named {
                let tag = crate::entry::printable(tag);
                self.problem(
                    at,
                    &layer.metadata,
                    "",
                    format!("device {id} is tagged `{tag}`, but its blob is {}", blob.digest()),
                );
            }
            let packed = !digest_of(blob).is_ok_and(|digest| self.plain.contains(&digest));
            devices.push(DeviceInfo { blocks: blob.size() / u64::from(BLOCK_SIZE), packed });
        }
        let covered: Vec<Option<&Covered>> = layer
            .data
            .iter()
            .map(|blob| self.tables.get(&digest_of(blob).ok()?)?.as_ref().filter(|_| self.deep))
            .collect();
        let mut uncovered = (0u64, None);
        let mut on_chunk = |device: u16, (block, blocks): (u64, u64)| {
            let covered = usize::from(device).checked_sub(1).and_then(|index| *covered.get(index)?);
            if covered.is_some_and(|covered| !covered.holds(block, blocks)) {
                uncovered.0 += 1;
                uncovered.1.get_or_insert((device, block, blocks));
            }
        };
        let checked = check_counting(&image, &devices, &mut on_chunk);
        self.report.inodes += checked.inodes;
        self.report.names += checked.names;
        for finding in checked.findings {
            self.problem(at, &layer.metadata, &finding.path, finding.what);
        }
        if let (count, Some((device, block, blocks))) = uncovered {
            let what = format!(
                "{count} chunks of files are not in a chunk table, the first is {blocks} blocks from block {block} of device {device}"
            );
            self.problem(at, &layer.metadata, "", what);
        }
    }

    /// Checks a chunk table against the blob that it is about, and keeps what it covers.
    fn table(
        &mut self,
        index: usize,
        layer: &Layer,
        descriptor: &Descriptor,
        file: File,
        data: &[Option<(Digest, File)>],
    ) {
        let at = Some(index);
        let table = match ChunkTable::open(file) {
            Ok(table) => table,
            Err(e) => return self.problem(at, descriptor, "", e.to_string()),
        };
        if !table.has_inputs() {
            self.plain.insert(*table.blob_digest());
        }
        let known = self.tables.contains_key(table.blob_digest());
        let position = layer.data.iter().position(|blob| digest_of(blob).ok().as_ref() == Some(table.blob_digest()));
        let Some((position, blob)) = position.and_then(|p| Some((p, layer.data.get(p)?))) else {
            let what = format!("the chunk table is about blob {}, which the layer does not have", table.blob_digest());
            self.tables.entry(*table.blob_digest()).or_insert(None);
            return self.problem(at, descriptor, "", what);
        };
        let says = descriptor.annotations().as_ref().and_then(|all| all.get(annotation::CHUNK_TABLE_OF));
        if let Some(says) = says.filter(|says| **says != table.blob_digest().to_string()) {
            let what =
                format!("the manifest has it as the chunk table of {says}, and it is about {}", table.blob_digest());
            self.problem(at, descriptor, "", what);
        }
        // A lower layer has the same blob and had the same table.
        if known {
            return;
        }
        self.tables.insert(*table.blob_digest(), None);
        if table.blob_blocks() != blob.size() / u64::from(BLOCK_SIZE) {
            let what =
                format!("the chunk table is about {} blocks, its blob has {} bytes", table.blob_blocks(), blob.size());
            return self.problem(at, descriptor, "", what);
        }
        self.report.chunks += table.len();
        // A blob whose digest is wrong is read all the same: the table says where it is wrong.
        let whole = data.get(position).and_then(|d| d.as_ref()).and_then(|(_, file)| file.try_clone().ok());
        let rehash = if self.deep { whole.or_else(|| self.reopen(blob)) } else { None };
        match self.records(index, blob, &table, rehash.as_ref()) {
            Ok(ranges) => {
                self.tables.insert(*table.blob_digest(), Some(Covered { ranges }));
            }
            Err(e) => self.problem(at, descriptor, "", e.to_string()),
        }
    }

    /// Opens a blob whose problems were told already.
    fn reopen(&self, blob: &Descriptor) -> Option<File> {
        self.store.open_blob(&digest_of(blob).ok()?, blob.size()).ok()
    }

    /// Reads all records, and their chunks from `data`; returns the ranges of blocks that they cover.
    fn records(
        &mut self,
        index: usize,
        blob: &Descriptor,
        table: &ChunkTable<File>,
        data: Option<&File>,
    ) -> Result<Vec<(u64, u64)>, ChunkTableError> {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        let mut bad = 0u64;
        for record in table.records() {
            let record = record?;
            let (start, end) = (u64::from(record.start), u64::from(record.start) + u64::from(record.blocks));
            match ranges.last_mut() {
                Some(last) if last.1 == start => last.1 = end,
                _ => ranges.push((start, end)),
            }
            let Some(file) = data else { continue };
            let what = match self.hash_chunk(file, start, end) {
                Ok(digest) if digest != record.digest => "does not match the chunk table".to_owned(),
                Ok(_) => match record.input.map_or(Ok(()), |input| self.plain(file, &record, &input)) {
                    Ok(()) => continue,
                    Err(what) => what,
                },
                Err(e) => format!("cannot be read: {e}"),
            };
            bad += 1;
            if bad <= NAMED_CHUNKS {
                self.problem(Some(index), blob, "", format!("the chunk of blocks {start} to {} {what}", end - 1));
            }
        }
        if bad > NAMED_CHUNKS {
            self.problem(Some(index), blob, "", format!("{} more chunks are bad", bad - NAMED_CHUNKS));
        }
        Ok(ranges)
    }

    /// Whether a chunk, whose stored bytes are right, stands for the bytes that its record says.
    fn plain(&self, file: &File, record: &Record, input: &Input) -> Result<(), String> {
        let stored = u64::from(record.blocks) * u64::from(BLOCK_SIZE);
        let Some(algorithm) = input.algorithm else { return Ok(()) };
        if stored > MAX_STORED_CLUSTER || u64::from(input.len) > MAX_PLAIN_CLUSTER {
            return Err(format!("stands for {} bytes, more than a cluster can have", input.len));
        }
        let mut bytes = vec![0; usize::try_from(stored).unwrap_or(0)];
        file.read_exact_at(&mut bytes, u64::from(record.start) * u64::from(BLOCK_SIZE))
            .map_err(|e| format!("cannot be read: {e}"))?;
        let mut plain = vec![0; input.len as usize];
        compress::decompress(algorithm, &bytes, &mut plain).map_err(|e| format!("cannot be decompressed: {e}"))?;
        if *blake3::hash(&plain).as_bytes() == input.digest {
            Ok(())
        } else {
            Err("decompresses to other bytes than the chunk table says".to_owned())
        }
    }

    fn hash_chunk(&mut self, file: &File, start: u64, end: u64) -> std::io::Result<[u8; 32]> {
        let mut hasher = blake3::Hasher::new();
        let (mut at, end) = (start * u64::from(BLOCK_SIZE), end * u64::from(BLOCK_SIZE));
        while at < end {
            let want = usize::try_from(end - at).map_or(BUFFER, |left| left.min(BUFFER));
            file.read_exact_at(&mut self.buffer[..want], at)?;
            hasher.update(&self.buffer[..want]);
            (self.progress)(Progress::Read(want as u64));
            at += want as u64;
        }
        Ok(*hasher.finalize().as_bytes())
    }
}

/// The blocks of one blob that a chunk table has records for.
struct Covered {
    /// (first block, block behind the last), sorted, apart from each other.
    ranges: Vec<(u64, u64)>,
}

impl Covered {
    fn holds(&self, block: u64, blocks: u64) -> bool {
        let after = self.ranges.partition_point(|(start, _)| *start <= block);
        let range = after.checked_sub(1).and_then(|i| self.ranges.get(i));
        range.is_some_and(|(_, end)| block + blocks <= *end)
    }
}

#[cfg(test)]
mod tests;
