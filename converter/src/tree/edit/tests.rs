use super::*;
use crate::entry::{Entry, EntryKind, printable};
use crate::tree::build::{Builder, Options};

/// `path/` is a directory, `path>to` a hard link, other words are files or whiteouts.
fn tree(words: &[&str]) -> Tree {
    let mut builder = Builder::new(Options::default());
    for word in words {
        let (path, kind) = match word.split_once('>') {
            Some((path, to)) => (path, EntryKind::HardLink { target: to.into() }),
            None if word.ends_with('/') => (*word, EntryKind::Directory),
            None => (*word, EntryKind::Regular { size: 0, sparse: false }),
        };
        let (mtime, xattrs) = (Timestamp::default(), Vec::new());
        builder.entry(Entry { path: path.into(), kind, mode: 0o600, uid: 0, gid: 0, mtime, xattrs }).unwrap();
    }
    builder.finish().0
}

/// All paths in tree order; opaque directories end in `!`, whiteouts in `-`.
fn listing(tree: &Tree) -> Vec<String> {
    let mut lines = Vec::new();
    tree.walk(|path, id| {
        let mark = match &tree.inode(id).kind {
            Kind::Directory(d) if d.opaque => "!",
            _ if tree.whiteout() == Some(id) => "-",
            _ => "",
        };
        lines.push(format!("{}{mark}", printable(path)));
    });
    assert_eq!(lines.remove(0).trim_end_matches('!'), "", "the root comes first");
    lines
}

fn at(tree: &Tree, path: &str) -> InodeId {
    tree.at(path.as_bytes()).unwrap_or_else(|| panic!("no {path} in {:?}", listing(tree)))
}

fn moved(words: &[&str], from: &str, to: &[&str]) -> Tree {
    let mut tree = tree(words);
    tree.move_contents(from.as_bytes(), &to.iter().map(|c| c.as_bytes().to_vec()).collect::<Vec<_>>());
    tree.sort();
    tree
}

#[test]
fn names_are_found_before_and_after_they_are_sorted_in() {
    let mut tree = tree(&["b/m", "z"]);
    let (b, m) = (at(&tree, "b"), at(&tree, "b/m"));
    tree.add_name(b, b"a", m);
    let made = tree.add_directory(ROOT, b"c");
    let inner = tree.add_directory(made, b"d");
    tree.add_name(inner, b"e", m);
    let paths = ["b/a", "b/m", "c/d/e"];
    assert!(paths.iter().all(|path| at(&tree, path) == m), "at once");
    assert_eq!(listing(&tree), ["b", "b/m", "z"], "but listed only when sorted");
    tree.sort();
    assert!(paths.iter().all(|path| at(&tree, path) == m));
    assert_eq!(listing(&tree), ["b", "b/a", "b/m", "c", "c/d", "c/d/e", "z"]);
    assert!(matches!(tree.inode(made).kind, Kind::Directory(d) if d.implied && !d.opaque && d.parent == ROOT));
    assert_eq!(tree.order().iter().find(|(id, _)| *id == m), Some(&(m, 3)));
    for gone in ["x", "b/mm", "b/m/x", "z/", "b/"] {
        assert_eq!(tree.at(gone.as_bytes()).is_some(), gone.ends_with('/'), "{gone}");
    }
    assert_eq!(tree.at(b""), Some(ROOT));
}

#[test]
fn removing() {
    let mut made = tree(&["a/b/c", "a/d", "link>a/d", "e"]);
    made.remove_names(|path, kind| path == b"link" || (path == b"a/b" && matches!(kind, Kind::Directory(_))));
    assert_eq!(listing(&made), ["a", "e"], "an inode goes with all its names");
    let before = listing(&made);
    made.remove_names(|_, _| false);
    assert_eq!(listing(&made), before);
    let mut made = tree(&["a/b/c", "a/d", "e/f"]);
    let gone = HashSet::from([at(&made, "a/b"), at(&made, "e")]);
    made.remove_directories(&gone);
    assert_eq!(listing(&made), ["a", "a/d"]);
}

#[test]
fn replacing() {
    let mut tree = tree(&["a>x", "d/b>x", "c", "e>y"]);
    let (a, c) = (at(&tree, "a"), at(&tree, "c"));
    tree.add_name(ROOT, b"f", a);
    tree.replace_inodes(&HashMap::from([(a, c)]));
    tree.sort();
    assert!(["a", "c", "f"].iter().all(|path| at(&tree, path) == c));
    assert_ne!(at(&tree, "e"), c);
}

#[test]
fn what_an_opaque_directory_hides() {
    let tree = tree(&["a/b/c/", "a/b/.wh..wh..opq", "a/b/f", "a/x/y/"]);
    let hidden = tree.hidden_from_below();
    let is = |path: &str| hidden[at(&tree, path) as usize];
    assert!(!is("a") && !is("a/b") && is("a/b/c") && !is("a/x") && !is("a/x/y"));
}

#[test]
fn directories_that_only_hold_whiteouts() {
    let tree =
        tree(&["a/b/.wh.x", "a/c/d/.wh.y", "e/.wh.x", "e/f", "g/", "g/.wh.x", "h/i/.wh..wh..opq", "k/l/", "k/m/.wh.x"]);
    let only = tree.directories_of_whiteouts();
    let mut paths = Vec::new();
    tree.walk(|path, id| {
        if only.contains(&id) {
            paths.push(printable(path));
        }
    });
    assert_eq!(paths, ["a", "a/b", "a/c", "a/c/d", "h", "h/i", "k/m"]);
}

#[test]
fn w01_hiding_all_of_the_roots_below() {
    let mut made = tree(&[".wh..wh..opq", "a/f", "b", "d/"]);
    made.hide_in_root(&["a", "b", "c", "e"].iter().map(|n| n.as_bytes().to_vec()).collect());
    assert_eq!(listing(&made), ["a!", "a/f", "b", "c-", "d", "e-"]);
    assert_eq!(made.order().iter().find(|(id, _)| Some(*id) == made.whiteout()).map(|o| o.1), Some(2));
    // With whiteouts of its own.
    let mut made = tree(&["d/.wh.x", "d/y"]);
    made.hide_in_root(&BTreeSet::from([b"c".to_vec()]));
    assert_eq!(listing(&made), ["c-", "d", "d/x-", "d/y"]);
    assert_eq!(at(&made, "c"), at(&made, "d/x"));
}

#[test]
fn t12_moving_to_where_a_link_leads() {
    // Made as needed, and merged with what is there.
    assert_eq!(
        listing(&moved(&["lib/a", "lib/d/b"], "lib", &["usr", "lib"])),
        ["usr", "usr/lib", "usr/lib/a", "usr/lib/d", "usr/lib/d/b"]
    );
    let tree = moved(&["lib/a", "lib/d/b", "usr/lib/d/c", "usr/lib/e"], "lib", &["usr", "lib"]);
    assert_eq!(listing(&tree), ["usr", "usr/lib", "usr/lib/a", "usr/lib/d", "usr/lib/d/b", "usr/lib/d/c", "usr/lib/e"]);
    assert_eq!(listing(&moved(&["x/y/a", "x/b"], "x/y", &[])), ["a", "x", "x/b"], "to the root");
    // Of two with one name the one in its real place stays, with what is below it.
    let tree = moved(&["l/a", "l/b/c", "l/d", "r/a", "r/b", "r/d/e"], "l", &["r"]);
    assert_eq!(listing(&tree), ["r", "r/a", "r/b", "r/d", "r/d/e"]);
    // Links keep their names, whiteouts and marks go along.
    let tree = moved(&["l/a", "l/b>l/a", "c>l/a", "l/.wh.w", "l/o/.wh..wh..opq", "l/o/x", "r/o/y"], "l", &["r"]);
    assert_eq!(listing(&tree), ["c", "r", "r/a", "r/b", "r/o!", "r/o/x", "r/o/y", "r/w-"]);
    assert!(at(&tree, "c") == at(&tree, "r/a") && at(&tree, "r/a") == at(&tree, "r/b"));
    assert_eq!(listing(&moved(&["l/.wh..wh..opq", "l/a", "r/b"], "l", &["r"])), ["r!", "r/a", "r/b"]);
    // The parents of what moved are the new ones.
    let tree = moved(&["l/d/e/f"], "l", &["r"]);
    let parent = |path| match tree.inode(at(&tree, path)).kind {
        Kind::Directory(d) => d.parent,
        _ => unreachable!("a directory"),
    };
    assert_eq!((parent("r/d"), parent("r/d/e")), (at(&tree, "r"), at(&tree, "r/d")));
}

#[test]
fn nothing_moves_where_it_cannot() {
    let words = ["l/a", "f", "r/s/"];
    let all = listing(&tree(&words));
    for (from, to) in [
        ("gone", &["r"][..]),
        ("l/gone", &["r"]),
        ("l", &["f"]),
        ("l", &["f", "x"]),
        ("l", &["l"]),
        ("r/s", &["r", "s"]),
    ] {
        assert_eq!(listing(&moved(&words, from, to)), all, "{from} {to:?}");
    }
}
