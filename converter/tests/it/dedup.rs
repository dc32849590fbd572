//! Layers that refer to chunks of other images: the same files as without, whatever is looked for where.

use crate::support::{Hashed, Place, cases, compress, judge, reader_differs};
use converter::blob::foreign::Limits;
use converter::chunk_table;
use converter::convert::{ConvertError, Converted, Request, convert_as};
use converter::dictionary::tables::Tables;
use converter::dictionary::{Dedup, Dictionary, DictionaryError, Place as ChunkPlace, Snapshot, stored};
use converter::erofs::format::FileType;
use converter::erofs::read::Image;
use converter::layer::{Existing, Options, Record};
use converter::manifest::Image as Manifest;
use converter::progress::Silent;
use converter::read_at::ReadAt;
use converter::source::Platform;
use converter::verify::verify;
use fixtures::oci::{self, Layout};
use fixtures::tree::{Compare, Snapshot as Tree, diff};
use fixtures::{mounts, require};
use fs3_client::{RefName, Store};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

/// All that equal chunks can give.
const ALL: Limits = Limits { devices: 100, saved: 0 };

/// One store and a source for it.
struct Case {
    place: Place,
}

impl Case {
    fn new() -> Self {
        Self { place: Place::new() }
    }

    fn store(&self) -> &Store {
        &self.place.store
    }

    /// How a converter is told of an image of these layers, in the words of [`fixtures::tar`].
    fn source(&self, name: &str, layers: &[String]) -> String {
        let dir = self.place.path(format!("oci-{name}"));
        let image = layers.iter().fold(oci::Image::new(), |image, script| image.layer(oci::Layer::text(script)));
        Layout::new().image("t", image).write(&dir).unwrap();
        format!("oci:{}:t", dir.display())
    }

    fn convert(&self, name: &str, layers: &[String], dedup: Option<&Dedup>) -> Result<Converted, ConvertError> {
        self.convert_with(name, layers, dedup, 2)
    }

    fn convert_with(
        &self,
        name: &str,
        layers: &[String],
        dedup: Option<&Dedup>,
        jobs: usize,
    ) -> Result<Converted, ConvertError> {
        self.convert_by(name, layers, dedup, jobs, Options::default())
    }

    fn convert_by(
        &self,
        name: &str,
        layers: &[String],
        dedup: Option<&Dedup>,
        jobs: usize,
        options: Options,
    ) -> Result<Converted, ConvertError> {
        let source = self.source(name, layers).parse().unwrap();
        let dedup = dedup.cloned();
        let request =
            Request { source, platform: Platform::host(), options, jobs, registry: Default::default(), dedup };
        convert_as(&format!("{name}:t").parse().unwrap(), &request, self.store(), &Silent)
    }

    /// Nothing may be wrong with any image.
    fn assert_sound(&self) {
        Hashed::all(self.store());
        for (name, descriptor) in self.store().list_refs().unwrap() {
            let digest = converter::manifest::digest_of(&descriptor).unwrap();
            let manifest = Manifest::from_json(&self.store().read_blob(&digest, descriptor.size()).unwrap()).unwrap();
            let found = verify(self.store(), &manifest, true, &mut |_| ());
            assert!(found.is_sound(), "{name}: {:#?}", found.problems);
        }
    }

    fn forget(&self, blob: &Existing) {
        fs::remove_file(self.store().local_dir().unwrap().blob_path(&blob.blob.digest)).unwrap();
    }
}

fn tables(store: &Store, limits: Limits) -> Dedup {
    let (tables, _, warnings) = Tables::new(store, &stored(store, &[]).unwrap(), 1 << 20).unwrap();
    assert_eq!(warnings, []);
    with(tables, limits)
}

fn with(dictionary: impl Dictionary + 'static, limits: Limits) -> Dedup {
    Dedup { dictionary: Arc::new(dictionary), limits, verify: false, against: Vec::new() }
}

#[cfg(feature = "dictionary")]
fn database(store: &Store, path: &Path, limits: Limits) -> Dedup {
    converter::dictionary::db::rebuild(path, store).unwrap();
    with(converter::dictionary::db::Db::open(path).unwrap(), limits)
}

/// Every name of a layer with what it is and its bytes, as our reader has them.
fn contents(store: &Store, record: &Record) -> BTreeMap<Vec<u8>, (String, Vec<u8>)> {
    let image = Image::open(store.open_blob(&record.metadata.digest, record.metadata.size).unwrap()).unwrap();
    let data: Vec<File> = record.data.iter().map(|b| store.open_blob(&b.digest, b.size).unwrap()).collect();
    let devices: Vec<&dyn ReadAt> = data.iter().map(|file| file as &dyn ReadAt).collect();
    let mut all = BTreeMap::new();
    let mut walk = image.walk();
    while let Some(visit) = walk.next() {
        let visit = visit.unwrap();
        let inode = visit.inode;
        let mut bytes = Vec::new();
        if inode.file_type() == FileType::Regular {
            bytes = vec![0; usize::try_from(inode.size).unwrap()];
            assert_eq!(image.read_file_at(inode, &devices, 0, &mut bytes).unwrap(), bytes.len());
        }
        let about = format!("{:o} {} {} {:?} {}", inode.mode, inode.uid, inode.gid, inode.mtime, inode.nlink);
        all.insert(visit.path.to_vec(), (about, bytes));
    }
    all
}

fn assert_same(a: (&Store, &Converted), b: (&Store, &Converted)) {
    assert_eq!(a.1.layers.len(), b.1.layers.len());
    for (one, two) in a.1.layers.iter().zip(&b.1.layers) {
        assert_eq!(contents(a.0, &one.record), contents(b.0, &two.record));
    }
}

fn file(name: &str, size: u32, seed: u32) -> String {
    format!("f {name} size={size} fill=random:{seed} mtime=7\n")
}

/// `a` is in both, `b` and `c` in one.
fn two_images() -> [Vec<String>; 2] {
    let one = file("a", 300_000, 1) + &file("b", 50_000, 2);
    let two = file("a", 300_000, 1) + &file("c", 70_000, 3);
    [vec![one], vec![two]]
}

#[test]
fn equal_chunks_are_referred_to() {
    let [one, two] = two_images();
    let (case, alone) = (Case::new(), Case::new());
    let first = case.convert("one", &one, None).unwrap();
    let second = case.convert("two", &two, Some(&tables(case.store(), ALL))).unwrap();
    let plain = alone.convert("two", &two, None).unwrap();
    assert_same((case.store(), &second), (alone.store(), &plain));
    let (lower, record) = (&first.layers[0].record, &second.layers[0].record);
    assert_eq!(record.data[1..], lower.data[..]);
    assert_eq!(record.chunk_tables[1..], lower.chunk_tables[..]);
    assert_eq!(record.data[0].size, 73_728);
    let counts = &record.counts;
    assert_eq!((counts.referred_bytes, counts.referred_chunks, counts.referred_blobs), (303_104, 19, 1));
    assert_eq!((counts.lookups, counts.own_bytes), (24, 73_728));
    case.assert_sound();
}

#[test]
fn a_layer_of_known_chunks_has_no_blob_of_its_own() {
    let [one, two] = two_images();
    let case = Case::new();
    case.convert("one", &one, None).unwrap();
    case.convert("two", &two, None).unwrap();
    let three = vec![file("x/c", 70_000, 3) + &file("y/a", 300_000, 1) + &file("z", 50_000, 2)];
    let converted = case.convert("three", &three, Some(&tables(case.store(), ALL))).unwrap();
    let record = &converted.layers[0].record;
    assert_eq!((record.counts.own_bytes, record.counts.referred_blobs), (0, 2));
    assert_eq!((record.data.len(), record.chunk_tables.len()), (2, 2));
    let alone = Case::new();
    assert_same((case.store(), &converted), (alone.store(), &alone.convert("three", &three, None).unwrap()));
    case.assert_sound();
}

/// Chunks of files that a later entry replaced do not count, and the order of entries does not show.
#[test]
fn only_the_final_tree_counts() {
    let [one, _] = two_images();
    let made = |script: String| {
        let case = Case::new();
        case.convert("one", &one, None).unwrap();
        let dedup = tables(case.store(), Limits { devices: 1, saved: 60_000 });
        let record = case.convert("x", &[script], Some(&dedup)).unwrap().layers.remove(0).record;
        case.assert_sound();
        (record.metadata, record.data)
    };
    let (b, d, a) = (file("b", 50_000, 2), file("d", 20_000, 9), file("a", 300_000, 1));
    let small = made(b.clone() + &d);
    assert_eq!(small.1.len(), 1, "50,000 bytes are not worth a device");
    assert_eq!(made(d.clone() + &b), small);
    assert_eq!(made(file("b", 300_000, 1) + &d + &b), small, "what is replaced is not referred to");
    let large = made(a.clone() + &b + &d);
    assert_eq!(large.1.len(), 2);
    assert_eq!(made(d + &b + &a), large);
}

#[test]
fn the_cap_keeps_the_best() {
    let images: Vec<Vec<String>> = (1..=4).map(|n| vec![file("f", n * 100_000, n)]).collect();
    let all: String = (1..=4).map(|n| file(&format!("f{n}"), n * 100_000, n)).collect();
    for (devices, saved, referred) in [
        (0, 0, vec![]),
        (1, 0, vec![4]),
        (2, 0, vec![3, 4]),
        (4, 0, vec![1, 2, 3, 4]),
        (9, 0, vec![1, 2, 3, 4]),
        (9, 300_000, vec![3, 4]),
        (9, 500_000, vec![]),
    ] {
        let case = Case::new();
        let blobs: Vec<_> = (1..)
            .zip(&images)
            .map(|(n, image)| case.convert(&format!("i{n}"), image, None).unwrap().layers[0].record.data[0])
            .collect();
        let dedup = tables(case.store(), Limits { devices, saved });
        let converted = case.convert("all", std::slice::from_ref(&all), Some(&dedup)).unwrap();
        let record = &converted.layers[0].record;
        let own = usize::from(referred.len() < 4);
        let found: Vec<_> = record.data[own..].to_vec();
        assert_eq!(found, referred.iter().map(|n: &usize| blobs[n - 1]).collect::<Vec<_>>(), "{devices} {saved}");
        case.assert_sound();
        let alone = Case::new();
        let plain = alone.convert("all", std::slice::from_ref(&all), None).unwrap();
        assert_same((case.store(), &converted), (alone.store(), &plain));
        if referred.is_empty() {
            assert_eq!(record.data, plain.layers[0].record.data, "with nothing to refer to it is what it always was");
            assert_eq!(record.metadata, plain.layers[0].record.metadata);
        }
    }
}

/// A hard link into a lower layer, and chunks of that layer's blob: one device.
#[test]
fn a_blob_is_one_device() {
    let [one, _] = two_images();
    let case = Case::new();
    let base = case.convert("one", &one, None).unwrap();
    let top = file("copy", 300_000, 1) + "h link -> b\n" + &file("new", 40_000, 8);
    let layers = [one[0].clone(), top];
    let converted = case.convert("two", &layers, Some(&tables(case.store(), ALL))).unwrap();
    let record = &converted.layers[1].record;
    assert_eq!(record.data[1..], base.layers[0].record.data[..]);
    assert_eq!(record.data.len(), 2);
    let alone = Case::new();
    assert_same((case.store(), &converted), (alone.store(), &alone.convert("two", &layers, None).unwrap()));
    case.assert_sound();
}

/// Layers with and without deduplication are not taken for one another.
#[test]
fn finished_layers_keep_their_kind() {
    let [one, two] = two_images();
    let case = Case::new();
    case.convert("one", &one, None).unwrap();
    let dedup = tables(case.store(), ALL);
    let referring = case.convert("two", &two, Some(&dedup)).unwrap();
    let again = case.convert("again", &two, Some(&dedup)).unwrap();
    assert!(again.layers[0].reused && again.manifest == referring.manifest);
    let other = Dedup { limits: Limits { devices: 0, saved: 0 }, ..dedup.clone() };
    let capped = case.convert("capped", &two, Some(&other)).unwrap();
    assert!(!capped.layers[0].reused && capped.layers[0].record.data.len() == 1);
    let against = Dedup { against: vec!["one:t".to_owned()], ..dedup.clone() };
    assert!(!case.convert("against", &two, Some(&against)).unwrap().layers[0].reused);
    let plain = case.convert("plain", &two, None).unwrap();
    assert!(!plain.layers[0].reused && plain.layers[0].record.data.len() == 1);
    // A layer that stands alone does for all.
    let case = Case::new();
    case.convert("two", &two, None).unwrap();
    case.convert("one", &one, None).unwrap();
    let reused = case.convert("two", &two, Some(&tables(case.store(), ALL))).unwrap();
    assert!(reused.layers[0].reused);
}

/// Images of one run see what earlier ones published, and layers of one image do not see one another.
#[test]
fn later_images_see_earlier_ones() {
    let [one, two] = two_images();
    let case = Case::new();
    let dedup = tables(case.store(), ALL);
    let both = case.convert("both", &[one[0].clone(), two[0].clone()], Some(&dedup)).unwrap();
    assert!(both.layers.iter().all(|layer| layer.record.counts.referred_bytes == 0));
    let three = vec![file("c", 70_000, 3) + &file("b", 50_000, 2)];
    let converted = case.convert("three", &three, Some(&dedup)).unwrap();
    assert_eq!(converted.layers[0].record.counts.referred_blobs, 2);
    case.assert_sound();
}

/// Hides a blob as soon as it was looked for, or leads elsewhere.
#[derive(Debug)]
struct Tampered {
    inner: Arc<dyn Snapshot>,
    store: Store,
    how: How,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum How {
    Vanish,
    NextBlock,
    Length,
    Beyond,
    NoBlob,
}

impl Snapshot for Tampered {
    fn find(
        &self,
        key: &[u8; 32],
        usable: &mut dyn FnMut(u32) -> Result<bool, DictionaryError>,
    ) -> Result<Option<ChunkPlace>, DictionaryError> {
        let Some(place) = self.inner.find(key, usable)? else { return Ok(None) };
        let blob = self.inner.blob(place.blob)?.unwrap();
        Ok(Some(match self.how {
            How::Vanish => {
                let _ = fs::remove_file(self.store.local_dir().unwrap().blob_path(&blob.blob.digest));
                place
            }
            How::NextBlock => ChunkPlace { start: place.start + 1, ..place },
            How::Length => ChunkPlace { blocks: place.blocks + 1, ..place },
            How::Beyond => ChunkPlace { start: u32::MAX - 1, ..place },
            How::NoBlob => ChunkPlace { blob: u32::MAX, ..place },
        }))
    }

    fn blob(&self, blob: u32) -> Result<Option<Existing>, DictionaryError> {
        self.inner.blob(blob)
    }
}

#[derive(Debug)]
struct Tamper(Dedup, Store, How);

impl Dictionary for Tamper {
    fn snapshot(&self) -> Arc<dyn Snapshot> {
        Arc::new(Tampered { inner: self.0.dictionary.snapshot(), store: self.1.clone(), how: self.2 })
    }

    fn add(&self, blob: &Existing, store: &Store) -> Result<(), DictionaryError> {
        self.0.dictionary.add(blob, store)
    }
}

fn tampered(case: &Case, how: How, limits: Limits) -> Dedup {
    with(Tamper(tables(case.store(), limits), case.store().clone(), how), limits)
}

#[test]
fn a_blob_that_goes_meanwhile_is_named() {
    let [one, two] = two_images();
    for (limits, what) in
        [(ALL, "has gone from the store since"), (Limits { devices: 0, saved: 0 }, "cannot read blob")]
    {
        let case = Case::new();
        let first = case.convert("one", &one, None).unwrap();
        let dedup = tampered(&case, How::Vanish, limits);
        let error = case.convert("two", &two, Some(&dedup)).unwrap_err().to_string();
        let blob = first.layers[0].record.data[0].digest.to_string();
        assert!(error.contains(what) && error.contains(&blob), "{error}");
        assert!(case.store().read_ref(&"two:t".parse().unwrap()).is_err());
    }
}

#[test]
fn a_blob_that_is_not_there_is_not_referred_to() {
    let [one, two] = two_images();
    let case = Case::new();
    let first = case.convert("one", &one, None).unwrap();
    let dedup = tables(case.store(), ALL);
    case.forget(&first.layers[0].record.existing().next().unwrap());
    let converted = case.convert("two", &two, Some(&dedup)).unwrap();
    assert_eq!(converted.layers[0].record.data.len(), 1);
    // Nor one that is cut.
    let case = Case::new();
    let first = case.convert("one", &one, None).unwrap();
    let dedup = tables(case.store(), ALL);
    let blob = first.layers[0].record.existing().next().unwrap();
    case.forget(&blob);
    fs::write(case.store().local_dir().unwrap().blob_path(&blob.blob.digest), vec![0; 4096]).unwrap();
    let converted = case.convert("two", &two, Some(&dedup)).unwrap();
    assert_eq!(converted.layers[0].record.data.len(), 1);
}

/// Entries that lead to where no chunk can be are no hits; ones that lead to other bytes are found out where bytes are
/// read: always when they are copied, and with verification always.
#[test]
fn wrong_entries() {
    let [one, two] = two_images();
    let plain = Case::new();
    let expected = plain.convert("two", &two, None).unwrap();
    for how in [How::Length, How::Beyond, How::NoBlob] {
        let case = Case::new();
        case.convert("one", &one, None).unwrap();
        let converted = case.convert("two", &two, Some(&tampered(&case, how, ALL))).unwrap();
        assert_eq!(converted.layers[0].record.data, expected.layers[0].record.data, "{how:?}");
    }
    let case = Case::new();
    let first = case.convert("one", &one, None).unwrap();
    let blob = first.layers[0].record.data[0].digest.to_string();
    let copying = tampered(&case, How::NextBlock, Limits { devices: 0, saved: 0 });
    let error = case.convert("two", &two, Some(&copying)).unwrap_err();
    assert!(error.is_corrupt() && error.to_string().contains(&format!("blob {blob}")), "{error}");
    let checking = Dedup { verify: true, ..tampered(&case, How::NextBlock, ALL) };
    let converted = case.convert("two", &two, Some(&checking)).unwrap();
    assert_same((case.store(), &converted), (plain.store(), &expected));
    assert_eq!(converted.layers[0].record.data, expected.layers[0].record.data);
    let [warning] = &converted.warnings[..] else { panic!("{:?}", converted.warnings) };
    assert!(warning.message.contains(&blob) && warning.message.contains("19 chunks"), "{}", warning.message);
}

/// A blob whose bytes changed under its name: copying and verification find it, and it is named.
#[test]
fn damaged_blobs() {
    let [one, two] = two_images();
    let plain = Case::new();
    let expected = plain.convert("two", &two, None).unwrap();
    let case = Case::new();
    let first = case.convert("one", &one, None).unwrap();
    let path = case.store().local_dir().unwrap().blob_path(&first.layers[0].record.data[0].digest);
    let mut bytes = fs::read(&path).unwrap();
    bytes[100_000] ^= 1;
    fs::remove_file(&path).unwrap();
    fs::write(&path, &bytes).unwrap();
    let none = tables(case.store(), Limits { devices: 0, saved: 0 });
    let error = case.convert("two", &two, Some(&none)).unwrap_err();
    assert!(error.is_corrupt() && error.to_string().contains("the 4 blocks from 24 do not match"), "{error}");
    let checking = Dedup { verify: true, ..tables(case.store(), ALL) };
    let converted = case.convert("two", &two, Some(&checking)).unwrap();
    assert_same((case.store(), &converted), (plain.store(), &expected));
    assert_eq!(converted.layers[0].record.counts.referred_chunks, 18);
    assert!(converted.warnings[0].message.contains("1 chunks"), "{:?}", converted.warnings);
}

/// A chunk table that is damaged, missing or about something else is left out, with its blob named; one that lies is
/// believed, as the store's other metadata is.
#[test]
fn damaged_tables_are_left_out() {
    let [one, two] = two_images();
    type Tamper = fn(&mut Vec<u8>);
    let tamper: [(&str, Tamper); 4] = [
        ("its contents have", |bytes| bytes[70] ^= 1),
        ("its contents have", |bytes| bytes[0] = 0),
        ("bytes where", |bytes| bytes.truncate(80)),
        ("is not in", Vec::clear),
    ];
    for (what, tamper) in tamper {
        let case = Case::new();
        let first = case.convert("one", &one, None).unwrap();
        let existing = first.layers[0].record.existing().next().unwrap();
        let path = case.store().local_dir().unwrap().blob_path(&existing.table.unwrap().digest);
        let mut bytes = fs::read(&path).unwrap();
        tamper(&mut bytes);
        fs::remove_file(&path).unwrap();
        if !bytes.is_empty() {
            fs::write(&path, &bytes).unwrap();
        }
        let (tables, loaded, warnings) =
            Tables::new(case.store(), &stored(case.store(), &[]).unwrap(), 1 << 20).unwrap();
        assert_eq!((loaded.blobs, loaded.chunks), (0, 0));
        let [warning] = &warnings[..] else { panic!("{warnings:?}") };
        let blob = existing.blob.digest.to_string();
        assert!(warning.message.contains(&blob) && warning.message.contains(what), "{}", warning.message);
        let converted = case.convert("two", &two, Some(&with(tables, ALL))).unwrap();
        assert_eq!(converted.layers[0].record.data.len(), 1);
    }
}

#[test]
fn memory_is_for_the_blobs_that_most_layers_refer_to() {
    let case = Case::new();
    let images: Vec<Vec<String>> = (1..=3).map(|n| vec![file("f", 320_000, n)]).collect();
    for (n, image) in (1..).zip(&images) {
        case.convert(&format!("i{n}"), image, None).unwrap();
    }
    let shared = case.convert("more", &[images[1].clone(), vec![file("x", 9000, 9)]].concat(), None).unwrap();
    let found = stored(case.store(), &[]).unwrap();
    assert_eq!(found.blobs.len(), 4);
    assert_eq!(found.blobs[0].blob, shared.layers[0].record.data[0]);
    let (_, loaded, warnings) = Tables::new(case.store(), &found, 21 * 24).unwrap();
    assert_eq!((loaded.blobs, loaded.chunks, loaded.left_out, warnings), (2, 21, 2, vec![]));
    let named: Vec<RefName> = vec!["i3:t".parse().unwrap()];
    assert_eq!(stored(case.store(), &named).unwrap().blobs.len(), 1);
    let unknown: Vec<RefName> = vec!["i9:t".parse().unwrap()];
    assert!(matches!(stored(case.store(), &unknown), Err(DictionaryError::Store(_))));
}

/// A ref to something else does not keep others from being used.
#[test]
fn foreign_refs_are_left_out() {
    let [one, _] = two_images();
    let case = Case::new();
    case.convert("one", &one, None).unwrap();
    let published = case.store().publish_bytes(b"{}").unwrap();
    let media = converter::manifest::MANIFEST_MEDIA_TYPE;
    let descriptor = converter::manifest::descriptor(media, published.digest, published.size, &[]);
    case.store().write_ref(&"other:t".parse().unwrap(), &descriptor).unwrap();
    let found = stored(case.store(), &[]).unwrap();
    assert_eq!((found.blobs.len(), found.warnings.len()), (1, 1));
    assert!(found.warnings[0].message.contains("other:t"), "{:?}", found.warnings);
    assert!(matches!(
        stored(case.store(), &["other:t".parse().unwrap()]),
        Err(DictionaryError::Image { name, .. }) if name == "other:t"
    ));
}

/// A tables index that grew image by image finds what one made at once finds.
#[test]
fn growing_is_as_good_as_making() {
    let case = Case::new();
    let dedup = tables(case.store(), Limits { devices: 0, saved: 1 << 40 });
    for n in 0..20 {
        case.convert(&format!("i{n}"), &[file("f", 30_000 + 9_000 * (n % 4), n)], Some(&dedup)).unwrap();
    }
    let (grown, made) = (dedup.dictionary.snapshot(), tables(case.store(), ALL).dictionary.snapshot());
    let mut chunks = 0;
    for existing in stored(case.store(), &[]).unwrap().blobs {
        let table = existing.table.unwrap();
        let file = case.store().open_blob(&table.digest, table.size).unwrap();
        for record in chunk_table::ChunkTable::open(file).unwrap().records() {
            let record = record.unwrap();
            let find = |view: &Arc<dyn Snapshot>| {
                let place = view.find(&record.digest, &mut |_| Ok(true)).unwrap().unwrap();
                (view.blob(place.blob).unwrap().unwrap(), place.start, place.blocks)
            };
            assert_eq!(find(&grown), find(&made));
            assert_eq!(find(&grown), (existing, record.start, record.blocks));
            chunks += 1;
        }
    }
    assert!(chunks > 40, "{chunks}");
    assert!(grown.find(&[7; 32], &mut |_| Ok(true)).unwrap().is_none());
}

/// Images whose layers have contents from one small pool, in files of any name.
fn families() -> impl Strategy<Value = Vec<Vec<String>>> {
    let sizes = prop_oneof![Just(100), Just(4096), 4097..9000u32, Just(16_384), 16_000..17_000u32, 30_000..200_000u32];
    let entry = prop_oneof![
        8 => (0..12u32, 0..6u32, sizes).prop_map(|(name, seed, size)| {
            // A prefix of one of few contents: equal chunks, and a last one that differs.
            let file = file(&format!("d{}/f{name}", name % 3), size, seed / 2);
            if seed % 2 == 0 { file } else { file.replace("random", "text") }
        }),
        1 => (0..12u32).prop_map(|n| format!("f d{}/z{n} size={} fill=zero\n", n % 3, 20_000 + n * 5000)),
        1 => (0..12u32, 0..12u32).prop_map(|(n, to)| format!("s d{}/s{n} -> f{to}\n", n % 3)),
    ];
    let layer = proptest::collection::vec(entry, 1..8).prop_map(|entries| entries.concat());
    proptest::collection::vec(proptest::collection::vec(layer, 1..3), 2..5)
}

/// How each image of a family is compressed, if it is.
fn codecs() -> impl Strategy<Value = Vec<Options>> {
    let one = prop_oneof![Just(None), Just(Some(("lz4", 16))), Just(Some(("lz4hc:9", 16))), Just(Some(("zstd:1", 17)))];
    let one = one.prop_map(|how| Options {
        compress: how.map(|(codec, cluster_bits)| compress(codec, cluster_bits)),
        ..Options::default()
    });
    proptest::collection::vec(one, 5)
}

fn limits() -> impl Strategy<Value = Limits> {
    (prop_oneof![Just(0u16), Just(1), Just(2), Just(50)], prop_oneof![Just(0u64), Just(20_000), Just(100_000)])
        .prop_map(|(devices, saved)| Limits { devices, saved })
}

#[test]
fn random_families_read_the_same() {
    proptest!(cases(60), |(images in families(), limits in limits(), verify: bool)| {
        let (alone, case, more) = (Case::new(), Case::new(), Case::new());
        let start = |case: &Case| Dedup { verify, ..tables(case.store(), limits) };
        let (dedup, dedup_more) = (start(&case), start(&more));
        for (n, layers) in images.iter().enumerate() {
            let name = format!("i{n}");
            let plain = alone.convert(&name, layers, None).unwrap();
            let found = case.convert_with(&name, layers, Some(&dedup), 1).unwrap();
            assert_same((case.store(), &found), (alone.store(), &plain));
            prop_assert_eq!(&found.warnings, &[]);
            for layer in &found.layers {
                prop_assert!(layer.record.counts.referred_blobs <= u64::from(limits.devices));
            }
            // The same bytes whatever the threads.
            let again = more.convert_with(&name, layers, Some(&dedup_more), 4).unwrap();
            prop_assert_eq!(found.manifest, again.manifest);
        }
        case.assert_sound();
    });
}

/// Images that are compressed in several ways, or not, in one store.
#[test]
fn compressed_families_read_the_same() {
    proptest!(cases(50), |(images in families(), codecs in codecs(), limits in limits(), verify: bool)| {
        let (alone, case, more) = (Case::new(), Case::new(), Case::new());
        let start = |case: &Case| Dedup { verify, ..tables(case.store(), limits) };
        let (dedup, dedup_more) = (start(&case), start(&more));
        for (n, (layers, options)) in images.iter().zip(&codecs).enumerate() {
            let name = format!("i{n}");
            let plain = alone.convert(&name, layers, None).unwrap();
            let found = case.convert_by(&name, layers, Some(&dedup), 1, *options).unwrap();
            assert_same((case.store(), &found), (alone.store(), &plain));
            prop_assert_eq!(&found.warnings, &[]);
            let again = more.convert_by(&name, layers, Some(&dedup_more), 4, *options).unwrap();
            prop_assert_eq!(found.manifest, again.manifest);
        }
        case.assert_sound();
    });
}

/// Clusters are found by what they decompress to: the level does not matter, the algorithm does.
#[test]
fn compressed_clusters_are_referred_to() {
    let text = |name: &str, size: u32, seed: u32| file(name, size, seed).replace("random", "text");
    let one = [text("a", 300_000, 1) + &file("noise", 200_000, 2)];
    let two = [text("b", 300_000, 1) + &file("noise", 200_000, 2) + &text("new", 100_000, 3)];
    let by = |codec: &str| Options { compress: Some(compress(codec, 16)), ..Options::default() };
    let alone = Case::new();
    let plain = alone.convert("two", &two, None).unwrap();
    for (first, second, expected) in
        // Five clusters of text, and three of noise, of which the last takes in the end that is less than a block.
        [("lz4", "lz4", 8), ("lz4", "lz4hc:9", 8), ("zstd:1", "zstd:5", 8), ("zstd:1", "lz4", 3)]
    {
        for (limits, verify) in [(ALL, false), (ALL, true), (Limits { devices: 0, saved: 0 }, false)] {
            let case = Case::new();
            case.convert_by("one", &one, None, 2, by(first)).unwrap();
            let dedup = Dedup { verify, ..tables(case.store(), limits) };
            let found = case.convert_by("two", &two, Some(&dedup), 2, by(second)).unwrap();
            assert_same((case.store(), &found), (alone.store(), &plain));
            let counts = &found.layers[0].record.counts;
            assert_eq!(counts.referred_chunks, if limits.devices == 0 { 0 } else { expected }, "{first} {second}");
            case.assert_sound();
        }
    }
    // Plain chunks of an uncompressed image serve a compressed one, where they are as long.
    let case = Case::new();
    let small = [file("s", 9000, 5)];
    case.convert("plain", &small, None).unwrap();
    let found = case.convert_by("packed", &small, Some(&tables(case.store(), ALL)), 2, by("zstd:1")).unwrap();
    assert_eq!(found.layers[0].record.counts.own_bytes, 0);
    assert_same((case.store(), &found), (case.store(), &case.convert("plain", &small, None).unwrap()));
    case.assert_sound();
}

/// Both kinds of dictionary give the same bytes where both know the same.
#[cfg(feature = "dictionary")]
#[test]
fn random_families_with_a_database() {
    proptest!(cases(25), |(images in families(), codecs in codecs(), limits in limits())| {
        let (alone, case) = (Case::new(), Case::new());
        let dedup = database(case.store(), &case.place.path("dict"), limits);
        for (n, (layers, options)) in images.iter().zip(&codecs).enumerate() {
            let name = format!("i{n}");
            let plain = alone.convert(&name, layers, None).unwrap();
            let found = case.convert_by(&name, layers, Some(&dedup), 2, *options).unwrap();
            assert_same((case.store(), &found), (alone.store(), &plain));
        }
        case.assert_sound();
        // Made anew in two ways, for one image more: `database` begins with what the store's tables say.
        drop(dedup);
        let last: Vec<String> = images.concat();
        let by_database = database(case.store(), &case.place.path("dict"), limits);
        // Its layers were converted before, when less was known: not those again, either time.
        let forget = || fs::remove_dir_all(case.place.store.local_dir().unwrap().root().join("converted")).unwrap();
        forget();
        let one = case.convert("last", &last, Some(&by_database)).unwrap();
        forget();
        case.store().remove_ref(&"last:t".parse().unwrap()).unwrap();
        let two = case.convert("last", &last, Some(&tables(case.store(), limits))).unwrap();
        prop_assert_eq!(one.manifest, two.manifest);
        assert_same((case.store(), &one), (alone.store(), &alone.convert("last", &last, None).unwrap()));
        case.assert_sound();
    });
}

/// The kernel shows of a deduplicated image what it shows of one that stands alone.
#[test]
fn privileged_random_families_mount_the_same() {
    if !require::mounts() {
        return;
    }
    mounts::in_private_namespace(|| {
        proptest!(cases(15), |(images in families(), codecs in codecs(), limits in limits())| {
            let (alone, case) = (Case::new(), Case::new());
            let dedup = tables(case.store(), limits);
            for (n, (layers, options)) in images.iter().zip(&codecs).enumerate() {
                let name = format!("i{n}");
                let plain = alone.convert(&name, layers, None).unwrap();
                let found = case.convert_by(&name, layers, Some(&dedup), 2, *options).unwrap();
                let (expected, _lower) = alone.place.mount_all(&plain);
                let (mounted, layers) = case.place.mount_all(&found);
                let same = diff(
                    &Tree::of(expected.path()).unwrap(),
                    &Tree::of(mounted.path()).unwrap(),
                    &Compare::exact(),
                );
                prop_assert_eq!(same, Vec::<String>::new());
                for (layer, mounted) in found.layers.iter().zip(&layers) {
                    let tree = Tree::of(mounted.path()).unwrap();
                    prop_assert_eq!(reader_differs(case.store(), &layer.record, &tree), Vec::<String>::new());
                    judge(case.store(), &layer.record);
                }
            }
        });
    });
}
