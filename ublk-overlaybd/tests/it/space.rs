//! A file system that is full.

use fixtures::{mounts, require};
use std::sync::Arc;
use ublk_overlaybd::engine::{Background, Device};
use ublk_overlaybd::upper::{Limits, Upper};

const MIB: usize = 1 << 20;

fn all(device: &Device) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(device.size()).unwrap()];
    device.read(&mut bytes, 0).unwrap();
    bytes
}

/// With a reserve, and without one, where the file system itself says that it is full.
#[test]
fn privileged_a_full_file_system_loses_nothing_and_is_freed_by_discards() {
    if !require::root() {
        return;
    }
    for reserve in [1 << 20, 0] {
        let tmpfs = mounts::tmpfs(8 << 20).unwrap();
        let (data, index) = (tmpfs.path().join("data"), tmpfs.path().join("index"));
        let limits = Limits { quota: None, reserve };
        let upper = Upper::create(&data, &index, 16 << 20, limits).unwrap();
        let device = Arc::new(Device::new(&[], Some(upper)).unwrap());
        let mut array = vec![0; 16 * MIB];
        let fill = |device: &Device, array: &mut Vec<u8>, byte: u8| {
            for at in (0..16 * MIB).step_by(64 << 10) {
                match device.write(&vec![byte; 64 << 10], at as u64, false) {
                    Ok(()) => array[at..at + (64 << 10)].fill(byte),
                    Err(error) => {
                        assert_eq!(error.errno(), libc::ENOSPC, "{error}");
                        return at;
                    }
                }
            }
            panic!("16 MiB do not fit into 8");
        };
        let first = fill(&device, &mut array, 1);
        assert!(first > 5 * MIB, "only {first} bytes fit");
        assert!(all(&device) == array);
        if reserve == 0 {
            device.discard(0, MIB as u64).unwrap();
            array[..MIB].fill(0);
        }
        // Room for the index is what the reserve is for.
        let flushed = device.flush();
        if reserve > 0 {
            flushed.unwrap();
        } else if let Err(error) = flushed {
            assert_eq!(error.errno(), libc::ENOSPC, "{error}");
        }
        // What is written over takes no more than it did, again and again, as long as there is garbage to be freed.
        for round in 0..20u8 {
            device.discard(2 << 20, 1 << 20).unwrap();
            device.write(&vec![round | 0x80; 1 << 19], 2 << 20, false).unwrap();
            array[2 << 20..3 << 20].fill(0);
            array[2 << 20..(2 << 20) + (1 << 19)].fill(round | 0x80);
        }
        assert!(all(&device) == array);
        // In the background, too.
        let background = Background::of(Arc::clone(&device));
        device.discard(0, 4 << 20).unwrap();
        array[..4 << 20].fill(0);
        device.flush().unwrap();
        let before = device.stat().unwrap().allocated;
        let end = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while device.stat().unwrap().allocated + 2 * MIB as u64 > before && std::time::Instant::now() < end {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let freed = std::os::unix::fs::MetadataExt::blocks(&data.metadata().unwrap()) * 512;
        assert!(freed < 4 << 20, "{freed} bytes are still taken");
        drop(background);
        device.write(&vec![0x77; 2 << 20], 1 << 20, true).unwrap();
        array[1 << 20..3 << 20].fill(0x77);
        drop(device);
        let upper = Upper::open_pair(&data, &index, limits).unwrap();
        assert_eq!(upper.recovered().dropped, None);
        let device = Device::new(&[], Some(upper)).unwrap();
        assert!(all(&device) == array, "reserve {reserve}");
    }
}
