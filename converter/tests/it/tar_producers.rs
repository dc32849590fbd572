//! What GNU tar, bsdtar and Python write on this machine, read back: sparse files (T09), xattrs (X01, X02, X05),
//! ACLs (X06), long names (T16) and times (T07).

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::Command;

use converter::entry::{Entry, EntryKind, EntrySink, Timestamp};
use converter::tar::{Limits, Parser, drive};

/// An entry and the pieces of its data.
type Member = (Entry, Vec<(u64, Vec<u8>)>);

#[derive(Default)]
struct Sink {
    entries: Vec<Member>,
}

impl EntrySink for Sink {
    type Error = std::convert::Infallible;

    fn entry(&mut self, entry: Entry) -> Result<(), Self::Error> {
        self.entries.push((entry, Vec::new()));
        Ok(())
    }

    fn data(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Self::Error> {
        self.entries.last_mut().unwrap().1.push((offset, bytes.to_vec()));
        Ok(())
    }

    fn end_entry(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }
}

struct Layer {
    entries: Vec<Member>,
    warnings: Vec<String>,
}

impl Layer {
    fn get(&self, name: &str) -> &Member {
        let found = self
            .entries
            .iter()
            .find(|(entry, _)| entry.path.strip_suffix(b"/").unwrap_or(&entry.path) == name.as_bytes());
        found.unwrap_or_else(|| {
            panic!("no {name} in {:?}", self.entries.iter().map(|(entry, _)| entry).collect::<Vec<_>>())
        })
    }

    fn xattrs(&self, name: &str) -> BTreeMap<Vec<u8>, Vec<u8>> {
        self.get(name).0.xattrs.iter().map(|xattr| (xattr.name.clone(), xattr.value.clone())).collect()
    }
}

/// Runs a tool; a missing one fails the test by its package's name.
fn tool(dir: &Path, program: &str, package: &str, args: &[&str]) -> Vec<u8> {
    let output = Command::new(program)
        .args(args)
        .current_dir(dir)
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}: install the Debian package {package}"));
    assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

fn gnu_tar(dir: &Path, args: &[&str]) -> Layer {
    read(&tool(dir, "tar", "tar", &[&["-cf", "-"], args].concat()))
}

fn bsdtar(dir: &Path, args: &[&str]) -> Layer {
    read(&tool(dir, "bsdtar", "libarchive-tools", &[&["-cf", "-"], args].concat()))
}

fn read(archive: &[u8]) -> Layer {
    let mut parser = Parser::new(Limits::default());
    let mut sink = Sink::default();
    for mut buffer in archive.chunks(100_000) {
        drive(&mut parser, &mut buffer, &mut sink).unwrap();
    }
    parser.finish().unwrap();
    let warnings = parser.take_warnings().into_iter().map(|warning| format!("{}: {}", warning.entry, warning.message));
    Layer { entries: sink.entries, warnings: warnings.collect() }
}

#[test]
fn t09_sparse_files_of_gnu_tar_and_bsdtar() {
    let dir = tempfile::tempdir().unwrap();
    let file = File::create(dir.path().join("f")).unwrap();
    file.set_len(10 << 20).unwrap();
    let mut want = vec![0u8; 10 << 20];
    // More pieces than a header and an extension block hold; the last one is no whole block.
    for piece in 0..40usize {
        let at = piece * 200_000 / 4096 * 4096;
        want[at..at + 4096].fill(u8::try_from(piece).unwrap() + 1);
        file.write_all_at(&want[at..at + 4096], at as u64).unwrap();
    }
    want.truncate((10 << 20) - 4096);
    want.extend(b"tail");
    file.set_len((10 << 20) - 4096).unwrap();
    file.write_all_at(b"tail", (10 << 20) - 4096).unwrap();
    let layers = [
        gnu_tar(dir.path(), &["-S", "--format=gnu", "f"]),
        gnu_tar(dir.path(), &["-S", "--format=posix", "--sparse-version=0.0", "f"]),
        gnu_tar(dir.path(), &["-S", "--format=posix", "--sparse-version=0.1", "f"]),
        gnu_tar(dir.path(), &["-S", "--format=posix", "--sparse-version=1.0", "f"]),
        bsdtar(dir.path(), &["--format", "pax", "f"]),
    ];
    for (i, layer) in layers.iter().enumerate() {
        assert_eq!(layer.warnings, [""; 0]);
        let (entry, data) = layer.get("f");
        assert_eq!(entry.kind, EntryKind::Regular { size: want.len() as u64, sparse: true }, "layer {i}");
        let mut got = vec![0; want.len()];
        for (offset, bytes) in data {
            let offset = usize::try_from(*offset).unwrap();
            got[offset..offset + bytes.len()].copy_from_slice(bytes);
        }
        assert!(got == want, "layer {i} has other bytes");
        let archived: usize = data.iter().map(|(_, bytes)| bytes.len()).sum();
        assert!(archived < 1 << 20, "layer {i} has {archived} bytes: holes became data");
    }
}

#[test]
fn x05_xattrs_of_gnu_tar_and_bsdtar() {
    let dir = tempfile::tempdir_in(".").unwrap();
    File::create(dir.path().join("f")).unwrap();
    let want = [
        ("user.a=b", "0x76616c"),
        ("user.p%q", "0xff0a3d00"),
        ("user.100%25", "0x31"),
        ("user.caf\u{e9}", "0x3132"),
        ("user.empty", "0x"),
    ];
    for (name, value) in want {
        tool(dir.path(), "setfattr", "attr", &["-n", name, "-v", value, "f"]);
    }
    let want: BTreeMap<Vec<u8>, Vec<u8>> =
        want.iter().map(|(name, value)| (name.as_bytes().to_vec(), hex::decode(&value[2..]).unwrap())).collect();
    for layer in [
        gnu_tar(dir.path(), &["--format=posix", "--xattrs", "f"]),
        bsdtar(dir.path(), &["--format", "pax", "--xattrs", "f"]),
    ] {
        assert_eq!(layer.xattrs("f"), want);
        assert_eq!(layer.warnings, [""; 0]);
    }
}

#[test]
fn x06_acls_of_gnu_tar_and_bsdtar() {
    let dir = tempfile::tempdir_in(".").unwrap();
    File::create(dir.path().join("f")).unwrap();
    fs::set_permissions(dir.path().join("f"), fs::Permissions::from_mode(0o644)).unwrap();
    fs::create_dir(dir.path().join("d")).unwrap();
    // Numbers that no passwd or group file names, so that GNU tar writes them.
    tool(dir.path(), "setfacl", "acl", &["-m", "u:54321:rwx,g:54322:r", "f"]);
    tool(dir.path(), "setfacl", "acl", &["-d", "-m", "g:54323:rx", "d"]);
    let binary = |file: &str, name: &str| {
        let args = ["--only-values", "--absolute-names", "-n", name, file];
        (name.as_bytes().to_vec(), tool(dir.path(), "getfattr", "attr", &args))
    };
    let file = BTreeMap::from([binary("f", "system.posix_acl_access")]);
    let directory = BTreeMap::from([binary("d", "system.posix_acl_default")]);
    for layer in [
        gnu_tar(dir.path(), &["--format=posix", "--acls", "f", "d"]),
        gnu_tar(dir.path(), &["--format=posix", "--xattrs", "--xattrs-include=*", "f", "d"]),
        gnu_tar(dir.path(), &["--format=posix", "--acls", "--xattrs", "f", "d"]),
        bsdtar(dir.path(), &["--format", "pax", "--acls", "f", "d"]),
    ] {
        assert_eq!(layer.xattrs("f"), file);
        assert_eq!(layer.xattrs("d"), directory);
        assert_eq!(layer.get("f").0.mode, 0o674);
        assert_eq!(layer.warnings, [""; 0]);
    }
}

#[test]
fn x06_acl_names_of_gnu_tar_are_reported_and_bsdtars_numbers_used() {
    let dir = tempfile::tempdir_in(".").unwrap();
    File::create(dir.path().join("f")).unwrap();
    tool(dir.path(), "setfacl", "acl", &["-m", "u:daemon:rwx", "f"]);
    let gnu = gnu_tar(dir.path(), &["--format=posix", "--acls", "f"]);
    assert!(gnu.xattrs("f").is_empty());
    assert_eq!(
        gnu.warnings,
        ["f: its access ACL was left out: its entry \"user:daemon:rwx\" has a name but no numeric id"]
    );
    let bsd = bsdtar(dir.path(), &["--format", "pax", "--acls", "f"]);
    let args = ["--only-values", "-n", "system.posix_acl_access", "f"];
    let want = tool(dir.path(), "getfattr", "attr", &args);
    assert_eq!(bsd.xattrs("f"), BTreeMap::from([(b"system.posix_acl_access".to_vec(), want)]));
}

#[test]
fn t07_t16_names_and_times() {
    let dir = tempfile::tempdir().unwrap();
    let long = ["component-of-a-long-name"; 12].join("/");
    fs::create_dir_all(dir.path().join(&long)).unwrap();
    let target = "t".repeat(200);
    std::os::unix::fs::symlink(&target, dir.path().join(&long).join("link")).unwrap();
    let name = format!("{long}/file");
    File::create(dir.path().join(&name)).unwrap();
    fs::hard_link(dir.path().join(&name), dir.path().join(&long).join("hard")).unwrap();
    for (date, secs, nanos) in
        [("@-2.75", -3, 250_000_000), ("@1.123456789", 1, 123_456_789), ("@-2147483648", -2_147_483_648, 0)]
    {
        tool(dir.path(), "touch", "coreutils", &["-d", date, &name]);
        let sorted = ["--sort=name", &long];
        let gnu = gnu_tar(dir.path(), &[&["--format=gnu"], &sorted[..]].concat());
        let posix = gnu_tar(dir.path(), &[&["--format=posix"], &sorted[..]].concat());
        let pax = bsdtar(dir.path(), &["--format", "pax", &long]);
        // GNU's own format has whole seconds, counted downwards. bsdtar 3.6 writes -2.75 as -3.25: not compared.
        let pax = (secs >= 0 || nanos == 0).then_some((&pax, nanos));
        for (layer, nanos) in [(&gnu, 0), (&posix, nanos)].into_iter().chain(pax) {
            let names = layer.entries.iter().filter(|(entry, _)| matches!(entry.kind, EntryKind::HardLink { .. }));
            assert_eq!(names.count(), 1);
            let file = layer.entries.iter().find(|(entry, _)| matches!(entry.kind, EntryKind::Regular { .. })).unwrap();
            assert_eq!(file.0.mtime, Timestamp { secs, nanos }, "{date}");
            assert_eq!(layer.get(&format!("{long}/link")).0.kind, EntryKind::Symlink { target: target.clone().into() });
            assert_eq!(layer.warnings, [""; 0]);
        }
    }
}
