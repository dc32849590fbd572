//! Archives that the Go, Python and tar-split packages carry, read by us, by GNU tar and by Python's tarfile.
//!
//! GNU tar is the reference, Python a second. Whatever we refuse, and wherever we read something else than one of
//! them, stands in the tables below with its reason; a line there that is no longer true fails as well.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use converter::entry::{Entry, EntryKind, EntrySink, printable};
use converter::tar::{DriveError, Limits, Parser, TarError, drive};
use sha2::{Digest as _, Sha256};

/// Refused by us: file name, part of the sentence, why that is right.
pub(crate) const REFUSED: &[(&str, &str, &str)] = &[
    ("issue10968.tar", "checksum", "garbage behind a header's type; Go and GNU tar refuse it too"),
    ("issue11169.tar", "newline", "a PAX record has the wrong length; Go and GNU tar refuse it too"),
    ("issue12435.tar", "the size field", "the size is text; Go and GNU tar refuse it too"),
    ("neg-size.tar", "the size field", "the size is text; Go and GNU tar refuse it too"),
    ("pax-bad-hdr-file.tar", "newline", "a record runs over its end; Go and GNU tar refuse it too"),
    ("pax-nul-path.tar", "holds a NUL", "GNU tar and Python cut or keep the NUL; Go and bsdtar refuse it"),
    ("pax-nul-xattrs.tar", "is no keyword", "a NUL in an xattr's name; Go and GNU tar refuse it too"),
    ("pax-path-hdr.tar", "ends in the middle", "an extended header and nothing after it; Go refuses it too"),
    ("writer-big.tar", "ends in the middle", "the header of a 16 GiB file without the file"),
    ("writer-big-long.tar", "ends in the middle", "the header of a 16 GiB file without the file"),
    ("recursion.tar", "length", "a PAX record of length 0"),
];

/// Read otherwise by GNU tar.
const NOT_AS_GNU_TAR: &[(&str, &str)] = &[
    ("hdr-only.tar", "GNU tar takes the next header for the data of fifos, devices and symlinks that claim a size"),
    ("invalid-go17.tar", "a path prefix under GNU magic, which Go before 1.8 wrote: GNU tar loses it"),
    ("pax-bad-mtime-file.tar", "GNU tar reads mtime 999 from \"999xxx9324.4\": we keep the header's"),
    ("pax-global-records.tar", "GNU tar forgets a global header with the next, and an empty path= leaves no name"),
    (
        "sparse-formats.tar",
        "to GNU tar each segment begins a block, but these of Go's are single bytes: it reads no more",
    ),
];

/// Read otherwise by Python's tarfile.
const NOT_AS_PYTHON: &[(&str, &str)] = &[
    ("gnu-incremental.tar", "Python puts GNU's access time in front of the name, as if it were a prefix"),
    ("gnu-multi-hdrs.tar", "Python takes the first of several long names"),
    ("pax-bad-mtime-file.tar", "Python reads mtime 0 from \"999xxx9324.4\": we keep the header's"),
    ("pax-global-records.tar", "to Python an empty path= leaves no name"),
    ("pax-multi-hdrs.tar", "Python lets the first of several PAX headers win"),
    ("pax-nil-sparse-data.tar", "Python keeps the map of sparse format 1.0 as data if there is no name record"),
    ("pax-nil-sparse-hole.tar", "Python keeps the map of sparse format 1.0 as data if there is no name record"),
    ("pax-sparse-big.tar", "Python keeps the map of sparse format 1.0 as data if there is no name record"),
];

/// Contents are compared by digest up to this size: beyond it there are only 60 GB of holes.
const HASHED: u64 = 1 << 30;

/// An entry as all three readers can tell it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    /// Without trailing slashes, which GNU tar and Python take off or add.
    name: Vec<u8>,
    kind: char,
    /// Of regular files.
    size: u64,
    mode: u64,
    uid: u64,
    gid: u64,
    /// Seconds and nanoseconds; Python's binary fractions are left out.
    mtime: (i64, u32),
    link: Vec<u8>,
    device: Option<(u64, u64)>,
    /// Of regular files up to [`HASHED`].
    sha256: Option<String>,
}

#[test]
fn corpora_are_read_as_gnu_tar_and_python_do() {
    let files = corpora();
    let mut used = BTreeSet::new();
    let mut contents = BTreeSet::new();
    let mut wrong = Vec::new();
    for file in &files {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let archive = std::fs::read(file).unwrap();
        let archive = if name.ends_with(".gz") { gunzip(&archive) } else { archive };
        if !contents.insert(Sha256::digest(&archive)) {
            continue; // most of Go's are tar-split's as well
        }
        let listed = REFUSED.iter().find(|line| line.0 == name);
        let ours = match (ours(&archive), listed) {
            (Ok(ours), None) => ours,
            (Ok(_), Some(_)) => {
                wrong.push(format!("{}: listed as refused, but accepted", file.display()));
                continue;
            }
            (Err(error), Some((_, part, _))) if error.to_string().contains(part) => {
                used.insert(("refused", name));
                continue;
            }
            (Err(error), _) => {
                wrong.push(format!("{}: {error}", file.display()));
                continue;
            }
        };
        let coarse: Vec<Seen> = ours.iter().map(|seen| Seen { mtime: (seen.mtime.0, 0), ..seen.clone() }).collect();
        for (reader, ours, theirs, known) in [
            ("GNU tar", &ours, gnu_tar(&archive), NOT_AS_GNU_TAR),
            ("Python", &coarse, python(&archive), NOT_AS_PYTHON),
        ] {
            let known = known.iter().any(|line| line.0 == name);
            let difference = difference(ours, &theirs);
            match difference {
                Some(_) if known => drop(used.insert((reader, name.clone()))),
                Some(difference) => wrong.push(format!("{}: {reader}: {difference}", file.display())),
                None if known => wrong.push(format!("{}: now read like {reader} does", file.display())),
                None => {}
            }
        }
    }
    for (list, names) in [
        ("refused", REFUSED.iter().map(|line| line.0).collect::<Vec<_>>()),
        ("GNU tar", NOT_AS_GNU_TAR.iter().map(|line| line.0).collect()),
        ("Python", NOT_AS_PYTHON.iter().map(|line| line.0).collect()),
    ] {
        for name in names {
            if !used.contains(&(list, name.to_owned())) {
                wrong.push(format!("{name} is listed ({list}) for nothing"));
            }
        }
    }
    assert!(contents.len() > 45, "{} different archives", contents.len());
    assert!(wrong.is_empty(), "of {} archives:\n{}", files.len(), wrong.join("\n"));
}

/// All archives that the packages have, or a panic that says which package is missing.
pub(crate) fn corpora() -> Vec<PathBuf> {
    let mut all = Vec::new();
    let go = below("/usr/share", "go-").into_iter().map(|dir| dir.join("src/archive/tar/testdata"));
    let split = PathBuf::from("/usr/share/gocode/src/github.com/vbatts/tar-split");
    let mut python = below("/usr/lib", "python3.").into_iter().map(|dir| dir.join("test")).collect::<Vec<_>>();
    python.extend(python.clone().into_iter().map(|dir| dir.join("archivetestdata")));
    for (package, at_least, found) in [
        ("golang-src (or golang-1.19-src)", 40, go.flat_map(|dir| archives(&dir)).collect::<Vec<_>>()),
        ("golang-github-vbatts-tar-split-dev", 45, archives(&split)),
        (
            "libpython3-testsuite (or libpython3.11-testsuite)",
            2,
            python
                .iter()
                .flat_map(|dir| [dir.join("testtar.tar"), dir.join("recursion.tar")])
                .filter(|file| file.exists())
                .collect(),
        ),
    ] {
        assert!(found.len() >= at_least, "{} archives found: install the Debian package {package}", found.len());
        all.extend(found);
    }
    all
}

fn below(dir: &str, prefix: &str) -> Vec<PathBuf> {
    let Ok(dir) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut found: Vec<_> = dir.map(|entry| entry.unwrap().path()).collect();
    found.retain(|path| path.file_name().unwrap().to_string_lossy().starts_with(prefix));
    found.sort();
    found
}

/// Plain and gzipped archives below `dir`.
fn archives(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut entries: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    entries
        .into_iter()
        .flat_map(|path| match path.to_string_lossy() {
            _ if path.is_dir() => archives(&path),
            name if name.ends_with(".tar") || name.ends_with(".tar.gz") => vec![path],
            _ => Vec::new(),
        })
        .collect()
}

pub(crate) fn gunzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    flate2::read::MultiGzDecoder::new(bytes).read_to_end(&mut out).unwrap();
    out
}

/// The first entry that differs.
fn difference(ours: &[Seen], theirs: &Result<Vec<Seen>, String>) -> Option<String> {
    let theirs = match theirs {
        Ok(theirs) => theirs,
        Err(error) => return Some(format!("refuses it: {error}")),
    };
    for (ours, theirs) in ours.iter().zip(theirs) {
        if ours != theirs {
            return Some(format!("\n  ours   {ours:?}\n  theirs {theirs:?}"));
        }
    }
    (ours.len() != theirs.len()).then(|| format!("{} entries instead of {}", ours.len(), theirs.len()))
}

/// What we make of an archive, given in two-page buffers.
fn ours(archive: &[u8]) -> Result<Vec<Seen>, TarError> {
    let mut parser = Parser::new(Limits::default());
    let mut sink = Sink::default();
    for mut buffer in archive.chunks(8192) {
        drive(&mut parser, &mut buffer, &mut sink).map_err(|error| match error {
            DriveError::Tar(error) => error,
            DriveError::Sink(never) => match never {},
        })?;
    }
    parser.finish()?;
    Ok(sink.seen)
}

#[derive(Default)]
struct Sink {
    seen: Vec<Seen>,
    hasher: Sha256,
    end: u64,
}

impl Sink {
    fn holes_to(&mut self, offset: u64) {
        while self.end < offset {
            let length = (offset - self.end).min(1 << 20);
            self.hasher.update(vec![0; usize::try_from(length).unwrap()]);
            self.end += length;
        }
    }
}

impl EntrySink for Sink {
    type Error = std::convert::Infallible;

    fn entry(&mut self, entry: Entry) -> Result<(), Self::Error> {
        let (kind, size, link, device) = match entry.kind {
            EntryKind::Regular { size, .. } => ('-', size, Vec::new(), None),
            EntryKind::HardLink { target } => ('h', 0, target, None),
            EntryKind::Symlink { target } => ('l', 0, target, None),
            EntryKind::Directory => ('d', 0, Vec::new(), None),
            EntryKind::CharDevice { major, minor } => ('c', 0, Vec::new(), Some((major, minor))),
            EntryKind::BlockDevice { major, minor } => ('b', 0, Vec::new(), Some((major, minor))),
            EntryKind::Fifo | EntryKind::Socket => ('p', 0, Vec::new(), None),
        };
        self.seen.push(Seen {
            name: trim(&entry.path),
            kind,
            size,
            mode: entry.mode.into(),
            uid: entry.uid.into(),
            gid: entry.gid.into(),
            mtime: (entry.mtime.secs, entry.mtime.nanos),
            link,
            device,
            sha256: None,
        });
        self.end = 0;
        Ok(())
    }

    fn data(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Self::Error> {
        if self.seen.last().is_some_and(|seen| seen.size <= HASHED) {
            self.holes_to(offset);
            self.hasher.update(bytes);
            self.end += bytes.len() as u64;
        }
        Ok(())
    }

    fn end_entry(&mut self) -> Result<(), Self::Error> {
        let size = self.seen.last().unwrap().size;
        if size <= HASHED {
            self.holes_to(size);
        }
        let digest = hex::encode(self.hasher.finalize_reset());
        let last = self.seen.last_mut().unwrap();
        last.sha256 = (last.kind == '-' && size <= HASHED).then_some(digest);
        Ok(())
    }
}

fn trim(name: &[u8]) -> Vec<u8> {
    let mut name = name;
    while let Some(shorter) = name.strip_suffix(b"/") {
        name = shorter;
    }
    name.to_vec()
}

/// Runs `command` on `input`.
fn run(command: &mut Command, input: &[u8]) -> Result<Vec<u8>, String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .env("LC_ALL", "C")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{program}: {error}: install the Debian package {program}"));
    let mut stdin = child.stdin.take().unwrap();
    let output = std::thread::scope(|scope| {
        // It may not read to the end.
        scope.spawn(move || drop(stdin.write_all(input)));
        child.wait_with_output().unwrap()
    });
    if output.status.success() { Ok(output.stdout) } else { Err(printable(&output.stderr)) }
}

/// What GNU tar lists, with the digests of what it extracts.
fn gnu_tar(archive: &[u8]) -> Result<Vec<Seen>, String> {
    let list = ["-tvf", "-", "--numeric-owner", "--full-time", "--utc", "--quoting-style=escape", "--absolute-names"];
    let listing = run(Command::new("tar").args(list), archive)?;
    let listing = String::from_utf8(listing).unwrap();
    let mut seen: Vec<Seen> = listing.lines().map(listed).collect();
    if seen.iter().any(|seen| seen.size > HASHED) {
        return Ok(seen);
    }
    let sums = run(Command::new("tar").args(["-xf", "-", "--absolute-names", "--to-command=sha256sum"]), archive)?;
    let sums = String::from_utf8(sums).unwrap();
    let mut sums = sums.lines().map(|line| line.split(' ').next().unwrap().to_owned());
    for file in seen.iter_mut().filter(|seen| seen.kind == '-') {
        file.sha256 = Some(sums.next().expect("a sum for each file"));
    }
    assert_eq!(sums.next(), None, "more sums than files");
    Ok(seen)
}

/// A line of `tar -tv`: `-rw-r--r-- 1000/100 5 2009-06-10 00:18:00.5 name`.
fn listed(line: &str) -> Seen {
    let mut rest = line;
    let mut field = || {
        let (field, after) = rest.trim_start().split_once(' ').unwrap();
        rest = after;
        field
    };
    let (permissions, owner, size, date, time) = (field(), field(), field(), field(), field());
    let kind = match permissions.chars().next().unwrap() {
        'C' => '-',
        kind => kind,
    };
    let (name, link) = match kind {
        'l' => rest.split_once(" -> ").unwrap(),
        'h' => rest.split_once(" link to ").unwrap(),
        _ => (rest, ""),
    };
    let (uid, gid) = owner.split_once('/').unwrap();
    Seen {
        name: trim(&unescape(name)),
        kind,
        size: if kind == '-' { size.parse().unwrap() } else { 0 },
        mode: mode(permissions),
        uid: uid.parse().unwrap(),
        gid: gid.parse().unwrap(),
        mtime: instant(date, time),
        link: unescape(link),
        device: size.split_once(',').map(|(major, minor)| (major.parse().unwrap(), minor.parse().unwrap())),
        sha256: None,
    }
}

/// `rwsr-xr-t` as bits.
fn mode(permissions: &str) -> u64 {
    permissions.bytes().skip(1).enumerate().fold(0, |mode, (place, letter)| {
        let bit = 0o400 >> place;
        let special = [0o4000, 0o2000, 0o1000][place / 3];
        mode | match letter {
            b'-' => 0,
            b's' | b't' => bit | special,
            b'S' | b'T' => special,
            _ => bit,
        }
    })
}

/// A UTC date and time, counted from 1970.
fn instant(date: &str, time: &str) -> (i64, u32) {
    let date: Vec<i64> = date.split('-').map(|part| part.parse().unwrap()).collect();
    let (time, fraction) = time.split_once('.').unwrap_or((time, ""));
    let time: Vec<i64> = time.split(':').map(|part| part.parse().unwrap()).collect();
    let (&[year, month, day], &[hour, minute, second]) = (&date[..], &time[..]) else { panic!("{date:?} {time:?}") };
    // Days of the civil calendar: March first, so that leap days come last.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1 - 719_468;
    (days * 86400 + hour * 3600 + minute * 60 + second, format!("{fraction:0<9}").parse().unwrap())
}

/// `\n`, `\\` and `\ooo` undone.
fn unescape(text: &str) -> Vec<u8> {
    let mut out = Vec::new();
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'\\' {
            out.push(byte);
            continue;
        }
        match bytes.next().unwrap() {
            b'n' => out.push(b'\n'),
            first @ b'0'..=b'3' => {
                let octal = [first, bytes.next().unwrap(), bytes.next().unwrap()];
                out.push(u8::from_str_radix(std::str::from_utf8(&octal).unwrap(), 8).unwrap());
            }
            other => out.push(other),
        }
    }
    out
}

const PYTHON: &str = r#"
import hashlib, io, json, math, os, sys, tarfile
KINDS = {b"1": "h", b"2": "l", b"3": "c", b"4": "b", b"5": "d", b"6": "p", b"D": "d"}
archive, out = io.BytesIO(sys.stdin.buffer.read()), []
tar = tarfile.open(fileobj=archive, mode="r:")
for m in tar:
    kind, digest = KINDS.get(m.type, "-"), None
    if kind == "-" and m.size <= int(sys.argv[1]):
        sha, file = hashlib.sha256(), tar.extractfile(m)
        while piece := file.read(1 << 20):
            sha.update(piece)
        digest = sha.hexdigest()
    out.append({
        "name": os.fsencode(m.name).hex(), "kind": kind, "size": m.size if kind == "-" else 0,
        "mode": m.mode & 0o7777, "uid": m.uid, "gid": m.gid, "mtime": math.floor(m.mtime),
        "link": os.fsencode(m.linkname).hex() if kind in "hl" else "",
        "device": [m.devmajor, m.devminor] if kind in "cb" else None, "sha256": digest,
    })
json.dump(out, sys.stdout)
"#;

/// What Python's tarfile makes of it.
fn python(archive: &[u8]) -> Result<Vec<Seen>, String> {
    let script = ["-X", "utf8", "-c", PYTHON, &HASHED.to_string()];
    let json: serde_json::Value = serde_json::from_slice(&run(Command::new("python3").args(script), archive)?).unwrap();
    let entries = json.as_array().unwrap();
    Ok(entries.iter().map(python_entry).collect())
}

fn python_entry(entry: &serde_json::Value) -> Seen {
    let text = |key: &str| entry[key].as_str().unwrap_or_default();
    let number = |key: &str| entry[key].as_u64().unwrap();
    Seen {
        name: trim(&hex::decode(text("name")).unwrap()),
        kind: text("kind").chars().next().unwrap(),
        size: number("size"),
        mode: number("mode"),
        uid: number("uid"),
        gid: number("gid"),
        mtime: (entry["mtime"].as_i64().unwrap(), 0),
        link: hex::decode(text("link")).unwrap(),
        device: entry["device"].as_array().map(|device| (device[0].as_u64().unwrap(), device[1].as_u64().unwrap())),
        sha256: entry["sha256"].as_str().map(str::to_owned),
    }
}

#[test]
fn the_reference_readers_are_read_right() {
    assert_eq!(mode("-rwsr-Sr-t"), 0o7745);
    assert_eq!(instant("1970-01-01", "00:00:00"), (0, 0));
    assert_eq!(instant("2009-06-10", "00:18:24.25"), (1_244_593_104, 250_000_000));
    assert_eq!(instant("1969-12-31", "23:59:59"), (-1, 0));
    assert_eq!(unescape(r"a\344\\\nb"), b"a\xe4\\\nb");
}
