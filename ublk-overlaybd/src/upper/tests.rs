use super::*;
use crate::format::lsmt::PADDING;
use fs3_client::testing::power_cut::Disk;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use uuid::Uuid;

const SECTORS: u64 = 48;

fn files(disk: &Disk) -> Files {
    Files {
        name: "upper".to_owned(),
        data: Arc::new(disk.open("data")),
        index: Arc::new(disk.open("index")),
        sidecar: Arc::new(disk.open("sidecar")),
        journal: None,
        salvage: None,
        renewal: Some(Arc::new(OnDisk(disk.clone(), AtomicU64::new(0)))),
        is_being_sealed: false,
    }
}

/// Renames as a directory does, on a disk that forgets.
#[derive(Debug)]
struct OnDisk(Disk, AtomicU64);

impl OnDisk {
    fn new_name(&self, kind: &str) -> String {
        format!("{kind}.new-{}", self.1.load(Ordering::Relaxed))
    }
}

impl Renewal for OnDisk {
    fn begin(&self) -> io::Result<Renewed> {
        self.1.fetch_add(1, Ordering::Relaxed);
        let create = |kind| -> io::Result<Arc<dyn Medium>> {
            let file = self.0.open(&self.new_name(kind));
            // What a crash left there.
            file.set_len(0)?;
            Ok(Arc::new(file))
        };
        Ok(Renewed { index: create("index")?, sidecar: create("sidecar")? })
    }

    fn forget_sidecar(&self) -> io::Result<()> {
        self.0.unlink("sidecar")
    }

    fn name_index(&self) -> io::Result<()> {
        self.0.rename(&self.new_name("index"), "index")
    }

    fn name_sidecar(&self) -> io::Result<()> {
        self.0.rename(&self.new_name("sidecar"), "sidecar")
    }
}

fn open(disk: &Disk) -> Result<Upper, UpperError> {
    Upper::open(files(disk), Limits::default())
}

fn new() -> (Disk, Upper) {
    let disk = Disk::new();
    files(&disk).format(SECTORS * SECTOR, Uuid::from_u128(99)).unwrap();
    let upper = open(&disk).unwrap();
    (disk, upper)
}

/// The bytes of a sector that write `id` left: every eight of them say which it was and where.
fn sector(id: u64, number: u64) -> [u8; 512] {
    let mut bytes = [0; 512];
    if id > 0 {
        let word = (id << 16 | number).to_le_bytes();
        bytes.as_chunks_mut().0.fill(word);
    }
    bytes
}

fn contents(id: u64, start: u64, sectors: u64) -> Vec<u8> {
    (start..start + sectors).flat_map(|number| sector(id, number)).collect()
}

fn read(upper: &Upper, range: Range<u64>) -> Vec<u8> {
    let (pieces, _reading) = upper.lookup(range);
    let mut all = Vec::new();
    for piece in pieces {
        let mut bytes = vec![0; usize::try_from(piece.len * SECTOR).unwrap()];
        if let Some(Kind::Data { moffset, .. }) = piece.kind {
            upper.read_data(&mut bytes, moffset * SECTOR).unwrap();
        }
        all.extend(bytes);
    }
    all
}

/// Which write each sector is of; fails where one is of none, or a mixture.
fn ids(upper: &Upper) -> Vec<u64> {
    let all = read(upper, 0..SECTORS);
    (0..)
        .zip(all.as_chunks::<512>().0)
        .map(|(number, bytes)| {
            let id = u64::from_le_bytes(*bytes.first_chunk().unwrap()) >> 16;
            assert_eq!(*bytes, sector(id, number), "sector {number} is torn");
            id
        })
        .collect()
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// What each sector may be after a power cut: as at the last flush, or as a later write left it.
struct Model {
    now: Vec<u64>,
    may: Vec<BTreeSet<u64>>,
}

impl Model {
    fn of(now: Vec<u64>) -> Self {
        let may = now.iter().map(|&id| BTreeSet::from([id])).collect();
        Self { now, may }
    }

    fn write(&mut self, id: u64, start: u64, sectors: u64, succeeded: bool) {
        for number in start..start + sectors {
            let number = usize::try_from(number).unwrap();
            self.may[number].insert(id);
            if succeeded {
                self.now[number] = id;
            }
        }
    }

    fn check(&self, found: &[u64], context: &str) {
        for (number, id) in found.iter().enumerate() {
            assert!(self.may[number].contains(id), "{context}: sector {number} is {id}, not of {:?}", self.may[number]);
        }
    }
}

/// Runs a script chosen by `seed` until something fails.
fn run(upper: &Upper, model: &mut Model, seed: u64, first_id: u64, steps: u64) -> Result<(), UpperError> {
    let mut random = Random(seed);
    for step in 0..steps {
        let (start, id) = (random.below(SECTORS), first_id + step);
        let len = 1 + random.below(SECTORS - start).min(random.below(20));
        match random.below(10) {
            0..5 => {
                let result = upper.write(start, &contents(id, start, len));
                model.write(id, start, len, result.is_ok());
                result?;
            }
            5 => {
                let result = upper.write(start, &contents(id, start, len)).and_then(|slots| upper.flush_to(slots));
                model.write(id, start, len, true);
                result?;
                *model = Model::of(model.now.clone());
            }
            6 => {
                let result = upper.zero(start, len);
                model.write(0, start, len, result.is_ok());
                result?;
            }
            7 if step.is_multiple_of(2) => drop(upper.reclaim()?),
            7 => {
                // What was published is durable with it.
                if upper.renew_now()? {
                    *model = Model::of(model.now.clone());
                }
            }
            _ => {
                upper.flush()?;
                *model = Model::of(model.now.clone());
            }
        }
    }
    Ok(())
}

/// How many scripts: more by `DSEC_CRASH_SEEDS`.
fn seeds() -> u64 {
    std::env::var("DSEC_CRASH_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(60)
}

#[test]
fn power_cuts_at_every_operation_lose_nothing_that_was_flushed() {
    let mut crashes = 0;
    for seed in 0..seeds() {
        let (disk, upper) = new();
        let begin = disk.operations();
        let mut model = Model::of(vec![0; 48]);
        run(&upper, &mut model, seed, 1, 30).unwrap();
        assert_eq!(ids(&upper), model.now, "without a crash, seed {seed}");
        for cut in begin..disk.operations() {
            let (disk, upper) = new();
            disk.cut_at(cut);
            let mut model = Model::of(vec![0; 48]);
            run(&upper, &mut model, seed, 1, 30).unwrap_err();
            drop(upper);
            for state in [0, 1, 2 + seed, 1000 + cut] {
                let context = format!("seed {seed}, cut {cut}, state {state}");
                let after = disk.after_cut(state);
                let upper = open(&after).unwrap_or_else(|error| panic!("{context}: {error}"));
                let found = ids(&upper);
                model.check(&found, &context);
                // What was seen after the restart stays: another script, another power cut, while opening too.
                let mut again = Model::of(found);
                drop(upper);
                after.cut_at(after.operations() + (cut * 7 + state) % 40);
                let Ok(upper) = open(&after) else {
                    let upper = open(&after.after_cut(state + 5)).unwrap();
                    again.check(&ids(&upper), &context);
                    continue;
                };
                let _ = run(&upper, &mut again, seed + 7, 1000, 12);
                let upper = open(&after.after_cut(state + 5)).unwrap();
                again.check(&ids(&upper), &format!("{context}, the second time"));
                crashes += 1;
            }
        }
    }
    assert!(crashes > 1000, "only {crashes} crashes");
}

/// Writers, each with sectors of its own, while somebody frees and renews: a power cut leaves each sector as it was at its
/// writer's last flush, or later.
#[test]
fn power_cuts_under_writers_at_once_lose_nothing_that_was_flushed() {
    const THREADS: u64 = 4;
    let mine = SECTORS / THREADS;
    let mut kept = 0;
    for seed in 0..seeds() {
        let (disk, upper) = new();
        disk.cut_at(disk.operations() + 10 + seed * 3 % 400);
        // What each sector was at a flush that returned, and what it was last meant to be.
        let sectors: Vec<_> = (0..SECTORS).map(|_| (AtomicU64::new(0), AtomicU64::new(0))).collect();
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (upper, sectors) = (&upper, &sectors);
                scope.spawn(move || {
                    let mut random = Random(seed * THREADS + thread);
                    for id in 1.. {
                        let start = thread * mine + random.below(mine);
                        let len = 1 + random.below((thread + 1) * mine - start);
                        for sector in start..start + len {
                            sectors[usize::try_from(sector).unwrap()].1.store(id, Ordering::Relaxed);
                        }
                        let Ok(slots) = upper.write(start, &contents(id, start, len)) else { return };
                        if random.below(3) == 0 {
                            let Ok(()) = upper.flush_to(slots) else { return };
                            // All that this thread wrote so far.
                            for (flushed, last) in &sectors[usize::try_from(thread * mine).unwrap()..][..12] {
                                flushed.store(last.load(Ordering::Relaxed), Ordering::Relaxed);
                            }
                        }
                    }
                });
            }
            let upper = &upper;
            scope.spawn(move || while upper.reclaim().is_ok() && upper.renew_now().is_ok() {});
        });
        for state in [0, 1, seed + 2] {
            let found = ids(&open(&disk.after_cut(state)).unwrap());
            for ((id, (flushed, last)), sector) in found.iter().zip(&sectors).zip(0..) {
                let (flushed, last) = (flushed.load(Ordering::Relaxed), last.load(Ordering::Relaxed));
                let context = format!("seed {seed}, state {state}, sector {sector}");
                assert!((flushed..=last).contains(id), "{context}: {id} is not of {flushed}..={last}");
                kept += u64::from(flushed > 0);
            }
        }
    }
    assert!(kept > 1000, "only {kept} sectors had been flushed");
}

#[test]
fn a_hybrid_layer_is_appended_to_and_stays_one() {
    let disk = Disk::new();
    files(&disk).format(SECTORS * SECTOR, Uuid::from_u128(99)).unwrap();
    for (name, flags) in [("data", 0x23), ("index", 0x21)] {
        disk.open(name).write_all_at(&[flags], 28).unwrap();
    }
    let upper = open(&disk).unwrap();
    upper.write(1, &sector(1, 1)).unwrap();
    upper.flush().unwrap();
    // A peer writes over it in its place: no checksum of ours says anything about that.
    disk.open("data").write_all_at(&sector(2, 1), 4096).unwrap();
    drop(upper);
    let upper = open(&disk).unwrap();
    assert_eq!(ids(&upper)[1], 2);
    upper.write(1, &sector(3, 1)).unwrap();
    upper.renew_now().unwrap();
    assert_eq!(disk.contents("data").unwrap()[4096..][..512], sector(2, 1), "it is not overwritten");
    drop(upper);
    assert_eq!(ids(&open(&disk).unwrap())[1], 3);
    assert_eq!([disk.contents("data").unwrap()[28], disk.contents("index").unwrap()[28]], [0x23, 0x21]);
}

#[test]
fn an_index_written_anew_is_short_and_says_the_same() {
    let (disk, upper) = new();
    for id in 1..100 {
        upper.write(id % 10, &sector(id, id % 10)).unwrap();
        if id.is_multiple_of(30) {
            upper.flush().unwrap();
        }
    }
    upper.zero(3, 2).unwrap();
    let before = ids(&upper);
    assert!(!upper.renew().unwrap(), "it is not long enough to be worth it");
    assert_eq!(upper.stat().slots, 100);
    assert!(upper.renew_now().unwrap());
    assert!(upper.stat().slots <= 12, "{:?}", upper.stat());
    assert_eq!(upper.stat().pending, 0);
    assert_eq!(ids(&upper), before);
    // It goes on from there, and is durable, and whole for a peer.
    let reopened = open(&disk.after_cut(0)).unwrap();
    assert_eq!(ids(&reopened), before);
    assert_eq!(reopened.recovered(), &Recovered { slots: upper.stat().slots, ..Recovered::default() });
    upper.write(20, &sector(500, 20)).unwrap();
    upper.flush().unwrap();
    assert!(upper.reclaim().unwrap() > 0);
    let index = disk.contents("index").unwrap();
    assert_eq!(index.len() as u64, 4096 + 16 * upper.stat().slots);
    assert_eq!(ids(&open(&disk.after_cut(0)).unwrap())[20], 500);
    // Somebody is about to remove it.
    upper.retire();
    assert!(!upper.renew_now().unwrap());
    // A disk that has no room for it keeps the old one.
    let (disk, upper) = new();
    for id in 1..40 {
        upper.write(id % 4, &sector(id, id % 4)).unwrap();
        upper.flush().unwrap();
    }
    let used: usize = disk.names().iter().map(|name| disk.contents(name).unwrap().len()).sum();
    disk.limit(Some(used as u64 + 1000));
    assert!(upper.renew_now().unwrap_err().is_no_space());
    disk.limit(None);
    upper.write(9, &sector(77, 9)).unwrap();
    upper.flush().unwrap();
    assert_eq!(ids(&open(&disk.after_cut(0)).unwrap()), ids(&upper));
}

#[test]
fn the_files_are_a_peers_pair() {
    let (disk, upper) = new();
    upper.write(3, &contents(1, 3, 2)).unwrap();
    upper.zero(4, 6).unwrap();
    upper.flush().unwrap();
    let data = disk.contents("data").unwrap();
    assert_eq!(Header::parse(&data).unwrap().flags.bits(), 3);
    assert_eq!(data[4096..], contents(1, 3, 2));
    let index = disk.contents("index").unwrap();
    let header = Header::parse(&index).unwrap();
    assert_eq!((header.flags.bits(), header.index_offset), (1, 4096));
    let entries: Vec<_> =
        index[4096..].as_chunks().0.iter().map(|entry| Entry::parse(entry).unwrap().unwrap()).collect();
    assert_eq!(
        entries,
        [
            Entry { offset: 3, length: 2, moffset: 8, zeroed: false, tag: 0 },
            Entry { offset: 4, length: 6, moffset: 8, zeroed: true, tag: 0 },
        ]
    );
}

#[test]
fn a_pair_without_a_sidecar_is_taken_up_to_the_first_nonsense() {
    let (disk, upper) = new();
    for id in 1..5 {
        upper.write(id, &sector(id, id)).unwrap();
    }
    upper.flush().unwrap();
    let index = disk.open("index");
    let mut bytes = disk.contents("index").unwrap();
    // Padding in the middle, then one past the end of the data, then a good one, then half of one.
    bytes.splice(4096 + 16..4096 + 16, PADDING);
    let beyond = Entry { offset: 9, length: 1, moffset: 50, zeroed: false, tag: 0 }.encode().unwrap();
    bytes.splice(4096 + 64..4096 + 64, beyond);
    bytes.extend([1; 7]);
    drop(upper);
    disk.open("sidecar").set_len(0).unwrap();
    index.write_all_at(&bytes, 0).unwrap();
    let upper = open(&disk).unwrap();
    assert_eq!(ids(&upper)[..10], [0, 1, 2, 3, 0, 0, 0, 0, 0, 0]);
    let recovered = upper.recovered().clone();
    assert_eq!((recovered.slots, recovered.adopted), (4, 4));
    let dropped = recovered.dropped.unwrap();
    assert_eq!((dropped.offset, dropped.bytes), (4096 + 64, 16 + 16 + 7));
    assert_eq!(disk.contents("index").unwrap().len(), 4096 + 64);
    // From here on as any other.
    upper.write(20, &sector(9, 20)).unwrap();
    upper.flush().unwrap();
    drop(upper);
    let upper = open(&disk.after_cut(0)).unwrap();
    assert_eq!(ids(&upper)[20], 9);
    assert_eq!(upper.recovered(), &Recovered { slots: 5, ..Recovered::default() });
}

#[test]
fn a_disk_that_lied_about_a_sync_is_found_out() {
    let (disk, upper) = new();
    for id in 1..5 {
        upper.write(id, &sector(id, id)).unwrap();
        upper.flush().unwrap();
    }
    drop(upper);
    disk.open("data").write_all_at(&[7], 4096 + 2 * 512 + 100).unwrap();
    let upper = open(&disk).unwrap();
    assert_eq!(ids(&upper)[..6], [0, 1, 2, 0, 0, 0]);
    assert!(upper.recovered().dropped.as_ref().unwrap().why.contains("checksum"));
}

#[test]
fn garbage_is_freed_when_it_is_durably_so_and_a_quota_holds() {
    let disk = Disk::new();
    files(&disk).format(SECTORS * SECTOR, Uuid::from_u128(99)).unwrap();
    let limits = Limits { quota: Some(4096 + 64 * SECTOR), reserve: 0 };
    let upper = Upper::open(files(&disk), limits).unwrap();
    upper.write(0, &contents(1, 0, 48)).unwrap();
    upper.flush().unwrap();
    upper.write(0, &contents(2, 0, 16)).unwrap();
    assert_eq!(upper.reclaim().unwrap(), 0, "nothing that a power cut could bring back");
    upper.flush().unwrap();
    assert_eq!(upper.reclaim().unwrap(), 16 * SECTOR);
    assert_eq!(upper.stat().allocated, 4096 + 48 * SECTOR);
    // Space runs out and is made by what was overwritten, for as long as there is any.
    for id in 3..20 {
        upper.write(8, &contents(id, 8, 16)).unwrap();
    }
    upper.zero(0, 8).unwrap();
    upper.write(0, &contents(30, 0, 16)).unwrap();
    assert!(upper.write(0, &contents(31, 0, 40)).unwrap_err().is_no_space());
    let mut expected = vec![1; 48];
    expected[..16].fill(30);
    expected[16..24].fill(19);
    assert_eq!(ids(&upper), expected);
    drop(upper);
    let upper = Upper::open(files(&disk), limits).unwrap();
    upper.reclaim().unwrap();
    assert!(upper.stat().allocated <= limits.quota.unwrap());
}

/// A medium whose syncs fail when told so.
#[derive(Debug)]
struct Unsyncable(fs3_client::testing::power_cut::DiskFile, Arc<std::sync::atomic::AtomicBool>);

impl Medium for Unsyncable {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(buffer, offset)
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn punch(&self, range: Range<u64>) -> io::Result<()> {
        self.0.punch(range)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn size(&self) -> io::Result<u64> {
        self.0.size()
    }

    fn sync(&self) -> io::Result<()> {
        if self.1.load(std::sync::atomic::Ordering::Relaxed) {
            return Err(io::Error::other("no"));
        }
        self.0.sync()
    }
}

#[test]
fn a_failed_sync_is_never_forgotten_and_reads_go_on() {
    let (disk, upper) = new();
    drop(upper);
    let fails = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let data = Arc::new(Unsyncable(disk.open("data"), Arc::clone(&fails)));
    let upper = Upper::open(Files { data, ..files(&disk) }, Limits::default()).unwrap();
    upper.write(1, &sector(1, 1)).unwrap();
    fails.store(true, std::sync::atomic::Ordering::Relaxed);
    assert!(matches!(upper.flush(), Err(UpperError::Io { .. })));
    fails.store(false, std::sync::atomic::Ordering::Relaxed);
    assert!(matches!(upper.flush(), Err(UpperError::Failed(_))));
    assert!(matches!(upper.write(2, &sector(2, 2)), Err(UpperError::Failed(_))));
    assert_eq!(ids(&upper)[1], 1);
}

#[test]
fn a_full_disk_at_the_index_is_an_error_that_passes() {
    let (disk, upper) = new();
    upper.write(1, &sector(1, 1)).unwrap();
    disk.limit(Some(4096 * 2 + 512 + 512));
    assert!(upper.flush().unwrap_err().is_no_space());
    upper.zero(5, 2).unwrap();
    disk.limit(None);
    upper.flush().unwrap();
    drop(upper);
    assert_eq!(ids(&open(&disk.after_cut(0)).unwrap())[1], 1);
}

#[test]
fn many_flushes_share_one() {
    let (disk, upper) = new();
    let before = disk.operations();
    std::thread::scope(|scope| {
        for thread in 0..16 {
            let upper = &upper;
            scope.spawn(move || {
                for id in 1..20 {
                    let slots = upper.write(thread * 3, &contents(id, thread * 3, 3)).unwrap();
                    upper.flush_to(slots).unwrap();
                }
            });
        }
    });
    let operations = disk.operations() - before;
    assert!(operations <= 16 * 19 * 6);
    drop(upper);
    assert_eq!(ids(&open(&disk.after_cut(0)).unwrap()), vec![19; 48]);
}

#[test]
fn real_files_are_locked_and_a_long_index_is_written_anew() {
    let dir = tempfile::tempdir().unwrap();
    let (data, index) = (dir.path().join("data"), dir.path().join("index"));
    let limits = Limits { reserve: 1 << 20, ..Limits::default() };
    let upper = Upper::create(&data, &index, SECTORS * SECTOR, limits).unwrap();
    assert!(matches!(Upper::open_pair(&data, &index, limits), Err(UpperError::Busy(_))));
    for id in 1..70_000 {
        upper.write(id % 40, &sector(id, id % 40)).unwrap();
    }
    upper.zero(41, 3).unwrap();
    upper.flush().unwrap();
    upper.reclaim().unwrap();
    let stat = upper.stat();
    assert_eq!(stat.slots, 70_000);
    assert!(stat.allocated < 1 << 20, "{stat:?}");
    let before = ids(&upper);
    drop(upper);
    let upper = Upper::open_pair(&data, &index, limits).unwrap();
    assert_eq!(ids(&upper), before);
    assert!(upper.stat().slots < 60);
    assert_eq!(index.metadata().unwrap().len(), 4096 + 16 * upper.stat().slots);
    upper.write(0, &sector(80_000, 0)).unwrap();
    upper.flush().unwrap();
    drop(upper);
    // As others read it.
    let layer = crate::layer::Layer::open_pair(&data, Some(&index)).unwrap();
    let image = crate::image::Image::new(vec![Arc::new(layer)]).unwrap();
    let mut all = vec![0; usize::try_from(SECTORS * SECTOR).unwrap()];
    crate::backend::Source::read_exact_at(&image, &mut all, 0).unwrap();
    assert_eq!(all[..512], sector(80_000, 0));
    assert_eq!(all[512..1024], sector(before[1], 1));
}

/// A process that dies loses nothing that was answered: writes, zeros and flushes at random, and again and again the layer
/// is let go as a kill would, and opened again.
#[test]
#[allow(clippy::cast_possible_truncation)] // Of sectors of a small disk, and of bytes that look random.
fn a_process_that_dies_loses_nothing() {
    for seed in 0..30u64 {
        let dir = tempfile::tempdir().unwrap();
        let (data, index) = (dir.path().join("data"), dir.path().join("index"));
        let mut model = vec![0u8; SECTORS as usize * 512];
        let mut upper = Upper::create(&data, &index, SECTORS * SECTOR, Limits::default()).unwrap();
        let mut state = seed;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for step in 0..120u64 {
            let at = random(SECTORS - 8);
            let range = at as usize * 512..(at + 1 + random(8)) as usize * 512;
            match random(12) {
                0..6 => {
                    let bytes: Vec<u8> = range.clone().map(|n| (n as u64 ^ step ^ seed) as u8 | 1).collect();
                    upper.write(at, &bytes).unwrap();
                    model[range].copy_from_slice(&bytes);
                }
                6 => {
                    upper.zero(at, range.len() as u64 / 512).unwrap();
                    model[range].fill(0);
                }
                7 => upper.flush().unwrap(),
                8 => drop(upper.reclaim().unwrap()),
                9 => drop(upper.renew_now().unwrap()),
                _ => {
                    // Nothing is flushed when it goes.
                    drop(upper);
                    upper = Upper::open_pair(&data, &index, Limits::default()).unwrap();
                    if random(2) == 0 {
                        upper.reclaim().unwrap();
                    }
                }
            }
            if step % 10 == 9 {
                assert_eq!(read(&upper, 0..SECTORS), model, "seed {seed}, step {step}");
            }
        }
        drop(upper);
        let upper = Upper::open_pair(&data, &index, Limits::default()).unwrap();
        assert_eq!(read(&upper, 0..SECTORS), model, "seed {seed}");
        // In another boot, what was not flushed is as good as gone, and the layer opens.
        upper.write(0, &[9; 512]).unwrap();
        drop(upper);
        let mut bytes = std::fs::read(journal_path(&data)).unwrap();
        bytes[16] ^= 1;
        std::fs::write(journal_path(&data), bytes).unwrap();
        let upper = Upper::open_pair(&data, &index, Limits::default()).unwrap();
        assert_eq!(upper.recovered().unflushed, 0);
        assert_eq!(read(&upper, 0..SECTORS), model, "seed {seed}, after a boot");
    }
}

#[test]
fn what_the_journal_has_no_room_for_is_flushed() {
    let (disk, small) = (Disk::new(), Disk::new());
    small.limit(Some(4096));
    files(&disk).format(SECTORS * SECTOR, Uuid::from_u128(3)).unwrap();
    let open = || {
        let journal: Arc<dyn Medium> = Arc::new(small.open("journal"));
        Upper::open(Files { journal: Some(journal), ..files(&disk) }, Limits::default()).unwrap()
    };
    let upper = open();
    upper.write(3, &[7; 512]).unwrap();
    assert_eq!(upper.stat().pending, 0, "it is durable instead");
    upper.zero(5, 2).unwrap();
    drop(upper);
    let upper = open();
    assert_eq!(upper.recovered().unflushed, 0);
    assert_eq!(read(&upper, 3..4), [7; 512]);
}
