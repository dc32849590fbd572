//! Layers that were made to hurt: they cost bounded memory and time, and nothing is written outside the store. What is
//! refused is refused in one sentence that names the entry.

use crate::program::{convert, in_shell, report, said};
use crate::support::{Hashed, Place, list};
use fixtures::content::Content;
use fixtures::oci::{self, Compression};
use fixtures::tar::{Entry, Format, Kind, Sparse, SparseForm, Writer, XattrForm};
use fixtures::tree::{Compare, Snapshot, assert_same};
use rustix::fs::{Mode, OFlags};
use std::io::{self, Write};
use std::path::Path;
use std::process::{ChildStdin, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Most memory of a conversion, in KiB.
const MEMORY: u64 = 256 << 10;
/// Longest time of one, on a machine that does other things too.
const TIME: Duration = Duration::from_secs(60);

/// A place with things around the store that must stay as they are.
struct Trap {
    place: Place,
    around: Snapshot,
}

/// How a conversion ended, within its limits.
struct End {
    output: Output,
    trap: Trap,
}

impl Trap {
    fn new() -> Self {
        let place = Place::new();
        for dir in ["around/work", "around/tmp", "around/etc"] {
            std::fs::create_dir_all(place.path(dir)).unwrap();
        }
        std::fs::write(place.path("around/etc/shadow"), "root").unwrap();
        let around = Snapshot::of(&place.path("around")).unwrap();
        Self { place, around }
    }

    fn command(&self, source: &str) -> Command {
        let mut command = convert(source, self.place.store.local_dir().unwrap().root(), "a:b");
        command.current_dir(self.place.path("around/work")).env("TMPDIR", self.place.path("around/tmp"));
        command.env("HOME", self.place.path("around"));
        command
    }

    /// Converts a tar that `write` makes while it is read.
    fn stream(self, args: &[&str], write: impl FnOnce(&mut dyn Write) -> anyhow::Result<()> + Send) -> End {
        let mut command = self.command("tar:-");
        command.args(args).stdin(Stdio::piped());
        self.run(&mut command, Some(Box::new(write)))
    }

    /// Converts one layer of an image.
    fn image(self, args: &[&str], layers: &[oci::Layer]) -> End {
        let source = self.place.layout(layers);
        self.source(args, &source)
    }

    fn source(self, args: &[&str], source: &str) -> End {
        let mut command = self.command(source);
        command.args(args);
        self.run(&mut command, None)
    }

    #[expect(clippy::type_complexity, reason = "a writer, once")]
    fn run(
        self,
        command: &mut Command,
        write: Option<Box<dyn FnOnce(&mut dyn Write) -> anyhow::Result<()> + Send + '_>>,
    ) -> End {
        let began = Instant::now();
        let mut child = command.spawn().unwrap();
        let stdin = child.stdin.take();
        let (peak, output) = std::thread::scope(|scope| {
            scope.spawn(move || feed(stdin, write));
            let pid = child.id();
            let waiting = scope.spawn(move || child.wait_with_output().unwrap());
            let peak = watch(pid, began, || waiting.is_finished());
            (peak, waiting.join().unwrap())
        });
        let took = began.elapsed();
        if std::env::var_os("DSEC_SHOW").is_some() {
            let name = std::thread::current().name().unwrap_or_default().to_owned();
            let _ = writeln!(io::stderr(), "{name}: {} MiB, {took:.1?}: {}", peak >> 10, said(&output).trim());
        }
        assert!(peak <= MEMORY, "{} MiB of memory: {}", peak >> 10, said(&output));
        assert!(took <= TIME, "{took:?}: {}", said(&output));
        let after = Snapshot::of(&self.place.path("around")).unwrap();
        assert_same(&self.around, &after, &Compare::exact());
        assert_eq!(list(&self.place.store.scratch()), [""; 0], "scratch files are left");
        Hashed::all(&self.place.store);
        End { output, trap: self }
    }
}

/// A converter that has seen enough leaves; that is not the writer's fault.
#[expect(clippy::type_complexity, reason = "a writer, once")]
fn feed(stdin: Option<ChildStdin>, write: Option<Box<dyn FnOnce(&mut dyn Write) -> anyhow::Result<()> + Send + '_>>) {
    if let (Some(stdin), Some(write)) = (stdin, write) {
        let mut stdin = io::BufWriter::with_capacity(1 << 20, stdin);
        if let Err(e) = write(&mut stdin).and_then(|()| Ok(stdin.flush()?)) {
            let left =
                e.chain().any(|e| e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe));
            assert!(left, "{e:#}");
        }
    }
}

/// The most memory that a process has at once, in KiB, until it is done; one that takes far too much is killed.
fn watch(pid: u32, began: Instant, done: impl Fn() -> bool) -> u64 {
    let status = format!("/proc/{pid}/status");
    let mut peak = 0;
    while !done() {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let now = line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0);
        peak = peak.max(now);
        if now > 0 && (began.elapsed() > TIME || now > 4 * MEMORY) {
            let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    peak
}

impl End {
    /// It was converted; returns the report.
    #[track_caller]
    fn accepted(&self) -> serde_json::Value {
        crate::program::report(&self.output)
    }

    /// It was refused in a sentence that has all of `words`, and left nothing.
    #[track_caller]
    fn refused(&self, words: &[&str]) {
        let said = said(&self.output);
        assert!(matches!(self.output.status.code(), Some(1 | 3)), "{}: {said}", self.output.status);
        assert!(words.iter().all(|word| said.contains(word)), "{words:?}: {said}");
        assert!(said.trim().lines().count() == 1 && said.len() < 2000, "{said}");
        assert_eq!(self.trap.place.store.list_refs().unwrap().len(), 0);
    }
}

fn entries(out: &mut dyn Write, entries: impl Iterator<Item = Entry>) -> anyhow::Result<()> {
    let mut writer = Writer::new(out);
    for entry in entries {
        writer.entry(&entry)?;
    }
    writer.finish()?;
    Ok(())
}

fn empty(path: impl Into<Vec<u8>>) -> Entry {
    Entry::new(path, Kind::Regular(Content::Bytes(Vec::new())))
}

fn text(script: &str) -> End {
    Trap::new().image(&[], &[oci::Layer::text(script)])
}

/// A layer of one file of `gib` GiB of zeros, packed so that packing it costs nothing: the same piece again and again.
fn bomb(gib: u64, pack: impl Fn(&[u8]) -> Vec<u8>) -> Vec<u8> {
    let mut header = Vec::new();
    entries(&mut header, std::iter::once(Entry { format: Format::Gnu, ..empty("zeros") })).unwrap();
    let size = gib << 30;
    header.truncate(512);
    // Base 256, and the checksum anew.
    header[124..136].copy_from_slice(&[&[0x80, 0, 0, 0][..], &size.to_be_bytes()].concat());
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let piece = pack(&vec![0; 64 << 20]);
    let mut all = pack(&header);
    (0..gib * 16).for_each(|_| all.extend_from_slice(&piece));
    all.extend(pack(&[0; 1024]));
    all
}

fn pack(compression: Compression) -> impl Fn(&[u8]) -> Vec<u8> {
    move |bytes| compression.pack(bytes).unwrap()
}

#[test]
fn gzip_bombs() {
    let trap = Trap::new();
    let file = trap.place.path("bomb.gz");
    let packed = bomb(10, pack(Compression::Gzip));
    assert!(packed.len() < 12 << 20, "10 GiB in {} bytes", packed.len());
    std::fs::write(&file, &packed).unwrap();
    trap.source(&["--max-layer-size", "1000000000"], &format!("tar:{}", file.display())).refused(&["1000000000"]);
    // A descriptor that claims less is found out by the blob's length.
    let layer = oci::Layer::tar(Vec::new()).stored(packed).claimed_size(1000);
    Trap::new().image(&[], &[layer]).refused(&["1000"]);
}

#[test]
fn a_gzip_bomb_within_the_limits_is_a_hole() {
    let trap = Trap::new();
    let file = trap.place.path("bomb.gz");
    std::fs::write(&file, bomb(5, pack(Compression::Gzip))).unwrap();
    let report = trap.source(&[], &format!("tar:{}", file.display())).accepted();
    assert_eq!((report["totals"]["data_bytes"].as_u64(), report["totals"]["files"].as_u64()), (Some(0), Some(1)));
    assert!(report["totals"]["metadata_bytes"].as_u64().unwrap() < 8 << 20, "{report}");
}

#[test]
fn zstd_bombs() {
    let trap = Trap::new();
    let file = trap.place.path("bomb.zst");
    std::fs::write(&file, bomb(60, pack(Compression::Zstd))).unwrap();
    trap.source(&[], &format!("tar:{}", file.display())).refused(&["1100"]);
}

#[test]
fn a_million_names_in_one_directory() {
    let end = Trap::new().stream(&[], |out| entries(out, (0..1_000_000).map(|n| empty(format!("d/{n}")))));
    assert_eq!(end.accepted()["totals"]["files"], 1_000_000);
    let end =
        Trap::new().stream(&["--max-inodes", "1000"], |out| entries(out, (0..2000).map(|n| empty(format!("d/{n}")))));
    end.refused(&["d/998", "1000 inodes"]);
}

fn deep(levels: usize, name: &str) -> Vec<u8> {
    [b"d/".repeat(levels), name.as_bytes().to_vec()].concat()
}

#[test]
fn paths_of_fifty_thousand_levels() {
    let end = Trap::new().stream(&[], |out| entries(out, (0..100).map(|n| empty(deep(50_000, &n.to_string())))));
    assert_eq!(end.accepted()["totals"]["inodes"], 50_101);
    // Both layers leave all directories to each other; the second also takes one away at the end.
    let layer = |names: &[&str]| {
        let mut tar = Vec::new();
        entries(&mut tar, names.iter().map(|name| empty(deep(50_000, name)))).unwrap();
        oci::Layer::tar(tar)
    };
    let end = Trap::new().image(&[], &[layer(&["a", "b"]), layer(&["c", ".wh.a"]), layer(&["d", "e"])]);
    assert_eq!(end.accepted()["totals"]["whiteouts"], 1);
}

#[test]
fn a_million_links_to_one_file() {
    let link = |n: u32| Entry::new(format!("l{n}"), Kind::HardLink(b"file".to_vec()));
    let end =
        Trap::new().stream(&[], |out| entries(out, std::iter::once(empty("file")).chain((0..1_000_000).map(link))));
    assert_eq!(end.accepted()["totals"]["inodes"], 2);
    // The links first.
    let end = Trap::new().stream(&[], |out| entries(out, (0..300_000).map(link).chain(std::iter::once(empty("file")))));
    assert_eq!(end.accepted()["totals"]["inodes"], 2);
}

/// Each link leads to the next, and only the last to a file.
#[test]
fn a_long_chain_of_links() {
    let count = 100_000;
    let link = |n: u32| Entry::new(format!("l{n}"), Kind::HardLink(format!("l{}", n + 1).into()));
    let last = || std::iter::once(empty(format!("l{count}")));
    let end = Trap::new().stream(&[], |out| entries(out, (0..count).map(link).chain(last())));
    assert_eq!(end.accepted()["totals"]["inodes"], 2);
    let end = Trap::new().stream(&[], |out| entries(out, (0..count).rev().map(link).chain(last())));
    assert_eq!(end.accepted()["totals"]["inodes"], 2);
}

#[test]
fn headers_of_a_gibibyte() {
    for kind in [b'x', b'g', b'L', b'K'] {
        let end = Trap::new().stream(&[], |out| {
            let mut header = fixtures::tar::build("f ././@LongLink\nraw size=\"10000000000\"\nend none");
            header[156] = kind;
            header[148..156].fill(b' ');
            let sum: u32 = header[..512].iter().map(|byte| u32::from(*byte)).sum();
            header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            out.write_all(&header[..512])?;
            let piece = vec![b'a'; 1 << 20];
            (0..1024).try_for_each(|_| out.write_all(&piece))?;
            Ok(())
        });
        end.refused(&["1073741824"]);
    }
}

fn sparse(path: &str, form: SparseForm, size: u64, map: Vec<(u64, u64)>) -> Entry {
    let kind = Kind::Regular(Content::Repeat { byte: 1, size });
    let format = if form == SparseForm::Gnu { Format::Gnu } else { Format::Pax };
    Entry { sparse: Some(Sparse { form, map }), format, ..Entry::new(path, kind) }
}

/// One large hole costs nothing; with data there are more chunks than are written for a file.
#[test]
fn sparse_files_of_eight_exbibytes() {
    let size = u64::MAX >> 1;
    for form in [SparseForm::Pax00, SparseForm::Pax01, SparseForm::Pax10] {
        let file = |map| sparse("huge", form, size, map);
        let end = Trap::new().stream(&[], |out| entries(out, std::iter::once(file(vec![(size, 0)]))));
        assert!(end.accepted()["totals"]["metadata_bytes"].as_u64().unwrap() < 16 << 20);
        for map in [vec![(size - 10, 10)], vec![(0, 10), (size - 10, 10)]] {
            let end = Trap::new().stream(&[], |out| entries(out, std::iter::once(file(map))));
            end.refused(&["9223372036854775807"]);
        }
    }
}

#[test]
fn many_sparse_files_of_a_tebibyte() {
    let map = || vec![(1 << 39, 10), (1 << 40, 0)];
    let files = (0..16).map(|n| sparse(&format!("f{n}"), SparseForm::Pax10, 1 << 40, map()));
    let end = Trap::new().stream(&[], |out| entries(out, files));
    let report = end.accepted();
    // An index for each MiB, 8 MiB a file: as much as is ever spent on one that has data.
    assert!(report["totals"]["metadata_bytes"].as_u64().unwrap() < 130 << 20, "{report}");
}

#[test]
fn a_sparse_map_of_a_million_ranges() {
    let map = |count: u64| (0..count).map(|n| (n * 4096, 1)).collect::<Vec<_>>();
    for form in [SparseForm::Gnu, SparseForm::Pax10] {
        let file = sparse("holes", form, 4096 * 1_000_000, map(1_000_000));
        let end = Trap::new().stream(&[], |out| entries(out, std::iter::once(file)));
        assert_eq!(end.accepted()["totals"]["files"], 1);
        let file = sparse("holes", form, 4096 * 1_100_000, map(1_100_000));
        Trap::new().stream(&[], |out| entries(out, std::iter::once(file))).refused(&["holes", "1048576"]);
    }
}

fn with_xattr(path: String, value: Vec<u8>) -> Entry {
    Entry { xattrs: vec![(XattrForm::Schily, b"user.x".to_vec(), value)], ..empty(path) }
}

#[test]
fn very_many_different_xattrs() {
    let files = (0..300_000_u32).map(|n| with_xattr(format!("f{n}"), n.to_string().into()));
    let end = Trap::new().stream(&[], |out| entries(out, files));
    assert_eq!(end.accepted()["totals"]["files"], 300_000);
}

/// What a layer keeps in memory while it is read is limited in bytes, not only in number.
#[test]
fn large_things_that_are_kept() {
    const FEWER: [&str; 2] = ["--max-inodes", "3000000"];
    let value = |n: u32| [n.to_le_bytes().to_vec(), vec![7; 65_000]].concat();
    // The same on all is one.
    let end =
        Trap::new().stream(&FEWER, |out| entries(out, (0..20_000).map(|n| with_xattr(format!("f{n}"), value(0)))));
    assert_eq!(end.accepted()["totals"]["files"], 20_000);
    let end =
        Trap::new().stream(&FEWER, |out| entries(out, (0..20_000).map(|n| with_xattr(format!("f{n}"), value(n)))));
    end.refused(&["entry `f", "bytes of names, links and extended attributes"]);
    let target = |n: u32| format!("{n:04090}").into_bytes();
    let links = (0..300_000).map(|n| Entry::new(format!("l{n}"), Kind::Symlink(target(n))));
    let end = Trap::new().stream(&FEWER, |out| entries(out, links));
    end.refused(&["entry `l", "bytes of names, links and extended attributes"]);
    let far = |n: u32| [format!("{n}/").into_bytes(), b"d/".repeat(500_000), b"f".to_vec()].concat();
    let links = (0..1000).map(|n| Entry::new(format!("l{n}"), Kind::HardLink(far(n))));
    let end = Trap::new().stream(&FEWER, |out| entries(out, links));
    end.refused(&["entry `l", "bytes of names, links and extended attributes"]);
    let names = (0..1_000_000).map(|n| empty(format!("{n:0255}")));
    let end = Trap::new().stream(&FEWER, |out| entries(out, names));
    end.refused(&["bytes of names, links and extended attributes"]);
}

/// Every entry is worth a warning.
#[test]
fn very_many_warnings() {
    let files = (0..300_000).map(|n| {
        let xattr = (XattrForm::Schily, b"system.odd".to_vec(), b"1".to_vec());
        Entry { xattrs: vec![xattr], ..empty(format!("{}{n}", "long/".repeat(30))) }
    });
    let end = Trap::new().stream(&[], |out| entries(out, files));
    let report = end.accepted();
    let warnings = report["layers"][0]["warnings"].as_array().unwrap();
    assert!((900..1100).contains(&warnings.len()), "{} warnings", warnings.len());
    assert!(warnings.last().unwrap().to_string().contains("more"), "{:?}", warnings.last());
}

#[test]
fn ways_out() {
    text("s a -> b\ns b -> a\nf a/x").refused(&["`a/x`", "symbolic links"]);
    text("f a/../../x").refused(&["`a/../../x`", ".."]);
    text("f ../../around/etc/shadow \"mine\"").refused(&["`../../around/etc/shadow`"]);
    text("h loot -> ../../around/etc/shadow").refused(&["`loot`"]);
    text("h loot -> gone").refused(&["`loot`", "`gone`"]);
    let long = "n".repeat(256);
    text(&format!("f d/{long}")).refused(&[&long, "255"]);
    let absolute = format!("/dsec-hostile-{}", std::process::id());
    let report = text(&format!("f {absolute} \"here\"\ns /lnk -> /etc\nf /lnk/passwd \"mine\"")).accepted();
    assert!(!Path::new(&absolute).exists());
    assert_eq!(report["totals"]["files"], 2);
    let report = text("s esc -> ../../../around/etc\nf esc/shadow \"mine\"\ns gone -> /nowhere/at/all").accepted();
    assert_eq!(report["totals"]["files"], 1);
    let loop_of = |n: usize| format!("s l{n} -> l{}/l{}\n", (n + 1) % 30, (n + 1) % 30);
    let script: String = (0..30).map(loop_of).collect();
    text(&(script + "f l0/x")).refused(&["`l0/x`", "symbolic links"]);
}

/// Symbolic links each of which names the next 400 times: 400^40 components, if all were followed.
#[test]
fn symbolic_links_that_explode() {
    let step = |n: usize| format!("s l{n} -> {}\n", format!("l{}/", n + 1).repeat(400));
    let script: String = (0..40).map(step).collect();
    // The first names of all are followed; what is behind them is not there, and made.
    let report = text(&(script + "d l40/\nf l0/x")).accepted();
    assert!(report["totals"]["inodes"].as_u64().unwrap() < 20_000, "{report}");
}

#[test]
fn manifests_of_a_hundred_thousand_layers() {
    let trap = Trap::new();
    let layer = oci::Layer::text("f a");
    let bytes = layer.blob();
    let row =
        serde_json::json!({"mediaType": oci::media::LAYER_TAR, "digest": oci::digest(&bytes), "size": bytes.len()});
    let digest = oci::digest(&bytes);
    let ids = vec![digest.as_str(); 100_000];
    let image =
        oci::Image::new().layer(layer).diff_ids(&ids).manifest(serde_json::json!({"layers": vec![row; 100_000]}));
    oci::Layout::new().image("t", image).write(&trap.place.path("oci")).unwrap();
    let source = format!("oci:{}", trap.place.path("oci").display());
    trap.source(&[], &source).refused(&["manifest", "4194304"]);
}

#[test]
fn indexes_inside_indexes() {
    let trap = Trap::new();
    let mut member = oci::Member::from(oci::Image::new().layer(oci::Layer::text("f a")));
    for _ in 0..300 {
        member = oci::Member::Index(vec![member]);
    }
    oci::Layout::new().index("t", vec![member]).write(&trap.place.path("oci")).unwrap();
    let source = format!("oci:{}", trap.place.path("oci").display());
    trap.source(&[], &source).refused(&["index"]);
}

/// A directory deeper than a process may have files open is converted from where it lies.
#[test]
fn a_deep_directory_needs_few_descriptors() {
    let place = Place::new();
    let root = place.path("tree");
    std::fs::create_dir(&root).unwrap();
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut directory = rustix::fs::open(&root, flags, Mode::empty()).unwrap();
    for _ in 0..3000 {
        rustix::fs::openat(&directory, "f", OFlags::CREATE | OFlags::CLOEXEC, Mode::RUSR).unwrap();
        rustix::fs::mkdirat(&directory, "d", Mode::RWXU).unwrap();
        directory = rustix::fs::openat(&directory, "d", flags, Mode::empty()).unwrap();
    }
    let store = place.path("deep");
    let command = convert(&format!("dir:{}", root.display()), &store, "a:b");
    let found = report(&in_shell("ulimit -n 200", &command).output().unwrap());
    assert_eq!(found["totals"]["inodes"], 6001);
    assert!(Command::new("rm").arg("-r").arg(&root).status().unwrap().success());
}
