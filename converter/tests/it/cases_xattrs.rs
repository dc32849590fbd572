//! Extended attributes: cases X01 to X08, and O10 where it is about the image.

use crate::support_cases::{BOTH, Case, assert_text, node, paths, xattrs};
use converter::layer::Options;
use converter::manifest::OverlayXattrs;
use fixtures::oci::Layer;
use fixtures::tree::{Compare, Kind, Snapshot, assert_same};
use fixtures::{mounts, require};
use rustix::fs::{CWD, FileType, Mode, XattrFlags, mknodat, setxattr};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::Command;

fn tool(dir: &Path, program: &str, package: &str, args: &[&str]) {
    let output = Command::new(require::tool(program, package)).args(args).current_dir(dir).output().unwrap();
    assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn set(path: &Path, name: &[u8], value: &[u8]) {
    setxattr(path, OsStr::from_bytes(name), value, XattrFlags::empty())
        .expect("this test needs root and ext4 or the like");
}

#[test]
fn privileged_x01_binary_capability() {
    if !require::mounts() {
        return;
    }
    let values = ["0100000200200000000000000000000000000000", "010000020a3d0d000000000000000a3d00000000"];
    let script = format!(
        "f bin/ping 04755 \"elf\" uid=1000 gid=5\nx security.capability=0x{}\n\
         f bin/odd 0755 \"elf\"\nx security.capability=0x{}\nx user.odd=0x0a3d000a3d\n\
         h bin/ping6 -> bin/ping",
        values[0], values[1]
    );
    for (overlay, layers) in BOTH.into_iter().zip([vec![&*script], vec!["f bin/ping \"old\"", &script]]) {
        let tree = Case::in_namespace(overlay, &layers).assert_as_umoci();
        for (name, value) in [("bin/ping", values[0]), ("bin/ping6", values[0]), ("bin/odd", values[1])] {
            assert_eq!(hex::encode(&node(&tree, name).xattrs[&b"security.capability"[..]]), value, "{name}");
        }
        assert_eq!(node(&tree, "bin/odd").xattrs[&b"user.odd"[..]], b"\n=\0\n=");
        let ping = node(&tree, "bin/ping");
        assert_eq!((ping.mode, ping.uid, ping.gid), (0o4755, 1000, 5));
    }
}

#[test]
fn privileged_x01_copied_from_a_lower_layer() {
    if !require::mounts() {
        return;
    }
    let value = "0100000200200000000000000000000000000000";
    let lower = format!("f ping 04755 \"elf\" uid=3\nx security.capability=0x{value}");
    let tree = Case::new(&[&lower, "h ping4 -> ping"]).assert_as_umoci();
    assert_eq!(hex::encode(&node(&tree, "ping4").xattrs[&b"security.capability"[..]]), value);
    assert_eq!(node(&tree, "ping4").mode, 0o4755);
}

#[test]
fn privileged_x02_empty_value() {
    if !require::mounts() {
        return;
    }
    let script = "d usr/\nx user.overlay.origin=\nf usr/curl \"elf\"\nx user.empty=\nx user.full=1";
    for overlay in BOTH {
        let case = Case::in_namespace(overlay, &[script, "f usr/other"]);
        let tree = case.assert_as_umoci();
        assert_eq!(xattrs(&tree, "usr/curl"), [("user.empty".into(), String::new()), ("user.full".into(), "1".into())]);
        // Whatever it meant where the layer was made, it means nothing to this mount, and the sandbox sees it.
        let node = node(&tree, "usr");
        assert_eq!(node.xattrs.get(&b"user.overlay.origin"[..]).map(Vec::as_slice), Some(&b""[..]), "{overlay:?}");
        assert_eq!(node.children.len(), 2);
    }
}

/// What an overlay shows of `c 0:0`, by the namespace: an empty file with the mark, in a directory with its own.
fn assert_inner_whiteout(tree: &Snapshot, overlay: OverlayXattrs, directory: &str) {
    let prefix = overlay.prefix();
    let file = node(tree, &format!("{directory}/x"));
    assert_eq!((file.kind, file.size), (Kind::Regular, 0));
    assert_eq!(file.xattrs, BTreeMap::from([(format!("{prefix}whiteout").into_bytes(), Vec::new())]));
    assert_eq!(
        node(tree, directory).xattrs.get(format!("{prefix}opaque").as_bytes()).map(Vec::as_slice),
        Some(&b"x"[..])
    );
}

#[test]
fn privileged_x03_a_real_0_0_device() {
    if !require::mounts() {
        return;
    }
    let device = "c lib/containers/storage/x 0:0";
    let stacks: [&[&str]; 6] = [
        &[device],
        // The directory's own entry comes after, or is of another layer.
        &[&format!("{device}\nd lib/containers/storage/ 0700")],
        &["d lib/containers/storage/ 0700\nx user.k=v", device],
        &["f lib/containers/storage/x \"lower\"", device],
        &["f lib/containers/storage/y", &format!("{device}\no lib/containers/storage")],
        // Where a lower symbolic link leads.
        &["d var/storage/\nd lib/containers/\ns lib/containers/storage -> /var/storage", device],
    ];
    for overlay in BOTH {
        for stack in stacks {
            let case = Case::in_namespace(overlay, stack);
            let tree = case.tree();
            let at = if tree.find(b"var").is_some() { "var/storage" } else { "lib/containers/storage" };
            assert_inner_whiteout(&tree, overlay, at);
            assert_eq!(node(&tree, at).children.len(), 1);
            let top = case.layer(stack.len() - 1);
            let name = format!("{}overlay.whiteout", overlay.prefix());
            assert!(node(&top, &format!("{at}/x")).xattrs.contains_key(name.as_bytes()), "escaped in the image");
            let warnings = case.warnings();
            assert!(warnings.len() == 1 && warnings[0].contains("is a 0:0 character device"), "{warnings:?}");
        }
    }
}

#[test]
fn privileged_x03_is_a_whiteout_again_to_an_overlay_inside() {
    if !require::mounts() {
        return;
    }
    let case =
        Case::new(&["f bottom/x \"x\"\nf bottom/sub/x\nf bottom/y", "d top/\nc top/x 0:0\nc top/sub/x 0:0\nf top/z"]);
    let tree = case.at_root(|root| {
        let empty = mounts::scratch();
        // What overlayfs has at the bottom it does not look for such marks in.
        let lowers = [empty.path(), &root.join("bottom"), &root.join("top")];
        let inner = mounts::overlay(&lowers, None).unwrap();
        Snapshot::of(inner.path()).unwrap()
    });
    assert_eq!(paths(&tree), ["sub", "y", "z"]);
}

#[test]
fn privileged_x03_a_directory_source() {
    if !require::mounts() {
        return;
    }
    let dir = mounts::scratch();
    let store = fs3_client::Store::create(&dir.path().join("store")).unwrap();
    let source = dir.path().join("tree");
    std::fs::create_dir_all(source.join("storage")).unwrap();
    mknodat(CWD, source.join("storage/x"), FileType::CharacterDevice, Mode::empty(), 0).unwrap();
    let name = format!("dir:{}", source.display());
    let converted = crate::support::convert_by(&store, &name, 1, Options::default()).unwrap();
    let records = [&converted.layers[0].record];
    let tree =
        crate::support_cases::mount(&store, &records, OverlayXattrs::Trusted, |root| Snapshot::of(root).unwrap());
    assert_inner_whiteout(&tree, OverlayXattrs::Trusted, "storage");
}

#[test]
fn privileged_x03_overlay_attributes_of_the_source_mean_nothing_here() {
    if !require::mounts() {
        return;
    }
    // What an upper directory looks like that someone packed as it was: it would hide, redirect and blank out.
    for overlay in BOTH {
        let prefix = overlay.prefix();
        let other = BOTH.into_iter().find(|o| *o != overlay).unwrap().prefix();
        let upper = format!(
            "d d/\nx {prefix}opaque=y\nx {other}opaque=y\nf d/new\nd r/\nx {prefix}redirect=/d\nf m \"mm\"\n\
             x {prefix}metacopy=\nd w/\nx {prefix}opaque=x\nf w/f\nx {prefix}whiteout=\nd o/\nx {prefix}overlay.opaque=y"
        );
        let case = Case::in_namespace(overlay, &["f d/old\nf o/old\nf r/own\nf m \"lower\"\nf w/f \"lower\"", &upper]);
        let tree = case.tree();
        let all = ["d", "d/new", "d/old", "m", "o", "o/old", "r", "r/own", "w", "w/f"];
        assert_eq!(paths(&tree), all, "{overlay:?}");
        assert_text(&tree, "m", "mm");
        assert_text(&tree, "w/f", "");
        // And the sandbox sees what was there.
        for (path, name, value) in [
            ("d", format!("{prefix}opaque"), "y"),
            ("d", format!("{other}opaque"), "y"),
            ("r", format!("{prefix}redirect"), "/d"),
            ("m", format!("{prefix}metacopy"), ""),
            ("w/f", format!("{prefix}whiteout"), ""),
            ("w", format!("{prefix}opaque"), "x"),
            ("o", format!("{prefix}overlay.opaque"), "y"),
        ] {
            let found = xattrs(&tree, path);
            assert!(
                found.contains(&(name.clone(), value.to_owned())),
                "{overlay:?} {path}: no {name}={value} in {found:?}"
            );
        }
    }
}

#[test]
fn privileged_x04_order_does_not_show() {
    if !require::mounts() {
        return;
    }
    let file = |order: &[&str]| format!("f f \"x\"\n{}\nf g\n{}", order.join("\n"), order.join("\n"));
    let all = ["x user.b=1", "x user.a=2", "x trusted.c=3", "x security.d=4", "x user.a.b=5"];
    let first = Case::new(&[&file(&all)]);
    for order in [[4, 3, 2, 1, 0], [1, 0, 2, 3, 4], [2, 4, 0, 3, 1]] {
        let case = Case::new(&[&file(&order.map(|at| all[at]))]);
        assert_eq!(case.record(0).metadata, first.record(0).metadata, "{order:?}");
    }
    assert_eq!(xattrs(&first.assert_as_umoci(), "f").len(), 5);
}

#[test]
fn privileged_x05_libarchive_form() {
    if !require::mounts() {
        return;
    }
    let dir = mounts::scratch();
    let source = dir.path().join("tree");
    std::fs::create_dir(&source).unwrap();
    for (file, names) in [
        ("a", &["user.plain", "user.per%cent"][..]),
        ("b", &["user.eq=uals", "user.\u{e9}\u{df}\u{4e2d}", "user.sp ace"]),
    ] {
        let path = source.join(file);
        std::fs::write(&path, file).unwrap();
        for (index, name) in names.iter().enumerate() {
            set(&path, name.as_bytes(), &b"\0\n=%\xff!"[..4 + index]);
        }
    }
    std::fs::create_dir(source.join("d")).unwrap();
    for length in 0..7 {
        set(&source.join("d"), format!("user.{length}").as_bytes(), &[0xfb; 7][..length]);
    }
    tool(&source, "bsdtar", "libarchive-tools", &["--xattrs", "--format", "pax", "-cf", "../x.tar", "."]);
    let case = Case::of(&[Layer::tar(std::fs::read(dir.path().join("x.tar")).unwrap())], Options::default()).unwrap();
    assert_same(&Snapshot::of(&source).unwrap(), &case.tree(), &Compare::overlay());
    assert_eq!(case.warnings(), Vec::<String>::new());
    // By hand: only LIBARCHIVE's form, only SCHILY's, and both.
    let value =
        |form: &str| format!("f f\n{form} user.one=0x00\n{form} user.two=0x0001\n{form} \"user.th%3d=ree\"=0x000102");
    let schily = Case::new(&["f f\nx user.one=0x00\nx user.two=0x0001\nx user.three=0x000102"]);
    for form in ["xl", "xb"] {
        let case = Case::new(&[&value(form).replace("\"user.th%3d=ree\"", "user.three")]);
        assert_eq!(case.record(0).metadata, schily.record(0).metadata, "{form}");
    }
}

#[test]
fn privileged_x06_acls_by_xattrs_survive() {
    if !require::mounts() {
        return;
    }
    let dir = mounts::scratch();
    let source = dir.path().join("tree");
    std::fs::create_dir_all(source.join("d")).unwrap();
    std::fs::write(source.join("f"), "f").unwrap();
    tool(&source, "setfacl", "acl", &["-m", "u:1000:rwx,g:61234:r", "f"]);
    tool(&source, "setfacl", "acl", &["-d", "-m", "g:5:rx,u:0:w", "d"]);
    let want = Snapshot::of(&source).unwrap();
    assert!(node(&want, "f").xattrs.contains_key(&b"system.posix_acl_access"[..]));
    assert!(node(&want, "d").xattrs.contains_key(&b"system.posix_acl_default"[..]));
    tool(&source, "tar", "tar", &["--xattrs", "--xattrs-include=*", "--format=pax", "-cf", "../x.tar", "."]);
    let tar = std::fs::read(dir.path().join("x.tar")).unwrap();
    let case = Case::of(&[Layer::tar(tar)], Options::default()).unwrap();
    assert_same(&want, &case.tree(), &Compare::overlay());
    // As the record that Docker and GNU tar write, whatever GNU tar chose above.
    let hex = |name: &str, of: &str| hex::encode(&node(&want, of).xattrs[name.as_bytes()]);
    let script = format!(
        "f f 0670 \"f\"\nx system.posix_acl_access=0x{}\nd d/ 0755\nx system.posix_acl_default=0x{}",
        hex("system.posix_acl_access", "f"),
        hex("system.posix_acl_default", "d")
    );
    for overlay in BOTH {
        let tree = Case::in_namespace(overlay, &[&script, "f other"]).tree();
        for (name, of) in [("system.posix_acl_access", "f"), ("system.posix_acl_default", "d")] {
            assert_eq!(node(&tree, of).xattrs.get(name.as_bytes()), node(&want, of).xattrs.get(name.as_bytes()));
        }
    }
}

#[test]
fn privileged_x06_acls_as_text_are_whole_or_reported() {
    if !require::mounts() {
        return;
    }
    let dir = mounts::scratch();
    let source = dir.path().join("tree");
    std::fs::create_dir(&source).unwrap();
    // Ids that nobody here has the name of, so that the text is numbers; and one that is a name.
    for (file, acl) in [("numbers", "u:61234:rwx,g:61235:r"), ("named", "u:root:rw,g:61235:r")] {
        std::fs::write(source.join(file), file).unwrap();
        tool(&source, "setfacl", "acl", &["-m", acl, file]);
    }
    tool(&source, "tar", "tar", &["--acls", "--format=pax", "-cf", "../x.tar", "."]);
    let case = Case::of(&[Layer::tar(std::fs::read(dir.path().join("x.tar")).unwrap())], Options::default()).unwrap();
    let (want, tree) = (Snapshot::of(&source).unwrap(), case.tree());
    assert_eq!(node(&tree, "numbers").xattrs, node(&want, "numbers").xattrs);
    assert_eq!(node(&tree, "numbers").mode, node(&want, "numbers").mode);
    assert!(node(&tree, "named").xattrs.is_empty(), "an ACL without one of its entries is another ACL");
    let warnings = case.warnings();
    assert!(warnings.len() == 1 && warnings[0].contains("named"), "{warnings:?}");
    // libarchive's text carries the numbers beside the names.
    tool(&source, "bsdtar", "libarchive-tools", &["--acls", "--format", "pax", "-cf", "../b.tar", "."]);
    let case = Case::of(&[Layer::tar(std::fs::read(dir.path().join("b.tar")).unwrap())], Options::default()).unwrap();
    assert_same(&want, &case.tree(), &Compare::overlay());
}

#[test]
fn privileged_x07_with_and_without_by_turns() {
    if !require::mounts() {
        return;
    }
    let mut script = String::new();
    for n in 0..240 {
        // Inline, at the limit of inline, one block, several, with a tail, and empty.
        let size = [0, 100, 3900, 4032, 4096, 4097, 70_000, 300_001][n % 8];
        let _ = writeln!(script, "f d{}/f{n} size={size} fill=random:{n}", n % 5);
        for attribute in 0..[0, 1, 0, 3, 0, 40, 0][n % 7] {
            let _ = writeln!(script, "x user.n{}=\"{}\"", attribute * 7 % 40, "v".repeat(n % 40 + 1));
        }
    }
    let tree = Case::new(&[&script]).assert_as_umoci();
    assert_eq!(tree.len(), 1 + 5 + 240);
    // The same again as layers of every third file.
    let mut layers = [String::new(), String::new(), String::new()];
    let mut at = 0;
    for line in script.lines() {
        at += usize::from(line.starts_with('f'));
        let _ = writeln!(layers[at % 3], "{line}");
    }
    let stacked = Case::new(&layers.iter().map(String::as_str).collect::<Vec<_>>()).assert_as_umoci();
    crate::support_cases::assert_same_overlay(&tree, &stacked);
}

#[test]
fn privileged_x08_the_upper_layers_set_wins_as_a_whole() {
    if !require::mounts() {
        return;
    }
    let layers = [
        "d d/\nx user.a=1\nx user.shared=same\nx trusted.t=1\nf d/1\nx user.shared=same\nf f\nx user.a=1\nx user.b=1",
        "d d/\nx user.b=2\nx user.shared=same\nf d/2\nx user.shared=same\nf f\nx user.b=2",
        "d d/\nx user.c=3\nf d/3\nx user.shared=same\nx user.c=3",
    ];
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    for overlay in BOTH {
        let tree = Case::in_namespace(overlay, &layers).tree();
        assert_eq!(xattrs(&tree, "d"), [pair("user.c", "3")]);
        assert_eq!(xattrs(&tree, "f"), [pair("user.b", "2")]);
        for (file, count) in [("d/1", 1), ("d/2", 1), ("d/3", 2)] {
            let all = xattrs(&tree, file);
            assert!(all.len() == count && all.contains(&pair("user.shared", "same")), "{file}: {all:?}");
        }
        // A directory without an entry of its own is what it was.
        let tree = Case::in_namespace(overlay, &[layers[0], layers[1], "f d/3", "o d\nf d/4"]).tree();
        assert_eq!(xattrs(&tree, "d"), [pair("user.b", "2"), pair("user.shared", "same")]);
        assert_eq!(paths(&tree), ["d", "d/4", "f"]);
    }
}
