//! Stacks of random layers, merged: against the plain model, against other orders of merging, and through the kernel.

use crate::support::{Place, cases, reader_differs};
use crate::support_merge::{BOTTOM, PACK, all_runs, assert_associative, layers, merge};
use converter::chunk_table::ChunkTable;
use converter::layer::Record;
use converter::merge::Options;
use fixtures::arbitrary::{Limits, stacks};
use fixtures::model::{Layer, Model};
use fixtures::tree::{Compare, Snapshot, diff};
use fixtures::{mounts, require};
use proptest::prelude::*;
use std::path::Path;

const NOTHING: Vec<String> = Vec::new();

/// Merged as a bottom, a whole stack is what the model says, link counts included.
fn check_bottom(stack: &[Layer], options: Options) -> Result<(), TestCaseError> {
    let place = Place::new();
    let converted = place.convert(&place.layout_of(stack)).unwrap();
    let model = Snapshot::of_model(&Model::merged(stack));
    let record = merge(&place.store, &layers(&converted), options);
    prop_assert_eq!(reader_differs(&place.store, &record, &model), NOTHING, "the merged layer | the model");
    prop_assert_eq!(record.counts.whiteouts + record.counts.opaques, 0);
    Ok(())
}

#[test]
fn merged_stacks_are_what_the_model_says() {
    proptest!(cases(150), |(stack in stacks(Limits::small(), 5))| check_bottom(&stack, BOTTOM)?);
}

#[test]
fn merged_loose_stacks_are_what_the_model_says() {
    proptest!(cases(150), |(stack in stacks(Limits::small_and_loose(), 5))| check_bottom(&stack, BOTTOM)?);
}

#[test]
fn packed_stacks_are_what_the_model_says() {
    let options = Options { bottom: true, ..PACK };
    proptest!(cases(60), |(stack in stacks(Limits { file: 60_000, ..Limits::small_and_loose() }, 4))| {
        check_bottom(&stack, options)?;
    });
}

/// Every layer of the stack in one of three forms: compressed in two ways, or plain.
fn mixed(place: &Place, stack: &[Layer]) -> Vec<converter::manifest::Layer> {
    let source = place.layout_of(stack);
    let forms = [
        layers(&place.convert_compressed(&source, "zstd", 16)),
        layers(&place.convert(&source).unwrap()),
        layers(&place.convert_compressed(&source, "zstd:9", 17)),
    ];
    (0..stack.len()).map(|number| forms[number % 3][number].clone()).collect()
}

/// As one blob, compressed layers and others have the same files; and the blob's table says what is in it.
#[test]
fn packed_compressed_stacks_are_what_the_model_says() {
    let options = Options { bottom: true, ..PACK };
    let limits = Limits { file: 300_000, ..Limits::small() };
    proptest!(cases(60), |(stack in stacks(limits, 4), mix: bool)| {
        let place = Place::new();
        let all = if mix {
            mixed(&place, &stack)
        } else {
            layers(&place.convert_compressed(&place.layout_of(&stack), "lz4", 16))
        };
        let model = Snapshot::of_model(&Model::merged(&stack));
        let record = merge(&place.store, &all, options);
        prop_assert_eq!(reader_differs(&place.store, &record, &model), NOTHING, "the merged layer | the model");
        prop_assert!(record.data.len() <= 1);
        if let [blob] = &record.data[..] {
            let table = record.chunk_tables[0].blob;
            let table = ChunkTable::open(place.store.open_blob(&table.digest, table.size).unwrap()).unwrap();
            let bytes = std::fs::read(place.store.local_dir().unwrap().blob_path(&blob.digest)).unwrap();
            let mut end = 0;
            for found in table.records() {
                let found = found.unwrap();
                prop_assert_eq!(found.start, end, "nothing lies between clusters");
                end += found.blocks;
                let stored = &bytes[found.start as usize * 4096..end as usize * 4096];
                prop_assert_eq!(found.digest, *blake3::hash(stored).as_bytes());
                if let Some(input) = found.input {
                    let mut plain = vec![0; input.len as usize];
                    match input.algorithm {
                        Some(algorithm) => converter::compress::decompress(algorithm, stored, &mut plain).unwrap(),
                        None => plain.copy_from_slice(&stored[..input.len as usize]),
                    }
                    prop_assert_eq!(input.digest, *blake3::hash(&plain).as_bytes());
                }
            }
            prop_assert_eq!(u64::from(end) * 4096, blob.size);
        }
        // Packed once, it can be packed again: with nothing new, into the same bytes.
        let again = merge(&place.store, &[record.to_layer()], options);
        prop_assert_eq!(&again.data, &record.data);
    });
}

#[test]
fn large_merged_stacks_are_what_the_model_says() {
    proptest!(cases(8), |(stack in stacks(Limits { file: 300_000, ..Limits::large() }, 4))| {
        check_bottom(&stack, BOTTOM)?;
    });
}

/// Step by step or at once, in any grouping, with whiteouts kept or not: the same bytes.
#[test]
fn merging_is_associative() {
    proptest!(cases(100), |(stack in stacks(Limits::small_and_loose(), 5))| {
        let place = Place::new();
        let converted = place.convert(&place.layout_of(&stack)).unwrap();
        assert_associative(&place.store, &layers(&converted), Options::default());
        assert_associative(&place.store, &layers(&converted), BOTTOM);
    });
}

/// What several lowers show under some layers, and under the same layers merged.
fn check_mounts(stack: &[Layer], lowers: &[Layer]) -> Result<(), TestCaseError> {
    let place = Place::new();
    let converted = place.convert(&place.layout_of(stack)).unwrap();
    let records: Vec<&Record> = converted.layers.iter().map(|layer| &layer.record).collect();
    let dirs = lowers.iter().enumerate().map(|(number, lower)| {
        let tar = lower.to_tar(fixtures::tar::Format::Pax);
        let other = Place::new();
        let file = other.path("lower.tar");
        std::fs::write(&file, tar).unwrap();
        let converted = other.convert(&format!("tar:{}", file.display())).unwrap();
        (number, other, converted)
    });
    let dirs: Vec<_> = dirs.collect();
    let all = layers(&converted);
    for run in all_runs(all.len()) {
        let merged = merge(&place.store, &all[run.clone()], Options::default());
        let mut with = records.clone();
        with.splice(run.clone(), [&merged]);
        let compare = |below: &[&Path]| -> Result<(), TestCaseError> {
            let (one, _layers) = place.mount_records(&records, below);
            let (other, _merged) = place.mount_records(&with, below);
            let (one, other) = (Snapshot::of(one.path()).unwrap(), Snapshot::of(other.path()).unwrap());
            let options = if below.is_empty() && with.len() == 1 { whole() } else { Compare::overlay() };
            prop_assert_eq!(diff(&one, &other, &options), NOTHING, "separate | {:?} merged", run.clone());
            Ok(())
        };
        if with.len() > 1 {
            compare(&[])?;
        }
        for (_, other, converted) in &dirs {
            let lower = other.mount(&converted.layers[0].record);
            compare(&[lower.path()])?;
        }
    }
    Ok(())
}

fn whole() -> Compare {
    Compare { nlink: false, dir_nlink: false, ..Compare::overlay() }
}

/// Lowers that meet the stack: everything that it ever had (so that all its whiteouts have something to hide), that
/// turned into other types, and something random.
fn lowers(stack: &[Layer], random: &Layer) -> Vec<Layer> {
    use fixtures::content::Content;
    use fixtures::model::{Change, Kind, Meta};
    let mut everything = Model::new();
    let mut conflicts = Model::new();
    for change in stack.iter().flat_map(|layer| &layer.changes) {
        let (path, kind) = match change {
            Change::Put(path, kind, _) => (path, kind.clone()),
            Change::Whiteout(path) | Change::Link(path, _) => (path, Kind::Regular(Content::Bytes(b"lower".to_vec()))),
            Change::Opaque(path) => {
                let mut below = path.clone();
                below.extend_from_slice(if path.is_empty() { b"below" } else { b"/below" });
                everything.put(&below, Kind::Regular(Content::Bytes(b"under opaque".to_vec())), Meta::new(0o600));
                continue;
            }
        };
        everything.put(path, kind.clone(), Meta::new(0o711));
        let other = match kind {
            Kind::Directory if path.len() % 2 == 0 => Kind::Symlink(b"/etc".to_vec()),
            Kind::Directory => Kind::Regular(Content::Bytes(b"not a directory".to_vec())),
            _ => Kind::Directory,
        };
        let is_directory = matches!(other, Kind::Directory);
        if !path.is_empty() {
            conflicts.put(path, other, Meta::new(0o755));
            if is_directory {
                let inside = [path.as_slice(), b"/inside"].concat();
                conflicts.put(&inside, Kind::Regular(Content::Bytes(b"inside".to_vec())), Meta::new(0o644));
            }
        }
    }
    vec![everything.to_layer(), conflicts.to_layer(), random.clone()]
}

#[test]
fn privileged_merged_layers_stack_as_separate_ones() {
    if !require::mounts() {
        return;
    }
    mounts::in_private_namespace(|| {
        let strategy = (stacks(Limits::small(), 4), fixtures::arbitrary::trees(Limits::small()));
        proptest!(cases(25), |((stack, random) in strategy)| {
            check_mounts(&stack, &lowers(&stack, &random.to_layer()))?;
        });
    });
}

#[test]
fn privileged_merged_loose_layers_stack_as_separate_ones() {
    if !require::mounts() {
        return;
    }
    mounts::in_private_namespace(|| {
        let strategy = (stacks(Limits::small_and_loose(), 4), fixtures::arbitrary::trees(Limits::small()));
        proptest!(cases(25), |((stack, random) in strategy)| {
            check_mounts(&stack, &lowers(&stack, &random.to_layer()))?;
        });
    });
}

/// What the kernel shows of packed compressed layers is what it shows of them one by one.
#[test]
fn privileged_packed_compressed_stacks_mount_the_same() {
    if !require::mounts() {
        return;
    }
    mounts::in_private_namespace(|| {
        proptest!(cases(12), |(stack in stacks(Limits { file: 300_000, ..Limits::small() }, 3))| {
            let place = Place::new();
            let all = mixed(&place, &stack);
            let alone = |layer| merge(&place.store, std::slice::from_ref(layer), Options::default());
            let records: Vec<Record> = all.iter().map(alone).collect();
            let packed = merge(&place.store, &all, PACK);
            let lower = tempfile::tempdir_in("/var/tmp").unwrap();
            let (one, _layers) = place.mount_records(&records.iter().collect::<Vec<_>>(), &[lower.path()]);
            let (other, _packed) = place.mount_records(&[&packed], &[lower.path()]);
            let (one, other) = (Snapshot::of(one.path()).unwrap(), Snapshot::of(other.path()).unwrap());
            prop_assert_eq!(diff(&one, &other, &Compare::overlay()), NOTHING, "separate | packed");
        });
    });
}
