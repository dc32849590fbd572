use super::*;
use crate::engine::Device;
use crate::upper::Limits;
use std::cell::RefCell;
use std::path::Path;

const SIZE: u64 = 1 << 20;

fn limits() -> Limits {
    Limits::default()
}

fn open(dir: &Path) -> (Chain, Device) {
    let (chain, layers, upper) = Chain::open(&dir.join("chain.json"), limits()).unwrap();
    (chain, Device::new(&layers, Some(upper)).unwrap())
}

fn copy(from: &Path) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.path().join(entry.file_name())).unwrap();
    }
    to
}

fn all(device: &Device) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(SIZE).unwrap()];
    device.read(&mut bytes, 0).unwrap();
    bytes
}

fn write(device: &Device, array: &mut [u8], seed: u64) {
    for i in 0..40u64 {
        let (value, len) =
            (u8::try_from((seed * 40 + i) % 255).unwrap() + 1, usize::try_from(1 + i * 77 % 3000).unwrap());
        let offset = (seed * 7919 + i * 104_729) % (SIZE - 4096);
        let place = usize::try_from(offset).unwrap();
        device.write(&vec![value; len], offset, false).unwrap();
        array[place..place + len].fill(value);
    }
    device.discard(seed * 8192, 10_000).unwrap();
    let start = usize::try_from(seed * 8192).unwrap();
    array[start..start + 10_000 / 512 * 512].fill(0);
}

/// What those rely on who serve requests in threads of their own.
#[test]
fn disks_and_chains_are_for_many_threads() {
    fn is_shared<T: Send + Sync + 'static>() {}
    is_shared::<Device>();
    is_shared::<Chain>();
    is_shared::<crate::engine::Located>();
    is_shared::<crate::image::Shelf>();
}

#[test]
fn a_crash_at_any_step_leaves_the_same_disk_and_the_seal_is_finished() {
    let dir = tempfile::tempdir().unwrap();
    let (mut chain, upper) = Chain::create(&dir.path().join("chain.json"), SIZE, limits()).unwrap();
    let device = Device::new(&[], Some(upper)).unwrap();
    let mut array = vec![0; usize::try_from(SIZE).unwrap()];
    for round in 0..3 {
        write(&device, &mut array, round);
        device.flush().unwrap();
        let copies = RefCell::new(Vec::new());
        let late = (round * 300_007, vec![0xA0 + u8::try_from(round).unwrap(); 700]);
        chain
            .seal(&device, |step| {
                // What is written and flushed between the steps is there, too.
                if step >= Step::Switched {
                    device.write(&late.1, late.0 + step as u64 * 700, true).unwrap();
                }
                copies.borrow_mut().push((step, copy(dir.path()), all(&device)));
            })
            .unwrap();
        let copies = copies.into_inner();
        assert_eq!(copies.len(), 7);
        for (step, copy, expected) in copies {
            let (mut chain, device) = open(copy.path());
            assert!(all(&device) == expected, "round {round}, {step:?}");
            let sealed = usize::from(step > Step::Created) + usize::try_from(round).unwrap();
            assert_eq!(chain.layers().count(), sealed, "round {round}, {step:?}");
            // And again, from there, with torn bytes of an ending where the last one was interrupted.
            let mut array = expected;
            write(&device, &mut array, 9);
            chain.seal(&device, |_| ()).unwrap();
            drop((chain, device));
            let (_, device) = open(copy.path());
            assert!(all(&device) == array, "round {round}, {step:?}, the second time");
        }
        array = all(&device);
    }
    drop((chain, device));
    // As anybody reads them: plain sealed layers, and a pair.
    let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 1 + 3 + 4, "{names:?}");
    let mut layers: Vec<_> = (0..3)
        .map(|n| Arc::new(crate::layer::Layer::open_file(&dir.path().join(format!("upper-{n}.data"))).unwrap()))
        .collect();
    let (data, index) = (dir.path().join("upper-3.data"), dir.path().join("upper-3.index"));
    layers.push(Arc::new(crate::layer::Layer::open_pair(&data, Some(&index)).unwrap()));
    let image = crate::image::Image::new(layers).unwrap();
    let mut bytes = vec![0; array.len()];
    image.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == array);
}

#[test]
fn an_interrupted_ending_is_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let (mut chain, upper) = Chain::create(&dir.path().join("chain.json"), SIZE, limits()).unwrap();
    let device = Device::new(&[], Some(upper)).unwrap();
    let mut array = vec![0; usize::try_from(SIZE).unwrap()];
    write(&device, &mut array, 1);
    let torn = RefCell::new(None);
    chain
        .seal(&device, |step| {
            if step == Step::Ended {
                let copy = copy(dir.path());
                // The trailer reached the disk, what is before it did not.
                let path = copy.path().join("upper-0.data");
                let file = std::fs::File::options().write(true).open(path).unwrap();
                let len = file.metadata().unwrap().len();
                std::os::unix::fs::FileExt::write_all_at(&file, &[0; 512], len - 4096 - 512).unwrap();
                *torn.borrow_mut() = Some(copy);
            }
        })
        .unwrap();
    let torn = torn.into_inner().unwrap();
    let (chain, device) = open(torn.path());
    assert_eq!(chain.layers().count(), 1);
    assert!(all(&device) == array);
}

#[test]
fn a_chain_that_is_none_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("chain.json");
    for (text, why) in [
        ("{", "EOF"),
        ("{\"version\":1,\"layers\":[],\"upper\":{\"data\":\"a\"},\"next\":1}", "index"),
        ("{\"version\":2,\"layers\":[],\"upper\":{\"data\":\"a\",\"index\":\"b\"},\"next\":1}", "version is 2"),
    ] {
        std::fs::write(&path, text).unwrap();
        let error = Chain::open(&path, limits()).unwrap_err().to_string();
        assert!(error.contains(why) && error.contains("chain.json"), "{error}");
    }
    assert!(Chain::create(&path, SIZE, limits()).is_err());
}
