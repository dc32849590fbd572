//! Cases of size: files beyond 32 bits (T06, T15) and very many small ones (T17).

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::process::{Command, Stdio};

use fixtures::content::Content;
use fixtures::model::{Change, Kind, Layer, Meta, Model};
use fixtures::mounts;
use fixtures::require;
use fixtures::tar::{self, Time};
use fixtures::tree::{Compare, Snapshot, assert_same};

use crate::support_tar::{Place, digests, dsec_convert_within, report, tool};

const GIB: u64 = 1 << 30;

/// What a conversion may have in memory, in bytes, whatever the size of its files.
const MEMORY: u64 = 64 << 20;

/// A file with bytes on both sides of every limit, and holes.
fn sparse_file(place: &Place, size: u64) -> Snapshot {
    let tree = place.path("tree");
    std::fs::create_dir(&tree).unwrap();
    let file = File::create(tree.join("f")).unwrap();
    file.set_len(size).unwrap();
    for limit in [0, 2 * GIB, 4 * GIB, 8 * GIB, size] {
        if limit > 0 {
            file.write_all_at(format!("before {limit:10}").as_bytes(), limit - 17).unwrap();
        }
        if limit < size {
            file.write_all_at(format!("behind {limit:10}").as_bytes(), limit).unwrap();
        }
    }
    std::fs::write(tree.join("small"), "after it").unwrap();
    Snapshot::of(&tree).unwrap()
}

/// Nine gigabytes as GNU tar and bsdtar store them without their holes, the size in base-256 and in PAX records.
#[test]
fn privileged_t15_t06_nine_gigabytes_of_holes() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let want = sparse_file(&place, 9 * GIB + 12_345);
    let mut data = Vec::new();
    for (package, program, args) in [
        ("tar", "tar", &["-S", "--format=gnu"][..]),
        ("tar", "tar", &["-S", "--format=posix", "--sparse-version=0.1"]),
        ("tar", "tar", &["-S", "--format=posix"]),
        ("libarchive-tools", "bsdtar", &["--format", "pax"]),
    ] {
        tool(place.dir(), package, program, &[&["-cf", "layer.tar", "-C", "tree"], args, &["."]].concat());
        assert!(std::fs::metadata(place.path("layer.tar")).unwrap().len() < 1 << 20);
        let converted = place.convert("tar:layer.tar").unwrap();
        let shown = place.only_layer(&converted);
        let whole_seconds = args.contains(&"--format=gnu");
        assert_same(&want, &shown, &Compare { mtime: !whole_seconds, ..Compare::exact() });
        let node = shown.find(b"f").unwrap();
        assert_eq!(node.size, 9 * GIB + 12_345);
        let stored: u64 = node.extents.clone().unwrap().iter().map(|(_, length)| length).sum();
        assert!(stored < 1 << 20, "{stored} bytes are data: {:?}", node.extents);
        data.push(digests(&converted.layers[0]).1);
    }
    assert!(data.iter().all(|digests| *digests == data[0]), "one tree, several data blobs: {data:?}");
}

/// The same kind of file with all its zeros in the archive, through a pipe: 8 GiB and more of stream.
#[test]
fn privileged_t15_t06_eight_gigabytes_of_stream() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let want = sparse_file(&place, 8 * GIB + (3 << 20) + 7);
    let mut producer = Command::new(require::tool("tar", "tar"))
        .args(["-C", "tree", "--format=posix", "-cf", "-", "."])
        .current_dir(place.dir())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let stream = producer.stdout.take().unwrap();
    let report = report(&dsec_convert_within(&place, MEMORY, "tar:-").stdin(stream).output().unwrap());
    assert!(producer.wait().unwrap().success());
    let stored = report["totals"]["data_bytes"].as_u64().unwrap();
    assert!(stored < 1 << 20, "{stored} bytes, so zeros were stored");
    assert_same(&want, &mounted(&place, &report), &Compare::exact());
}

/// What the kernel shows of a reported image's only layer.
fn mounted(place: &Place, report: &serde_json::Value) -> Snapshot {
    let layer = &report["layers"][0];
    let blob = |value: &serde_json::Value| {
        place.store.local_dir().unwrap().blob_path(&value["digest"].as_str().unwrap().parse().unwrap())
    };
    let (image, data) = (blob(&layer["metadata"]), blob(&layer["data"][0]));
    mounts::fsck(&image, &[&data]).unwrap();
    let mounted = mounts::erofs(&image, &[&data]).unwrap();
    Snapshot::of(mounted.path()).unwrap()
}

/// What is not a hole: more data than 32 bits count, in one file, in blocks that are all different.
#[test]
fn privileged_t15_four_gigabytes_of_data() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let size = 4 * GIB + (4 << 20) + 5;
    let kind = Kind::Regular(Content::Random { seed: 15, size });
    let meta = Meta { mtime: Time { secs: 4_294_967_296, nanos: 1 }, ..Meta::new(0o600) };
    let layer = Layer { changes: vec![Change::Put(b"f".to_vec(), kind.clone(), meta)] };
    let want = Snapshot::of_model(&Model::merged([&layer]));
    let mut program = dsec_convert_within(&place, MEMORY, "tar:-");
    let mut program = program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut writer = tar::Writer::new(program.stdin.take().unwrap());
    let mut entry = tar::Entry::new("f", tar::Kind::Regular(Content::Random { seed: 15, size }));
    entry.mode = 0o600;
    entry.mtime = Time { secs: 4_294_967_296, nanos: 1 };
    writer.entry(&entry).unwrap();
    drop(writer.finish().unwrap());
    let report = report(&program.wait_with_output().unwrap());
    assert!(report["totals"]["data_bytes"].as_u64().unwrap() > size);
    assert_same(&want, &mounted(&place, &report), &Compare::exact());
}

/// 200,000 files of 0 to 300 bytes in 2,000 directories.
#[test]
fn privileged_t17_very_many_small_files() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let mut changes = Vec::new();
    for directory in 0..2000u64 {
        let path = format!("d{}/e{directory}", directory % 50);
        changes.push(Change::Put(path.clone().into(), Kind::Directory, Meta::new(0o755)));
        for file in 0..100u64 {
            let number = directory * 100 + file;
            let content = Content::Random { seed: number, size: number * 7919 % 301 };
            let path = format!("{path}/file-{number}");
            changes.push(Change::Put(path.into(), Kind::Regular(content), Meta::new(0o644)));
        }
    }
    check(&place, &Layer { changes });
}

/// One directory of 100,000 names: all listed, each found.
#[test]
fn privileged_t17_a_hundred_thousand_names_in_one_directory() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let mut changes = vec![Change::Put(b"many".to_vec(), Kind::Directory, Meta::new(0o755))];
    for number in 0..100_000u32 {
        // In no order, and of many lengths, so that directory blocks end everywhere.
        let number = number * 7919 % 1_000_003;
        let name = format!("many/{number}-{}", "n".repeat((number % 60) as usize));
        let content = Content::Bytes(number.to_le_bytes().to_vec());
        changes.push(Change::Put(name.into(), Kind::Regular(content), Meta::new(0o644)));
    }
    let layer = Layer { changes };
    let shown = check(&place, &layer);
    assert_eq!(shown.find(b"many").unwrap().children.len(), 100_000);
}

fn check(place: &Place, layer: &Layer) -> Snapshot {
    let want = Snapshot::of_model(&Model::merged([layer]));
    let converted = place.tar(&layer.to_tar(tar::Format::Gnu)).unwrap();
    let shown = place.only_layer(&converted);
    assert_same(&want, &shown, &Compare::exact());
    assert_eq!(converted.layers[0].record.counts.inodes, want.len() as u64);
    // Names and inodes are all that is kept in memory.
    let report = report(&dsec_convert_within(place, 2 * MEMORY, "tar:layer.tar").output().unwrap());
    let digest = converted.layers[0].record.metadata.digest.to_string();
    assert_eq!(report["layers"][0]["metadata"]["digest"], digest);
    shown
}
