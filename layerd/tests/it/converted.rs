//! Images that the converter made, from OCI layouts to mounted roots and back.

use crate::support::{Place, list, text};
use converter::compress::Compress;
use converter::convert::{Converted, Request, convert_as};
use converter::layer::Options;
use converter::manifest::{self, MANIFEST_MEDIA_TYPE};
use converter::merge::{Options as MergeOptions, merge_layers};
use converter::progress::Silent;
use converter::source::Platform;
use fixtures::mounts;
use fixtures::oci::{Compression, Image, Layer, Layout};
use fixtures::tree::{Compare, Snapshot, assert_same};
use fs3_client::{Store, StoreDir, StoreError};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

const BASE: &str = r#"
    d etc/ 0755 mtime=100.5
    f etc/passwd "root\n" mtime=101
    f etc/removed "x"
    d usr/bin/ 0755 mtime=102
    f usr/bin/tool 4755 size=300K fill=random:1 uid=7 gid=8
    h usr/bin/link -> usr/bin/tool
    s bin -> usr/bin
    d var/cache/ 0700 mtime=103
    f var/cache/old size=10K fill=text:2
    f replaced/inside "x"
    d usr/share/ 0755 mtime=104
    f usr/share/words size=500K fill=text:9
    d / 0755 mtime=1
"#;
const MIDDLE: &str = r#"
    w etc/removed
    d etc/ 0755 mtime=200
    f etc/added "middle"
    f etc/extra size=40K fill=random:5
    x user.note=kept
    d var/cache/ 0711 mtime=201
    o var/cache
    f var/cache/new size=200K fill=random:3
    w replaced
    f replaced "now a file"
    d / 0755 mtime=2
    d var/ 0755 mtime=202
"#;
const TOP: &str = r#"
    f bin/late "behind the link"
    h etc/tool -> usr/bin/tool
    h etc/words -> usr/share/words
    w var/cache/new
    d / 0755 mtime=3
    d var/ 0755 mtime=300
    d var/cache/ 0755 mtime=301
    d etc/ 0755 mtime=302
    d usr/bin/ 0755 mtime=303
    d usr/ 0755 mtime=304
"#;

fn convert(store: &StoreDir, name: &str, source: &Path) -> Converted {
    convert_by(store, name, source, Options::default())
}

fn convert_by(store: &StoreDir, name: &str, source: &Path, options: Options) -> Converted {
    let request = Request {
        source: format!("oci:{}", source.display()).parse().unwrap(),
        platform: Platform::host(),
        options,
        jobs: 2,
        registry: Default::default(),
        dedup: None,
    };
    convert_as(&name.parse().unwrap(), &request, &store.clone().into(), &Silent).unwrap()
}

/// Three layers, each packed its own way, in a layout at `dir`.
fn three_layers(dir: &Path) {
    write(dir, [Compression::Gzip, Compression::Zstd, Compression::None]);
}

fn write(dir: &Path, packed: [Compression; 3]) {
    let layers = [BASE, MIDDLE, TOP].map(Layer::text).into_iter().zip(packed);
    let image = layers.fold(Image::new(), |image, (layer, packed)| image.layer(layer.compression(packed)));
    Layout::new().image("made", image).write(dir).unwrap();
}

/// Asserts that the root shows what umoci extracts, which nothing of ours has touched.
fn assert_like_umoci(place: &Place) {
    // umoci knows no zstd yet.
    let layout = place.path("plain");
    write(&layout, [Compression::None; 3]);
    let unpacked = mounts::umoci_unpack(&layout, "made").unwrap();
    // umoci links to the file below itself, so that all its names there count too; a layer stands alone.
    let options = Compare { groups: false, ..Compare::overlay() };
    let (shown, theirs) = (Snapshot::of(&place.root()).unwrap(), Snapshot::of(&unpacked.rootfs()).unwrap());
    assert_same(&shown, &theirs, &options);
}

#[test]
fn privileged_three_converted_layers() {
    check_three_layers();
}

/// Attached from files and by loop devices, verified, read and unmounted.
pub(crate) fn check_three_layers() {
    let place = Place::new();
    let layout = place.path("oci");
    three_layers(&layout);
    let converted = convert(&place.store, "made:1", &layout);
    assert_eq!(converted.layers.iter().map(|l| l.record.counts.whiteouts).collect::<Vec<_>>(), [0, 1, 1]);
    for attach in ["file", "loop"] {
        let mounted = place.mount(&["made:1", "--attach", attach, "--verify"]).ok();
        assert_eq!(mounted["kind"], "overlay");
        let metadata: Vec<String> =
            converted.layers.iter().map(|layer| layer.record.metadata.digest.to_string()).collect();
        let shown = mounted["layers"].as_array().unwrap().iter();
        assert_eq!(shown.map(|layer| layer["metadata"]["digest"].as_str().unwrap()).collect::<Vec<_>>(), metadata);
        assert_like_umoci(&place);
        assert_eq!(list(place.root().join("var/cache")), [""; 0]);
        assert_eq!(text(place.root().join("usr/bin/late")), "behind the link");
        assert!(fs::write(place.root().join("x"), "").is_err(), "read-only");
        place.umount().ok();
        place.assert_nothing_left();
    }
}

#[test]
fn privileged_three_compressed_layers() {
    check_three_compressed_layers();
}

/// As [`check_three_layers`], compressed: their devices have places in the unified address space.
pub(crate) fn check_three_compressed_layers() {
    for codec in ["lz4", "zstd"] {
        let place = Place::new();
        let layout = place.path("oci");
        three_layers(&layout);
        let compress = Some(Compress { codec: codec.parse().unwrap(), cluster_bits: 16 });
        let options = Options { compress, ..Options::default() };
        let converted = convert_by(&place.store, "made:1", &layout, options);
        let record = &converted.layers[2].record;
        assert_eq!(record.algorithms.iter().map(|a| a.name()).collect::<Vec<_>>(), [codec], "the link to the words");
        assert_eq!(record.data, converted.layers[0].record.data);
        for attach in ["file", "loop"] {
            place.mount(&["made:1", "--attach", attach, "--verify"]).ok();
            assert_like_umoci(&place);
            let words = fs::read(place.root().join("etc/words")).unwrap();
            assert!(words.len() == 500 << 10 && words == fs::read(place.root().join("usr/share/words")).unwrap());
            place.umount().ok();
            place.assert_nothing_left();
        }
    }
}

/// Layers merged into one, whose data is on the devices of all of them; and into two, one over the other.
#[test]
fn privileged_merged_layers_with_all_their_devices() {
    let place = Place::new();
    let layout = place.path("oci");
    three_layers(&layout);
    let codecs = [None, Some("lz4"), Some("zstd")];
    for (number, codec) in codecs.into_iter().enumerate() {
        let compress = codec.map(|codec| Compress { codec: codec.parse().unwrap(), cluster_bits: 16 });
        let name = format!("made:{number}");
        let converted = convert_by(&place.store, &name, &layout, Options { compress, ..Options::default() });
        let layers = converted.image.layers.len();
        let options = MergeOptions::default();
        for (part, run) in [("whole", 0..layers), ("upper", 1..layers)] {
            let store = Store::from(place.store.clone());
            let (record, _) = merge_layers(&converted.image.layers[run.clone()], run.start, options, &store).unwrap();
            let devices = record.data.len();
            assert!(devices > 1, "{devices} devices");
            let mut image = converted.image.clone();
            image.layers.splice(run, [record.to_layer()]);
            let published = place.store.publish_bytes(&image.to_json()).unwrap();
            let descriptor = manifest::descriptor(MANIFEST_MEDIA_TYPE, published.digest, published.size, &[]);
            let name = format!("{part}:{number}");
            place.store.write_ref(&name.parse().unwrap(), &descriptor).unwrap();
            for attach in ["file", "loop"] {
                let mounted = place.mount(&[&name, "--attach", attach, "--verify"]).ok();
                assert_eq!(mounted["layers"].as_array().unwrap().len(), image.layers.len());
                assert_like_umoci(&place);
                place.umount().ok();
                place.assert_nothing_left();
            }
        }
    }
}

/// Attributes of the source that would mean something to overlayfs are stored under other names, which only overlayfs
/// shows as they were: such a layer is no root by itself, even alone.
#[test]
fn privileged_escaped_attributes_show_as_they_were() {
    let place = Place::new();
    let layout = place.path("oci");
    let text = "f plain \"x\"\nd d/\nx trusted.overlay.opaque=y\nf d/file \"y\"";
    Layout::new().image("made", Image::new().layer(Layer::text(text))).write(&layout).unwrap();
    let converted = convert(&place.store, "made:1", &layout);
    assert_eq!(converted.layers[0].record.counts.escaped, 1);
    assert_eq!(place.mount(&["made:1"]).ok()["kind"], "overlay");
    let mut value = [0; 8];
    let got = rustix::fs::getxattr(place.root().join("d"), "trusted.overlay.opaque", &mut value).unwrap();
    assert_eq!(&value[..got], b"y");
    assert!(rustix::fs::getxattr(place.root().join("d"), "trusted.overlay.overlay.opaque", &mut value).is_err());
    place.umount().ok();
    place.assert_nothing_left();
}

#[test]
fn privileged_three_converted_layers_writable() {
    check_three_layers_writable();
}

/// Changed by way of a writable layer, which keeps the changes.
pub(crate) fn check_three_layers_writable() {
    let place = Place::new();
    let layout = place.path("oci");
    three_layers(&layout);
    convert(&place.store, "made:1", &layout);
    let rw = place.path("rw");
    let args = ["made:1", "--rw", rw.to_str().unwrap()];
    place.mount(&args).ok();
    assert_like_umoci(&place);
    let root = place.root();
    let before = Snapshot::of(&root).unwrap();
    fs::write(root.join("etc/passwd"), "changed").unwrap();
    fs::remove_file(root.join("etc/added")).unwrap();
    fs::remove_dir_all(root.join("var")).unwrap();
    fs::create_dir(root.join("var")).unwrap();
    fs::rename(root.join("replaced"), root.join("var/moved")).unwrap();
    let check = || {
        assert_eq!(text(root.join("etc/passwd")), "changed");
        assert_eq!(list(root.join("var")), ["moved"]);
        assert_eq!(text(root.join("var/moved")), "now a file");
        assert!(!root.join("etc/added").exists() && !root.join("replaced").exists());
    };
    check();
    place.umount().ok();
    // The changes are the writable layer's, and there again with it; the image is as it was.
    place.mount(&args).ok();
    check();
    place.umount().ok();
    place.mount(&["made:1"]).ok();
    assert_same(&before, &Snapshot::of(&root).unwrap(), &Compare::overlay());
    place.umount().ok();
    place.assert_nothing_left();
}

/// Cases O03 and O09: commas, colons and backslashes in the paths of source, store and writable layer.
#[test]
fn privileged_o03_o09_converted_into_odd_paths() {
    let odd = "c,o:l\\n b#\u{fc}=x";
    let place = Place::with_store(format!("{odd}/store,1"));
    let layout = place.path(format!("{odd}/oci:made"));
    three_layers(&layout);
    convert(&place.store, "made:1", &layout);
    let rw = place.path(format!("rw {odd}"));
    for attach in ["file", "loop"] {
        place.mount(&["made:1", "--attach", attach]).ok();
        assert_like_umoci(&place);
        place.umount().ok();
        place.mount(&["made:1", "--attach", attach, "--rw", rw.to_str().unwrap()]).ok();
        fs::write(place.root().join(attach), "x").unwrap();
        place.umount().ok();
        place.assert_nothing_left();
    }
}

/// Case O04: a layer whose data the kernel would miss only when it is read.
#[test]
fn privileged_o04_converted_blobs_gone_short_and_wrong() {
    let place = Place::new();
    let layout = place.path("oci");
    three_layers(&layout);
    let converted = convert(&place.store, "made:1", &layout);
    // The top layer links into the bottom one's blob, so the same blob is needed twice.
    let data = converted.layers[0].record.data[0].digest;
    assert_eq!(converted.layers[2].record.data, converted.layers[0].record.data);
    let metadata = converted.layers[1].record.metadata.digest;
    for digest in [data, metadata] {
        let path = place.store.blob_path(&digest);
        let good = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let error = place.mount(&["made:1"]).fails(1);
        assert!(error.contains(&format!("blob {digest} is not in the store")), "{error}");
        for length in [good.len() - 4096, good.len() - 1, 0] {
            fs::write(&path, &good[..length]).unwrap();
            let error = place.mount(&["made:1"]).fails(3);
            assert!(error.contains(&format!("blob {digest} is corrupt: it has {length} bytes")), "{error}");
            fs::remove_file(&path).unwrap();
        }
        let mut wrong = good.clone();
        *wrong.last_mut().unwrap() ^= 1;
        fs::write(&path, &wrong).unwrap();
        let error = place.mount(&["made:1", "--verify"]).fails(3);
        assert!(error.contains(&format!("blob {digest} is corrupt: its contents have sha256:")), "{error}");
        place.assert_nothing_left();
        // Converting again mends what has the wrong length, and leaves what it cannot tell.
        fs::write(&path, &good[..good.len() - 1]).unwrap();
        convert(&place.store, "made:1", &layout);
        assert!(fs::read(&path).unwrap() == good);
    }
    place.mount(&["made:1", "--verify"]).ok();
    assert_like_umoci(&place);
    place.umount().ok();
    place.assert_nothing_left();
}

/// Case O12: one cleans up and removes an image without a pause while fifty others are made.
#[test]
fn privileged_o12_cleaning_up_beside_fifty_conversions() {
    let place = Place::new();
    let layout = |n: usize| {
        let dir = place.path(format!("oci{n}"));
        // Half of what they hold is the same, so that they also meet under final names.
        let shared = Layer::text(&format!("f shared size=90K fill=random:{}\nf small{0} \"x\"", n % 5));
        let own = Layer::text(&format!("f own size=70K fill=random:{}\nw shared", 1000 + n));
        let image = Image::new().layer(shared.compression(Compression::Gzip)).layer(own);
        Layout::new().image("made", image).write(&dir).unwrap();
        dir
    };
    let layouts: Vec<_> = (0..50).map(layout).collect();
    let victim = layout(99);
    let (done, next) = (AtomicBool::new(false), AtomicUsize::new(0));
    let (mut rounds, mut alive) = (0, 0);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..10)
            .map(|_| {
                scope.spawn(|| {
                    loop {
                        let n = next.fetch_add(1, Ordering::Relaxed);
                        let Some(layout) = layouts.get(n) else { return };
                        // As the program does: a handle of its own, and a sweep first.
                        let store = StoreDir::open(place.store.root()).unwrap();
                        store.sweep().unwrap();
                        convert(&store, &format!("image:{n}"), layout);
                    }
                })
            })
            .collect();
        let cleaner = scope.spawn(|| {
            let (mut rounds, mut alive) = (0, 0);
            while !done.load(Ordering::Relaxed) {
                convert(&place.store, "victim:1", &victim);
                let swept = place.store.sweep().unwrap();
                alive += swept.alive;
                // A file may go between its creation and its lock; its writer sees that and makes another.
                assert_eq!(swept.foreign, 0);
                match place.store.remove_ref(&"victim:1".parse().unwrap()) {
                    Ok(()) | Err(StoreError::NoSuchRef { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
                rounds += 1;
            }
            (rounds, alive)
        });
        let results: Vec<_> = workers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        done.store(true, Ordering::Relaxed);
        (rounds, alive) = cleaner.join().unwrap();
        assert!(results.iter().all(Result::is_ok), "a conversion failed");
    });
    assert!(rounds > 5 && alive > 0, "{rounds} rounds saw {alive} living files: they never met");
    assert_eq!(place.store.list_refs().unwrap().len(), 50);
    assert_eq!(place.store.sweep().unwrap(), fs3_client::Swept::default(), "nothing is left in between");
    for n in [0, 7, 31, 49] {
        place.mount(&[&format!("image:{n}"), "--verify"]).ok();
        assert_eq!(list(place.root()), ["own".to_owned(), format!("small{}", n % 5)]);
        assert_eq!(fs::metadata(place.root().join("own")).unwrap().len(), 70 << 10);
        place.umount().ok();
    }
    place.assert_nothing_left();
}

/// M04: an image without layers is an empty root, to read and to write.
#[test]
fn privileged_m04_an_image_without_layers_is_an_empty_root() {
    if !fixtures::require::mounts() {
        return;
    }
    let place = Place::new();
    let source = place.path("oci");
    Layout::new().image("t", Image::new()).write(&source).unwrap();
    convert(&place.store, "empty:1", &source);
    assert_eq!(place.mount(&["empty:1"]).ok()["kind"], "overlay");
    assert_eq!(list(place.root()), [""; 0]);
    place.umount().ok();
    let rw = place.path("rw");
    place.mount(&["empty:1", "--rw", rw.to_str().unwrap()]).ok();
    fs::write(place.root().join("new"), "x").unwrap();
    assert_eq!(list(place.root()), ["new"]);
    place.umount().ok();
    place.assert_nothing_left();
}
