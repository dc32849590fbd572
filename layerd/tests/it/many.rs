//! Case O01: as many layers as overlayfs takes.

use crate::support::{Place, list, text};
use converter::manifest::Layer;

#[test]
fn privileged_o01_128_and_500_layers_and_501_refused() {
    let place = Place::new();
    let layers: Vec<Layer> = (0..501)
        .map(|n| {
            place.layer(|tree| {
                tree.file("top", n.to_string());
                tree.file(&format!("layer-{n:03}"), "x");
            })
        })
        .collect();
    for (name, n) in [("l:128", 128), ("l:500", 500)] {
        place.image(name, &layers[..n]);
        place.mount(&[name]).ok();
        assert_eq!(text(place.root().join("top")), (n - 1).to_string());
        assert_eq!(list(place.root()).len(), n + 1);
        place.umount().ok();
    }
    let rw = place.path("rw");
    place.mount(&["l:500", "--handover", "parked", "--rw", rw.to_str().unwrap()]).ok();
    assert_eq!(text(place.root().join("layer-000")), "x");
    place.umount().ok();

    place.image("l:501", &layers);
    let error = place.mount(&["l:501"]).fails(1);
    assert!(error.contains("501 layers are more than the 500 that overlayfs takes"), "{error}");
    assert!(error.contains("hint: `dsec-convert merge"), "{error}");
    place.assert_nothing_left();
}
