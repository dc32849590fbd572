//! Random file systems through a tar, the converter and the kernel, and back.

use crate::support::{Place, cases, reader_differs};
use fixtures::arbitrary::{Limits, trees};
use fixtures::model::Model;
use fixtures::tar::Format;
use fixtures::tree::{Compare, Snapshot, diff};
use fixtures::{mounts, require};
use proptest::prelude::*;
use std::collections::BTreeSet;

/// The converted tree as the kernel shows it is the model's, and our reader says the same.
fn same(model: &Model, format: Format) -> Result<(), TestCaseError> {
    let place = Place::new();
    let tar = place.path("layer.tar");
    std::fs::write(&tar, model.to_layer().to_tar(format)).unwrap();
    let converted = place.convert(&format!("tar:{}", tar.display())).unwrap();
    let record = &converted.layers[0].record;
    prop_assert_eq!(&record.warnings, &[]);
    let mounted = place.mount(record);
    let found = Snapshot::of(mounted.path()).unwrap();
    prop_assert_eq!(diff(&Snapshot::of_model(model), &found, &Compare::exact()), Vec::<String>::new());
    prop_assert_eq!(reader_differs(&place.store, record, &found), Vec::<String>::new());
    Ok(())
}

#[test]
fn privileged_random_trees_are_the_same() {
    if !require::mounts() {
        return;
    }
    mounts::in_private_namespace(|| {
        proptest!(cases(80), |(model in trees(Limits::small()))| same(&model, Format::Pax)?);
    });
}

#[test]
fn privileged_large_random_trees_are_the_same() {
    if !require::mounts() {
        return;
    }
    mounts::in_private_namespace(|| {
        proptest!(cases(20), |(model in trees(Limits::large()))| same(&model, Format::Pax)?);
    });
}

/// What umoci extracted, read as a directory, is what it shows, and byte for byte what the tar became.
#[test]
fn privileged_a_directory_is_converted_as_the_tar_of_it() {
    if !require::mounts() {
        return;
    }
    mounts::in_private_namespace(|| {
        proptest!(cases(30), |(model in trees(Limits::small()))| {
            let place = Place::new();
            let of_tar = place.convert(&place.layout_of(&[model.to_layer()])).unwrap();
            let unpacked = mounts::umoci_unpack(&place.path("oci"), "t").unwrap();
            let of_dir = place.convert(&format!("dir:{}", unpacked.rootfs().display())).unwrap();
            let (of_tar, of_dir) = (&of_tar.layers[0].record, &of_dir.layers[0].record);
            let mounted = place.mount(of_dir);
            let found = Snapshot::of(mounted.path()).unwrap();
            let extracted = Snapshot::of(&unpacked.rootfs()).unwrap();
            prop_assert_eq!(diff(&extracted, &found, &Compare::exact()), Vec::<String>::new());
            let lost = model.paths().iter().any(|(_, node)| model.node(*node).meta.xattrs.values().any(Vec::is_empty))
                || model.node(Model::ROOT).meta.xattrs.values().any(Vec::is_empty);
            // umoci loses empty attributes.
            if !lost {
                prop_assert_eq!((of_dir.metadata, &of_dir.data), (of_tar.metadata, &of_tar.data));
            }
        });
    });
}

/// fsck.erofs 1.5 reads the header of xattrs behind an inode without any, also where the image ends: found by random
/// stacks.
#[test]
fn images_do_not_end_with_an_inode() {
    let mut sizes = BTreeSet::new();
    for count in 25..50 {
        let place = Place::new();
        let tar = place.path("layer.tar");
        let script: String = (0..count).map(|n| format!("b {n} 8:{n} mtime={}\n", n + 5)).collect();
        std::fs::write(&tar, fixtures::tar::build(&script)).unwrap();
        let converted = place.convert(&format!("tar:{}", tar.display())).unwrap();
        sizes.insert(converted.layers[0].record.metadata.size);
    }
    assert!(sizes.len() > 1, "no image was about to need another block: {sizes:?}");
}
