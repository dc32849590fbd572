//! Many converters, one store.

use crate::program::{convert, layers, report, run};
use crate::support::{Hashed, Place, list};
use std::process::Child;

/// Starts all, then waits for all; returns what each reported.
fn all(place: &Place, runs: &[(String, String)]) -> Vec<serde_json::Value> {
    let start = |(source, name): &(String, String)| {
        convert(source, place.store.local_dir().unwrap().root(), name).spawn().unwrap()
    };
    let children: Vec<Child> = runs.iter().map(start).collect();
    children.into_iter().map(|child| report(&child.wait_with_output().unwrap())).collect()
}

#[test]
fn converters_of_one_image() {
    let place = Place::new();
    let source = place.layout(&layers(20, 80));
    let alone = Place::new();
    let expected = run(&mut convert(&source, alone.store.local_dir().unwrap().root(), "a:b"));
    for count in [2, 8] {
        let place = Place::new();
        let name = |n| if n % 2 == 0 { "a:b".to_owned() } else { format!("n:{n}") };
        let runs: Vec<_> = (0..count).map(|n| (source.clone(), name(n))).collect();
        let reports = all(&place, &runs);
        assert!(reports.iter().all(|report| report["manifest"] == expected["manifest"]));
        assert_eq!(Hashed::all(&place.store).names(), Hashed::all(&alone.store).names());
        assert_eq!(list(&place.store.scratch()), [""; 0]);
        assert_eq!(place.store.list_refs().unwrap().len(), 1 + count / 2);
    }
}

/// Images that share layers, each converted twice, with another converter's leftovers about.
#[test]
fn converters_of_several_images() {
    let sources: Vec<(Place, String)> = (0..4)
        .map(|n| {
            let place = Place::new();
            let source = place.layout(&layers(30 + n, 50));
            (place, source)
        })
        .collect();
    let serial = Place::new();
    let expected: Vec<_> =
        sources.iter().map(|(_, s)| run(&mut convert(s, serial.store.local_dir().unwrap().root(), "a:b"))).collect();
    let place = Place::new();
    let runs: Vec<_> = (0..8).map(|n| (sources[n % 4].1.clone(), format!("image{}:{n}", n % 4))).collect();
    for round in 0..2 {
        let reports = all(&place, &runs);
        for (n, report) in reports.iter().enumerate() {
            assert_eq!(report["manifest"], expected[n % 4]["manifest"]);
            assert!(round == 0 || report["totals"]["layers_reused"] == 3, "{report}");
        }
        assert_eq!(Hashed::all(&place.store).names(), Hashed::all(&serial.store).names());
        assert_eq!(list(&place.store.scratch()), [""; 0]);
    }
}
