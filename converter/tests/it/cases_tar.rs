//! Tars that other converters and extractors stumbled over, from conversion to the kernel's view of the image.
//!
//! Each case has a number by which the project's list of such cases knows it; the reader's own tests have the same
//! numbers. Every image is checked by fsck.erofs on its way to the mount.

use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use fixtures::content::Content;
use fixtures::model::{Change, Kind, Layer, Meta, Model};
use fixtures::tar::{self, Format};
use fixtures::tree::{Compare, Snapshot, assert_same};
use fixtures::{mounts, require};

use crate::support_tar::{
    Place, With as _, assert_shows, directory, dsec_convert, file, model, put, symlink, tool, warnings,
};

fn regular(path: &str, content: Content) -> Change {
    put(path, Kind::Regular(content), 0o644)
}

fn text(seed: u64, size: u64) -> Content {
    Content::Text { seed, size }
}

#[test]
fn privileged_t01_an_entry_named_slash() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    for name in ["/", "./", ".", "///", "/."] {
        let shown = place.shown(&format!("d {name} 0711 uid=7 gid=8 mtime=9.25\nx user.root=1\nf a \"x\""));
        let root = directory("").mode(0o711).owner(7, 8).mtime(9, 250_000_000).xattr("user.root", b"1");
        assert_shows(&shown, [root, file("a", "x")]);
    }
    assert!(place.script_refused("f / \"x\"").contains("would replace the root"));
}

#[test]
fn privileged_t02_an_empty_name() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    assert_eq!(
        place.script_refused("f \"\" \"x\"\nf b \"y\""),
        format!("layer 0 ({}): an entry has an empty name", place.path("layer.tar").display())
    );
    // A directory's can only be the root.
    let shown = place.shown("d \"\" 0700\nf b \"y\"");
    assert_shows(&shown, [directory("").mode(0o700), file("b", "y")]);
}

#[test]
fn privileged_t03_no_end_of_archive() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let whole = place.script("d d/\nf d/f size=9000 fill=text:1\nf last size=5000 fill=text:2");
    let want = [directory("d"), regular("d/f", text(1, 9000)), regular("last", text(2, 5000))];
    assert_shows(&place.only_layer(&whole), want);
    for end in ["end none", "end one"] {
        let script = format!("d d/\nf d/f size=9000 fill=text:1\nf last size=5000 fill=text:2\n{end}");
        let converted = place.script(&script);
        assert_eq!(converted.layers[0].record.metadata, whole.layers[0].record.metadata, "{end}");
        let warned = warnings(&converted).iter().any(|warning| warning.contains("end"));
        assert!(warned, "{end}: {:?}", warnings(&converted));
    }
}

#[test]
fn t04_cut_in_the_middle_of_a_member() {
    let place = Place::new();
    let archive = tar::build("d d/\nf d/whole \"x\"\nf d/cut size=4K fill=text:1");
    let begin = archive.len() - 1024 - 4096;
    for cut in [begin - 512 + 1, begin - 1, begin, begin + 1, begin + 2048, begin + 4095] {
        let error = place.tar(&archive[..cut]).unwrap_err();
        assert!(error.is_corrupt(), "{error}");
        assert!(error.to_string().contains("d/cut") || cut < begin, "cut at {cut}: {error}");
        place.assert_empty();
    }
    // On a pipe, by the program.
    let mut child = Command::new(env!("CARGO_BIN_EXE_dsec-convert"))
        .args(["convert", "tar:-", "--name", "a:1", "--quiet", "--store"])
        .arg(place.store.local_dir().unwrap().root())
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&archive[..begin + 2048]).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("d/cut") && said.contains("standard input"), "{said}");
    place.assert_empty();
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn privileged_t05_several_gzip_members() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let archive = tar::build("d d/\nf d/a size=700K fill=random:1\nf d/b size=300K fill=text:2\ns l -> d/a");
    let want = || {
        let content = [Content::Random { seed: 1, size: 700 << 10 }, Content::Text { seed: 2, size: 300 << 10 }];
        let [a, b] = content;
        [directory("d"), regular("d/a", a), regular("d/b", b), symlink("l", "d/a")]
    };
    // In the middle of data, of a header, and an empty member between.
    for at in [300_000, 512 + 100, 1024] {
        let (head, tail) = archive.split_at(at);
        for members in [vec![head, tail], vec![head, b"", tail], vec![b"", head, tail, b""]] {
            let packed: Vec<u8> = members.into_iter().flat_map(gzip).collect();
            let converted = place.tar(&packed).unwrap();
            assert_shows(&place.only_layer(&converted), want());
            let layer =
                fixtures::oci::Layer::tar(archive.clone()).stored(packed).media_type(fixtures::oci::media::LAYER_GZIP);
            place.layout(fixtures::oci::Image::new().layer(layer));
            let converted = place.convert("oci:oci").unwrap();
            assert_shows(&place.only_layer(&converted), want());
        }
    }
}

#[test]
fn privileged_t06_pax_size_beats_the_header() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let shown = place.shown(
        "f a size=1000 fill=text:1\nraw size=\"00000000000\"\npax size=1000\n\
         f b size=70000 fill=text:2\nraw size=\"77777777777\"\npax size=70000\n\
         f c \"behind\"",
    );
    assert_shows(&shown, [regular("a", text(1, 1000)), regular("b", text(2, 70000)), file("c", "behind")]);
}

#[test]
fn privileged_t07_negative_and_fractional_times() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let shown = place.shown(
        "format gnu\nf minus-one mtime=-1\n\
         format pax\nf half mtime=0\npax mtime=123.5\nf quarter\npax mtime=-1.25\nf nano\npax mtime=0.000000001\n\
         f before\npax mtime=-6795364578.871345152\nf finer\npax mtime=5.1234567899\nf later mtime=20000000000\n\
         d dir/\npax mtime=-0.5\ns link -> x\npax mtime=7.000000007",
    );
    let empty = |path: &str| file(path, "");
    assert_shows(
        &shown,
        [
            empty("minus-one").mtime(-1, 0),
            empty("half").mtime(123, 500_000_000),
            empty("quarter").mtime(-2, 750_000_000),
            empty("nano").mtime(0, 1),
            empty("before").mtime(-6_795_364_579, 128_654_848),
            empty("finer").mtime(5, 123_456_789),
            empty("later").mtime(20_000_000_000, 0),
            directory("dir").mtime(-1, 500_000_000),
            symlink("link", "x").mtime(7, 7),
        ],
    );
}

#[test]
fn privileged_t08_odd_pax_headers() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let shown = place.shown(
        "V \"a volume\"\nglobal comment=nothing\nf kept \"1\"\npax path=\nd any 0700 mtime=3\npax path=///\n\
         global mtime=77\nf global \"2\" mtime=5\nf own \"3\"\npax mtime=78",
    );
    assert_shows(
        &shown,
        [
            directory("").mode(0o700).mtime(3, 0),
            file("kept", "1"),
            file("global", "2").mtime(77, 0),
            file("own", "3").mtime(78, 0),
        ],
    );
    // An extended header whose own name is empty.
    let mut writer = tar::Writer::new(Vec::new());
    writer.extension(b'x', b"", Format::Pax, b"12 path=new\n").unwrap();
    writer.entry(&tar::Entry::new("old", tar::Kind::Regular(Content::Bytes(b"1".to_vec())))).unwrap();
    let converted = place.tar(&writer.finish().unwrap()).unwrap();
    assert_shows(&place.only_layer(&converted), [file("new", "1")]);
}

/// Asserts that no more of a file is data than `pieces` chunks.
#[track_caller]
fn assert_holes(shown: &Snapshot, path: &[u8], pieces: u64) {
    let extents = shown.find(path).unwrap().extents.clone().unwrap();
    let data: u64 = extents.iter().map(|(_, length)| length).sum();
    assert!(data > 0 && data <= pieces << 16, "{extents:?}");
}

#[test]
fn privileged_t09_sparse_members() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let mut content = vec![0; 1 << 20];
    let random = Content::Random { seed: 1, size: 1 << 20 };
    random.fill(512 << 10, &mut content[512 << 10..(512 << 10) + 4096]);
    random.fill((1 << 20) - 10, &mut content[(1 << 20) - 10..]);
    let want = [regular("dir/f", Content::Bytes(content)), file("g", "behind")];
    for form in ["gnu", "0.0", "0.1", "1.0"] {
        let format = if form == "gnu" { "gnu" } else { "pax" };
        let shown = place.shown(&format!(
            "format {format}\nf dir/f size=1M fill=random:1\nsparse {form} 524288:4096,1048566:10\nf g \"behind\""
        ));
        assert_shows(&shown, want.clone());
        assert_holes(&shown, b"dir/f", 2);
        // All of it a hole.
        let shown = place.shown(&format!("format {format}\nf h size=3M fill=zero\nsparse {form} 3145728:0"));
        assert_shows(&shown, [regular("h", Content::Repeat { byte: 0, size: 3 << 20 })]);
        assert_eq!(shown.find(b"h").unwrap().extents, Some(Vec::new()), "{form}");
    }
}

#[test]
fn privileged_t09_sparse_members_of_gnu_tar_and_bsdtar() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let tree = place.path("tree");
    std::fs::create_dir(&tree).unwrap();
    let f = std::fs::File::create(tree.join("f")).unwrap();
    f.set_len(1 << 20).unwrap();
    f.write_all_at(b"data", 512 << 10).unwrap();
    // More pieces than a header has room for.
    let g = std::fs::File::create(tree.join("g")).unwrap();
    g.set_len(40 << 20).unwrap();
    for piece in 0..70u64 {
        g.write_all_at(&[1; 4096], piece * (8 << 16)).unwrap();
    }
    let want = Snapshot::of(&tree).unwrap();
    for (package, program, args) in [
        ("tar", "tar", &["-S", "--format=gnu"][..]),
        ("tar", "tar", &["-S", "--format=posix", "--sparse-version=0.0"]),
        ("tar", "tar", &["-S", "--format=posix", "--sparse-version=0.1"]),
        ("tar", "tar", &["-S", "--format=posix", "--sparse-version=1.0"]),
        ("libarchive-tools", "bsdtar", &["--format", "pax"]),
        ("tar", "tar", &["--format=posix"]),
    ] {
        tool(place.dir(), package, program, &[&["-cf", "layer.tar", "-C", "tree"], args, &["."]].concat());
        let shown = place.only_layer(&place.convert("tar:layer.tar").unwrap());
        let nanos = program == "bsdtar" || args.contains(&"--format=posix");
        assert_same(&want, &shown, &Compare { mtime: nanos, ..Compare::exact() });
        assert_holes(&shown, b"f", 1);
        assert_holes(&shown, b"g", 70);
    }
}

#[test]
fn privileged_t10_missing_parents() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let lower = "d etc/ 0700 uid=5 gid=6 mtime=50\nx user.a=1\nf etc/old \"1\"";
    let converted = place.image(&[lower, "f etc/app/x \"2\""]).unwrap();
    let root = place.mount(&converted);
    let etc = || directory("etc").mode(0o700).owner(5, 6).mtime(50, 0).xattr("user.a", b"1");
    let merged = model([etc(), file("etc/old", "1"), directory("etc/app"), file("etc/app/x", "2")]);
    assert_same(&root.snapshot(), &merged, &Compare::overlay());
    // The layer alone has what the directory will be merged with.
    assert_shows(&root.layer(1), [etc(), directory("etc/app"), file("etc/app/x", "2")]);
    let unpacked = Snapshot::of(&place.umoci().unwrap().rootfs()).unwrap();
    // Extraction leaves the time of day on what it makes or touches.
    let any_mtime = ["", "etc", "etc/app"].map(|path| path.as_bytes().to_vec()).to_vec();
    assert_same(&root.snapshot(), &unpacked, &Compare { any_mtime, root: false, ..Compare::overlay() });

    let shown = place.shown("f usr/share/locale/ca/x \"1\"");
    assert_shows(&shown, [file("usr/share/locale/ca/x", "1")]);
    // With nothing known of what is below, a layer's implied directories stay so.
    assert_shows(&place.shown("f etc/app/x \"2\""), [file("etc/app/x", "2")]);
}

#[test]
fn privileged_t10_the_converting_user_does_not_matter() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let own = place.script("f usr/share/x \"1\"");
    // A program and a store where a user who may not read /root gets at them.
    let dir = mounts::scratch();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    std::fs::copy(env!("CARGO_BIN_EXE_dsec-convert"), dir.path().join("dsec-convert")).unwrap();
    std::fs::copy(place.path("layer.tar"), dir.path().join("layer.tar")).unwrap();
    let output = Command::new("./dsec-convert")
        .args(["convert", "tar:layer.tar", "--store", "store", "--name", "a:1", "--json"])
        .current_dir(dir.path())
        .uid(1234)
        .gid(1234)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let digest = own.layers[0].record.metadata.digest.to_string();
    assert_eq!(report["layers"][0]["metadata"]["digest"], digest);
}

#[test]
fn privileged_t11_a_directory_becomes_a_link_and_a_file_a_directory() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let lower = "d a/\nf a/x \"1\"\nd a/y/\nf a/y/z \"1\"\nf f \"1\"\nd b/\nf b/kept \"1\"";
    let converted = place.image(&[lower, "s a -> /b\nd f/\nf f/n \"2\""]).unwrap();
    let root = place.mount(&converted);
    let want = [directory("b"), file("b/kept", "1"), symlink("a", "/b"), directory("f"), file("f/n", "2")];
    assert_same(&root.snapshot(), &model(want), &Compare::overlay());
    let unpacked = Snapshot::of(&place.umoci().unwrap().rootfs()).unwrap();
    assert_same(&root.snapshot(), &unpacked, &Compare { root: false, ..Compare::overlay() });
    // The same in one layer.
    let shown = place.shown(&format!("{lower}\ns a -> /b\nd f/\nf f/n \"2\""));
    let want = [directory("b"), file("b/kept", "1"), symlink("a", "/b"), directory("f"), file("f/n", "2")];
    assert_same(&shown, &model(want), &Compare::overlay());
    // What replaced a lower directory leaves nothing of it, whatever takes its place.
    let lower = "d f/\nf f/old \"1\"\nd g/\nf g/old \"1\"";
    let upper = "f f \"2\"\nd f/\nf f/n \"2\"\ns g -> f\nd g/";
    let root = place.mount(&place.image(&[lower, upper]).unwrap());
    assert_same(&root.snapshot(), &model([directory("f"), file("f/n", "2"), directory("g")]), &Compare::overlay());
    assert_same(
        &root.snapshot(),
        &Snapshot::of(&place.umoci().unwrap().rootfs()).unwrap(),
        &Compare { root: false, ..Compare::overlay() },
    );
}

#[test]
fn privileged_t12_through_a_planted_symlink() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let outside = place.path("outside");
    std::fs::create_dir(&outside).unwrap();
    let absolute = outside.to_str().unwrap();
    for (target, to) in [
        (absolute, absolute.trim_start_matches('/')),
        ("../../..", ""),
        ("../../../../../tmp/../escaped", "escaped"),
        ("/", ""),
        ("inside/..", ""),
    ] {
        let pwned = if to.is_empty() { "pwn".to_owned() } else { format!("{to}/pwn") };
        let want = || [directory("inside"), symlink("esc", target), file(&pwned, "x")];
        let (plant, write) = (format!("d inside/\ns esc -> {target}\n"), "f esc/pwn \"x\"");
        for layers in [vec![plant.clone() + write], vec![plant.clone(), write.to_owned()]] {
            let scripts: Vec<&str> = layers.iter().map(String::as_str).collect();
            let root = place.mount(&place.image(&scripts).unwrap());
            assert_same(&root.snapshot(), &model(want()), &Compare::overlay());
            let unpacked = Snapshot::of(&place.umoci().unwrap().rootfs()).unwrap();
            // umoci makes the directories now.
            let options = Compare { dir_mtime: false, root: false, ..Compare::overlay() };
            assert_same(&root.snapshot(), &unpacked, &options);
        }
    }
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
    assert!(!std::path::Path::new("/pwn").exists() && !std::path::Path::new("/escaped").exists());
    let error = place.script_refused("s . -> /tmp\nf x \"1\"");
    assert!(error.contains("would replace the root with something that is not a directory"), "{error}");
    let error = place.script_refused("f ../x \"1\"");
    assert!(error.contains("`../x`") && error.contains("lead out of the image"), "{error}");
    let error = place.script_refused("s a -> b\ns b -> a\nf a/x \"1\"");
    assert!(error.contains("more than 40 symbolic links"), "{error}");
}

#[test]
fn privileged_t13_names_that_are_not_utf_8() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let long = "d".repeat(120);
    for (format, name) in
        [("ustar", String::new()), ("gnu", long.clone() + "/"), ("pax", long.clone() + "/"), ("v7", String::new())]
    {
        let name = format!("{name}caf\\xe9");
        let shown = place.shown(&format!("format {format}\nf \"{name}\" \"1\"\ns \"{name}l\" -> \"\\xff\\xfe\""));
        let bytes = [name.replace("caf\\xe9", "").as_bytes(), b"caf\xe9"].concat();
        let link = [&bytes[..], b"l"].concat();
        let content = Kind::Regular(Content::Bytes(b"1".to_vec()));
        let want = [
            Change::Put(bytes, content, Meta::new(0o644)),
            Change::Put(link, Kind::Symlink(b"\xff\xfe".to_vec()), Meta::new(0o777)),
        ];
        assert_shows(&shown, want);
    }
}

#[test]
fn privileged_t14_big_ids_and_names() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let ids = [65_535, 65_536, 2_097_151, 2_097_152, 2_000_000_000, 4_294_967_294u32];
    for format in ["gnu", "pax"] {
        let mut script = format!("format {format}\nf named uid=1000 gid=1001 uname=root gname=root\n");
        let mut want = vec![file("named", "").owner(1000, 1001)];
        for id in ids {
            script += &format!("f f{id} uid={id} gid={}\nd d{id} uid={id}\n", id - 1);
            want.push(file(&format!("f{id}"), "").owner(id, id - 1));
            want.push(directory(&format!("d{id}")).owner(id, 0));
        }
        assert_shows(&place.shown(&script), want);
        // What is -1 to chown is no id; an extractor leaves the file to root.
        let converted =
            place.script(&format!("format {format}\nf none uid=4294967295 gid=4294967295\nf g gid=4294967295 uid=3"));
        assert_shows(&place.only_layer(&converted), [file("none", ""), file("g", "").owner(3, 0)]);
        assert_eq!(warnings(&converted).len(), 3);
        let error = place.script_refused(&format!("format {format}\nf more uid=4294967296"));
        assert!(error.contains("entry \"more\"") && error.contains("uid"), "{error}");
    }
}

#[test]
fn privileged_t16_long_names_and_big_headers() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let mut scripts = [("gnu", String::new()), ("pax", String::new()), ("ustar", String::new())];
    let mut want = Vec::new();
    for length in [99, 100, 101, 254, 255] {
        let name = "n".repeat(length);
        for (format, script) in &mut scripts {
            if *format != "ustar" {
                *script += &format!("f {name} \"1\"\ns l{} -> {}\n", &name[1..], "t".repeat(length * 16));
            }
        }
        want.push(file(&name, "1"));
        want.push(symlink(&format!("l{}", &name[1..]), &"t".repeat(length * 16)));
    }
    let mut ustar = Vec::new();
    for prefix in [154, 155, 156] {
        let path = format!("{}/{}/{}", "p".repeat(100), "q".repeat(prefix - 101), "r".repeat(100));
        for (format, script) in &mut scripts {
            if *format != "ustar" || prefix < 156 {
                *script += &format!("f {path} \"2\"\n");
            }
        }
        want.push(file(&path, "2"));
        if prefix < 156 {
            ustar.push(file(&path, "2"));
        }
    }
    let deep = vec!["component"; 400].join("/");
    assert!(deep.len() >= 3999);
    for (format, script) in &mut scripts {
        if *format != "ustar" {
            *script += &format!("f {deep} \"3\"\n");
        }
    }
    want.push(file(&deep, "3"));
    for (format, script) in scripts {
        let want = if format == "ustar" { ustar.clone() } else { want.clone() };
        assert_shows(&place.shown(&format!("format {format}\n{script}")), want);
    }
    let name = "x".repeat(256);
    let error = place.script_refused(&format!("f dir/{name} \"1\""));
    assert!(error.contains(&name) && error.contains("is longer than 255 bytes"), "{error}");
}

#[test]
fn privileged_t16_a_megabyte_of_pax_in_small_reads() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let archive = tar::build(&format!("f a \"1\"\npax comment={}\nf b \"2\"", "c".repeat(1 << 20)));
    let whole = place.tar(&archive).unwrap();
    assert_shows(&place.only_layer(&whole), [file("a", "1"), file("b", "2")]);
    let mut child = Command::new(env!("CARGO_BIN_EXE_dsec-convert"))
        .args(["convert", "tar:-", "--name", "a:1", "--json", "--store"])
        .arg(place.store.local_dir().unwrap().root())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    for piece in archive.chunks(777) {
        stdin.write_all(piece).unwrap();
    }
    drop(stdin);
    let report: serde_json::Value = serde_json::from_slice(&child.wait_with_output().unwrap().stdout).unwrap();
    assert_eq!(report["layers"][0]["metadata"]["digest"], whole.layers[0].record.metadata.digest.to_string());

    // A long name that claims a gigabyte is refused before any of it is read.
    let mut archive = tar::build("L \"name\"\nf a \"1\"");
    archive[124..136].copy_from_slice(b"10000000000\0");
    let sum: u32 = (0..512).map(|at| if (148..156).contains(&at) { 32 } else { u32::from(archive[at]) }).sum();
    archive[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    std::fs::write(place.path("giant.tar"), &archive).unwrap();
    let error = place.refused("tar:giant.tar");
    assert!(error.contains("exceeds the limit"), "{error}");
    let args = ["convert", "tar:giant.tar", "--store", "store", "--name", "a:1"];
    let output = dsec_convert(place.dir(), &args, Stdio::null());
    assert_eq!(output.status.code(), Some(1), "a limit, not damage: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn privileged_t18_modes_do_not_hinder_extraction() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let shown = place.shown(
        "d closed/ 0500 uid=1000\nf closed/a \"1\"\nd closed/none/ 0000\nf closed/none/b \"2\" mode=0000\n\
         f su 4755 \"3\" uid=1000\nf sg 2755 \"4\" gid=1000\nd sticky/ 1777",
    );
    assert_shows(
        &shown,
        [
            directory("closed").mode(0o500).owner(1000, 0),
            file("closed/a", "1"),
            directory("closed/none").mode(0),
            file("closed/none/b", "2").mode(0),
            file("su", "3").mode(0o4755).owner(1000, 0),
            file("sg", "4").mode(0o2755).owner(0, 1000),
            directory("sticky").mode(0o1777),
        ],
    );
}

#[test]
fn privileged_t19_nul_filled_pax_fields() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let converted = place.script(
        "f a \"1\" mtime=5\npax mtime=\"\\0\\0\\0\\0\\0\\0\\0\\0\"\npax atime=\"junk\\0\"\nf b \"2\"\npax ctime=\"\"",
    );
    assert_shows(&place.only_layer(&converted), [file("a", "1").mtime(5, 0), file("b", "2")]);
    assert!(
        warnings(&converted).iter().any(|w| w.starts_with("a: ") && w.contains("mtime")),
        "{:?}",
        warnings(&converted)
    );
}

#[test]
fn privileged_t20_directory_times_of_the_topmost_layer() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let layers = [
        "d dir/ 0700 uid=1 mtime=0\nx user.one=1\nx user.same=1\nf dir/a \"1\"",
        "d dir/ 0750 uid=2 mtime=100\nx user.same=2\nf dir/b \"2\"",
        "d dir/ 0711 uid=3 mtime=200.5\nx user.three=3\nf dir/c \"3\"",
    ];
    let own = [
        directory("dir").mode(0o700).owner(1, 0).xattr("user.one", b"1").xattr("user.same", b"1"),
        directory("dir").mode(0o750).owner(2, 0).mtime(100, 0).xattr("user.same", b"2"),
        directory("dir").mode(0o711).owner(3, 0).mtime(200, 500_000_000).xattr("user.three", b"3"),
    ];
    let files = [file("dir/a", "1"), file("dir/b", "2"), file("dir/c", "3")];
    for count in 1..=3 {
        let root = place.mount(&place.image(&layers[..count]).unwrap());
        let want = model([own[count - 1].clone()].into_iter().chain(files[..count].iter().cloned()));
        assert_same(&root.snapshot(), &want, &Compare::overlay());
        for index in 0..count {
            assert_same(&root.layer(index), &model([own[index].clone(), files[index].clone()]), &Compare::overlay());
        }
    }
    // A layer that only puts a file in leaves the directory as the one below has it, and its time with it.
    let root = place.mount(&place.image(&[layers[0], layers[2], "f dir/b \"2\""]).unwrap());
    let want = [own[2].clone(), files[0].clone(), files[1].clone(), files[2].clone()];
    assert_same(&root.snapshot(), &model(want), &Compare::overlay());
}

#[test]
fn privileged_t21_device_numbers() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let shown = place.shown(
        "c null 1:3 mode=0666\nb big 259:1048575\nc last 4095:1048575\nc zero-major 0:1\nb zero 0:0\nc byte 255:255\n\
         c over 256:256\np pipe 0622",
    );
    let node = |path: &str, kind: Kind| put(path, kind, 0o644);
    assert_shows(
        &shown,
        [
            node("null", Kind::Char(1, 3)).mode(0o666),
            node("big", Kind::Block(259, 1_048_575)),
            node("last", Kind::Char(4095, 1_048_575)),
            node("zero-major", Kind::Char(0, 1)),
            node("zero", Kind::Block(0, 0)),
            node("byte", Kind::Char(255, 255)),
            node("over", Kind::Char(256, 256)),
            node("pipe", Kind::Fifo).mode(0o622),
        ],
    );
    for device in ["4294967295:1", "4096:0", "1:1048576", "0:4294967296"] {
        let error = place.script_refused(&format!("format gnu\nc dev/x {device}"));
        assert!(error.contains(&format!("`dev/x`: device {device} is out of range")), "{error}");
    }
    // A real 0:0 character device must not hide anything (its form is case X03's).
    let converted = place.image(&["f dev/x \"lower\"\nf dev/y \"lower\"", "c dev/x 0:0"]).unwrap();
    let root = place.mount(&converted);
    assert!(root.snapshot().find(b"dev/x").is_some(), "it is there");
    assert!(root.snapshot().find(b"dev/y").is_some());
    assert_eq!(converted.layers[1].record.counts.whiteouts, 0);
}

/// The whole as a model that is not written down twice: what the model says of itself as a tar comes back.
#[test]
fn privileged_t13_t16_every_byte_in_a_name() {
    if !require::mounts() {
        return;
    }
    let place = Place::new();
    let mut changes = Vec::new();
    for byte in 1..=255u8 {
        if byte != b'/' && byte != b'.' {
            let kind = Kind::Regular(Content::Bytes(vec![byte]));
            changes.push(Change::Put(vec![byte], kind.clone(), Meta::new(0o600)));
            changes.push(Change::Put([&b"dir/"[..], &[byte; 255]].concat(), kind, Meta::new(0o600)));
        }
    }
    let layer = Layer { changes };
    let want = Snapshot::of_model(&Model::merged([&layer]));
    for format in [Format::Gnu, Format::Pax] {
        let shown = place.only_layer(&place.tar(&layer.to_tar(format)).unwrap());
        assert_same(&shown, &want, &Compare::exact());
    }
}
