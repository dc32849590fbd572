//! The same tree through many writers of tars and compressors: one metadata image, one data blob. What a layer becomes
//! depends on its tree only, not on its tar's dialect, order or packing.

use std::fs;
use std::os::unix::fs::{FileExt as _, symlink};
use std::path::Path;

use converter::convert::Converted;
use fixtures::content::splitmix64;
use fixtures::require;
use fixtures::tree::{Compare, Snapshot, assert_same};

use crate::support_tar::{Place, digests, tool};

/// A tree that every dialect can hold: short names, whole seconds, small ids.
fn plain_tree(tree: &Path) {
    for directory in ["", "usr/bin", "usr/share/doc", "etc/ssl/certs", "empty", "var"] {
        fs::create_dir_all(tree.join(directory)).unwrap();
    }
    for number in 0..60u64 {
        let size = usize::try_from(splitmix64(number) % 9000).unwrap();
        let bytes: Vec<u8> = (0..size as u64).map(|at| splitmix64(number << 32 | at).to_le_bytes()[0]).collect();
        let directory = ["usr/bin", "usr/share/doc", "etc", "etc/ssl/certs"][usize::try_from(number % 4).unwrap()];
        fs::write(tree.join(directory).join(format!("f{number}")), bytes).unwrap();
    }
    let big: Vec<u8> = (0..400_000u64).map(|at| splitmix64(at / 3).to_le_bytes()[0]).collect();
    fs::write(tree.join("usr/bin/big"), &big).unwrap();
    fs::write(tree.join("var/copy-of-big"), &big).unwrap();
    fs::write(tree.join("etc/none"), "").unwrap();
    let holes = fs::File::create(tree.join("var/holes")).unwrap();
    holes.set_len(700_000).unwrap();
    holes.write_all_at(b"in the middle", 400_000).unwrap();
    symlink("../usr/bin/f0", tree.join("etc/link")).unwrap();
    symlink("/nowhere", tree.join("dangling")).unwrap();
    fs::hard_link(tree.join("usr/bin/f0"), tree.join("usr/share/doc/hard")).unwrap();
    fs::hard_link(tree.join("usr/bin/f0"), tree.join("var/hard")).unwrap();
    tool(tree, "coreutils", "mkfifo", &["-m", "0600", "var/pipe"]);
    tool(tree, "coreutils", "mknod", &["-m", "0666", "var/null", "c", "1", "3"]);
    tool(tree, "coreutils", "chown", &["1000:1001", "etc/none", "usr/bin/f4", "var"]);
    tool(tree, "coreutils", "chmod", &["4755", "usr/bin/f4"]);
    tool(tree, "coreutils", "chmod", &["1777", "var"]);
}

/// Gives everything a time of its own, in whole seconds or finer; directories last, since what is in them changes theirs.
fn set_times(tree: &Path, fraction: &str) {
    let list = tool(tree, "findutils", "find", &[".", "-depth"]);
    for (index, name) in String::from_utf8(list).unwrap().lines().enumerate() {
        tool(tree, "coreutils", "touch", &["-h", "-d", &format!("@{}{fraction}", 1_000_000 + index * 1000), name]);
    }
}

const PYTHON: &str = "import sys, tarfile\n\
    with tarfile.open(sys.argv[1], 'w', format=getattr(tarfile, sys.argv[2])) as t: t.add('tree', '.')";

#[track_caller]
fn assert_one(made: &[(String, Converted)]) {
    let first = &made[0];
    for (how, converted) in made {
        let same = digests(&converted.layers[0]) == digests(&first.1.layers[0]);
        assert!(same, "{how} and {} are not the same:\n{:?}\n{:?}", first.0, converted.layers, first.1.layers);
    }
}

#[test]
fn privileged_every_producer_gives_the_same_layer() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    fs::create_dir(place.path("tree")).unwrap();
    plain_tree(&place.path("tree"));
    set_times(&place.path("tree"), "");
    let mut made = vec![("dir:".to_owned(), place.convert("dir:tree").unwrap())];
    let want = Snapshot::of(&place.path("tree")).unwrap();
    assert_same(&want, &place.only_layer(&made[0].1), &Compare::exact());
    let mut convert = |how: String, file: &str| {
        let converted = place.convert(&format!("tar:{file}")).unwrap_or_else(|error| panic!("{how}: {error}"));
        made.push((how, converted));
    };
    for format in ["gnu", "oldgnu", "posix", "ustar"] {
        tool(place.dir(), "tar", "tar", &["-C", "tree", "--format", format, "-cf", "t.tar", "."]);
        convert(format!("GNU tar {format}"), "t.tar");
    }
    for sparse in ["0.0", "0.1", "1.0"] {
        let version = format!("--sparse-version={sparse}");
        tool(place.dir(), "tar", "tar", &["-C", "tree", "--format=posix", "-S", &version, "-cf", "t.tar", "."]);
        convert(format!("GNU tar, sparse {sparse}"), "t.tar");
    }
    tool(place.dir(), "tar", "tar", &["-C", "tree", "--format=gnu", "-S", "-cf", "t.tar", "."]);
    convert("GNU tar, old sparse".to_owned(), "t.tar");
    tool(place.dir(), "tar", "tar", &["-C", "tree", "-b", "1", "--sort=inode", "-cf", "t.tar", "."]);
    convert("GNU tar, short records, by inode".to_owned(), "t.tar");
    for format in ["gnutar", "pax", "ustar"] {
        tool(place.dir(), "libarchive-tools", "bsdtar", &["-C", "tree", "--format", format, "-cf", "t.tar", "."]);
        convert(format!("bsdtar {format}"), "t.tar");
    }
    for format in ["GNU_FORMAT", "PAX_FORMAT", "USTAR_FORMAT"] {
        tool(place.dir(), "python3", "python3", &["-c", PYTHON, "t.tar", format]);
        convert(format!("Python {format}"), "t.tar");
    }
    // Packed.
    tool(place.dir(), "tar", "tar", &["-C", "tree", "-cf", "t.tar", "."]);
    let whole = fs::read(place.path("t.tar")).unwrap();
    for (package, program, args) in [
        ("gzip", "gzip", &["-kf9"][..]),
        ("gzip", "gzip", &["-kf1", "--rsyncable"]),
        ("pigz", "pigz", &["-kf", "-b", "128"]),
        ("pigz", "pigz", &["-kf", "-i"]),
        ("zstd", "zstd", &["-qkf", "--rsyncable", "-T2", "-o", "t.tar.gz"]),
        ("zstd", "zstd", &["-qkf", "-19", "--long=25", "-o", "t.tar.gz"]),
    ] {
        tool(place.dir(), package, program, &[args, &["t.tar"]].concat());
        convert(format!("{program} {args:?}"), "t.tar.gz");
    }
    let mut members = Vec::new();
    for piece in whole.chunks(123_457) {
        fs::write(place.path("piece"), piece).unwrap();
        members.extend(tool(place.dir(), "gzip", "gzip", &["-c", "piece"]));
    }
    fs::write(place.path("t.tar.gz"), members).unwrap();
    convert("several gzip members".to_owned(), "t.tar.gz");
    assert!(made.len() > 20);
    assert_one(&made);
}

/// The order of entries does not matter: files before their directories, links before or after, everything anyhow.
#[test]
fn privileged_any_order_gives_the_same_layer() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    fs::create_dir(place.path("tree")).unwrap();
    plain_tree(&place.path("tree"));
    set_times(&place.path("tree"), ".123456789");
    let names = String::from_utf8(tool(&place.path("tree"), "findutils", "find", &["."])).unwrap();
    let mut names: Vec<&str> = names.lines().collect();
    let mut made = vec![("dir:".to_owned(), place.convert("dir:tree").unwrap())];
    for seed in 0..12u64 {
        match seed {
            0 => names.sort_unstable(),
            1 => names.sort_unstable_by(|a, b| b.cmp(a)),
            _ => names.sort_by_key(|name| name.bytes().fold(seed, |hash, byte| splitmix64(hash ^ u64::from(byte)))),
        }
        let args = ["-C", "tree", "--no-recursion", "--format=posix", "-cf", "t.tar", "-T", "list"];
        fs::write(place.path("list"), names.join("\n")).unwrap();
        tool(place.dir(), "tar", "tar", &args);
        made.push((format!("order {seed}"), place.convert("tar:t.tar").unwrap()));
    }
    assert_one(&made);
}

/// Attributes that only the newer dialects have, and back through extraction.
#[test]
fn privileged_attributes_and_times_through_pax() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let tree = place.path("tree");
    fs::create_dir(&tree).unwrap();
    plain_tree(&tree);
    for (file, name, value) in [
        ("etc/none", "user.empty", "0x"),
        ("etc/none", "user.binary", "0x000a3dff00"),
        ("usr/bin/f8", "security.capability", "0x0100000200200000000000000000000000000000"),
        ("usr", "trusted.shared", "0x41"),
        ("etc", "trusted.shared", "0x41"),
        ("usr/bin/big", "user.long", &format!("0x{}", "7a".repeat(3000))),
    ] {
        tool(&tree, "attr", "setfattr", &["-n", name, "-v", value, file]);
    }
    tool(&tree, "acl", "setfacl", &["-m", "u:54321:rwx,g:54322:r", "usr/bin/f12"]);
    tool(&tree, "acl", "setfacl", &["-d", "-m", "g:54323:rx", "usr/share"]);
    let long = tree.join(["long-component-of-a-path"; 11].join("/"));
    fs::create_dir_all(&long).unwrap();
    fs::write(long.join("n".repeat(200)), "deep").unwrap();
    set_times(&tree, ".987654321");
    let want = Snapshot::of(&tree).unwrap();
    let mut made = vec![("dir:".to_owned(), place.convert("dir:tree").unwrap())];
    assert_same(&want, &place.only_layer(&made[0].1), &Compare::exact());
    let keep = ["--xattrs", "--xattrs-include=*", "--acls"];
    tool(place.dir(), "tar", "tar", &[&["-C", "tree", "--format=posix", "-cf", "t.tar"], &keep[..], &["."]].concat());
    made.push(("GNU tar".to_owned(), place.convert("tar:t.tar").unwrap()));
    tool(
        place.dir(),
        "libarchive-tools",
        "bsdtar",
        &["-C", "tree", "--format", "pax", "--xattrs", "--acls", "-cf", "b.tar", "."],
    );
    made.push(("bsdtar".to_owned(), place.convert("tar:b.tar").unwrap()));
    // What GNU tar makes of it again is the same directory.
    fs::create_dir(place.path("again")).unwrap();
    let extract = ["-C", "again", "--same-owner", "-p", "-xf", "t.tar"];
    tool(place.dir(), "tar", "tar", &[&extract[..], &keep].concat());
    made.push(("extracted".to_owned(), place.convert("dir:again").unwrap()));
    assert_one(&made);
}
