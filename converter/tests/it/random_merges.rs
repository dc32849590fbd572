//! Stacks of random layers, merged: against the plain model, against other orders of merging, and through the kernel.

use crate::support::{Place, cases, reader_differs};
use crate::support_merge::{BOTTOM, PACK, all_runs, assert_associative, layers, merge};
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
