//! Layers of a few lines, published one on the other in a store of their own.

use super::*;
use crate::layer::{self, Options};
use crate::manifest::Unresolved;
use crate::progress::Silent;
use crate::source::{LayerOrigin, SourceLayer, TAR_MEDIA_TYPE};
use crate::tree::build::TreeError;
use std::fmt::Write as _;
use std::time::Instant;

struct Stack {
    dir: tempfile::TempDir,
    store: Store,
    records: Vec<Record>,
    warnings: Vec<Vec<Warning>>,
}

impl Stack {
    fn empty() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(&dir.path().join("store")).unwrap();
        Self { dir, store, records: Vec::new(), warnings: Vec::new() }
    }

    /// Of layers in the words of [`fixtures::tar`], bottom first.
    #[track_caller]
    fn new(layers: &[&str]) -> Self {
        let mut stack = Self::empty();
        for layer in layers {
            stack.push(layer).unwrap_or_else(|e| panic!("{e}"));
        }
        stack
    }

    fn read(&self, script: &str) -> ReadLayer {
        let path = self.dir.path().join("layer.tar");
        std::fs::write(&path, fixtures::tar::build(script)).unwrap();
        let len = std::fs::metadata(&path).unwrap().len();
        let origin = LayerOrigin::Range { path, offset: 0, len };
        let media_type = TAR_MEDIA_TYPE.to_owned();
        let layer = SourceLayer { media_type, digest: None, size: None, diff_id: None, origin };
        layer::read(&layer, 0, &Options::default(), &self.store, None, &Silent).unwrap()
    }

    fn push(&mut self, script: &str) -> Result<(), LayerError> {
        let mut read = self.read(script);
        let lower = settle(&mut read, &self.records, &self.store, None, OverlayXattrs::Trusted)?;
        let record = layer::publish(read, &lower, Unresolved::default(), &Options::default(), &self.store)?;
        self.warnings.push(record.warnings.clone());
        self.records.push(record);
        Ok(())
    }

    fn image(&self, layer: usize) -> read::Image<std::fs::File> {
        let metadata = &self.records[layer].metadata;
        read::Image::open(self.store.open_blob(&metadata.digest, metadata.size).unwrap()).unwrap()
    }

    /// The top layer's own names, in tree order: directories end in `/`, whiteouts in `-`, opaque ones in `!`.
    fn top(&self) -> Vec<String> {
        let image = self.image(self.records.len() - 1);
        let mut walk = image.walk();
        let mut names = Vec::new();
        while let Some(visit) = walk.next() {
            let visit = visit.unwrap();
            let opaque = image.xattrs(visit.inode).unwrap().iter().any(|x| x.name == b"trusted.overlay.opaque");
            let mark = match visit.inode.file_type() {
                FileType::Directory if opaque => "/!",
                FileType::Directory => "/",
                _ if visit.inode.is_whiteout() => "-",
                _ => "",
            };
            names.push(format!("{}{mark}", printable(visit.path)));
        }
        names.remove(0);
        names
    }

    fn inode(&self, path: &str) -> read::Inode {
        let image = self.image(self.records.len() - 1);
        let mut inode = image.root().unwrap();
        for name in path.split('/').filter(|name| !name.is_empty()) {
            let nid = image.lookup(&inode, name.as_bytes()).unwrap();
            inode = image.inode(nid.unwrap_or_else(|| panic!("no {path} in {:?}", self.top()))).unwrap();
        }
        inode
    }

    fn xattrs(&self, path: &str) -> Vec<String> {
        let all = self.image(self.records.len() - 1).xattrs(&self.inode(path)).unwrap();
        all.iter().map(|x| format!("{}={}", printable(&x.name), printable(&x.value))).collect()
    }
}

#[track_caller]
fn refused(layers: &[&str]) -> LayerError {
    let (last, first) = layers.split_last().unwrap();
    Stack::new(first).push(last).expect_err(last)
}

#[test]
fn t10_implied_directories_are_what_they_are_merged_with() {
    let lower = "d . 0701 uid=9\nd a/ 0710 uid=1 gid=2 mtime=3.25\nx user.k=v\nd a/b/ 0720 uid=4\nf a/b/old";
    let stack = Stack::new(&[lower, "f a/b/new\nf c/new"]);
    let (root, a, b, c) = (stack.inode(""), stack.inode("a"), stack.inode("a/b"), stack.inode("c"));
    assert_eq!((root.mode & 0o7777, root.uid), (0o701, 9));
    assert_eq!((a.mode & 0o7777, a.uid, a.gid, a.mtime.secs, a.mtime.nanos), (0o710, 1, 2, 3, 250_000_000));
    assert_eq!(stack.xattrs("a"), ["user.k=v"]);
    assert_eq!((b.mode & 0o7777, b.uid), (0o720, 4));
    assert_eq!((c.mode & 0o7777, c.uid, c.mtime.secs), (0o755, 0, 0), "no layer has it");
    // The topmost one counts, as a whole, also where it was itself implied.
    let stack = Stack::new(&[lower, "f a/b/new", "d a/ 0733", "f a/b/newest"]);
    assert_eq!((stack.inode("a").mode & 0o7777, stack.inode("a").uid, stack.xattrs("a").len()), (0o733, 0, 0));
    assert_eq!(stack.inode("a/b").uid, 4);
    // Not what a layer between removed or hid.
    for between in ["w a", "o .", "f a"] {
        let stack = Stack::new(&[lower, between, "f a/b/new"]);
        assert_eq!((stack.inode("a").uid, stack.inode("a/b").uid), (0, 0), "{between}");
    }
    let stack = Stack::new(&[lower, "o a", "f a/b/new"]);
    assert_eq!((stack.inode("a").uid, stack.inode("a/b").uid), (1, 0));
    // Nor what this layer hides: an opaque directory keeps itself, one that was removed is another.
    let stack = Stack::new(&[lower, "o a\nf a/b/new"]);
    assert_eq!((stack.inode("a").uid, stack.inode("a/b").uid), (1, 0));
    let stack = Stack::new(&[lower, "w a\nf a/b/new"]);
    assert_eq!((stack.inode("a").uid, stack.xattrs("a")), (0, vec!["trusted.overlay.opaque=y".to_owned()]));
}

#[test]
fn marks_of_lower_layers_are_theirs() {
    let lower = "d a/ 0700\no a\nd a/w/\nw a/w/x\nf a/w/y\nd e/\nx trusted.overlay.opaque=y";
    let stack = Stack::new(&[lower, "f a/new\nf a/w/new\nf e/new"]);
    assert_eq!((stack.xattrs("a"), stack.xattrs("a/w")), (vec![], vec![]));
    assert_eq!(stack.xattrs("e"), ["trusted.overlay.overlay.opaque=y"], "what the source had stays escaped");
    let stack = Stack::new(&["d s/\nc s/x 0:0", "c s/y 0:0"]);
    assert_eq!(stack.xattrs("s"), ["trusted.overlay.overlay.opaque=x"], "of its own device");
}

#[test]
fn t12_contents_go_where_lower_links_lead() {
    let lower = "d usr/lib/ 0711\nf usr/lib/old\ns lib -> usr/lib\ns abs -> /lib\ns up -> srv/../lib\nd srv/\n\
        s usr/self -> ..\ns nowhere -> not/there";
    for link in ["lib", "abs", "up", "usr/self/lib", "usr/self/usr/self/abs"] {
        let stack = Stack::new(&[lower, &format!("f {link}/new\nw {link}/old\nf usr/lib/own")]);
        assert_eq!(stack.top(), ["usr/", "usr/lib/", "usr/lib/new", "usr/lib/old-", "usr/lib/own"], "{link}");
        assert_eq!(stack.inode("usr/lib").mode & 0o7777, 0o711, "{link}");
    }
    assert_eq!(Stack::new(&[lower, "f nowhere/new"]).top(), ["not/", "not/there/", "not/there/new"]);
    // Only whiteouts, of something that is not there.
    assert_eq!(Stack::new(&[lower, "w nowhere/x"]).top(), [""; 0]);
    // A directory with an entry of its own replaces the link; one that was removed first is a new one.
    assert_eq!(Stack::new(&[lower, "d lib/\nf lib/new"]).top(), ["lib/", "lib/new"]);
    assert_eq!(Stack::new(&[lower, "w lib\nf lib/new"]).top(), ["lib/!", "lib/new"]);
    // An opaque marker clears where the link leads.
    assert_eq!(Stack::new(&[lower, "o lib\nf lib/new"]).top(), ["usr/", "usr/lib/!", "usr/lib/new"]);
    // The link was itself replaced, or removed.
    assert_eq!(Stack::new(&[lower, "d lib/", "f lib/new"]).top(), ["lib/", "lib/new"]);
    assert_eq!(Stack::new(&[lower, "w lib", "f lib/new"]).top(), ["lib/", "lib/new"]);
    // Of one file under both names the real place's stays.
    let stack = Stack::new(&[lower, "f lib/x \"link\"\nf usr/lib/x \"real\""]);
    assert_eq!(
        (stack.top(), stack.inode("usr/lib/x").size),
        (vec!["usr/".into(), "usr/lib/".into(), "usr/lib/x".into()], 4)
    );
}

#[test]
fn chains_of_lower_links() {
    let mut lower = "d end/\nf end/old\n".to_owned();
    let links = 40;
    for n in 0..=links {
        let to = if n == 0 { "end".to_owned() } else { format!("l{}", n - 1) };
        let _ = writeln!(lower, "s l{n} -> {to}");
    }
    assert_eq!(Stack::new(&[&lower, "f l39/new"]).top(), ["end/", "end/new"]);
    let error = refused(&[&lower, "f l40/new"]);
    assert!(matches!(&error, LayerError::Tree(TreeError::SymlinkLoop { path }) if path == "l40"), "{error}");
    // Each behind another, over several layers.
    let layers = ["s a -> b/c", "d b/\ns b/c -> ../d/e", "d d/\ns d/e -> /f", "f f/old"];
    assert_eq!(Stack::new(&[&layers[..], &["f a/x/new"]].concat()).top(), ["f/", "f/x/", "f/x/new"]);
    for circle in ["s a -> a", "s a -> b\ns b -> a", "s a -> a/b", "s a -> b/c\nd b/\ns b/c -> ../a", "s a -> ./../a/."]
    {
        for upper in ["f a/new", "w a/x", "d a/deep/er/"] {
            let error = refused(&[circle, upper]);
            assert!(matches!(error, LayerError::Tree(TreeError::SymlinkLoop { .. })), "{circle:?} {upper}: {error}");
        }
        assert!(matches!(refused(&[circle, "h x -> a/x"]), LayerError::DanglingLink { .. }), "{circle:?}");
    }
}

#[test]
fn w05_directories_that_nothing_needs_are_left_out() {
    let stack = Stack::new(&["d var/\nf a", "o var/cache/apt\nw x/y/z\nw var/gone/file\nf b"]);
    assert_eq!(stack.top(), ["b", "var/"], "a directory that is below is repeated, and no more");
}

#[test]
fn something_else_below_is_hidden_with_a_word() {
    let stack = Stack::new(&["f a\np b", "f a/x\nf b/x"]);
    assert_eq!(stack.top(), ["a/", "a/x", "b/", "b/x"]);
    let warned: Vec<&str> = stack.warnings[1].iter().map(|w| w.entry.as_str()).collect();
    assert_eq!(warned, ["a", "b"]);
}

#[test]
fn w01_an_opaque_root_hides_by_name() {
    let lower = ["f a\nf d/x\nf e/x\nf gone", "w gone\nf b"];
    let stack = Stack::new(&[lower[0], lower[1], "o .\nf b\nf d/y\nd new/"]);
    assert_eq!(stack.top(), ["a-", "b", "d/!", "d/y", "e-", "new/"]);
    assert_eq!(stack.inode("d").uid, 0);
    // On which nothing of the lowest shows, also to a fourth.
    let mut stack = stack;
    stack.push("f a/x\nf d/z").unwrap();
    assert_eq!(stack.warnings[3], []);
    assert!(matches!(stack.push("h l -> d/x"), Err(LayerError::DanglingLink { .. })));
    assert_eq!(Stack::new(&["o .\nf b"]).top(), ["b"], "at the bottom there is nothing to hide");
}

#[test]
fn alone_it_is_left_open() {
    let stack = Stack::empty();
    let mut read = stack.read("o .\nf a\nh d/b -> x/y\nh c -> d/b\nh e -> a");
    let open = leave_open(&mut read);
    let mut names = Vec::new();
    read.tree.walk(|path, _| names.push(printable(path)));
    assert_eq!(names, ["", "a", "d", "e"]);
    let target = hex::encode("x/y");
    assert_eq!(open.links, [(hex::encode("c"), target.clone()), (hex::encode("d/b"), target)]);
    let warned: Vec<&str> = read.warnings.iter().map(|w| w.entry.as_str()).collect();
    assert_eq!(warned, ["", "c", "d/b"]);
}

#[test]
fn l02_links_into_lower_layers() {
    let lower = "d d/ 0711 uid=4\nf d/big size=9000 fill=random:1 uid=5\nf d/small \"small\"\ns lib -> d";
    let stack = Stack::new(&[lower, "h x -> d/big\nh y/z -> lib/small\nh y/big -> /d/./big"]);
    assert_eq!(stack.top(), ["d/", "d/big", "d/small", "x", "y/", "y/big", "y/z"]);
    assert_eq!((stack.inode("d").mode & 0o7777, stack.inode("d").uid), (0o711, 4));
    assert_eq!(stack.records[1].data, stack.records[0].data);
    let (x, big, placed) = (stack.inode("x"), stack.inode("y/big"), stack.inode("d/big"));
    assert!(x.nid == big.nid && big.nid == placed.nid && (x.nlink, x.uid, x.size) == (3, 5, 9000));
    assert_eq!(stack.inode("y/z").nid, stack.inode("d/small").nid);
    // A link to this layer's own file by way of a lower symbolic link.
    let stack = Stack::new(&[lower, "f d/small \"own\"\nh y -> lib/small"]);
    assert_eq!(stack.top(), ["d/", "d/small", "y"]);
    assert!(stack.inode("y").nid == stack.inode("d/small").nid && stack.inode("y").size == 3);
    // To a lower file by way of this layer's symbolic link, which stands over a lower directory.
    let stack = Stack::new(&[lower, "s e -> d\nh y -> e/small"]);
    assert_eq!(stack.top(), ["d/", "d/small", "e", "y"]);
    // Under the target's own name this layer has something else, or hides it: that stays.
    for (upper, top) in [
        ("h x -> d/small\nw d/small", &["d/", "d/small-", "x"][..]),
        ("h x -> d/small\no d\nf d/n", &["d/!", "d/n", "x"]),
        ("h x -> d/small\nw d", &["d-", "x"]),
        ("h x -> d/small\nd d/\no .", &["d/!", "lib-", "x"]),
    ] {
        let stack = Stack::new(&[lower, upper]);
        assert_eq!(stack.top(), top, "{upper:?}");
        assert_eq!((stack.inode("x").nlink, stack.inode("x").size), (1, 5), "{upper:?}");
    }
}

#[test]
fn l02_links_that_lead_nowhere() {
    for upper in ["h b -> gone", "h b -> a/x", "h b -> b", "h b -> d/gone", "h b -> c\nh c -> b"] {
        assert!(matches!(refused(&["f a\nd d/", upper]), LayerError::DanglingLink { .. }), "{upper}");
    }
    let error = refused(&["d d/\ns l -> d", "h b -> d"]);
    assert!(matches!(error, LayerError::Tree(TreeError::LinkToDirectory { .. })), "{error}");
    // To the symbolic link itself, not to what it leads to.
    assert_eq!(Stack::new(&["d d/\ns l -> d", "h b -> l"]).inode("b").file_type(), FileType::Symlink);
}

/// A path of 50,000 directories in both layers, none of which has an entry.
#[test]
fn deep_chains_of_implied_directories() {
    let start = Instant::now();
    let deep = "d/".repeat(50_000);
    let stack =
        Stack::new(&[&format!("d d/ 0711\nf {deep}old"), &format!("f {deep}new\nw {deep}old\nw d/{deep}never")]);
    assert_eq!(stack.inode("d").mode & 0o7777, 0o711);
    assert_eq!(stack.records[1].counts.directories, 50_001);
    assert_eq!(stack.records[1].counts.whiteouts, 1);
    assert!(start.elapsed().as_secs() < 90, "{:?}", start.elapsed());
}

/// As many links to as many lower files, and to one.
#[test]
fn l02_very_many_links() {
    const LINKS: u64 = 100_000;
    let start = Instant::now();
    let (mut lower, mut upper) = (String::new(), String::new());
    for n in 0..LINKS {
        let _ = writeln!(lower, "f d/f{n}");
        let _ = writeln!(upper, "h l/f{n} -> d/f{}", if n % 2 == 0 { n } else { 0 });
    }
    let stack = Stack::new(&[&lower, &upper]);
    assert_eq!(stack.records[1].counts.files, LINKS / 2);
    assert_eq!(u64::from(stack.inode("l/f1").nlink), LINKS / 2 + 2);
    // In a directory of many blocks, what is not there is not found either: before, between and behind.
    let (image, d) = (stack.image(1), stack.inode("d"));
    for (name, there) in [("!", false), ("f0", true), ("f10", true), ("f1", false), ("f10x", false), ("g", false)] {
        assert_eq!(image.lookup(&d, name.as_bytes()).unwrap().is_some(), there, "{name}");
    }
    assert!(start.elapsed().as_secs() < 90, "{:?}", start.elapsed());
}
