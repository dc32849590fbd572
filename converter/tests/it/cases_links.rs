//! Hard links: cases L01 to L09.

use crate::support_cases::{
    BOTH, Case, assert_content, assert_one_inode, assert_same_overlay, assert_text, node, paths,
};
use converter::convert::ConvertError;
use converter::layer::{LayerError, Options};
use converter::manifest::{Unresolved, annotation};
use converter::tree::build::TreeError;
use fixtures::content::Content;
use fixtures::oci::Layer;
use fixtures::require;
use fixtures::tree::{Compare, Kind, assert_same};
use std::fmt::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::process::Command;

/// Why layer `index` of these was refused.
#[track_caller]
fn refused(layers: &[&str], index: usize) -> LayerError {
    let layers: Vec<Layer> = layers.iter().map(|script| Layer::text(script)).collect();
    match Case::of(&layers, Options::default()) {
        Err(ConvertError::Layer { index: found, error, .. }) if found == index => *error,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it was converted"),
    }
}

#[test]
fn privileged_l01_the_same_file_twice() {
    if !require::mounts() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("foo"), "content").unwrap();
    let status = Command::new("tar").args(["-cf", "t.tar", "foo", "foo"]).current_dir(dir.path()).status();
    assert!(status.expect("this test needs tar").success());
    let real = Layer::tar(std::fs::read(dir.path().join("t.tar")).unwrap());
    for layer in
        [real, Layer::text("f foo \"content\"\nh foo -> foo"), Layer::text("f foo \"content\"\nh ./foo -> /foo")]
    {
        let case = Case::of(&[layer], Options::default()).unwrap();
        assert_text(&case.tree(), "foo", "content");
        assert_eq!((node(&case.layer(0), "foo").nlink, case.record(0).counts.files), (1, 1));
    }
    // The same link twice, and a link to a link of itself.
    let case = Case::new(&["f a\nh b -> a\nh b -> a\nh a -> b"]);
    assert_eq!(node(&case.layer(0), "a").nlink, 2);
}

#[test]
fn privileged_l02_link_to_a_file_of_a_lower_layer() {
    if !require::mounts() {
        return;
    }
    let big = Content::Random { seed: 3, size: 300_000 };
    let lower = "d d/ 0711 uid=4 mtime=9\nf d/small 0640 \"small\" uid=7 mtime=3.5\nx user.a=1\nf d/big size=300000 fill=random:3\nf d/empty";
    let upper = "h b/small -> d/small\nh b/big -> d/big\nh b/empty -> d/empty\nh big2 -> /d/big";
    for overlay in BOTH {
        let case = Case::in_namespace(overlay, &[lower, upper]);
        let tree = case.assert_as_umoci();
        assert_text(&tree, "b/small", "small");
        assert_content(&tree, "big2", &big);
        assert_one_inode(&tree, &["d/small", "b/small"]);
        assert_one_inode(&tree, &["d/big", "b/big", "big2"]);
        assert_eq!((node(&tree, "d").mode, node(&tree, "d").uid), (0o711, 4), "a parent that it made is the lower one");
        let own = case.layer(1);
        assert_eq!((node(&own, "b/small").nlink, node(&own, "b/big").nlink), (2, 3));
        // The data stays where it is.
        assert_eq!(case.record(1).data, case.record(0).data);
        assert_eq!(case.record(1).chunk_tables, case.record(0).chunk_tables);
    }
}

#[test]
fn privileged_l02_links_to_anything_and_through_several_layers() {
    if !require::mounts() {
        return;
    }
    let lower = "s link -> nowhere\np fifo 0600\nc dev 5:1 mode=0622\nb disk 8:1\nf f size=9000 fill=text:1";
    let case = Case::new(&[
        lower,
        "f own size=9000 fill=text:2",
        "h a/link -> link\nh a/fifo -> fifo\nh a/dev -> dev\nh a/disk -> disk\nh a/f -> f\nh a/own -> own",
    ]);
    let tree = case.tree();
    for name in ["link", "fifo", "dev", "disk", "f", "own"] {
        assert_one_inode(&tree, &[name, &format!("a/{name}")]);
    }
    assert_same(&case.umoci().unwrap(), &tree, &crate::support_cases::as_umoci());
    assert_eq!(case.record(2).data, [case.record(0).data.clone(), case.record(1).data.clone()].concat(), "two devices");
    // A link to a link; its file is two layers down, and the middle one has no data of its own.
    let case = Case::new(&["f f size=9000 fill=text:1", "h g -> f", "h k -> g\nf own size=9000 fill=text:2"]);
    let tree = case.assert_as_umoci_but_links();
    assert_one_inode(&tree, &["g", "k"]);
    assert_eq!(case.record(2).data.len(), 2);
    assert_eq!(case.record(2).data[1], case.record(0).data[0]);
}

#[test]
fn privileged_l02_where_the_target_is_is_judged_as_overlayfs_would() {
    if !require::mounts() {
        return;
    }
    // Behind a lower symbolic link; replaced by a layer between; under a path that this layer made otherwise.
    let tree = Case::new(&["f usr/lib/a \"a\"\ns lib -> usr/lib", "h b -> lib/a"]).assert_as_umoci();
    assert_one_inode(&tree, &["b", "usr/lib/a"]);
    let tree = Case::new(&["f a \"1\"", "f a \"2\"", "h b -> a"]).assert_as_umoci();
    assert_text(&tree, "b", "2");
    assert_one_inode(&tree, &["a", "b"]);
    // This layer has another file there by the time it is complete: the link is to the lower one.
    let tree = Case::new(&["f d/a \"1\"", "h b -> d/a\nw d"]).tree();
    assert_eq!(paths(&tree), ["b"]);
    assert_text(&tree, "b", "1");
    // This layer's own symbolic link leads to the lower file.
    let tree = Case::new(&["f usr/lib/a \"a\"", "s lib -> usr/lib\nh b -> lib/a"]).assert_as_umoci();
    assert_one_inode(&tree, &["b", "usr/lib/a"]);
    // Chains, in both orders.
    for upper in ["h b -> a\nh c -> b", "h c -> b\nh b -> a"] {
        let tree = Case::new(&["f a \"a\"", upper]).tree();
        assert_one_inode(&tree, &["a", "b", "c"]);
    }
}

#[test]
fn privileged_l02_alone_it_is_left_open_with_a_word() {
    if !require::mounts() {
        return;
    }
    let case = Case::of_tar(&fixtures::tar::build("f own\nh d/b -> a/\\xff\nh c -> d/b\nh own2 -> own")).unwrap();
    let tree = case.tree();
    assert_eq!(paths(&tree), ["d", "own", "own2"]);
    let links = vec![(hex::encode("c"), hex::encode(b"a/\xff")), (hex::encode("d/b"), hex::encode(b"a/\xff"))];
    // Neither the root nor `d` has an entry of its own here.
    assert_eq!(case.record(0).unresolved, Unresolved { links, implied: vec![1, 2], ..Unresolved::default() });
    let warnings = case.warnings();
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(
        warnings[1].starts_with("d/b: is a hard link to `a/\\xff`, which this layer does not have"),
        "{warnings:?}"
    );
    let annotations = case.converted.image.layers[0].metadata.annotations().clone().unwrap();
    let open: Unresolved = serde_json::from_str(&annotations[annotation::UNRESOLVED]).unwrap();
    assert_eq!(open, case.record(0).unresolved);
}

#[test]
fn l02_a_link_that_no_layer_has_the_target_of() {
    for upper in ["h b -> gone", "h b -> a/x", "h b -> b", "h b -> c\nh c -> b", "h b -> loop/x"] {
        let error = refused(&["f a\nf x\ns loop -> loop", upper], 1);
        let said = error.to_string();
        assert!(matches!(error, LayerError::DanglingLink { .. }), "{upper}: {said}");
        assert!(said.contains("`b`") || said.contains("`c`"), "{said}");
    }
    // One that a layer between removed.
    assert!(matches!(refused(&["f a", "w a", "h b -> a"], 2), LayerError::DanglingLink { .. }));
    assert!(matches!(refused(&["f d/a", "o d", "h b -> d/a"], 2), LayerError::DanglingLink { .. }));
    // One that is above.
    assert!(matches!(refused(&["h b -> a", "f a"], 0), LayerError::DanglingLink { .. }));
    let directory = refused(&["d d/", "h b -> d"], 1);
    assert!(matches!(directory, LayerError::Tree(TreeError::LinkToDirectory { .. })), "{directory}");
}

#[test]
fn privileged_l03_link_before_its_target() {
    if !require::mounts() {
        return;
    }
    let (a, b, c) = ("f a 0600 \"content\" uid=3 mtime=4\nx user.k=v", "h b -> a", "h d/c -> b");
    let first = Case::new(&[&[a, b, c].join("\n")]);
    let tree = first.assert_as_umoci();
    assert_one_inode(&tree, &["a", "b", "d/c"]);
    assert_eq!(node(&first.layer(0), "a").nlink, 3);
    for order in [[a, c, b], [b, a, c], [b, c, a], [c, a, b], [c, b, a]] {
        let case = Case::new(&[&order.join("\n")]);
        assert_eq!(case.record(0).metadata, first.record(0).metadata, "{order:?}");
        assert_eq!(case.warnings(), Vec::<String>::new());
    }
    // Behind a symbolic link that comes later, too.
    let tree = Case::new(&["h b -> lib/a\ns lib -> usr/lib\nf usr/lib/a \"content\""]).tree();
    assert_one_inode(&tree, &["b", "usr/lib/a"]);
}

#[test]
fn privileged_l04_parent_of_the_link_without_an_entry() {
    if !require::mounts() {
        return;
    }
    let case = Case::new(&["f bin/app 0755 \"#!\"\nh bin/app.runfiles/_main/app_/app -> bin/app"]);
    let tree = case.assert_as_umoci();
    assert_one_inode(&tree, &["bin/app", "bin/app.runfiles/_main/app_/app"]);
    assert_eq!(node(&tree, "bin/app.runfiles/_main").mode, 0o755);
}

#[test]
fn privileged_l05_absolute_link_name() {
    if !require::mounts() {
        return;
    }
    let unzip = "f usr/bin/unzip 0755 \"elf\"";
    let one = Case::new(&[&format!("{unzip}\nh usr/bin/zipinfo -> /usr/bin/unzip")]);
    let two = Case::new(&[unzip, "h usr/bin/zipinfo -> /usr/bin/unzip"]);
    let odd = Case::new(&[&format!("{unzip}\nh /usr//bin/./zipinfo -> .//usr/./bin//unzip")]);
    for case in [&one, &two, &odd] {
        assert_one_inode(&case.assert_as_umoci(), &["usr/bin/unzip", "usr/bin/zipinfo"]);
    }
    assert_eq!(odd.record(0).metadata, one.record(0).metadata);
    assert_same_overlay(&one.tree(), &two.tree());
}

#[test]
fn privileged_l06_link_replaces_what_is_there() {
    if !require::mounts() {
        return;
    }
    let upper = "f usr/bin/perl 0755 \"new\"\nh usr/bin/perl5.38.2 -> usr/bin/perl";
    for old in [
        "f usr/bin/perl5.38.2 \"old too\"",
        "s usr/bin/perl5.38.2 -> perl",
        "s usr/bin/perl5.38.2 -> nowhere",
        "f usr/bin/perl5.38.2/inside",
        "h usr/bin/perl5.38.2 -> usr/bin/perl",
        "p usr/bin/perl5.38.2",
    ] {
        // In a lower layer, and before it in its own.
        let lower = format!("f usr/bin/perl \"old\"\n{old}");
        for case in [Case::new(&[&lower, upper]), Case::new(&[&format!("{lower}\n{upper}")])] {
            let tree = case.tree();
            assert_eq!(paths(&tree), ["usr", "usr/bin", "usr/bin/perl", "usr/bin/perl5.38.2"], "{old}");
            assert_text(&tree, "usr/bin/perl5.38.2", "new");
            assert_one_inode(&tree, &["usr/bin/perl", "usr/bin/perl5.38.2"]);
        }
        // The link alone, its target below.
        let tree = Case::new(&[&lower, "h usr/bin/perl5.38.2 -> usr/bin/perl"]).tree();
        assert_text(&tree, "usr/bin/perl5.38.2", "old");
    }
}

#[test]
fn privileged_l07_links_are_one_file() {
    if !require::mounts() {
        return;
    }
    let size = 100 << 20;
    let case = Case::new(&["f d/a size=100M fill=random:9\nh d/b -> d/a\nh c -> d/b\nh e/f/g -> c"]);
    let stored: u64 = case.record(0).data.iter().map(|blob| blob.size).sum();
    assert_eq!(stored, size, "its data is stored once");
    let (inodes, used) = case.at_root(|root| {
        let stat = |name: &str| std::fs::metadata(root.join(name)).unwrap();
        let inodes = ["d/a", "d/b", "c", "e/f/g"].map(|name| (stat(name).ino(), stat(name).nlink()));
        let out = Command::new("du").args(["-s", "--block-size=1"]).arg(root).output().unwrap();
        let used: u64 = String::from_utf8(out.stdout).unwrap().split_whitespace().next().unwrap().parse().unwrap();
        (inodes, used)
    });
    assert!(inodes.iter().all(|inode| *inode == (inodes[0].0, 4)), "{inodes:?}");
    assert!((size..size + (1 << 20)).contains(&used), "du says {used}");
    assert_content(&case.tree(), "e/f/g", &Content::Random { seed: 9, size });
}

#[test]
fn privileged_l08_one_file_in_200_directories() {
    if !require::mounts() {
        return;
    }
    let mut script = "f first \"shared\"\n".to_owned();
    for n in 0..200 {
        let _ = writeln!(
            script,
            "d d{n}/\nd d{n}/sub/\nh d{n}/same -> first\nf d{n}/sub/own \"{n}\"\nh d{n}/sub/same -> d{n}/same"
        );
    }
    let case = Case::new(&[&script]);
    let tree = case.assert_as_umoci();
    assert_eq!(tree.len(), 1 + 1 + 200 * 5);
    let alone = case.layer(0);
    assert_eq!(node(&alone, "d7/same").nlink, 401);
    assert_eq!(node(&alone, "d7").nlink, 3, "a directory's links are its own");
    assert_same(
        &case.umoci().unwrap(),
        &alone,
        &Compare { nlink: true, dir_nlink: true, ..crate::support_cases::as_umoci() },
    );
    // As layers: half of the links come later.
    let (lower, upper): (Vec<&str>, Vec<&str>) =
        script.lines().partition(|line| !line.contains("/sub/same") && !line.starts_with("h d1"));
    let tree = Case::new(&[&lower.join("\n"), &upper.join("\n")]).assert_as_umoci_but_links();
    assert_eq!(tree.len(), 1 + 1 + 200 * 5);
    assert_text(&tree, "d150/sub/same", "shared");
}

#[test]
fn l09_link_target_leaves_the_root() {
    for target in ["../../../../etc/shadow", "/../x", "a/../../x", "..", "a/.."] {
        for layers in [&[&*format!("f a\nf x\nh loot -> {target}")][..], &["f a\nf x", &*format!("h loot -> {target}")]]
        {
            let error = refused(layers, layers.len() - 1);
            assert!(matches!(error, LayerError::Tree(TreeError::Escapes { .. })), "{target}: {error}");
            assert!(error.to_string().starts_with("entry `loot`: its link target has a `..` component"), "{error}");
        }
    }
    // An absolute target is inside the image, whatever the machine has there.
    assert!(matches!(refused(&["h loot -> /etc/passwd"], 0), LayerError::DanglingLink { .. }));
}

#[test]
fn privileged_l09_links_stay_inside_through_symbolic_links() {
    if !require::mounts() {
        return;
    }
    // A symbolic link that points out of the image points to its root's own; the target is the image's file.
    for up in ["../../../../etc", "/etc", "/../../etc"] {
        let script = format!("f etc/passwd \"inside\"\ns out -> {up}\nh loot -> out/passwd");
        let tree = Case::new(&[&script]).tree();
        assert_one_inode(&tree, &["etc/passwd", "loot"]);
        let lower = format!("f etc/passwd \"inside\"\ns out -> {up}");
        let tree = Case::new(&[&lower, "h loot -> out/passwd"]).tree();
        assert_text(&tree, "loot", "inside");
        assert_eq!(node(&tree, "out").kind, Kind::Symlink);
    }
}
