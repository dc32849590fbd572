//! Case O12 with programs: fifty conversions into one store, some of them killed, while refs go and leftovers are
//! swept.

use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use fixtures::oci::{Compression, Image, Layer, Layout};
use fs3_client::StoreError;

use crate::support_tar::{Place, dsec_convert};

fn start(place: &Place, n: usize) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dsec-convert"));
    command.args(["convert", &format!("oci:oci{n}"), "--store", "store", "--name", &format!("image:{n}"), "--json"]);
    command.current_dir(place.dir()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn o12_fifty_programs_and_a_cleaner() {
    let place = Place::new();
    for n in 0..50 {
        // Some of what they hold is the same, so that they also meet under final names.
        let shared = Layer::text(&format!("f shared size=200K fill=random:{}\nf small \"x\"", n % 5));
        let own = Layer::text(&format!("f own size=150K fill=random:{}\nw shared", 1000 + n));
        let image = Image::new().layer(shared.compression(Compression::Gzip)).layer(own);
        Layout::new().image("made", image).write(&place.path(format!("oci{n}"))).unwrap();
    }
    let done = AtomicBool::new(false);
    let mut rounds = 0;
    std::thread::scope(|scope| {
        let cleaner = scope.spawn(|| {
            let mut rounds = 0;
            while !done.load(Ordering::Relaxed) {
                assert_eq!(place.store.sweep().unwrap().foreign, 0);
                let victim = format!("image:{}", rounds % 50).parse().unwrap();
                match place.store.remove_ref(&victim) {
                    Ok(()) | Err(StoreError::NoSuchRef { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
                place.store.list_refs().unwrap();
                rounds += 1;
            }
            rounds
        });
        let numbers: Vec<usize> = (0..50).collect();
        for batch in numbers.chunks(8) {
            let mut children: Vec<(usize, Child)> = batch.iter().map(|&n| (n, start(&place, n))).collect();
            // One of them never ends by itself, and another is begun in its place.
            children[0].1.kill().unwrap();
            children[0].1.wait().unwrap();
            children[0].1 = start(&place, batch[0]);
            for (n, child) in children {
                let output = child.wait_with_output().unwrap();
                let said = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "image {n}: {}: {said}", output.status);
            }
        }
        done.store(true, Ordering::Relaxed);
        rounds = cleaner.join().unwrap();
    });
    assert!(rounds > 50, "only {rounds} rounds");
    place.store.sweep().unwrap();
    assert_eq!(std::fs::read_dir(place.store.local_dir().unwrap().root().join("tmp")).unwrap().count(), 0, "leftovers");
    // What is missing now is only names: all layers are there, and whole.
    for n in 0..50 {
        let report = crate::support_tar::report(&start(&place, n).wait_with_output().unwrap());
        assert_eq!(report["totals"]["layers_reused"], 2, "{report}");
        let verified = dsec_convert(place.dir(), &["verify", "--deep", "store", &format!("image:{n}")], Stdio::null());
        assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stderr));
    }
    assert_eq!(place.store.list_refs().unwrap().len(), 50);
}
