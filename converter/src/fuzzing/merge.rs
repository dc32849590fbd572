//! Merging of any two images.

use crate::erofs::read::Image;
use crate::erofs::read::check::{DeviceInfo, check};
use crate::erofs::write::{Contents, Device, write_ordered};
use crate::manifest::{OverlayXattrs, Unresolved};
use crate::merge::{How, Layer, plan};
use crate::read_at::ReadAt;
use fs3_client::Digest;

/// Merges the images in `data`: one byte says how, four the length of the first, and the rest are the two.
///
/// Invariant: no panic; what is accepted becomes an image in which our strict checker finds nothing, and which, merged
/// with nothing, stays what it is.
///
/// # Panics
/// When the invariant is broken: that is the finding. Also when no file can be made.
pub fn merge(data: &[u8]) {
    let Some((head, rest)) = data.split_first_chunk::<5>() else { return };
    let [how, len @ ..] = *head;
    let len = usize::try_from(u32::from_le_bytes(len)).map_or(rest.len(), |len| len.min(rest.len()));
    let (low, high) = rest.split_at(len);
    let overlay = if how & 2 == 0 { OverlayXattrs::Trusted } else { OverlayXattrs::User };
    pair(low, high, How { overlay, bottom: how & 1 != 0 });
}

fn pair(low: &[u8], high: &[u8], how: How) {
    let (Ok(low), Ok(high)) = (Image::open(low), Image::open(high)) else { return };
    let blobs: Vec<(Digest, u32)> = [&low, &high]
        .iter()
        .flat_map(|image| image.devices())
        .map(|device| (Digest::of(&device.tag), u32::try_from(device.blocks).unwrap_or(u32::MAX)))
        .collect();
    let devices: Vec<u32> = (0u32..).take(blobs.len()).collect();
    let (low_devices, high_devices) = devices.split_at(low.devices().len());
    let nothing = Unresolved::default();
    let layers = [
        Layer { image: &low, devices: low_devices, unresolved: &nothing },
        Layer { image: &high, devices: high_devices, unresolved: &nothing },
    ];
    let Ok(merged) = plan(&layers, how) else { return };
    let used: Vec<(Digest, u32)> = merged.devices.iter().map(|n| blobs[*n as usize]).collect();
    let table: Vec<Device> = used.iter().map(|(digest, blocks)| Device { digest: *digest, blocks: *blocks }).collect();
    let order = merged.tree.order();
    let file = tempfile::tempfile().expect("a temporary file");
    let contents: [&dyn ReadAt; 2] = [low.source(), high.source()];
    let written = write_ordered(&merged.tree, &order, &merged.runs, Contents::Images(&contents), &table, &file);
    // What EROFS cannot hold (too much, for it) is refused; there is nothing of it to look at.
    let Ok(written) = written else { return };
    let image = Image::open(&file).expect("our own image opens");
    // Devices whose length the table does not tell reach as far as they are asked for.
    if used.iter().all(|(_, blocks)| *blocks > 0) {
        let infos: Vec<DeviceInfo> =
            used.iter().map(|(_, b)| DeviceInfo { blocks: u64::from(*b), packed: false }).collect();
        let findings: Vec<_> = check(&image, &infos)
            .into_iter()
            .filter(|finding| finding.severity == crate::erofs::read::check::Severity::Broken)
            // A time that a broken image had is passed on.
            .filter(|finding| !finding.what.contains("nanoseconds"))
            .collect();
        assert_eq!(findings, [], "our own image is sound");
    }
    let devices: Vec<u32> = (0u32..).take(used.len()).collect();
    let alone = [Layer { image: &image, devices: &devices, unresolved: &merged.unresolved }];
    let again = plan(&alone, how).expect("what we wrote can be merged");
    let second = tempfile::tempfile().expect("a temporary file");
    let contents: [&dyn ReadAt; 1] = [&file];
    let order = again.tree.order();
    let rewritten = write_ordered(&again.tree, &order, &again.runs, Contents::Images(&contents), &table, &second);
    assert_eq!(rewritten.expect("it was written before"), written, "merged with nothing it is another image");
}

#[cfg(test)]
mod tests {
    use crate::convert::{Request, convert};
    use crate::layer::Options;
    use crate::progress::Silent;
    use crate::source::{Platform, SourceRef, TarInput};
    use fixtures::arbitrary::{Limits, stacks};
    use fixtures::tar::Format;
    use fs3_client::Store;
    use proptest::prelude::*;

    fn image(tar: &[u8]) -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("layer.tar");
        std::fs::write(&file, tar).unwrap();
        let store = Store::create(&dir.path().join("store")).unwrap();
        let request = Request {
            source: SourceRef::Tar(TarInput::File(file)),
            platform: Platform::host(),
            options: Options::default(),
            jobs: 1,
            registry: Default::default(),
            dedup: None,
        };
        let record = convert(&request, &store, &Silent).unwrap().layers.remove(0).record;
        std::fs::read(store.local_dir().unwrap().blob_path(&record.metadata.digest)).unwrap()
    }

    fn input(how: u8, low: &[u8], high: &[u8]) -> Vec<u8> {
        let mut data = vec![how];
        data.extend_from_slice(&u32::try_from(low.len()).unwrap().to_le_bytes());
        data.extend_from_slice(low);
        data.extend_from_slice(high);
        data
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_two_trees(layers in stacks(Limits::small(), 2), how in 0..2_u8) {
            let images: Vec<Vec<u8>> = layers.iter().map(|layer| image(&layer.to_tar(Format::Pax))).collect();
            super::merge(&input(how, &images[0], &images[images.len() - 1]));
        }

        /// The superblock's checksum is made right again, so that what it covers is read.
        #[test]
        fn damaged_trees(
            layers in stacks(Limits::small(), 2),
            how in 0..2_u8,
            damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
        ) {
            let mut images: Vec<Vec<u8>> = layers.iter().map(|layer| image(&layer.to_tar(Format::Pax))).collect();
            for (at, byte) in damage {
                let number = usize::from(byte) % images.len();
                let image = &mut images[number];
                let at = at.index(image.len());
                image[at] = byte;
                let sum = crate::erofs::read::superblock_checksum(&image[1024..4096]);
                image[1028..1032].copy_from_slice(&sum.to_le_bytes());
            }
            super::merge(&input(how, &images[0], &images[images.len() - 1]));
        }

        #[test]
        fn any_bytes(data in prop::collection::vec(any::<u8>(), 0..6000)) {
            super::merge(&data);
        }
    }
}
