use super::*;

fn entry(path: &str, kind: EntryKind, uid: u32, gid: u32) -> Entry {
    let mtime = Timestamp::default();
    Entry { path: path.into(), kind, mode: 0o644, uid, gid, mtime, xattrs: Vec::new() }
}

/// Python's `testtar.tar` has such a file. In an image, the kernel would let nobody write it.
#[test]
fn the_id_that_is_none_becomes_roots() {
    let mut builder = Builder::new(Options::default());
    let file = EntryKind::Regular { size: 0, sparse: false };
    let placed = builder.entry(entry("f", file.clone(), u32::MAX, 7)).unwrap();
    let Placed::File(id) = placed else { panic!("{placed:?}") };
    assert_eq!((builder.inodes[id as usize].uid, builder.inodes[id as usize].gid), (0, 7));
    builder.entry(entry("", EntryKind::Directory, 3, u32::MAX)).unwrap();
    assert_eq!((builder.inodes[ROOT as usize].uid, builder.inodes[ROOT as usize].gid), (3, 0));
    builder.entry(entry("g", file, u32::MAX - 1, u32::MAX - 1)).unwrap();
    let warnings: Vec<String> = builder.take_warnings().into_iter().map(|w| w.entry).collect();
    assert_eq!(warnings, ["f", ""]);
}
