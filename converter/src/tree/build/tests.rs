use super::*;
use crate::tree::XattrSets;

/// `d path`, `f path`, `s path target`, `h path target`, `c path major:minor`, `b path major:minor`, `p path`,
/// `k path` (a socket).
fn entry(line: &str) -> Entry {
    let mut words = line.split(' ');
    let (verb, path, rest) = (words.next().unwrap(), words.next().unwrap(), words.next());
    let target = || rest.unwrap().as_bytes().to_vec();
    let device = || {
        let (major, minor) = rest.unwrap().split_once(':').unwrap();
        (major.parse().unwrap(), minor.parse().unwrap())
    };
    let kind = match verb {
        "d" => EntryKind::Directory,
        "f" => EntryKind::Regular { size: 1, sparse: false },
        "s" => EntryKind::Symlink { target: target() },
        "h" => EntryKind::HardLink { target: target() },
        "c" => EntryKind::CharDevice { major: device().0, minor: device().1 },
        "b" => EntryKind::BlockDevice { major: device().0, minor: device().1 },
        "p" => EntryKind::Fifo,
        "k" => EntryKind::Socket,
        other => panic!("{other}"),
    };
    let (mode, uid, gid) = if verb == "d" { (0o700, 3, 4) } else { (0o640, 1, 2) };
    Entry { path: path.into(), kind, mode, uid, gid, mtime: Timestamp { secs: 5, nanos: 6 }, xattrs: Vec::new() }
}

fn builder(lines: &[&str]) -> Builder {
    let mut builder = Builder::new(Options::default());
    for line in lines {
        builder.entry(entry(line)).unwrap_or_else(|e| panic!("{line}: {e}"));
    }
    builder
}

fn finish(lines: &[&str]) -> (Tree, Open) {
    builder(lines).finish()
}

/// Every name in tree order with what it is: `d`, `d?` implied, `d!` opaque, `f`, `s->…`, `w`, `h->…`, `c…`, `b…`, `p`,
/// `k`.
fn listing(tree: &Tree) -> Vec<String> {
    let mut lines = Vec::new();
    tree.walk(|path, id| {
        let what = match &tree.inode(id).kind {
            _ if tree.whiteout() == Some(id) => "w".into(),
            Kind::Directory(d) => {
                format!("d{}{}", if d.opaque { "!" } else { "" }, if d.implied { "?" } else { "" })
            }
            Kind::Regular(_) => "f".into(),
            Kind::Symlink(target) => format!("s->{}", printable(target)),
            Kind::PendingLink(target) => format!("h->{}", printable(target)),
            Kind::CharDevice(rdev) => format!("c{rdev:x}"),
            Kind::BlockDevice(rdev) => format!("b{rdev:x}"),
            Kind::Fifo => "p".into(),
            Kind::Socket => "k".into(),
        };
        if !path.is_empty() {
            lines.push(format!("{} {what}", printable(path)));
        }
    });
    lines
}

#[track_caller]
fn check(lines: &[&str], want: &[&str]) {
    assert_eq!(listing(&finish(lines).0), want, "{lines:?}");
}

fn at(tree: &Tree, path: &str) -> InodeId {
    tree.at(path.as_bytes()).unwrap_or_else(|| panic!("no {path} in {:?}", listing(tree)))
}

#[track_caller]
fn refused(lines: &[&str]) -> TreeError {
    let (last, first) = lines.split_last().unwrap();
    builder(first).entry(entry(last)).expect_err(last)
}

#[test]
fn every_kind_is_placed_once_with_its_attributes() {
    let (tree, open) = finish(&["d d/", "f d/f", "s d/s to", "c d/c 5:1", "b d/b 8:300", "p d/p", "k d/k"]);
    assert_eq!(listing(&tree), ["d d", "d/b b10082c", "d/c c501", "d/f f", "d/k k", "d/p p", "d/s s->to"]);
    assert!(open.links.is_empty() && open.implied, "only the root is implied");
    let file = tree.inode(at(&tree, "d/f"));
    assert_eq!((file.mode, file.uid, file.gid, file.mtime), (0o640, 1, 2, Timestamp { secs: 5, nanos: 6 }));
    assert_eq!(tree.inode(at(&tree, "d/s")).mode, 0o777, "Linux has no other");
    assert_eq!(tree.inode(at(&tree, "d")).mode, 0o700);
}

#[test]
fn data_is_asked_for_files_only() {
    let mut builder = Builder::new(Options::default());
    let Placed::File(id) = builder.entry(entry("f f")).unwrap() else { panic!("a file has data") };
    for line in ["d d/", "s s f", "h h f", "c c 0:0", "p p", "f .wh.x", "f d/.wh..wh..opq", "f .wh..wh.aufs"] {
        assert_eq!(builder.entry(entry(line)).unwrap(), Placed::Nothing, "{line}");
    }
    builder.set_data(id, FileData::Inline { at: 7, len: 1 });
    let (tree, _) = builder.finish();
    assert!(matches!(tree.inode(at(&tree, "h")).kind, Kind::Regular(FileData::Inline { at: 7, len: 1 })));
}

#[test]
fn later_entries_replace_earlier_ones() {
    check(&["f a", "s a x"], &["a s->x"]);
    check(&["d a/", "f a/b", "f a"], &["a f"]);
    // The file had removed what lower layers have there.
    check(&["d a/", "f a/b", "f a", "d a/"], &["a d!"]);
    check(&["s a x", "d a/"], &["a d!"]);
    check(&["f a", "h b a", "f a"], &["a f", "b f"]);
    let (tree, _) = finish(&["f a", "h b a", "f a"]);
    assert_ne!(at(&tree, "a"), at(&tree, "b"), "a was replaced, b is the old one");
    // A directory again keeps what is in it and takes the later attributes.
    let mut builder = builder(&["d a/", "f a/b"]);
    builder.entry(Entry { mode: 0o1711, ..entry("d a") }).unwrap();
    let (tree, _) = builder.finish();
    assert_eq!(listing(&tree), ["a d", "a/b f"]);
    assert_eq!(tree.inode(at(&tree, "a")).mode, 0o1711);
}

#[test]
fn t10_missing_parents_are_implied() {
    let (tree, open) = finish(&["f a/b/c", "d a/"]);
    assert_eq!(listing(&tree), ["a d", "a/b d?", "a/b/c f"]);
    assert!(open.implied);
    let b = tree.inode(at(&tree, "a/b"));
    assert_eq!((b.mode, b.uid, b.gid, b.mtime, b.xattrs), (0o755, 0, 0, Timestamp::default(), SetId::EMPTY));
    assert!(!finish(&["d ./", "d a", "f a/b"]).1.implied);
}

#[test]
fn t01_t02_the_root() {
    for root in ["/", ".", "./", "//.//", "./."] {
        let (tree, open) = finish(&[&format!("d {root}"), "f a"]);
        assert_eq!(listing(&tree), ["a f"], "{root}");
        assert_eq!(tree.inode(ROOT).mode, 0o700);
        assert!(!open.implied);
    }
    assert!(matches!(refused(&["f ./"]), TreeError::Root { path } if path == "./"));
    assert!(matches!(refused(&["h / a"]), TreeError::Root { .. }));
    assert!(matches!(refused(&["f "]), TreeError::EmptyName));
    assert_eq!(listing(&finish(&["d "]).0), [""; 0], "a directory without a name is the root");
}

#[test]
fn paths_are_taken_as_a_file_system_would() {
    check(&["f /a//b/./c/", "f ./a/b/d"], &["a d?", "a/b d?", "a/b/c f", "a/b/d f"]);
    for path in ["..", "../a", "a/..", "a/../b", "/.."] {
        assert!(matches!(refused(&[&format!("f {path}")]), TreeError::Escapes { what: "its path", .. }), "{path}");
    }
    check(&["f ...", "f ..a", "f a.."], &["... f", "..a f", "a.. f"]);
}

#[test]
fn names_of_any_bytes_in_byte_order() {
    let mut builder = Builder::new(Options::default());
    for name in [&b"b"[..], b"B", b"\xff", b"\n", b"a b", b"a/x", b"a", b"ab", b"a-"] {
        builder.entry(Entry { path: name.to_vec(), ..entry(if name == b"a" { "d a" } else { "f x" }) }).unwrap();
    }
    let (tree, _) = builder.finish();
    let names: Vec<&[u8]> = tree.names_of(ROOT).map(|(name, _)| name).collect();
    assert_eq!(names, [&b"\n"[..], b"B", b"a", b"a b", b"a-", b"ab", b"b", b"\xff"]);
}

#[test]
fn names_that_no_file_system_has() {
    let long = "n".repeat(255);
    check(&[&format!("f {long}")], &[&format!("{long} f")]);
    for (path, what) in [(format!("f {long}x"), "is longer than 255 bytes"), ("f a/n\0l".to_owned(), "holds a NUL")] {
        let error = refused(&[&path]);
        assert!(matches!(&error, TreeError::Name { what: found, .. } if *found == what), "{error}");
    }
    assert!(matches!(refused(&[&format!("f {long}x/a")]), TreeError::Name { .. }), "as a parent too");
    // The name that a whiteout hides is as long as a name can be, though the marker is longer.
    check(&[&format!("f .wh.{long}")], &[&format!("{long} w")]);
    assert!(matches!(refused(&[&format!("f .wh.{long}x")]), TreeError::Name { .. }));
}

#[test]
fn symbolic_links_among_parents_are_followed_inside() {
    check(&["d usr/lib/", "s lib usr/lib", "f lib/a"], &["lib s->usr/lib", "usr d?", "usr/lib d", "usr/lib/a f"]);
    // Absolute, upwards past the root, through each other, with dots.
    for target in ["/usr", "../../usr", "./usr/.", "usr//", "x/../usr", "other"] {
        let link = format!("s l {target}");
        let (tree, _) = finish(&["d usr/", "d x/", "s other /l2", "s l2 x/../usr", &link, "f l/a"]);
        assert!(tree.at(b"usr/a").is_some(), "{target}: {:?}", listing(&tree));
    }
    // Where one leads nowhere yet, that place is made.
    check(&["s l gone/deep", "f l/a"], &["gone d?", "gone/deep d?", "gone/deep/a f", "l s->gone/deep"]);
    // `..` is of where the link leads, not of where it is.
    check(&["d a/b/", "s l a/b", "s up l/..", "f up/c"], &["a d?", "a/b d", "a/c f", "l s->a/b", "up s->l/.."]);
    // The last component is not followed: it is replaced.
    check(&["f a", "s l a", "f l"], &["a f", "l f"]);
    // The cache of the last parent forgets when a link changes.
    check(&["s l x", "f l/1", "s l y", "f l/2"], &["l s->y", "x d?", "x/1 f", "y d?", "y/2 f"]);
    check(&["f l/1", "s l y", "f l/2"], &["l s->y", "y d?", "y/2 f"]);
}

#[test]
fn chains_of_symbolic_links_end() {
    let chain = |length: usize| -> Vec<String> {
        let links = (0..length).map(|n| format!("s l{n} l{}", n + 1));
        links.chain([format!("d l{length}/"), "f l0/a".to_owned()]).collect()
    };
    let lines = chain(40);
    let (tree, _) = finish(&lines.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(tree.at(b"l40/a").is_some());
    let lines = chain(41);
    assert!(matches!(refused(&lines.iter().map(String::as_str).collect::<Vec<_>>()), TreeError::SymlinkLoop { .. }));
    for circle in [
        &["s a a", "f a/x"][..],
        &["s a b", "s b a", "f a/x"],
        &["s a a/b", "f a/x"],
        &["s a b/c", "s b /a/d", "f b/x"],
    ] {
        let error = refused(circle);
        assert!(matches!(error, TreeError::SymlinkLoop { .. }), "{error}");
    }
    assert!(matches!(refused(&["f f", "s a a", "h b a/f"]), TreeError::SymlinkLoop { .. }));
    assert!(matches!(refused(&["s a a", "f a/.wh.x"]), TreeError::SymlinkLoop { .. }));
}

#[test]
fn parents_that_are_no_directories() {
    for parent in ["f p", "c p 1:3", "b p 8:0", "p p", "k p", "h p elsewhere", "c p 0:0"] {
        for child in ["f p/a", "d p/a", "f p/.wh.a", "f p/.wh..wh..opq", "s p/a x", "h p/a p", "f p/a/b"] {
            let error = refused(&[parent, child]);
            assert!(
                matches!(&error, TreeError::ParentNotDirectory { parent, .. } if parent == "p"),
                "{parent} {child}: {error}"
            );
        }
    }
}

#[test]
fn devices_that_linux_has() {
    check(&["c a 4095:1048575"], &["a cffffffff"]);
    for (line, numbers) in
        [("c a 4096:0", (4096, 0)), ("b a 0:1048576", (0, 1 << 20)), ("c a 18446744073709551615:1", (u64::MAX, 1))]
    {
        let error = refused(&[line]);
        assert!(matches!(error, TreeError::Device { major, minor, .. } if (major, minor) == numbers), "{error}");
    }
    check(&["b a 0:0"], &["a b0"]);
}

#[test]
fn texts_of_symbolic_links() {
    let most = "t".repeat(4095);
    check(&[&format!("s a {most}")], &[&format!("a s->{}…", "t".repeat(300))]);
    for (target, len) in [(String::new(), 0), (format!("{most}t"), 4096)] {
        assert!(
            matches!(refused(&[&format!("s a {target}")]), TreeError::SymlinkLength { len: found, .. } if found == len)
        );
    }
    check(&["s a ../../../etc/shadow", "s b /", "s c ."], &["a s->../../../etc/shadow", "b s->/", "c s->."]);
}

#[test]
fn links_are_names_of_one_inode() {
    for lines in [
        &["f a", "h b a", "h d/c b"][..],
        &["h d/c b", "h b a", "f a"],
        &["h d/c b", "f a", "h b a"],
        &["h b a", "h d/c b", "f a"],
        &["f a", "h b /a", "h d/c ./b", "h a a", "h b d/c"],
    ] {
        let (tree, open) = finish(lines);
        assert_eq!(listing(&tree), ["a f", "b f", "d d?", "d/c f"], "{lines:?}");
        assert!(at(&tree, "a") == at(&tree, "b") && at(&tree, "b") == at(&tree, "d/c"), "{lines:?}");
        assert_eq!(open.links, []);
        assert_eq!(tree.order().iter().find(|(id, _)| *id == at(&tree, "a")), Some(&(at(&tree, "a"), 3)));
    }
    // To anything but a directory; what a link replaces is gone.
    check(&["s a x", "h b a", "p p", "h q p"], &["a s->x", "b s->x", "p p", "q p"]);
    check(&["f a", "d b/", "f b/c", "h b a"], &["a f", "b f"]);
    check(&["f a", "s l a", "h l a"], &["a f", "l f"]);
    // Parents of the target that are links, which may come later.
    check(&["h b l/a", "s l d", "f d/a"], &["b f", "d d?", "d/a f", "l s->d"]);
    check(&["h b l/a", "h l m", "s m d", "f d/a"], &["b f", "d d?", "d/a f", "l s->d", "m s->d"]);
}

#[test]
fn links_that_the_layer_cannot_settle_are_open() {
    let (tree, open) = finish(&["h b a", "h c /x//./y", "f x/z"]);
    assert_eq!(listing(&tree), ["b h->a", "c h->x/y", "x d?", "x/z f"]);
    assert_eq!(open.links, [(at(&tree, "b"), b"a"[..].into()), (at(&tree, "c"), b"x/y"[..].into())]);
    // Links to open links are names of those.
    for lines in [["h b a", "h c b", "h d c"], ["h d c", "h c b", "h b a"]] {
        let (tree, open) = finish(&lines);
        assert_eq!(open.links, [(at(&tree, "b"), b"a"[..].into())], "{lines:?}");
        assert!(at(&tree, "b") == at(&tree, "c") && at(&tree, "c") == at(&tree, "d"));
    }
    // Circles stay open, and so does what leads into one.
    let (_, open) = finish(&["h a b", "h b c", "h c b", "h x x"]);
    assert_eq!(open.links.len(), 3, "b and c are names of one");
    // Replaced, it is nobody's concern any more.
    assert_eq!(finish(&["h b a", "f b"]).1.links, []);
    // Through a file: not there.
    assert_eq!(finish(&["f f", "h b f/a"]).1.links.len(), 1);
}

#[test]
fn links_that_cannot_be() {
    assert!(matches!(refused(&["d d/", "h b d"]), TreeError::LinkToDirectory { target, .. } if target == "d"));
    // A directory without an entry may be a symbolic link in a lower layer, which can be linked to.
    assert_eq!(finish(&["f d/a", "h b d/"]).1.links.len(), 1);
    assert!(matches!(refused(&["h b /"]), TreeError::LinkToDirectory { .. } | TreeError::Escapes { .. }));
    for target in ["..", "../a", "/../a", "a/../../b"] {
        let error = refused(&["f a", &format!("h b {target}")]);
        assert!(matches!(error, TreeError::Escapes { what: "its link target", .. }), "{target}: {error}");
    }
}

#[test]
fn w_whiteouts_become_names_of_one_device() {
    check(&["f .wh.a", "f d/.wh.b", "f d/c"], &["a w", "d d?", "d/b w", "d/c f"]);
    let (tree, _) = finish(&["f .wh.a", "f d/.wh.b", "f .wh.a"]);
    assert_eq!(at(&tree, "a"), at(&tree, "d/b"));
    assert_eq!(tree.inode(at(&tree, "a")).mode, 0);
    // Bookkeeping names leave nothing, not even their parents.
    check(&["d .wh..wh.plnk/", "f .wh..wh.plnk/x/y", "f etc/.wh..wh..opaque", "f etc/.wh..wh.opq"], &[]);
    // What is inside a whiteout is left out, with a word.
    let mut builder = builder(&["d .wh.a/", "f .wh.a/b", "f .wh..wh..opq/c"]);
    assert_eq!(builder.take_warnings().len(), 2);
    let tree = builder.finish().0;
    assert_eq!(listing(&tree), ["a w"]);
    for name in [".wh.", ".wh..", ".wh...", "a/.wh."] {
        assert!(matches!(refused(&[&format!("f {name}")]), TreeError::InvalidWhiteout { path } if path == name));
    }
    // Not of a directory that is read as it lies there.
    let mut plain = Builder::new(Options { whiteouts: false, ..Options::default() });
    for line in ["f .wh.a", "f .wh..wh..opq", "f .wh."] {
        assert!(matches!(plain.entry(entry(line)).unwrap(), Placed::File(_)));
    }
    assert_eq!(listing(&plain.finish().0), [".wh. f", ".wh..wh..opq f", ".wh.a f"]);
}

#[test]
fn w01_w06_opaque_directories() {
    for lines in [&["f d/.wh..wh..opq", "d d/", "f d/a"][..], &["d d/", "f d/a", "f d/.wh..wh..opq"]] {
        check(lines, &["d d!", "d/a f"]);
    }
    check(&["f d/.wh..wh..opq", "f d/a"], &["d d!?", "d/a f"]);
    // Whiteouts under one, however deep, are dropped.
    check(&["f d/.wh.x", "f d/e/f/.wh.y", "d d/", "f d/.wh..wh..opq"], &["d d!", "d/e d?", "d/e/f d?"]);
    // But not beside it or above.
    check(&["f d/e/.wh..wh..opq", "f d/.wh.x", "f .wh.z"], &["d d?", "d/e d!?", "d/x w", "z w"]);
    let (tree, open) = finish(&["d .", "f .wh..wh..opq", "f .wh.a", "f b"]);
    assert_eq!(listing(&tree), ["b f"]);
    assert!(tree.is_opaque(ROOT) && open.implied, "only the layers below tell what it hides");
}

#[test]
fn w03_removed_and_made_again_in_one_layer() {
    check(&["f .wh.a", "f a"], &["a f"]);
    check(&["f a", "f .wh.a"], &["a f"]);
    check(&["d a/", "f .wh.a"], &["a d!"]);
    // Not implied any more: nothing of the one below is to be taken.
    check(&["f .wh.a", "f a/b"], &["a d!", "a/b f"]);
    check(&["f a/b/c", "f .wh.a"], &["a d!", "a/b d?", "a/b/c f"]);
    check(&["h a gone", "f .wh.a"], &["a h->gone"]);
    check(&["f .wh.a", "s a x"], &["a s->x"]);
}

#[test]
fn w04_markers_inside_what_a_marker_removes() {
    for lines in [["f .wh.a", "f a/b/.wh.c"], ["f a/b/.wh.c", "f .wh.a"], ["f a/b/.wh..wh..opq", "f .wh.a"]] {
        check(&lines, &["a w"]);
    }
    check(&["f a/.wh.b", "f a/b/c/.wh.d", "f a/b/c/e"], &["a d?", "a/b d!", "a/b/c d?", "a/b/c/e f"]);
    check(&["f .wh.a", "f a/.wh.b", "f a/b/.wh.c", "f a/x"], &["a d!", "a/x f"]);
    // A directory that something else replaced has no say.
    check(&["f a/b", "f a", "f .wh.a"], &["a f"]);
    check(&["f x/a/b", "f x/a", "d x/", "f .wh.x"], &["x d!", "x/a f"]);
}

#[test]
fn whiteouts_through_symbolic_links() {
    check(&["d usr/", "s l usr", "f l/.wh.a", "f l/.wh..wh.x"], &["l s->usr", "usr d", "usr/a w"]);
    check(&["d usr/", "s l usr", "f l/.wh..wh..opq"], &["l s->usr", "usr d!"]);
    // The link itself is removed below and is this layer's own.
    check(&["s l usr", "f .wh.l"], &["l s->usr"]);
}

fn with_xattrs(line: &str, xattrs: &[(&str, &str)]) -> Entry {
    let xattrs = xattrs.iter().map(|(n, v)| Xattr { name: (*n).into(), value: (*v).into() });
    Entry { xattrs: xattrs.collect(), ..entry(line) }
}

fn names(sets: &XattrSets, set: SetId) -> Vec<String> {
    sets.get(set).iter().map(|x| format!("{}={}", printable(&x.name), printable(&x.value))).collect()
}

#[test]
fn x03_a_0_0_device_is_escaped_and_its_directory_marked() {
    for overlay in [OverlayXattrs::Trusted, OverlayXattrs::User] {
        let prefix = overlay.prefix();
        // The directory is described after, before, or not at all.
        for lines in [["c d/x 0:0", "d d/"], ["d d/", "c d/x 0:0"], ["c d/x 0:0", "f d/y"]] {
            let mut builder = Builder::new(Options { overlay, ..Options::default() });
            for line in lines {
                builder.entry(entry(line)).unwrap();
            }
            let warnings = builder.take_warnings();
            assert!(warnings.len() == 1 && warnings[0].entry == "d/x", "{warnings:?}");
            let (mut tree, _) = builder.finish();
            tree.mark_for_overlay(overlay);
            let set = |path| names(tree.xattrs(), tree.inode(at(&tree, path)).xattrs);
            assert_eq!(set("d/x"), [format!("{prefix}overlay.whiteout=")]);
            assert_eq!(set("d"), [format!("{prefix}overlay.opaque=x")]);
            assert_eq!(names(tree.xattrs(), tree.inode(ROOT).xattrs), [""; 0]);
            assert_eq!(tree.whiteout(), None);
        }
    }
}

#[test]
fn overlay_attributes_of_the_source_are_escaped() {
    let mut builder = Builder::new(Options::default());
    let all = [
        ("trusted.overlay.opaque", "y"),
        ("user.overlay.opaque", "y"),
        ("trusted.overlay.overlay.x", ""),
        ("trusted.overlayx", ""),
    ];
    builder.entry(with_xattrs("d d/", &all)).unwrap();
    builder.entry(entry("f d/.wh.x")).unwrap();
    let (mut tree, _) = builder.finish();
    tree.mark_for_overlay(OverlayXattrs::Trusted);
    assert_eq!(
        names(tree.xattrs(), tree.inode(at(&tree, "d")).xattrs),
        [
            "trusted.overlay.origin=",
            "trusted.overlay.overlay.opaque=y",
            "trusted.overlay.overlay.overlay.x=",
            "trusted.overlayx=",
            "user.overlay.opaque=y",
        ]
    );
}

#[test]
fn marks_for_overlayfs() {
    let (mut tree, _) = finish(&["f o/.wh..wh..opq", "f o/a", "f w/.wh.a", "f w/b", "f n/a", "d w/d/"]);
    tree.mark_for_overlay(OverlayXattrs::User);
    let set = |path| names(tree.xattrs(), tree.inode(at(&tree, path)).xattrs);
    assert_eq!(set("o"), ["user.overlay.opaque=y"]);
    assert_eq!(set("w"), ["user.overlay.origin="]);
    assert_eq!((set("n"), set("w/d")), (vec![], vec![]));
}

#[test]
fn attributes_that_erofs_has_no_place_for_are_reported() {
    let (long, big) = (format!("user.{}", "n".repeat(256)), "v".repeat(65_536));
    let all = [("user.ok", "1"), ("btrfs.compression", "zstd"), (&*long, ""), ("user.big", &*big), ("user.", "")];
    let mut builder = Builder::new(Options::default());
    builder.entry(with_xattrs("f f", &all)).unwrap();
    let warnings = builder.take_warnings();
    assert_eq!(warnings.len(), 4, "{warnings:?}");
    assert!(warnings.iter().all(|w| w.entry == "f" && w.message.starts_with("extended attribute `")));
    // Together they are bounded too: what fits is kept.
    let values: Vec<(String, String)> = (0..100).map(|n| (format!("user.{n:03}"), "v".repeat(1000))).collect();
    let values: Vec<(&str, &str)> = values.iter().map(|(n, v)| (&**n, &**v)).collect();
    builder.entry(with_xattrs("f g", &values)).unwrap();
    assert_eq!(builder.take_warnings().len(), 36);
    let (tree, _) = builder.finish();
    assert_eq!(names(tree.xattrs(), tree.inode(at(&tree, "f")).xattrs), ["user.ok=1"]);
    assert_eq!(tree.xattrs().get(tree.inode(at(&tree, "g")).xattrs).len(), 64);
}

#[test]
fn limits_hold() {
    let options = Options { max_inodes: 4, ..Options::default() };
    let mut builder = Builder::new(options);
    builder.entry(entry("f a/b/c")).unwrap();
    let error = builder.entry(entry("f d")).unwrap_err();
    assert!(matches!(error, TreeError::TooMany { what: "inodes", limit: 4, .. }), "{error}");
    for verb in ["h n{} a", "f .wh.n{}", "h n{} gone"] {
        let mut builder = Builder::new(options);
        builder.entry(entry("f a")).unwrap();
        let names = (0..100).map(|n| builder.entry(entry(&verb.replace("{}", &n.to_string()))));
        let error = names.filter_map(Result::err).next().unwrap_or_else(|| panic!("{verb} has no limit"));
        assert!(matches!(error, TreeError::TooMany { limit: 4 | 16, .. }), "{verb}: {error}");
    }
}

#[test]
fn errors_name_the_entry() {
    for (lines, said) in [
        (&["f ../x"][..], "entry `../x`: its path has a `..` component, which could lead out of the image"),
        (&["f p", "f p/a"], "entry `p/a`: its parent `p` is not a directory in this layer"),
        (&["s a a", "f a/b"], "entry `a/b`: more than 40 symbolic links among its parents"),
        (&["f /"], "entry `/` would replace the root with something that is not a directory"),
        (&["d d", "h l d"], "entry `l` is a hard link to the directory `d`"),
        (&["c \x07 9999:1"], "entry `\\x07`: device 9999:1 is out of range (major to 4095, minor to 1048575)"),
    ] {
        assert_eq!(refused(lines).to_string(), said);
    }
}

/// 100,000 links in a chain, each before its target, in a time that does not grow with the square; and in a circle.
#[test]
fn l03_very_many_links_before_their_targets() {
    const LINKS: usize = 100_000;
    let start = std::time::Instant::now();
    for last in ["f l100000", "h l100000 l0", "h l100000 below"] {
        let mut builder = Builder::new(Options::default());
        for n in 0..LINKS {
            builder.entry(entry(&format!("h l{n} l{}", n + 1))).unwrap();
        }
        builder.entry(entry(last)).unwrap();
        let (tree, open) = builder.finish();
        let (first, end) = (at(&tree, "l0"), at(&tree, "l100000"));
        match last {
            "h l100000 l0" => assert_eq!(open.links.len(), LINKS),
            "f l100000" => assert!(first == end && open.links.is_empty()),
            _ => assert!(first == end && open.links.len() == 1),
        }
    }
    assert!(start.elapsed().as_secs() < 60, "{:?}", start.elapsed());
}

/// A path of 50,000 directories, and 100,000 whiteouts at its end that each ask what is above them.
#[test]
fn very_deep_trees_and_very_many_whiteouts() {
    const DEPTH: usize = 50_000;
    let start = std::time::Instant::now();
    let mut builder = Builder::new(Options::default());
    let deep = "d/".repeat(DEPTH);
    for n in 0..3 {
        builder.entry(entry(&format!("f {deep}f{n}"))).unwrap();
    }
    // Without spelling the path each time, as a hostile layer would.
    let part = "d/".repeat(2000);
    for n in 0..25 {
        let before = if n == 0 { String::new() } else { format!("s{}/", n - 1) };
        builder.entry(entry(&format!("s s{n} {before}{part}"))).unwrap();
    }
    for n in 0..100_000 {
        builder.entry(entry(&format!("f s24/.wh.{n}"))).unwrap();
    }
    let (mut tree, open) = builder.finish();
    tree.mark_for_overlay(OverlayXattrs::Trusted);
    assert!(open.implied);
    assert_eq!(tree.order().len(), 1 + DEPTH + 3 + 25 + 1);
    assert!(tree.at(format!("{deep}99999").as_bytes()).is_some_and(|id| Some(id) == tree.whiteout()));
    assert_eq!(tree.at(format!("{deep}f2").as_bytes()).map(|id| tree.inode(id).mode), Some(0o640));
    assert!(start.elapsed().as_secs() < 60, "{:?}", start.elapsed());
}

fn owned(path: &str, kind: EntryKind, uid: u32, gid: u32) -> Entry {
    let mtime = Timestamp::default();
    Entry { path: path.into(), kind, mode: 0o644, uid, gid, mtime, xattrs: Vec::new() }
}

/// Python's `testtar.tar` has such a file. In an image, the kernel would let nobody write it.
#[test]
fn the_id_that_is_none_becomes_roots() {
    let mut builder = Builder::new(Options::default());
    let file = EntryKind::Regular { size: 0, sparse: false };
    let placed = builder.entry(owned("f", file.clone(), u32::MAX, 7)).unwrap();
    let Placed::File(id) = placed else { panic!("{placed:?}") };
    assert_eq!((builder.inodes[id as usize].uid, builder.inodes[id as usize].gid), (0, 7));
    builder.entry(owned("", EntryKind::Directory, 3, u32::MAX)).unwrap();
    assert_eq!((builder.inodes[ROOT as usize].uid, builder.inodes[ROOT as usize].gid), (3, 0));
    builder.entry(owned("g", file, u32::MAX - 1, u32::MAX - 1)).unwrap();
    let warnings: Vec<String> = builder.take_warnings().into_iter().map(|w| w.entry).collect();
    assert_eq!(warnings, ["f", ""]);
}
