//! Rings of a library that a C compiler made: that what is called is what C would call, and what comes of a library that
//! tells things that are not so.

use super::*;
use std::ffi::c_int;
use std::process::Command;

/// A library of its own for each test, since what it does is told to all of it.
struct Foreign {
    place: Place,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Foreign {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("libhf3fs-in-c.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/hf3fs-stand-in/c/library.c");
        let compiled = Command::new("cc")
            .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-o"])
            .args([&path, &source])
            .output()
            .expect("a C compiler (Debian package gcc)");
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        Self { place: Place::new(""), path, _dir: dir }
    }

    fn blobs(&self) -> UsrbioBlobs {
        let blobs = self.place.blobs(|options| {
            options.library = Some(self.path.clone());
            options.deadline = Duration::from_millis(400);
            options.most_left_behind = 1000;
        });
        assert!(matches!(blobs.path(), ReadPath::Usrbio { .. }), "{:?}", blobs.path());
        blobs
    }

    fn call(&self, name: &str, with: c_int) -> c_int {
        library::call_for_tests(self.path.as_os_str(), name, with)
    }
}

const RANGES: [Range<u64>; 5] = [0..3 << 20, 0..1, 4095..4097, (3 << 20) - 10..3 << 20, 100_000..1_900_000];

#[tokio::test(flavor = "multi_thread")]
async fn a_library_in_c_is_called_as_its_header_says() {
    let foreign = Foreign::new();
    let (digest, bytes) = foreign.place.blob(60, 3 << 20);
    let blobs = foreign.blobs();
    for range in RANGES {
        assert!(blobs.read_range(&digest, range.clone()).await.unwrap() == slice(&bytes, &range), "{range:?}");
    }
    let error = blobs.read_range(&digest, (3 << 20) - 5..(3 << 20) + 5).await.unwrap_err();
    assert!(error.is_corrupt(), "{error}");
    let counts = blobs.counts().unwrap();
    assert_eq!((counts.by_mount, counts.left_rings, counts.errors), (0, 0, 0), "{counts:?}");
    assert_eq!(foreign.call("hf3fs_test_registrations", 0), 2, "once, and once more for what ended early");
    drop(blobs);
    let began = Instant::now();
    // The file, and the rings: given back as they should be.
    while foreign.call("hf3fs_test_alive", 0) > 0 {
        assert!(began.elapsed() < Duration::from_secs(10), "{} stay", foreign.call("hf3fs_test_alive", 0));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(foreign.call("hf3fs_test_wrong_calls", 0), 0);
}

/// Results that are too long, counts that are too high, transfers that are told twice or were never begun, errors that
/// are none: bytes are right, or there is an error, and once the library tells the truth all is well.
#[tokio::test(flavor = "multi_thread")]
async fn a_library_that_lies_gives_no_wrong_byte() {
    let foreign = Foreign::new();
    let (digest, bytes) = foreign.place.blob(61, 3 << 20);
    let blobs = foreign.blobs();
    let mut failed = 0;
    for lie in 1..=6 {
        foreign.call("hf3fs_test_lie", lie);
        for range in RANGES {
            match blobs.read_range(&digest, range.clone()).await {
                Ok(read) => assert!(read == slice(&bytes, &range), "lie {lie}: {range:?} is other bytes"),
                Err(error) => {
                    assert!(error.is_transient(), "lie {lie}: {error}");
                    failed += 1;
                }
            }
        }
        foreign.call("hf3fs_test_lie", 0);
        let began = Instant::now();
        while !blobs.read_range(&digest, 0..3 << 20).await.is_ok_and(|read| read == bytes) {
            assert!(began.elapsed() < Duration::from_secs(10), "after lie {lie} nothing goes any more");
        }
    }
    assert!(failed >= 12, "{failed} reads failed");
    assert!(blobs.counts().unwrap().left_rings >= 3);
    assert_eq!(foreign.call("hf3fs_test_wrong_calls", 0), 0);
}
