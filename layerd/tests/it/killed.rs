//! Killed at any instant, `layerd mount` leaves a whole root or none.

use crate::support::{Place, text, umount};
use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

#[test]
fn privileged_killed_at_any_instant() {
    let place = Place::new();
    let layers: Vec<_> = (0..4)
        .map(|n| {
            place.layer(|tree| {
                tree.file(&format!("f{n}"), vec![b'x'; 70_000]);
                rustix::fs::chmod(&tree.root, rustix::fs::Mode::from_raw_mode(0o1751)).unwrap();
            })
        })
        .collect();
    place.image("a:1", &layers);
    let (mut mounted, mut not_mounted) = (0, 0);
    for round in 0..80u64 {
        let rw = place.path(format!("rw{round}"));
        let (attach, handover) =
            (["file", "loop"][usize::from(round % 2 == 1)], ["auto", "parked"][usize::from(round % 4 > 1)]);
        let mut child = Command::new(env!("CARGO_BIN_EXE_layerd"))
            .args(["mount", "a:1", "--attach", attach, "--handover", handover, "--store"])
            .args([place.store.root(), "--rw".as_ref(), &rw, &place.root()])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_micros(round * 500));
        child.kill().unwrap();
        child.wait().unwrap();
        if place.mounts().iter().any(|(target, _)| *target == place.root()) {
            assert_eq!(text(place.root().join("f0")).len(), 70_000);
            place.umount().ok();
            mounted += 1;
        } else {
            not_mounted += 1;
        }
        // What was left of the writable layer serves the next mount.
        let args = ["a:1", "--handover", "parked", "--rw", rw.to_str().unwrap()];
        place.mount(&args).ok();
        assert_eq!(std::os::unix::fs::MetadataExt::mode(&fs::metadata(place.root()).unwrap()) & 0o7777, 0o1751);
        umount(&[place.root()]).ok();
    }
    place.assert_nothing_left();
    assert!(mounted > 0 && not_mounted > 0, "the delays miss: {mounted} mounted, {not_mounted} not");
}
