//! The dictionary's values and its life, without a converter.

use super::*;
use crate::chunk_table;
use proptest::prelude::*;

struct Case {
    dir: tempfile::TempDir,
    store: Store,
}

impl Case {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(&dir.path().join("store")).unwrap();
        Self { dir, store }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("dict")
    }

    fn open(&self) -> Db {
        Db::open(&self.path()).unwrap()
    }

    /// A published blob of chunks of one block, each filled with one of these bytes.
    fn blob(&self, chunks: &[u8]) -> Existing {
        let bytes: Vec<u8> = chunks.iter().flat_map(|n| [*n; 4096]).collect();
        let records: Vec<Record> =
            (0..).zip(chunks).map(|(start, n)| Record { digest: digest(*n), start, blocks: 1, input: None }).collect();
        let blob = self.store.publish_bytes(&bytes).unwrap();
        let blocks = u32::try_from(chunks.len()).unwrap();
        let table = self.store.publish_bytes(&chunk_table::to_bytes(&blob.digest, blocks, &records).unwrap()).unwrap();
        let reference = |published: fs3_client::Published| BlobRef { digest: published.digest, size: published.size };
        Existing { blob: reference(blob), table: Some(reference(table)) }
    }
}

fn digest(n: u8) -> [u8; 32] {
    *blake3::hash(&[n; 4096]).as_bytes()
}

fn find(view: &dyn Snapshot, n: u8) -> Option<(Existing, u32)> {
    let place = view.find(&digest(n), &mut |_| Ok(true)).unwrap()?;
    Some((view.blob(place.blob).unwrap()?, place.start))
}

#[test]
fn what_was_added_is_found_after_opening_again() {
    let case = Case::new();
    let (one, two) = (case.blob(&[1, 2]), case.blob(&[2, 3]));
    let db = case.open();
    for blob in [&one, &two, &one] {
        db.add(blob, &case.store).unwrap();
    }
    drop(db);
    let db = case.open();
    let view = db.snapshot();
    assert_eq!(find(&*view, 1), Some((one, 0)));
    assert_eq!(find(&*view, 2), Some((one, 1)), "the first blob keeps a chunk");
    assert_eq!(find(&*view, 3), Some((two, 1)));
    assert_eq!(find(&*view, 4), None);
    assert_eq!(view.find(&digest(1), &mut |_| Ok(false)).unwrap(), None);
    let stat = db.stat().unwrap();
    assert_eq!((stat.blobs, stat.incomplete, stat.chunks), (2, 0, 3));
    assert!(stat.bytes > 0);
}

#[test]
fn a_snapshot_does_not_see_what_comes_later() {
    let case = Case::new();
    let (one, two) = (case.blob(&[1, 2]), case.blob(&[2, 3]));
    let db = case.open();
    db.add(&one, &case.store).unwrap();
    let before = db.snapshot();
    db.add(&two, &case.store).unwrap();
    assert_eq!((find(&*before, 3), find(&*db.snapshot(), 3)), (None, Some((two, 1))));
    // Nor does it come to see another place of what it knew, but none.
    std::fs::remove_file(case.store.local_dir().unwrap().blob_path(&one.blob.digest)).unwrap();
    let three = case.blob(&[9, 1]);
    db.add(&three, &case.store).unwrap();
    assert_eq!((find(&*before, 1), find(&*db.snapshot(), 1)), (None, Some((three, 1))));
}

#[test]
fn one_writer_at_a_time() {
    let case = Case::new();
    let db = case.open();
    let busy = Db::open(&case.path()).unwrap_err();
    assert!(matches!(busy, DictionaryError::Busy { .. }), "{busy}");
    assert!(matches!(rebuild(&case.path(), &case.store), Err(DictionaryError::Busy { .. })));
    drop(db);
    case.open();
}

#[test]
fn a_blob_that_was_half_added_is_added_again() {
    let case = Case::new();
    let one = case.blob(&[1, 2]);
    let db = case.open();
    // As a crash leaves it: the blob has its number, and some of its chunks are there.
    let mut batch = WriteBatch::default();
    batch.put(b"next", 1u32.to_le_bytes());
    batch.put(blob_key(0), encode_blob(one.blob, one.table.unwrap(), false));
    batch.put(digest_key(&one.blob.digest), 0u32.to_le_bytes());
    let place = Place { blob: 0, start: 0, blocks: 1, digest: digest(1) };
    batch.put_cf(db.inner.chunks(), digest(1), encode_place(&digest(1), &place));
    db.inner.write(batch, true).unwrap();
    drop(db);
    let db = case.open();
    assert_eq!(db.stat().unwrap().incomplete, 1);
    assert_eq!(find(&*db.snapshot(), 2), None);
    db.add(&one, &case.store).unwrap();
    assert_eq!(find(&*db.snapshot(), 2), Some((one, 1)));
    assert_eq!((db.stat().unwrap().incomplete, db.stat().unwrap().blobs), (0, 1));
}

#[test]
fn another_format_and_other_files_are_refused() {
    let case = Case::new();
    case.open().inner.db.put(b"format", 7u32.to_le_bytes()).unwrap();
    let error = Db::open(&case.path()).unwrap_err().to_string();
    assert!(error.contains("format 7"), "{error}");
    let file = case.dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    assert!(matches!(Db::open(&file), Err(DictionaryError::Database { .. })));
}

#[test]
fn damaged_tables_are_not_added() {
    let case = Case::new();
    let (one, two) = (case.blob(&[1, 2]), case.blob(&[2, 3]));
    let db = case.open();
    let mixed = Existing { blob: one.blob, table: two.table };
    let error = db.add(&mixed, &case.store).unwrap_err();
    assert!(matches!(error, DictionaryError::Table { .. }), "{error}");
    let path = case.store.local_dir().unwrap().blob_path(&two.table.unwrap().digest);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[70] ^= 1;
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, bytes).unwrap();
    let error = db.add(&two, &case.store).unwrap_err();
    assert!(error.to_string().contains("its contents have"), "{error}");
    assert_eq!(find(&*db.snapshot(), 3), None);
}

/// Values that no program of ours wrote are no places.
#[test]
fn wrong_values_are_no_hits() {
    let case = Case::new();
    let one = case.blob(&[1]);
    let db = case.open();
    db.add(&one, &case.store).unwrap();
    for value in [&b""[..], &[0], &[0, 0], &[0, 0, 0], &[0xff; 20], &[9, 0, 1], &[0, 0, 1, 0], &[0x80, 0, 0, 1]] {
        db.inner.db.put_cf(db.inner.chunks(), digest(1), value).unwrap();
        assert_eq!(find(&*db.snapshot(), 1), None, "{value:?}");
    }
    for value in [&b""[..], &[7; 80], &[7; 81], &[0; 82]] {
        db.inner
            .db
            .put_cf(
                db.inner.chunks(),
                digest(1),
                encode_place(&digest(1), &Place { blob: 0, start: 0, blocks: 1, digest: digest(1) }),
            )
            .unwrap();
        db.inner.db.put(blob_key(0), value).unwrap();
        assert_eq!(find(&*db.snapshot(), 1), None, "{value:?}");
    }
    db.add(&one, &case.store).unwrap();
    assert_eq!(find(&*db.snapshot(), 1), Some((one, 0)), "it is put right when the blob is met again");
}

proptest! {
    #[test]
    fn places_come_back(blob: u32, start: u32, blocks in 1..u32::MAX, compressed: bool) {
        let key = [9; 32];
        let place = Place { blob, start, blocks, digest: if compressed { [8; 32] } else { key } };
        prop_assert_eq!(decode_place(&key, &encode_place(&key, &place)), Some(place));
    }

    #[test]
    fn any_value_is_read_or_refused(value in proptest::collection::vec(any::<u8>(), 0..90)) {
        let key = [9; 32];
        if let Some(place) = decode_place(&key, &value) {
            prop_assert_eq!(encode_place(&key, &place), value.clone());
        }
        if let Some((existing, complete)) = decode_blob(&value) {
            prop_assert_eq!(encode_blob(existing.blob, existing.table.unwrap(), complete).to_vec(), value);
        }
    }
}
