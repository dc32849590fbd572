//! The same bytes for the same input, whatever is around.

use crate::program::{convert, in_shell, layer, layers, report, run};
use crate::support::{Hashed, Place, list};
use fixtures::oci::Compression;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// The blobs of a fresh store after a run of `command(store)`.
fn blobs(command: impl FnOnce(&Path) -> Command) -> Vec<String> {
    let place = Place::new();
    run(&mut command(place.store.local_dir().unwrap().root()));
    let names = Hashed::all(&place.store).names().into_iter().map(ToOwned::to_owned).collect();
    assert_eq!(list(&place.store.scratch()), [""; 0]);
    names
}

#[test]
fn surroundings_do_not_show() {
    let place = Place::new();
    let source = place.layout(&layers(40, 60));
    let plain = |store: &Path| convert(&source, store, "a:b");
    let expected = blobs(plain);
    assert!(expected.len() > 8, "{expected:?}");
    for jobs in ["1", "2", "8", "1", "8"] {
        let found = blobs(|store| {
            let mut command = plain(store);
            command.args(["--jobs", jobs]);
            command
        });
        assert_eq!(found, expected, "--jobs {jobs}");
    }
    for settings in [
        "umask 0; cd /",
        "umask 777; export TZ=Pacific/Apia LC_ALL=tr_TR.UTF-8 LANG=C",
        "export TZ=:/nowhere LC_ALL=nowhere HOME=/nowhere; unset PATH; cd /proc",
        "export SOURCE_DATE_EPOCH=1 RUST_LOG=trace",
        "ulimit -n 64",
    ] {
        // Root may read what umask takes away; others are spared that one.
        if settings.contains("umask 777") && !rustix::process::geteuid().is_root() {
            continue;
        }
        assert_eq!(blobs(|store| in_shell(settings, &plain(store))), expected, "{settings}");
    }
}

/// A pipe fed in pieces of any length gives what a file gives, plain or compressed.
#[test]
fn pieces_do_not_show() {
    let place = Place::new();
    for compression in [Compression::None, Compression::Gzip, Compression::Zstd] {
        let bytes = layer(50, 20, compression).blob();
        let file = place.path("layer");
        std::fs::write(&file, &bytes).unwrap();
        let expected = blobs(|store| convert(&format!("tar:{}", file.display()), store, "a:b"));
        for pieces in [&[1, 511, 513][..], &[65_536, 1, 4095], &[300_007], &[7, 262_144, 262_143]] {
            let place = Place::new();
            let mut child =
                convert("tar:-", place.store.local_dir().unwrap().root(), "a:b").stdin(Stdio::piped()).spawn().unwrap();
            let mut stdin = child.stdin.take().unwrap();
            let mut rest = &bytes[..];
            // Odd pieces for the first megabyte, then whole ones: a pipe that is fed by single bytes takes long.
            for piece in pieces.iter().cycle().take(3000) {
                let (now, later) = rest.split_at((*piece).min(rest.len()));
                stdin.write_all(now).unwrap();
                rest = later;
            }
            stdin.write_all(rest).unwrap();
            drop(stdin);
            report(&child.wait_with_output().unwrap());
            assert_eq!(Hashed::all(&place.store).names(), expected, "{compression:?} in pieces of {pieces:?}");
        }
    }
}

/// Entries in any order are the same tree, and so the same bytes.
#[test]
fn the_order_of_entries_does_not_show() {
    let place = Place::new();
    let entries = [
        "f a/x \"x\" mtime=4",
        "f a/y size=9000 fill=random:1 mtime=4",
        "f b size=70000 fill=text:2",
        "d a/ 0700",
        "d ./ mtime=3",
    ];
    let mut all: Vec<Vec<String>> = Vec::new();
    for rotation in 0..entries.len() {
        let script: String =
            entries.iter().cycle().skip(rotation).take(entries.len()).map(|e| format!("{e}\n")).collect();
        let file = place.path(format!("{rotation}.tar"));
        std::fs::write(&file, fixtures::tar::build(&script)).unwrap();
        let store = Place::new();
        let report =
            run(&mut convert(&format!("tar:{}", file.display()), store.store.local_dir().unwrap().root(), "a:b"));
        let layer = &report["layers"][0];
        all.push(vec![layer["metadata"].to_string(), layer["data"].to_string()]);
    }
    assert!(all.iter().all(|blobs| *blobs == all[0]), "{all:#?}");
}

/// Contents that go where a lower layer's symbolic link leads are, blob and all, as if they had been written there.
#[test]
fn contents_behind_a_lower_link_are_in_tree_order() {
    let below = "d usr/ mtime=1\nd usr/lib/ mtime=1\ns lib -> usr/lib\n";
    let behind = "f lib/b mtime=2 size=9000 fill=random:1\nf opt/a mtime=2 size=9000 fill=random:2\n";
    let there = "f usr/lib/b mtime=2 size=9000 fill=random:1\nf opt/a mtime=2 size=9000 fill=random:2\n";
    let top = |script: &str| {
        let place = Place::new();
        let layers = [below, script].map(|script| fixtures::oci::Layer::tar(fixtures::tar::build(script)));
        let source = place.layout(&layers);
        let record = place.convert(&source).unwrap().layers.remove(1).record;
        (record.metadata.digest, record.data[0].digest)
    };
    assert_eq!(top(behind), top(there));
}
