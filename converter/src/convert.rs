//! An image on its way into a store: its layers in parallel, then its manifest and its ref.
//!
//! Every layer is read without the others. One that leaves nothing open is published at once; one that has parents
//! without entries, or hard links into lower layers, waits until those below are published, and takes from their
//! metadata images what it needs (the module `stack`). Workers take layers from the bottom, so that little ever waits.
//!
//! A finished layer is remembered in the store under a key of all that decides its bytes, so that a later run, of this
//! image or another one, takes it as it is.

pub mod plan;

use crate::dictionary::{self, Dedup, DictionaryError, Session};
use crate::entry::Warning;
use crate::layer::{self, Existing, LayerError, Options, ReadLayer, Record};
use crate::manifest::{self, CONFIG_MEDIA_TYPE, MANIFEST_MEDIA_TYPE, Unresolved, annotation};
use crate::merge::{self, ImageRequest, MergeError, Under};
use crate::progress::Progress;
use crate::source::{self, LayerOrigin, Platform, SourceError, SourceImage, SourceLayer, SourceRef};
use crate::stack;
use crate::unpack::declared_as;
use fs3_client::{Digest, RefName, Store, StoreError};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Increased whenever the same source and options give other bytes than before: older records are then not used.
pub const FORMAT_VERSION: u32 = 3;

/// What to convert, and how.
#[derive(Debug, Clone)]
pub struct Request {
    /// Where the image is.
    pub source: SourceRef,
    /// Which of a multi-platform image.
    pub platform: Platform,
    /// What shapes the layers.
    pub options: Options,
    /// Layers at a time, at least 1.
    pub jobs: usize,
    /// How to talk to registries.
    pub registry: fs3_client::registry::Options,
    /// Where chunks are looked for that need not be stored again; `None` for layers that stand alone.
    pub dedup: Option<Dedup>,
}

impl Request {
    /// Stands for all that decides the image, its source excepted; `under` says which layers are merged. It may change
    /// with the program, which costs no more than to look at every layer's record again.
    #[must_use]
    pub fn fingerprint(&self, under: Under) -> String {
        // Options that only refuse something do not shape what is not refused.
        let options = Options { max_inodes: 0, max_plain: 0, ..self.options };
        let dedup = self.dedup.as_ref().map(Dedup::shape);
        Digest::of(format!("{FORMAT_VERSION} {under} {options:?} {dedup:?}").as_bytes()).hex()[..32].to_owned()
    }
}

/// A converted image that is in the store, but has no name yet.
#[derive(Debug)]
pub struct Converted {
    /// The image.
    pub image: manifest::Image,
    /// Digest of its manifest.
    pub manifest: Digest,
    /// Length of its manifest in bytes.
    pub manifest_size: u64,
    /// What its config says it is for.
    pub platform: Option<Platform>,
    /// Its layers, bottom first.
    pub layers: Vec<ConvertedLayer>,
    /// How those were merged into the image's; each of them by itself when they were not.
    pub parts: Vec<merge::Part>,
    /// Oddities of the image as a whole.
    pub warnings: Vec<Warning>,
}

/// One layer of a conversion.
#[derive(Debug, Clone)]
pub struct ConvertedLayer {
    /// What it became.
    pub record: Record,
    /// Whether an earlier run had done it.
    pub reused: bool,
    /// Time from its begin to its end.
    pub took: Duration,
    /// Bytes of its source.
    pub source_size: Option<u64>,
}

/// Why an image was not converted.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The source cannot be read, or holds no such image.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A layer failed.
    #[error("layer {index} ({name}): {error}")]
    Layer {
        /// 0 is the bottom one.
        index: usize,
        /// Its digest or path.
        name: String,
        /// Why.
        error: Box<LayerError>,
    },
    /// The layers could not be merged.
    #[error("merging: {0}")]
    Merge(#[from] MergeError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// [`Progress::is_cancelled`] said so.
    #[error("the conversion was cancelled")]
    Cancelled,
    /// The image is in the store, but the dictionary did not take it in.
    #[error(transparent)]
    Dictionary(Box<DictionaryError>),
}

impl ConvertError {
    /// Whether the source's bytes, or a blob's, are damaged.
    #[must_use]
    pub fn is_corrupt(&self) -> bool {
        match self {
            Self::Source(e) => e.is_corrupt(),
            Self::Layer { error, .. } => error.is_corrupt(),
            Self::Merge(e) => e.is_corrupt(),
            Self::Store(e) => e.is_corrupt(),
            Self::Cancelled => false,
            Self::Dictionary(e) => e.is_corrupt(),
        }
    }
}

/// Converts an image and publishes everything but its name, no layers merged. Whoever gives it one, or relies on what is
/// returned in another way, has to call this with a writer's store ([`Store::writing`]).
///
/// # Errors
/// The first failure; what was published before it stays for the next run.
pub fn convert(request: &Request, store: &Store, progress: &dyn Progress) -> Result<Converted, ConvertError> {
    convert_merged(request, Under::Never, store, progress)
}

/// Converts an image, merges runs of its layers, and publishes everything but its name.
///
/// # Errors
/// As [`convert`], and when layers cannot be merged.
pub fn convert_merged(
    request: &Request,
    under: Under,
    store: &Store,
    progress: &dyn Progress,
) -> Result<Converted, ConvertError> {
    let source = source::resolve(&request.source, &request.platform, &store.scratch(), &request.registry)?;
    let dedup = request.dedup.as_ref().map(|dedup| Session::new(dedup, store));
    let layers = Stack::new(&source, request, store, dedup.as_ref(), progress).run()?;
    let mut converted = publish_image(request, source, layers, under, store, progress)?;
    if let Some(session) = dedup {
        converted.warnings.append(&mut session.warnings());
        for blob in converted.image.layers.iter().flat_map(dictionary::existing) {
            let added = session.dedup().dictionary.add(&blob, store);
            added.map_err(|e| ConvertError::Dictionary(Box::new(e)))?;
        }
    }
    Ok(converted)
}

/// Converts without merging, and gives the image its name. A lease on the store is held meanwhile.
///
/// # Errors
/// As [`convert`], and when the ref cannot be written.
pub fn convert_as(
    name: &RefName,
    request: &Request,
    store: &Store,
    progress: &dyn Progress,
) -> Result<Converted, ConvertError> {
    convert_merged_as(name, request, Under::Never, store, progress)
}

/// As [`convert_merged`], and gives the image its name. A lease on the store is held meanwhile.
///
/// # Errors
/// As [`convert_merged`], and when the ref cannot be written.
pub fn convert_merged_as(
    name: &RefName,
    request: &Request,
    under: Under,
    store: &Store,
    progress: &dyn Progress,
) -> Result<Converted, ConvertError> {
    // From before anything is found in the store that the image will rely on, until its name says so.
    let store = &store.writing("convert")?;
    let converted = convert_merged(request, under, store, progress)?;
    if progress.is_cancelled() {
        return Err(ConvertError::Cancelled);
    }
    let descriptor = manifest::descriptor(MANIFEST_MEDIA_TYPE, converted.manifest, converted.manifest_size, &[]);
    store.write_ref(name, &descriptor)?;
    Ok(converted)
}

fn publish_image(
    request: &Request,
    source: SourceImage,
    layers: Vec<ConvertedLayer>,
    under: Under,
    store: &Store,
    progress: &dyn Progress,
) -> Result<Converted, ConvertError> {
    let config = source.config.clone().unwrap_or_else(|| minimal_config(&layers));
    let config = store.publish_bytes(&config)?;
    let mut annotations = BTreeMap::new();
    if let Some(digest) = source.manifest {
        annotations.insert(annotation::SOURCE_MANIFEST.to_owned(), digest.to_string());
    }
    annotations.insert(annotation::OPTIONS.to_owned(), request.fingerprint(under));
    let config = manifest::descriptor(CONFIG_MEDIA_TYPE, config.digest, config.size, &[]);
    let stack: Vec<manifest::Layer> = layers.iter().map(|layer| layer.record.to_layer()).collect();
    let request = ImageRequest { under, options: merge::Options::default() };
    let parts = merge::merge_stack(&stack, &request, store, progress)?;
    let merged = merge::publish_stack(&stack, parts, config, annotations, store)?;
    Ok(Converted {
        image: merged.image,
        manifest: merged.manifest,
        manifest_size: merged.manifest_size,
        platform: source.platform.clone(),
        layers,
        parts: merged.layers,
        warnings: source.warnings.clone(),
    })
}

/// A config for what comes without one: no time and no host in it, so that the same tree gives the same image.
fn minimal_config(layers: &[ConvertedLayer]) -> Vec<u8> {
    let host = Platform::host();
    // A directory has no tar; its tree is known by its metadata image.
    let diff_ids: Vec<String> =
        layers.iter().map(|l| l.record.diff_id.unwrap_or(l.record.metadata.digest).to_string()).collect();
    let config = serde_json::json!({
        "architecture": host.architecture,
        "os": host.os,
        "config": {},
        "rootfs": { "type": "layers", "diff_ids": diff_ids },
    });
    config.to_string().into_bytes()
}

enum Slot {
    Waiting,
    /// Taken apart; the layers below are not all published.
    Read(Box<ReadLayer>, Instant),
    Busy,
    Done(Box<ConvertedLayer>),
}

struct Stack<'c> {
    layers: &'c [SourceLayer],
    /// Whether these layers are a whole image, so that nothing can be below.
    whole: bool,
    request: &'c Request,
    store: &'c Store,
    dedup: Option<&'c Session<'c>>,
    progress: &'c dyn Progress,
    slots: Mutex<Vec<Slot>>,
    next: AtomicUsize,
    failed: AtomicBool,
    failure: Mutex<Option<(usize, LayerError)>>,
}

impl<'c> Stack<'c> {
    fn new(
        source: &'c SourceImage,
        request: &'c Request,
        store: &'c Store,
        dedup: Option<&'c Session<'c>>,
        progress: &'c dyn Progress,
    ) -> Self {
        Self {
            layers: &source.layers,
            whole: !matches!(request.source, SourceRef::Tar(_) | SourceRef::Dir { .. }),
            request,
            store,
            dedup,
            progress,
            slots: Mutex::new(source.layers.iter().map(|_| Slot::Waiting).collect()),
            next: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
        }
    }

    fn run(self) -> Result<Vec<ConvertedLayer>, ConvertError> {
        std::thread::scope(|scope| {
            for _ in 1..self.request.jobs.min(self.layers.len()) {
                scope.spawn(|| self.work());
            }
            self.work();
        });
        if self.progress.is_cancelled() {
            return Err(ConvertError::Cancelled);
        }
        if let Some((index, error)) = self.failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            let (name, error) = (name_of(&self.layers[index]), Box::new(error));
            return Err(ConvertError::Layer { index, name, error });
        }
        let slots = self.slots.into_inner().unwrap_or_else(PoisonError::into_inner);
        let done = slots.into_iter().map(|slot| match slot {
            Slot::Done(layer) => *layer,
            _ => unreachable!("no layer failed, so all are done"),
        });
        Ok(done.collect())
    }

    fn slots(&self) -> MutexGuard<'_, Vec<Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= self.layers.len() {
                return;
            }
            let _turn = self.progress.turn();
            if self.failed.load(Ordering::Relaxed) || self.progress.is_cancelled() {
                return;
            }
            let outcome = self.begin(index).map_err(|e| (index, e)).and_then(|()| self.advance());
            if let Err((index, error)) = outcome {
                self.failed.store(true, Ordering::Relaxed);
                let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
                // The lowest layer's failure is the one told, so that the message does not depend on timing more
                // than it must.
                if failure.as_ref().is_none_or(|(first, _)| index < *first) {
                    *failure = Some((index, error));
                }
                return;
            }
        }
    }

    /// Reads a layer, and publishes it if it needs no other.
    fn begin(&self, index: usize) -> Result<(), LayerError> {
        let began = Instant::now();
        let layer = &self.layers[index];
        self.progress.layer_started(index, layer.size.or_else(|| origin_size(&layer.origin)));
        for key in self.keys(index) {
            if let Some(record) = Record::recall(self.store, &key)? {
                self.done(index, record, true, began);
                return Ok(());
            }
        }
        let mut read = layer::read(layer, index, &self.request.options, self.store, self.dedup, self.progress)?;
        let unresolved = if !self.whole {
            stack::leave_open(&mut read)
        } else if !read.open.implied && read.open.links.is_empty() {
            Unresolved::default()
        } else {
            self.slots()[index] = Slot::Read(Box::new(read), began);
            return Ok(());
        };
        read.arrange(self.store, self.dedup)?;
        let devices = read.foreign.clone();
        let record = self.publish(read, &devices, unresolved)?;
        self.remember(index, false, &record)?;
        self.done(index, record, false, began);
        Ok(())
    }

    fn publish(&self, read: ReadLayer, devices: &[Existing], unresolved: Unresolved) -> Result<Record, LayerError> {
        if let Some(session) = self.dedup {
            // What was found may have gone since.
            read.foreign.iter().try_for_each(|blob| session.hold(blob))?;
        }
        layer::publish(read, devices, unresolved, &self.request.options, self.store)
    }

    /// Publishes every layer that waited for others which are published now.
    fn advance(&self) -> Result<(), (usize, LayerError)> {
        while let Some((index, read, began, below)) = self.take_ready() {
            let settled = self.settle(index, *read, &below).map_err(|e| (index, e))?;
            self.done(index, settled, false, began);
        }
        Ok(())
    }

    fn take_ready(&self) -> Option<(usize, Box<ReadLayer>, Instant, Vec<Record>)> {
        let mut slots = self.slots();
        let undone = slots.iter().position(|slot| !matches!(slot, Slot::Done(_)))?;
        if !matches!(slots[undone], Slot::Read(..)) {
            return None;
        }
        let below = slots[..undone].iter().map(|slot| match slot {
            Slot::Done(layer) => layer.record.clone(),
            _ => unreachable!("all slots below are done"),
        });
        let below = below.collect();
        match std::mem::replace(&mut slots[undone], Slot::Busy) {
            Slot::Read(read, began) => Some((undone, read, began, below)),
            _ => unreachable!("it was just seen"),
        }
    }

    fn settle(&self, index: usize, mut read: ReadLayer, below: &[Record]) -> Result<Record, LayerError> {
        let devices = stack::settle(&mut read, below, self.store, self.dedup, self.request.options.overlay)?;
        let record = self.publish(read, &devices, Unresolved::default())?;
        self.remember(index, true, &record)?;
        Ok(record)
    }

    fn done(&self, index: usize, mut record: Record, reused: bool, began: Instant) {
        // A matter of this image's manifest, not of the layer: the same layer may be declared rightly elsewhere.
        let oddity = record.compression.and_then(|found| declared_as(&self.layers[index].media_type, found));
        record.warnings.extend(oddity.map(|message| Warning::new(b"", message)));
        let source_size = self.layers[index].size.or_else(|| origin_size(&self.layers[index].origin));
        let layer = ConvertedLayer { record, reused, took: began.elapsed(), source_size };
        self.slots()[index] = Slot::Done(Box::new(layer));
        self.progress.layer_finished(index, reused);
    }

    fn remember(&self, index: usize, with_lower: bool, record: &Record) -> Result<(), LayerError> {
        if let Some(key) = self.key(index, with_lower, self.dedup) {
            record.remember(self.store, &key)?;
        }
        Ok(())
    }

    /// The keys under which a layer may be found that is as good as a new one. A layer that refers to no other one's
    /// blobs is that for a run with deduplication too: all of it is in the store already.
    fn keys(&self, index: usize) -> Vec<String> {
        let ways = if self.dedup.is_some() { &[self.dedup, None][..] } else { &[None] };
        let keys = ways.iter().flat_map(|dedup| [false, true].map(|with_lower| self.key(index, with_lower, *dedup)));
        keys.flatten().collect()
    }

    /// What decides a layer's bytes: its own source, the options and, where it took something from them, the layers
    /// below. `None` when the source is only known by reading it. What a dictionary knew is not part of it: a layer that
    /// an earlier run made with less is in the store.
    fn key(&self, index: usize, with_lower: bool, dedup: Option<&Session<'_>>) -> Option<String> {
        let identity = |layer: &SourceLayer| {
            let id = layer.digest.or(layer.diff_id)?;
            Some(format!("{id} {}", layer.diff_id.map_or_else(String::new, |d| d.to_string())))
        };
        let lower = if with_lower { &self.layers[..index] } else { &[] };
        let lower: Option<Vec<String>> = lower.iter().map(identity).collect();
        let mut text = serde_json::json!({
            "version": FORMAT_VERSION,
            "source": identity(&self.layers[index])?,
            "whole": self.whole,
            "lower": with_lower.then_some(lower?),
            "inline_max": self.request.options.inline_max,
            "chunk_bits": self.request.options.chunks.max_bits,
            "compress": self.request.options.compress.map(|c| (c.codec.to_string(), c.cluster_bits)),
            "overlay": self.request.options.overlay,
        });
        if let Some(session) = dedup {
            text["dedup"] = session.dedup().shape().into();
        }
        Some(Digest::of(text.to_string().as_bytes()).hex())
    }
}

fn origin_size(origin: &LayerOrigin) -> Option<u64> {
    match origin {
        LayerOrigin::Range { len, .. } => Some(*len),
        LayerOrigin::Remote(remote) => Some(remote.size()),
        LayerOrigin::Stdin | LayerOrigin::Dir(_) => None,
    }
}

fn name_of(layer: &SourceLayer) -> String {
    match (&layer.digest, &layer.origin) {
        (Some(digest), _) => digest.to_string(),
        (None, LayerOrigin::Range { path, .. } | LayerOrigin::Dir(path)) => path.display().to_string(),
        (None, LayerOrigin::Remote(remote)) => remote.digest().to_string(),
        (None, LayerOrigin::Stdin) => "standard input".to_owned(),
    }
}
