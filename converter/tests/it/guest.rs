//! What a stock kernel, older than most hosts', makes of converted layers: in the guest of the tier `vm`.

use crate::random_stacks::check_stack;
use crate::support::{Place, cases};
use crate::support_cases::{BOTH, Case, assert_text, node, paths};
use fixtures::arbitrary::{Limits, stacks, trees};
use fixtures::model::Model;
use fixtures::tar::Format;
use fixtures::tree::{Compare, Kind, Snapshot, diff};
use fixtures::{mounts, require};
use proptest::prelude::*;
use std::path::{Path, PathBuf};

/// A layer straight from its files, and by loop devices, is the model that it was made from.
fn same_both_ways(model: &Model) -> Result<(), TestCaseError> {
    let place = Place::new();
    let tar = place.path("layer.tar");
    std::fs::write(&tar, model.to_layer().to_tar(Format::Pax)).unwrap();
    let converted = place.convert(&format!("tar:{}", tar.display())).unwrap();
    let record = &converted.layers[0].record;
    let model = Snapshot::of_model(model);
    let by_file = place.mount(record);
    let found = Snapshot::of(by_file.path()).unwrap();
    prop_assert_eq!(diff(&model, &found, &Compare::exact()), Vec::<String>::new(), "from files");
    drop(by_file);

    let data: Vec<PathBuf> =
        record.data.iter().map(|blob| place.store.local_dir().unwrap().blob_path(&blob.digest)).collect();
    let data: Vec<&Path> = data.iter().map(PathBuf::as_path).collect();
    let image = place.store.local_dir().unwrap().blob_path(&record.metadata.digest);
    let (by_loop, loops) = mounts::erofs_by_loop(&image, &data).unwrap();
    prop_assert_eq!(loops.len(), 1 + record.data.len());
    let found = Snapshot::of(by_loop.path()).unwrap();
    prop_assert_eq!(diff(&model, &found, &Compare::exact()), Vec::<String>::new(), "by loop devices");
    Ok(())
}

#[test]
fn vm_layers_are_mounted_from_files_and_by_loop_devices() {
    require::vm();
    mounts::in_private_namespace(|| {
        proptest!(cases(6), |(model in trees(Limits::small()))| same_both_ways(&model)?);
        let limits = Limits { entries: 150, depth: 20, file: 1 << 20, ..Limits::small() };
        proptest!(cases(2), |(model in trees(limits))| same_both_ways(&model)?);
    });
}

#[test]
fn vm_two_layers_with_whiteouts() {
    require::vm();
    let lower = r#"
        d etc/ 0755 mtime=100.5
        f etc/passwd "root\n" mtime=101
        f etc/removed "x"
        f usr/bin/tool 4755 size=300K fill=random:1 uid=7 gid=8
        h usr/bin/link -> usr/bin/tool
        f var/cache/old size=10K fill=text:2
        f replaced/inside "x"
    "#;
    let upper = r#"
        w etc/removed
        f etc/added "upper"
        d var/cache/ 0711 mtime=201
        o var/cache
        f var/cache/new size=200K fill=random:3
        w replaced
        f replaced "now a file"
    "#;
    for overlay in BOTH {
        let case = Case::in_namespace(overlay, &[lower, upper]);
        let tree = case.assert_as_umoci();
        assert_text(&tree, "replaced", "now a file");
        assert_text(&tree, "etc/added", "upper");
        let of = |path: &str| paths(&tree).into_iter().filter(|found| found.starts_with(path)).collect::<Vec<_>>();
        assert_eq!(of("etc/"), ["etc/added", "etc/passwd"], "{overlay:?}");
        assert_eq!(of("var/cache/"), ["var/cache/new"], "{overlay:?}");
        let tool = node(&tree, "usr/bin/tool");
        assert_eq!((tool.mode, tool.uid, tool.gid, tool.size), (0o4755, 7, 8, 300 << 10));
        assert_eq!(node(&tree, "usr/bin/link").group, tool.group);
        // The lower layer alone still has what the upper one hides, and the upper one its whiteout as a device.
        assert!(case.layer(0).find(b"etc/removed").is_some());
        assert_eq!(node(&case.layer(1), "etc/removed").kind, Kind::Char);
    }
}

#[test]
fn vm_random_stacks_are_what_umoci_unpacks() {
    require::vm();
    mounts::in_private_namespace(|| {
        proptest!(cases(8), |(layers in stacks(Limits::small_and_loose(), 4))| check_stack(&layers)?);
    });
}
