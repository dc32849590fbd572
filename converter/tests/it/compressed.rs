//! Compressed layers: what the kernel reads back, and what is said of them.

use crate::program::{convert, in_shell, layer, layers, report, run, said, signal};
use crate::support::{Hashed, Place, cases, compress, convert_by, list, reader_differs};
use converter::convert::Converted;
use converter::layer::Options;
use converter::manifest::{Image, digest_of};
use converter::verify::{Report, verify};
use fixtures::arbitrary::{Limits, stacks, trees};
use fixtures::content::{Content, splitmix64};
use fixtures::model::{Kind, Meta, Model};
use fixtures::oci::Compression;
use fixtures::tar::Format;
use fixtures::tree::{Compare, Snapshot, diff};
use fixtures::{mounts, require};
use fs3_client::Store;
use proptest::prelude::*;
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Command;

const CODECS: [&str; 3] = ["lz4", "lz4hc:9", "zstd:3"];
const CLUSTERS: [u8; 2] = [16, 17];
const NOTHING: Vec<String> = Vec::new();

/// Bytes of all kinds in turn, a cluster of each.
fn mixed(seed: u64, size: u64, cluster: u64) -> Content {
    let mut bytes = Vec::new();
    let mut turn = 0;
    while (bytes.len() as u64) < size {
        let part = match turn % 4 {
            0 => Content::Text { seed: seed + turn, size: cluster },
            1 => Content::Random { seed: seed + turn, size: cluster },
            2 => Content::Repeat { byte: 0, size: cluster },
            // A cluster that many files have.
            _ => Content::Text { seed: 7, size: cluster },
        };
        bytes.extend(part.to_vec());
        turn += 1;
    }
    bytes.truncate(usize::try_from(size).unwrap());
    Content::Bytes(bytes)
}

/// Files of all sizes around those of blocks and clusters, with contents of all kinds.
fn awkward(cluster_bits: u8) -> Model {
    let cluster = 1u64 << cluster_bits;
    let mut model = Model::new();
    let mut sizes = BTreeSet::from([0, 1, 4031, 4032, 4033, 4095, 4096, 4097, 8191, 8192, 8193, 12_288, 20_000]);
    for around in [cluster / 2, cluster, cluster * 3 / 2, cluster * 2, cluster * 5 / 2, cluster * 5] {
        sizes.extend([around - 4096, around - 1, around, around + 1, around + 4095, around + 4096, around + 4097]);
    }
    for size in sizes {
        let contents = [
            ("text", Content::Text { seed: 7, size }),
            ("random", Content::Random { seed: size, size }),
            ("zero", Content::Repeat { byte: 0, size }),
            ("one", Content::Repeat { byte: 1, size }),
            ("mixed", mixed(size, size, cluster)),
        ];
        for (kind, content) in contents {
            let mut meta = Meta::new(0o644);
            if size % 3 == 0 {
                meta.xattrs.insert(b"user.x".to_vec(), vec![1; usize::try_from(size % 90).unwrap()]);
            }
            model.put(format!("{kind}-{size}").as_bytes(), Kind::Regular(content), meta);
        }
    }
    model
}

/// Converts `model`, compressed, and compares the kernel's view with it and with our reader's.
fn same(model: &Model, codec: &str, cluster_bits: u8) -> Result<(Place, Converted), TestCaseError> {
    let place = Place::new();
    let tar = place.path("layer.tar");
    std::fs::write(&tar, model.to_layer().to_tar(Format::Pax)).unwrap();
    let converted = place.convert_compressed(&format!("tar:{}", tar.display()), codec, cluster_bits);
    let record = &converted.layers[0].record;
    prop_assert_eq!(&record.warnings, &[]);
    let mounted = place.mount(record);
    let found = Snapshot::of(mounted.path()).unwrap();
    prop_assert_eq!(diff(&Snapshot::of_model(model), &found, &Compare::exact()), NOTHING);
    prop_assert_eq!(reader_differs(&place.store, record, &found), NOTHING);
    prop_assert_eq!(deep(&place.store, &converted).problems, &[]);
    drop(mounted);
    Ok((place, converted))
}

fn deep(store: &Store, converted: &Converted) -> Report {
    verify(store, &converted.image, true, &mut |_| ())
}

#[test]
fn privileged_awkward_sizes_through_the_kernel() {
    if !require::mounts() {
        return;
    }
    mounts::in_private_namespace(|| {
        for cluster_bits in CLUSTERS {
            let model = awkward(cluster_bits);
            for codec in CODECS {
                let (place, converted) = same(&model, codec, cluster_bits).unwrap();
                let record = &converted.layers[0].record;
                assert_eq!(record.algorithms[0].name(), codec.split([':', 'h']).next().unwrap(), "{codec}");
                assert!(record.counts.compressed_files > 80 && record.counts.deduplicated_bytes > 1 << 20);
                // Reads at random places of a cold mount.
                let mounted = place.mount(record);
                let mut random = (0u64..).map(splitmix64);
                let mut next = |below: u64| random.next().unwrap() % below;
                let paths: Vec<_> = model.paths().into_iter().filter(|(path, _)| !path.is_empty()).collect();
                for _ in 0..2000 {
                    let (path, node) = &paths[usize::try_from(next(paths.len() as u64)).unwrap()];
                    let Kind::Regular(content) = &model.node(*node).kind else { continue };
                    let size = content.size();
                    if size == 0 {
                        continue;
                    }
                    let at = next(size);
                    let len = usize::try_from((next(200_000) + 1).min(size - at)).unwrap();
                    let (mut want, mut found) = (vec![0; len], vec![0; len]);
                    content.fill(at, &mut want);
                    let file = mounted.path().join(std::str::from_utf8(path).unwrap());
                    std::fs::File::open(&file).unwrap().read_exact_at(&mut found, at).unwrap();
                    assert!(want == found, "{codec} {cluster_bits}: {} at {at}, {len} bytes", file.display());
                }
            }
        }
    });
}

/// On a stock kernel: sizes around those of clusters, and random trees.
#[test]
fn vm_compressed_layers_are_the_same() {
    require::vm();
    mounts::in_private_namespace(|| {
        for (codec, cluster_bits) in [("lz4", 16), ("lz4hc:9", 17), ("zstd:3", 16), ("zstd:3", 17)] {
            let whole = awkward(cluster_bits);
            // The guest is emulated: every third file will do.
            let mut some = Model::new();
            for (path, node) in whole.paths().into_iter().step_by(3).filter(|(path, _)| !path.is_empty()) {
                let node = whole.node(node);
                some.put(&path, node.kind.clone(), node.meta.clone());
            }
            let (_, converted) = same(&some, codec, cluster_bits).unwrap();
            assert!(converted.layers[0].record.counts.compressed_files > 20);
        }
        proptest!(cases(3), |(model in trees(Limits { file: 300_000, ..Limits::small() }), codec in 0..3usize)| {
            same(&model, CODECS[codec], 16)?;
        });
    });
}

#[test]
fn privileged_random_trees_are_the_same_when_compressed() {
    if !require::mounts() {
        return;
    }
    mounts::in_private_namespace(|| {
        proptest!(cases(12), |(model in trees(Limits::large()), codec in 0..3usize, bits in 16..=17u8)| {
            same(&model, CODECS[codec], bits)?;
        });
    });
}

/// Layers over each other, with hard links into compressed files of lower layers.
#[test]
fn privileged_compressed_stacks_under_overlayfs() {
    if !require::mounts() {
        return;
    }
    mounts::in_private_namespace(|| {
        let limits = Limits { file: 300_000, ..Limits::small_and_loose() };
        proptest!(cases(24), |(layers in stacks(limits, 4), codec in 0..3usize)| {
            let place = Place::new();
            let converted = place.convert_compressed(&place.layout_of(&layers), CODECS[codec], 16);
            let (overlay, _layers) = place.mount_all(&converted);
            let found = Snapshot::of(overlay.path()).unwrap();
            let options = if layers.len() == 1 { Compare::exact() } else { Compare::overlay() };
            prop_assert_eq!(diff(&Snapshot::of_model(&Model::merged(&layers)), &found, &options), NOTHING);
            prop_assert_eq!(deep(&place.store, &converted).problems, &[]);
        });
    });
}

/// What a link brings from below is as it is there: compressed, plain among compressed, and chunked.
#[test]
fn privileged_links_into_a_compressed_layer() {
    if !require::mounts() {
        return;
    }
    mounts::in_private_namespace(|| {
        for codec in CODECS {
            let place = Place::new();
            let mut below = Model::new();
            for (name, content) in [
                ("text", Content::Text { seed: 1, size: 333_333 }),
                ("mixed", mixed(1, 500_001, 65_536)),
                ("random", Content::Random { seed: 1, size: 200_000 }),
                ("zero", Content::Repeat { byte: 0, size: 200_000 }),
                ("small", Content::Text { seed: 1, size: 100 }),
            ] {
                below.put(name.as_bytes(), Kind::Regular(content), Meta::new(0o644));
            }
            let links =
                ["text", "mixed", "random", "zero", "small"].map(|name| format!("h l/{name} -> {name}\n")).concat();
            let above = fixtures::oci::Layer::tar(fixtures::tar::build(&links));
            let source = place.layout(&[fixtures::oci::Layer::tar(below.to_layer().to_tar(Format::Pax)), above]);
            let converted = place.convert_compressed(&source, codec, 16);
            let (lower, upper) = (&converted.layers[0].record, &converted.layers[1].record);
            assert_eq!(upper.data, lower.data, "nothing is copied");
            assert_eq!(upper.algorithms, lower.algorithms);
            let (lower, upper) = (place.mount(lower), place.mount(upper));
            let read = |path: std::path::PathBuf| std::fs::read(path).unwrap();
            for name in ["text", "mixed", "random", "zero", "small"] {
                let want = read(lower.path().join(name));
                assert!(
                    want == read(upper.path().join("l").join(name)) && want == read(upper.path().join(name)),
                    "{name}"
                );
            }
            assert_eq!(deep(&place.store, &converted).problems, []);
        }
    });
}

/// A program is mapped into memory, page by page.
#[test]
fn privileged_a_program_runs_from_a_compressed_layer() {
    if !require::mounts() {
        return;
    }
    mounts::in_private_namespace(|| {
        let program = std::fs::read("/bin/sh").unwrap();
        for codec in CODECS {
            let mut model = Model::new();
            model.put(b"sh", Kind::Regular(Content::Bytes(program.clone())), Meta::new(0o755));
            let (place, converted) = same(&model, codec, 17).unwrap();
            let mounted = place.mount(&converted.layers[0].record);
            let output = Command::new(mounted.path().join("sh")).args(["-c", "echo $((6 * 7))"]).output().unwrap();
            assert_eq!(String::from_utf8_lossy(&output.stdout), "42\n", "{codec}");
        }
    });
}

/// Holes of any size: those of a file of which little is left stay holes, and the file plain.
#[test]
fn privileged_sparse_files() {
    if !require::mounts() {
        return;
    }
    mounts::in_private_namespace(|| {
        let place = Place::new();
        let dir = place.path("root");
        std::fs::create_dir(&dir).unwrap();
        let make = |name: &str, size: u64, pieces: &[(u64, Vec<u8>)]| {
            let file = std::fs::File::create(dir.join(name)).unwrap();
            file.set_len(size).unwrap();
            for (at, bytes) in pieces {
                file.write_all_at(bytes, *at).unwrap();
            }
        };
        let text = |seed, size| Content::Text { seed, size }.to_vec();
        make("terabytes", 5 << 40, &[((3 << 40) + 77, text(1, 90_000)), ((5 << 40) - 1, vec![1])]);
        make("gigabytes", 9 << 30, &[(0, text(2, 10_000)), (4 << 30, text(3, 70_000)), ((9 << 30) - 5, vec![2; 5])]);
        make("hole", 300 << 20, &[]);
        make("some", 3 << 20, &[(1 << 20, text(4, 1 << 20))]);
        make("end", 1_000_000, &[(999_999, vec![9])]);
        for codec in CODECS {
            let source = format!("dir:{}", dir.display());
            let converted = place.convert_compressed(&source, codec, 16);
            let record = &converted.layers[0].record;
            assert_eq!(record.counts.compressed_files, 2, "some and end");
            // Most of it are the indexes of the largest file, whose chunks have 1 MiB.
            assert!(record.metadata.size < 48 << 20 && record.data[0].size < 4 << 20, "{record:?}");
            let mounted = place.mount(record);
            for (name, at, len) in [
                ("terabytes", 3 << 40, 100_000),
                ("terabytes", (5 << 40) - 70_000, 70_000),
                ("gigabytes", 0, 200_000),
                ("gigabytes", (4 << 30) - 70_000, 200_000),
                ("gigabytes", (9 << 30) - 70_000, 70_000),
                ("hole", 5 << 20, 100_000),
                ("some", 0, 3 << 20),
                ("end", 0, 1_000_000),
            ] {
                let read = |root: &Path| {
                    let mut bytes = vec![0; len];
                    std::fs::File::open(root.join(name)).unwrap().read_exact_at(&mut bytes, at).unwrap();
                    bytes
                };
                assert!(read(&dir) == read(mounted.path()), "{codec}: {name} at {at}");
                let size = |root: &Path| std::fs::metadata(root.join(name)).unwrap().len();
                assert_eq!(size(&dir), size(mounted.path()));
            }
        }
    });
}

#[test]
fn threads_and_jobs_do_not_show_in_compressed_blobs() {
    let place = Place::new();
    let source = place.layout(&layers(70, 40));
    for codec in ["lz4", "zstd"] {
        let blobs = |settings: &str, jobs: &str| {
            let place = Place::new();
            let mut command = convert(&source, place.store.local_dir().unwrap().root(), "a:b");
            command.args(["--compress", codec, "--cluster", "64KiB", "--jobs", jobs]);
            report(&in_shell(settings, &command).output().unwrap());
            let names: Vec<String> = Hashed::all(&place.store).names().into_iter().map(ToOwned::to_owned).collect();
            assert_eq!(list(&place.store.scratch()), [""; 0]);
            names
        };
        let expected = blobs("true", "1");
        for (settings, jobs) in [("true", "2"), ("true", "8"), ("taskset -p -c 0 $$ >/dev/null", "1")] {
            assert_eq!(blobs(settings, jobs), expected, "{codec}, {settings}, --jobs {jobs}");
        }
    }
}

#[test]
fn compressed_converters_killed_at_any_instant() {
    let place = Place::new();
    let source = place.layout(&layers(1, 40));
    let attempt = |store: &Path, inline_max: u64| {
        let mut command = convert(&source, store, "killed:x");
        command.args(["--compress", "zstd", "--inline-max", &inline_max.to_string()]);
        command
    };
    let began = std::time::Instant::now();
    run(&mut attempt(place.store.local_dir().unwrap().root(), 1));
    let mut whole = began.elapsed();
    let mut hashed = Hashed::default();
    let mut killed = 0;
    for round in 0..40u64 {
        let mut child = attempt(place.store.local_dir().unwrap().root(), 2 + round / 4).spawn().unwrap();
        std::thread::sleep(whole * u32::try_from(splitmix64(round) % 900).unwrap() / 1000);
        signal(&child, Signal::KILL);
        if child.wait().unwrap().signal() == Some(9) {
            killed += 1;
        } else {
            // It was done before: the machine was busier when the length was taken.
            whole = whole * 3 / 4;
        }
        hashed.assert_sound(&place.store);
    }
    assert!(killed >= 10, "only {killed} were killed");
    let other = Place::new();
    let expected = run(&mut attempt(other.store.local_dir().unwrap().root(), 3));
    assert_eq!(run(&mut attempt(place.store.local_dir().unwrap().root(), 3))["manifest"], expected["manifest"]);
}

#[test]
fn damage_is_found_and_named() {
    let place = Place::new();
    let source = place.layout(&[layer(3, 40, Compression::None)]);
    let options = Options { compress: Some(compress("zstd", 16)), ..Options::default() };
    let converted = convert_by(&place.store, &source, 2, options).unwrap();
    assert_eq!(deep(&place.store, &converted).problems, []);
    let blob = place.store.local_dir().unwrap().blob_path(&converted.layers[0].record.data[0].digest);
    let good = std::fs::read(&blob).unwrap();
    let mut bad = good.clone();
    let at = bad.len() / 2 + 4000;
    bad[at] ^= 0x10;
    std::fs::remove_file(&blob).unwrap();
    std::fs::write(&blob, &bad).unwrap();
    let found = deep(&place.store, &converted);
    let texts: Vec<&str> = found.problems.iter().map(|problem| problem.what.as_str()).collect();
    assert_eq!(texts.len(), 2, "{texts:#?}");
    assert!(texts[0].starts_with("the blob is corrupt"), "{texts:#?}");
    assert!(texts[1].starts_with("the chunk of blocks ") && texts[1].ends_with("does not match the chunk table"));
    let output = Command::new(env!("CARGO_BIN_EXE_dsec-convert"))
        .args(["verify", "--deep"])
        .arg(place.store.local_dir().unwrap().root())
        .arg("t:t")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
}

#[test]
fn what_the_program_says_of_compressed_layers() {
    let place = Place::new();
    let source = place.layout(&[layer(3, 40, Compression::None)]);
    let compressed = |codec: &str, cluster: &str| {
        let mut command = convert(&source, place.store.local_dir().unwrap().root(), "a:b");
        command.args(["--compress", codec, "--cluster", cluster]);
        command
    };
    let plain = run(&mut convert(&source, place.store.local_dir().unwrap().root(), "a:plain"));
    let zstd = run(&mut compressed("zstd", "64KiB"));
    let layer = &zstd["layers"][0];
    assert_eq!((&layer["reused"], &layer["compression"][0]), (&false.into(), &"zstd".into()));
    let number = |value: &serde_json::Value| value.as_u64().unwrap();
    let (before, after) = (number(&layer["compressed_plain_bytes"]), number(&layer["compressed_stored_bytes"]));
    assert!(after * 2 < before && number(&layer["compressed_files"]) > 10, "{layer:#}");
    assert_eq!(zstd["totals"]["compressed_stored_bytes"], after);
    assert!(number(&zstd["totals"]["data_bytes"]) < number(&plain["totals"]["data_bytes"]));
    assert_eq!(plain["layers"][0]["compression"].as_array().unwrap().len(), 0);
    // Each choice is a layer of its own, and is found again.
    for (codec, cluster, reused) in [("zstd:3", "64KiB", true), ("zstd:4", "64KiB", false), ("zstd", "128KiB", false)] {
        assert_eq!(run(&mut compressed(codec, cluster))["layers"][0]["reused"], reused, "{codec} {cluster}");
    }
    for (codec, cluster, words) in [
        ("zstd:99", "64KiB", "zstd has levels 1 to 22, not `99`"),
        ("gzip", "64KiB", "`gzip` is not lz4, lz4hc[:LEVEL] or zstd[:LEVEL]"),
        ("lz4", "4KiB", "clusters have 64KiB or 128KiB"),
    ] {
        let output = compressed(codec, cluster).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(said(&output).contains(words), "{}", said(&output));
    }
    // The manifest and the image say it, too.
    run(&mut compressed("lz4", "128KiB"));
    let descriptor = place.store.read_ref(&"a:b".parse().unwrap()).unwrap();
    let manifest = place.store.read_blob(&digest_of(&descriptor).unwrap(), descriptor.size()).unwrap();
    let image = Image::from_json(&manifest).unwrap();
    let annotations = image.layers[0].metadata.annotations().clone().unwrap();
    assert_eq!(annotations["dev.dsec.compression"], "lz4");
    let inspect = |arguments: &[&std::ffi::OsStr]| {
        let output = Command::new(env!("CARGO_BIN_EXE_dsec-convert")).arg("inspect").args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let text = inspect(&[place.store.local_dir().unwrap().root().as_ref(), "a:b".as_ref()]);
    assert!(text.contains("  compression  lz4\n"), "{text}");
    let metadata = place.store.local_dir().unwrap().blob_path(&digest_of(&image.layers[0].metadata).unwrap());
    let text = inspect(&[metadata.as_ref(), "--tree".as_ref()]);
    assert!(text.contains("least kernel  5.16\n") && text.contains(" lz4"), "{text}");
    let zstd =
        place.store.local_dir().unwrap().blob_path(&layer["metadata"]["digest"].as_str().unwrap().parse().unwrap());
    assert!(inspect(&[zstd.as_ref()]).contains("least kernel  6.10\n"));
}

/// Where nothing of a layer could be compressed, its blob is still one of clusters: `verify` must not measure it by the
/// rules of plain ones.
#[test]
fn incompressible_layers_verify() {
    for sizes in [&[1_000_000, 131_072][..], &[70_000, 1_048_576, 5000, 200_000]] {
        let place = Place::new();
        let files = sizes.iter().zip(0..).map(|(size, n)| format!("f {n} size={size} fill=random:{n}\n"));
        let layer = fixtures::oci::Layer::text(&files.collect::<String>());
        let converted = place.convert_compressed(&place.layout(&[layer]), "zstd", 16);
        let record = &converted.layers[0].record;
        assert!(record.algorithms.is_empty(), "it was meant to stay plain");
        crate::support::judge(&place.store, record);
        let merged = crate::support_merge::merge(
            &place.store,
            &crate::support_merge::layers(&converted),
            converter::merge::Options { pack: true, ..Default::default() },
        );
        crate::support::judge(&place.store, &merged);
        Hashed::all(&place.store).assert_sound(&place.store);
    }
}
