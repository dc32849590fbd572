use super::*;
use crate::upper::{Files, Limits};
use fs3_client::testing::power_cut::Disk;
use std::sync::atomic::AtomicBool;
use uuid::Uuid;

const SIZE: usize = 256 * 512;

fn upper(disk: &Disk, name: &str) -> Upper {
    let file = |kind| Arc::new(disk.open(&format!("{name}.{kind}"))) as Arc<dyn fs3_client::Medium>;
    let files = Files {
        name: name.to_owned(),
        data: file("data"),
        index: file("index"),
        sidecar: file("sidecar"),
        journal: None,
        salvage: None,
        renewal: None,
        is_being_sealed: false,
    };
    if files.data.size().unwrap() == 0 {
        files.format(SIZE as u64, Uuid::from_u128(name.len() as u128 + 1)).unwrap();
    }
    Upper::open(files, Limits::default()).unwrap()
}

/// A device whose lower layer has something everywhere but in the last quarter.
fn device(disk: &Disk) -> (Device, Vec<u8>) {
    let device = Device::new(&[], Some(upper(disk, "lower"))).unwrap();
    let mut bytes: Vec<u8> = (0..SIZE * 3 / 4).map(|i| u8::try_from(i % 251).unwrap() | 1).collect();
    device.write(&bytes, 0, false).unwrap();
    seal(&device, upper(disk, "upper"));
    bytes.resize(SIZE, 0);
    (device, bytes)
}

fn seal(device: &Device, new: Upper) {
    let old = device.push(new).unwrap();
    let index = Arc::new(old.to_index().unwrap());
    let data = Arc::new(crate::seal::UpperData::new(old));
    device.settle(index, data).unwrap();
}

fn all(device: &Device) -> Vec<u8> {
    let mut bytes = vec![0xEE; SIZE];
    device.read(&mut bytes, 0).unwrap();
    bytes
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % bound
    }
}

#[test]
fn any_ranges_are_those_of_a_plain_array_through_seals() {
    for seed in 0..40 {
        let disk = Disk::new();
        let (device, mut array) = device(&disk);
        let mut random = Random(seed);
        for step in 0..120u8 {
            let start = random.below(SIZE);
            let len = 1 + random.below((SIZE - start).min(5000));
            let (offset, range) = (start as u64, start..start + len);
            match random.below(12) {
                0..6 => {
                    let bytes: Vec<u8> = (0..len).map(|i| step ^ u8::try_from(i % 256).unwrap()).collect();
                    device.write(&bytes, offset, random.below(4) == 0).unwrap();
                    array[range].copy_from_slice(&bytes);
                }
                6 => {
                    device.write_zeroes(offset, len as u64, false).unwrap();
                    array[range].fill(0);
                }
                7 => {
                    device.discard(offset, len as u64).unwrap();
                    let whole = start.next_multiple_of(512)..(start + len) / 512 * 512;
                    if whole.start < whole.end {
                        array[whole].fill(0);
                    }
                }
                8 if step.is_multiple_of(5) => {
                    seal(&device, upper(&disk, &format!("upper {}", "x".repeat(step.into()))))
                }
                9 => drop(device.reclaim().unwrap()),
                10 => device.flush().unwrap(),
                _ => {
                    let mut found = vec![0xEE; len];
                    assert!(device.try_read(&mut found, offset).unwrap());
                    assert_eq!(found, array[range], "seed {seed}, step {step}");
                }
            }
        }
        assert!(all(&device) == array, "seed {seed}");
    }
}

#[test]
fn what_is_zero_already_costs_nothing_and_ranges_are_checked() {
    let disk = Disk::new();
    let (device, _) = device(&disk);
    device.discard(SIZE as u64 * 3 / 4, SIZE as u64 / 4).unwrap();
    assert_eq!(device.stat().unwrap().slots, 0);
    device.discard(0, SIZE as u64).unwrap();
    device.discard(0, SIZE as u64).unwrap();
    assert_eq!(device.stat().unwrap().slots, 1);
    assert_eq!(all(&device), [0; SIZE]);
    let error = device.write(&[0; 2], SIZE as u64 - 1, false).unwrap_err();
    assert_eq!(error.errno(), libc::EINVAL);
    assert!(device.read(&mut [0], u64::MAX).is_err());
    assert!(device.discard(1, u64::MAX).is_err());
}

#[test]
fn parts_of_a_sector_written_at_once_are_all_kept() {
    let disk = Disk::new();
    let (device, mut array) = device(&disk);
    let threads = 8;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let device = &device;
            scope.spawn(move || {
                // Each has its own bytes of every sector, and some lie across two.
                for round in 0..200usize {
                    let offset = (round % 20) * 512 + thread * 64 - usize::from(thread > 0) * 8;
                    device.write(&[u8::try_from(thread + 1).unwrap(); 48], offset as u64, false).unwrap();
                }
            });
        }
    });
    for round in 0..20 {
        for thread in 0..threads {
            let offset = round * 512 + thread * 64 - usize::from(thread > 0) * 8;
            array[offset..offset + 48].fill(u8::try_from(thread + 1).unwrap());
        }
    }
    assert!(all(&device) == array);
}

/// What a ring would read is what a read gives, and stays there as long as it is held.
#[test]
fn located_bytes_stay_where_they_are() {
    use std::os::unix::fs::FileExt as _;
    let dir = tempfile::tempdir().unwrap();
    let real = |name: &str| {
        let path = |kind: &str| dir.path().join(format!("{name}.{kind}"));
        Upper::create(&path("data"), &path("index"), SIZE as u64, Limits::default()).unwrap()
    };
    let device = Device::new(&[], Some(real("lower"))).unwrap();
    let mut array: Vec<u8> = (0..SIZE / 2).map(|i| u8::try_from(i % 251).unwrap() | 1).collect();
    device.write(&array, 0, false).unwrap();
    array.resize(SIZE, 0);
    seal(&device, real("upper"));
    let pread = |located: &Located, len: usize| {
        let mut bytes = vec![0; len];
        let file = std::fs::File::from(located.descriptor().unwrap().try_clone_to_owned().unwrap());
        file.read_exact_at(&mut bytes, located.offset()).unwrap();
        bytes
    };
    let (mut random, mut found) = (Random(3), [0; 3]);
    for step in 0..240u8 {
        let start = random.below(SIZE);
        let len = 1 + random.below((SIZE - start).min(3000));
        match step % 4 {
            0 => {
                device.write(&vec![step | 1; len], start as u64, false).unwrap();
                array[start..start + len].fill(step | 1);
            }
            1 if step % 8 == 1 => {
                device.write_zeroes(start as u64, len as u64, false).unwrap();
                array[start..start + len].fill(0);
            }
            _ => match device.locate(start as u64, len as u64).unwrap() {
                Place::Zero => {
                    assert!(array[start..start + len].iter().all(|&byte| byte == 0));
                    found[0] += 1;
                }
                Place::File(located) => {
                    assert_eq!(pread(&located, len), array[start..start + len]);
                    found[1] += 1;
                }
                Place::Elsewhere => found[2] += 1,
            },
        }
    }
    assert!(found.iter().all(|&times| times > 5), "{found:?}");
    assert!(device.locate(SIZE as u64, 1).is_err());

    // Overwritten, durably, and not freed before the reader is done.
    device.write(&[9; 8192], 8192, true).unwrap();
    device.reclaim().unwrap();
    let Place::File(located) = device.locate(8192, 8192).unwrap() else { panic!("it was just written") };
    device.write(&[7; 8192], 8192, true).unwrap();
    std::thread::scope(|scope| {
        let reclaimed = scope.spawn(|| device.reclaim().unwrap());
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(pread(&located, 8192), [9; 8192]);
        assert!(!reclaimed.is_finished());
        drop(located);
        assert!(reclaimed.join().unwrap() >= 8192);
    });
}

/// Writers that verify what they read, while layers are sealed under them and garbage is freed.
#[test]
fn no_request_notices_that_layers_change() {
    let disk = Disk::new();
    let device = Arc::new(Device::new(&[], Some(upper(&disk, "first"))).unwrap());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4u8)
            .map(|thread| {
                let device = &device;
                scope.spawn(move || {
                    let (part, mut random) = (SIZE / 4, Random(thread.into()));
                    let base = part * usize::from(thread);
                    let mut mine = vec![0; part];
                    for step in 0..600u32 {
                        let start = random.below(part);
                        let len = 1 + random.below((part - start).min(3000));
                        let value = u8::try_from(step % 255).unwrap() + 1;
                        device.write(&vec![value; len], (base + start) as u64, step.is_multiple_of(50)).unwrap();
                        mine[start..start + len].fill(value);
                        let start = random.below(part);
                        let mut found = vec![0; part - start];
                        device.read(&mut found, (base + start) as u64).unwrap();
                        assert!(found == mine[start..], "thread {thread}, step {step}");
                    }
                })
            })
            .collect();
        let (device, done) = (&device, &done);
        scope.spawn(move || {
            let mut number = 0;
            while !done.load(Ordering::Relaxed) {
                number += 1;
                if number < 200 {
                    seal(device, upper(&disk, &format!("u{}", "x".repeat(number))));
                }
                device.flush().unwrap();
                device.reclaim().unwrap();
            }
            assert!(device.lower_layers() > 3);
        });
        let results: Vec<_> = workers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        done.store(true, Ordering::Relaxed);
        results.into_iter().for_each(|result| result.unwrap());
    });
}
