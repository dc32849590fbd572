//! Whiteouts of real images, and of those that broke other converters: cases W01 to W10.

use crate::support::convert_by;
use crate::support_cases::{BOTH, Case, assert_same_overlay, assert_text, mount, node, paths};
use converter::layer::Options;
use converter::manifest::OverlayXattrs;
use fixtures::oci::{Compression, Layer};
use fixtures::tree::Kind;
use fixtures::{mounts, require};
use fs3_client::Store;

#[test]
fn privileged_w01_opaque_marker_anywhere_in_its_layer() {
    if !require::mounts() {
        return;
    }
    let lower = "d d/ 0700 uid=1 mtime=1\nf d/old\nf d/sub/old";
    let (dir, new, opaque) = ("d d/ 0750 uid=7 gid=8 mtime=5", "f d/new \"n\"", "o d");
    let mut images = Vec::new();
    for upper in [[opaque, dir, new], [dir, opaque, new], [dir, new, opaque], [new, opaque, dir], [opaque, new, dir]] {
        let case = Case::new(&[lower, &upper.join("\n")]);
        let tree = case.assert_as_umoci();
        assert_eq!(paths(&tree), ["d", "d/new"]);
        assert_text(&tree, "d/new", "n");
        let d = node(&tree, "d");
        assert_eq!((d.mode, d.uid, d.gid, d.mtime.secs), (0o750, 7, 8, 5), "the upper layer's own");
        images.push(case.record(1).metadata);
    }
    assert!(images.iter().all(|image| *image == images[0]), "the order shows: {images:?}");
}

#[test]
fn privileged_w01_opaque_marker_of_the_root() {
    if !require::mounts() {
        return;
    }
    for overlay in BOTH {
        let case = Case::in_namespace(overlay, &["f old\nf d/old", "f d/new\no ."]);
        assert_eq!(paths(&case.tree()), ["d", "d/new"]);
    }
}

#[test]
fn privileged_w02_opaque_lost_in_three_layers() {
    if !require::mounts() {
        return;
    }
    let (old, new) = ("f dir/old.txt \"old\"", "f dir/new.txt \"new\"");
    let opaque_dir = "d dir/ 0711\no dir";
    let stacks: [&[&str]; 6] = [
        &[old, "o dir", new],
        &[old, "o dir", "f elsewhere", new],
        &[old, opaque_dir, new],
        &[old, opaque_dir, "d other/", "d dir/ 0700\nf dir/new.txt \"new\""],
        &[old, "f dir/older.txt", "o dir", new],
        &[old, "f elsewhere", "o dir\nf dir/between.txt", "f elsewhere", "w dir/between.txt", new],
    ];
    for overlay in BOTH {
        for stack in stacks {
            let tree = Case::in_namespace(overlay, stack).assert_as_umoci();
            assert_text(&tree, "dir/new.txt", "new");
            let inside = node(&tree, "dir").children.len();
            assert_eq!(inside, 1, "{overlay:?} {stack:?}: {:?}", paths(&tree));
        }
    }
}

#[test]
fn privileged_w03_whiteouts_are_of_their_layer() {
    if !require::mounts() {
        return;
    }
    let tree = Case::new(&["f f \"1\"", "w f", "f f \"3\""]).assert_as_umoci();
    assert_text(&tree, "f", "3");
    let tree = Case::new(&["f d/a", "o d", "f d/b"]).assert_as_umoci();
    assert_eq!(paths(&tree), ["d", "d/b"]);
    // Gone, there, gone, there again, as something else each time.
    let tree =
        Case::new(&["f x", "w x", "d x/\nf x/1", "w x", "s x -> y", "w x", "d x/ 0700\nf x/2"]).assert_as_umoci();
    assert_eq!(paths(&tree), ["x", "x/2"]);
    // In one layer: what it removes is below, what it has is its own.
    let tree = Case::new(&["f a \"1\"\nf d/old", "f a \"2\"\nw a\nw d\nf d/new"]).tree();
    assert_eq!(paths(&tree), ["a", "d", "d/new"]);
    assert_text(&tree, "a", "2");
}

#[test]
fn privileged_w03_a_directory_removed_and_made_again_owes_nothing_to_the_old_one() {
    if !require::mounts() {
        return;
    }
    for overlay in BOTH {
        // umoci agrees, since the marker comes first.
        let old = "d d/ 0700 uid=5 gid=6 mtime=7\nx user.mime=x\nf d/old";
        let tree = Case::in_namespace(overlay, &[old, "w d\nf d/new"]).assert_as_umoci();
        assert_eq!(paths(&tree), ["d", "d/new"]);
        let d = node(&tree, "d");
        assert_eq!((d.mode, d.uid, d.xattrs.len()), (0o755, 0, 0));
        let through = "d e/\nf e/kept\ns d -> e";
        let tree = Case::in_namespace(overlay, &[through, "w d\nf d/new"]).assert_as_umoci();
        assert_eq!(paths(&tree), ["d", "d/new", "e", "e/kept"]);
        assert_eq!(node(&tree, "d").kind, Kind::Directory);
        // An opaque marker alone removes only what is inside.
        let tree = Case::in_namespace(overlay, &[old, "o d\nf d/new"]).assert_as_umoci();
        assert_eq!((node(&tree, "d").mode, node(&tree, "d").uid), (0o700, 5));
    }
}

#[test]
fn privileged_w04_whiteout_below_a_parent_listed_later() {
    if !require::mounts() {
        return;
    }
    let lower = ["d root/\nf root/dirA/dirB/fileA", "w root/dirA"];
    let top = "w root/dirA/dirB/fileA\nd root/\nd root/dirA/\nf root/dirA/fileB";
    for overlay in BOTH {
        let case = Case::in_namespace(overlay, &[lower[0], lower[1], top]);
        assert_eq!(paths(&case.tree()), ["root", "root/dirA", "root/dirA/fileB"]);
    }
    // The whole of it in one layer, the removed parent's own marker last.
    let case = Case::new(&[lower[0], &format!("{top}\nw root/dirA")]);
    assert_eq!(paths(&case.tree()), ["root", "root/dirA", "root/dirA/fileB"]);
    // A marker inside what another marker removes adds nothing, in whatever order.
    for upper in
        ["w root/dirA\nw root/dirA/dirB/fileA", "w root/dirA/dirB/fileA\nw root/dirA", "o root/dirA/dirB\nw root/dirA"]
    {
        let case = Case::new(&[lower[0], upper]);
        assert_eq!(paths(&case.tree()), ["root"], "{upper}");
    }
}

#[test]
fn privileged_w05_whiteout_of_what_never_was() {
    if !require::mounts() {
        return;
    }
    let upper = "o var/cache/apt/archives\nw x/y/z";
    for overlay in BOTH {
        let case = Case::in_namespace(overlay, &["f a", upper]);
        assert_eq!(paths(&case.tree()), ["a"]);
        // At the bottom, alone, and twice.
        assert_eq!(paths(&Case::in_namespace(overlay, &[upper]).tree()), Vec::<String>::new());
        assert_eq!(paths(&Case::in_namespace(overlay, &[upper, upper]).tree()), Vec::<String>::new());
        // Beside something that is there, in directories that no layer below has: the markers must not show.
        let stacks: [&[&str]; 3] = [
            &["f a", "d d/\nw d/x\nf d/b"],
            &["d d/\nw d/x\nf d/b"],
            &["f a", "f d/b\nw d/x\nw d/e/y", "w d/never", "d d/\nw d/z"],
        ];
        for stack in stacks {
            let tree = Case::in_namespace(overlay, stack).tree();
            let found: Vec<String> = paths(&tree).into_iter().filter(|path| path != "a").collect();
            assert_eq!(found, ["d", "d/b"], "{overlay:?} {stack:?}");
        }
    }
}

#[test]
fn privileged_w06_whiteout_inside_an_opaque_directory() {
    if !require::mounts() {
        return;
    }
    for overlay in BOTH {
        for upper in ["d d/\no d\nw d/x", "w d/x\nd d/\no d", "w d/x\nw d/e/y\no d", "d d/\no d\nw d/e/y\nw d/x"] {
            let case = Case::in_namespace(overlay, &["f d/x\nf d/e/y", upper]);
            assert_eq!(paths(&case.tree()), ["d"], "{overlay:?} {upper:?}");
            assert_eq!(paths(&case.layer(1)), ["d"], "no 0:0 device under the opaque directory");
        }
        let case = Case::in_namespace(overlay, &["f d/x\nf d/y", "w d\nw d/x\nf d/y \"new\""]);
        assert_eq!(paths(&case.tree()), ["d", "d/y"]);
    }
}

#[test]
fn privileged_w07_other_aufs_names() {
    if !require::mounts() {
        return;
    }
    let lower = "f a\nf etc/e\nf usr/u\nf plnk\nf aufs";
    let upper = "d .wh..wh.plnk/\nf .wh..wh.plnk/12.34\nf .wh..wh.aufs\nf etc/.wh..wh..opaque\nf usr/.wh..wh.opq\n\
        d .wh..wh.orph/ 0700\nf .wh..wh.";
    let case = Case::new(&[lower, upper]);
    let tree = case.tree();
    assert_same_overlay(&tree, &Case::new(&[lower]).tree());
    assert_eq!(paths(&case.layer(1)), Vec::<String>::new());
    assert_eq!((case.record(1).counts.whiteouts, case.record(1).counts.opaques), (0, 0));
}

#[test]
fn privileged_w08_whiteouts_are_judged_by_name() {
    if !require::mounts() {
        return;
    }
    let lower = "f tmp/CERN.repo \"c\"\nf tmp/K \"k\"";
    for upper in [
        "h tmp/.wh.K -> tmp/CERN.repo",
        "f tmp/CERN.repo \"c\"\nh tmp/.wh.K -> tmp/CERN.repo",
        "s tmp/.wh.K -> CERN.repo",
        "d tmp/.wh.K/",
        "d tmp/.wh.K/\nf tmp/.wh.K/inside",
        "f tmp/.wh.K \"ten  bytes\"",
        "f tmp/.wh.K size=100K fill=random:1",
        "c tmp/.wh.K 0:0",
        "p tmp/.wh.K",
    ] {
        let tree = Case::new(&[lower, upper]).tree();
        assert_eq!(paths(&tree), ["tmp", "tmp/CERN.repo"], "{upper}");
        assert_text(&tree, "tmp/CERN.repo", "c");
        assert_eq!(node(&tree, "tmp/CERN.repo").nlink, 1, "{upper}");
    }
}

#[test]
fn privileged_w09_layers_converted_alone_and_in_parallel() {
    if !require::mounts() {
        return;
    }
    let scripts = [
        "d . 0755\nd d/\nf f\nf d/x\nf big size=1M fill=random:1",
        "d . 0755\nd d/\nw f\nw d/x\nf d/y",
        "d . 0755\nw big",
    ];
    let dir = mounts::scratch();
    let alone = Store::create(&dir.path().join("alone")).unwrap();
    let records: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = scripts
            .iter()
            .enumerate()
            .map(|(index, script)| {
                let file = dir.path().join(format!("{index}.tar"));
                std::fs::write(&file, fixtures::tar::build(script)).unwrap();
                let source = format!("tar:{}", file.display());
                let store = &alone;
                scope.spawn(move || convert_by(store, &source, 1, Options::default()).unwrap().layers.remove(0).record)
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let whole = Case::new(&scripts);
    for (index, record) in records.iter().enumerate() {
        assert_eq!(record.metadata, whole.record(index).metadata, "layer {index}");
        assert_eq!(record.data, whole.record(index).data, "layer {index}");
    }
    let records: Vec<_> = records.iter().collect();
    let tree = mount(&alone, &records, OverlayXattrs::Trusted, |root| fixtures::tree::Snapshot::of(root).unwrap());
    assert_eq!(paths(&tree), ["d", "d/y"]);
    assert_same_overlay(&tree, &whole.assert_as_umoci());
}

#[test]
fn privileged_w09_any_number_of_workers() {
    if !require::mounts() {
        return;
    }
    let layers: Vec<Layer> = (0..12)
        .map(|n| {
            let (gone, link) = (n / 2, if n > 0 { format!("h link{n} -> f{}", n - 1) } else { String::new() });
            let gone = if n % 3 == 2 { format!("w d/g{gone}\n") } else { String::new() };
            let script = format!("f f{n} size=20K fill=random:{n}\nf d/g{n} \"{n}\"\n{gone}{link}");
            Layer::text(&script).compression(if n % 2 == 0 { Compression::Gzip } else { Compression::None })
        })
        .collect();
    let case = Case::of(&layers, Options::default()).unwrap();
    case.assert_as_umoci_but_links();
    for jobs in [1, 7] {
        let dir = mounts::scratch();
        let store = Store::create(dir.path()).unwrap();
        let again = convert_by(&store, &case.source(), jobs, Options::default()).unwrap();
        assert_eq!(again.manifest, case.converted.manifest, "{jobs} workers");
    }
}

#[test]
fn privileged_w10_only_the_exact_prefix_of_the_exact_name() {
    if !require::mounts() {
        return;
    }
    let lower = "f test\nf root/test\nf a.wh.b\nf .wherever\nf .wh\nf b.test\nf dir.wh.test/test";
    for overlay in BOTH {
        let tree = Case::in_namespace(overlay, &[lower, "w test"]).assert_as_umoci();
        let left = [".wh", ".wherever", "a.wh.b", "b.test", "dir.wh.test", "dir.wh.test/test", "root", "root/test"];
        assert_eq!(paths(&tree), left);
    }
    let tree = Case::new(&[lower, "w root/test"]).assert_as_umoci();
    assert!(tree.find(b"root/test").is_none() && tree.find(b"test").is_some());
    // In the upper layer they are ordinary too.
    let tree = Case::new(&["f b\nf erever\nf x", lower]).assert_as_umoci();
    assert!(tree.find(b"b").is_some() && tree.find(b"erever").is_some() && tree.find(b".wherever").is_some());
    // Names that begin with a dot or hold the prefix again.
    let tree = Case::new(&["f .hidden\nf ..data\nf kept", "w .hidden\nw ..data"]).assert_as_umoci();
    assert_eq!(paths(&tree), ["kept"]);
}

#[test]
fn w10_a_marker_that_names_nothing_is_refused() {
    for name in [".wh.", ".wh..", ".wh...", "d/.wh."] {
        let Err(error) = Case::of(&[Layer::text(&format!("f {name}"))], Options::default()) else {
            panic!("{name} was taken");
        };
        assert!(error.to_string().contains(&format!("`{name}` is a whiteout that names no file")), "{error}");
    }
}

#[test]
fn privileged_whiteouts_go_where_links_lead() {
    if !require::mounts() {
        return;
    }
    let lower =
        "d usr/lib/ 0711\nf usr/lib/x\nf usr/lib/y\ns lib -> usr/lib\ns l2 -> /lib\nd srv/ 0700\ns up -> srv/../l2";
    for overlay in BOTH {
        for through in ["lib", "l2", "up"] {
            let upper = format!("w {through}/x\nf {through}/z");
            let tree = Case::in_namespace(overlay, &[lower, &upper]).assert_as_umoci();
            assert_eq!(node(&tree, through).kind, Kind::Symlink, "{through}");
            assert_eq!(node(&tree, "usr/lib").children.len(), 2, "{:?}", paths(&tree));
            assert!(tree.find(b"usr/lib/z").is_some() && tree.find(b"usr/lib/y").is_some());
            assert_eq!(node(&tree, "usr/lib").mode, 0o711);
        }
    }
}
