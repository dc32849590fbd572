//! TurboOCI layers: structure in one file, contents in an OCI layer that stays as it is.

use crate::support::{image, read_all, run, run_ok};
use fixtures::overlaybd::{Write, indexed_gzip, turbo};
use std::io::Read as _;
use std::sync::Arc;
use ublk_overlaybd::backend::{Gzip, ReadError, Source};
use ublk_overlaybd::layer::Layer;

fn plain(len: usize) -> Vec<u8> {
    // With a period, so that blocks refer back into their windows.
    (0..len).map(|i| u8::try_from(i % 20_000 * 31 / 7 % 256).unwrap() ^ u8::try_from(i / 90_000).unwrap()).collect()
}

fn gzip(stored: Vec<u8>, index: Vec<u8>) -> Result<Gzip, ReadError> {
    Gzip::open(Arc::new(stored), Arc::new(index), "layer.tar.gz")
}

#[test]
fn a_gzip_file_is_read_from_any_place() {
    let plain = plain(300_001);
    for (block, compressed) in [(9_999, true), (40_000, false), (70_001, true), (1 << 20, false)] {
        let (stored, index) = indexed_gzip(&plain, block, compressed);
        let mut inflated = Vec::new();
        flate2::read::GzDecoder::new(&stored[..]).read_to_end(&mut inflated).unwrap();
        assert!(inflated == plain, "the fixture is a gzip file");
        let file = gzip(stored, index).unwrap();
        assert_eq!(file.size(), plain.len() as u64);
        let mut state = 7u64;
        for _ in 0..300 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let start = usize::try_from(state >> 33).unwrap() % plain.len();
            let end = (start + usize::try_from(state >> 20).unwrap() % 9000).min(plain.len());
            let mut buf = vec![0; end - start];
            if state.is_multiple_of(2) {
                file.read_exact_at(&mut buf, start as u64).unwrap();
            } else {
                assert!(file.try_read_at(&mut buf, start as u64).unwrap());
            }
            assert!(buf == plain[start..end], "{start}..{end} in blocks of {block}");
        }
        assert!(read_all(&file) == plain);
    }
}

#[test]
fn a_damaged_index_is_refused_and_nothing_panics() {
    let plain = plain(100_000);
    let (stored, index) = indexed_gzip(&plain, 9_999, true);
    let mut longer = stored.clone();
    longer.push(0);
    assert!(gzip(longer, index.clone()).unwrap_err().to_string().contains("gzip_file_size"));
    for at in 0..333 {
        let mut bad = index.clone();
        bad[at] ^= 1;
        assert!(gzip(stored.clone(), bad).unwrap_err().is_corrupt(), "byte {at}");
    }
    for at in (333..index.len()).step_by(7) {
        let mut bad = index.clone();
        bad[at] ^= 0x10;
        if let Ok(file) = gzip(stored.clone(), bad) {
            for start in (0..90_000).step_by(10_000) {
                let _ = file.read_exact_at(&mut [0; 100], start);
            }
        }
    }
    for cut in 0..index.len() / 50 {
        assert!(gzip(stored.clone(), index[..cut * 50].to_vec()).is_err());
    }
    let mut bad = stored;
    // A kind of block that there is not: nothing else is checked of bytes in the middle of a gzip file.
    bad[10] |= 0b110;
    let file = gzip(bad, index).unwrap();
    let error = file.read_exact_at(&mut [0; 9000], 0).unwrap_err();
    assert!(error.is_corrupt(), "{error}");
    // What does not hang on those bytes is still read.
    let mut buf = [0; 500];
    file.read_exact_at(&mut buf, 60_000).unwrap();
    assert_eq!(buf, plain[60_000..60_500]);
}

/// Own sectors, remote ones, and the last of those beyond the tar's end.
#[test]
fn layers_refer_to_their_tar() {
    // Ends within a sector.
    let tar = plain(100_100);
    let sectors = 100_100_u64.div_ceil(512);
    let own = [Write::Data { at: 0, bytes: vec![1; 1024] }, Write::Discard { at: 50, sectors: 2 }];
    let remote = [(2, 10, 3), (20, sectors - 100, 100)];
    let size = 200 * 512;
    let mut expected = vec![0; 200 * 512];
    expected[..1024].fill(1);
    for (at, len, from) in [(2usize, 10usize, 3usize), (20, 96, 100)] {
        let bytes = &tar[from * 512..tar.len().min((from + len) * 512)];
        expected[at * 512..at * 512 + bytes.len()].copy_from_slice(bytes);
    }
    let mut own = own.to_vec();
    own.pop();
    for lowest in [0, 3] {
        let meta = turbo(size, &own, &remote, lowest);
        let layer = Layer::open_turbo(Arc::new(meta), Arc::new(tar.clone()), "ext4.fs.meta").unwrap();
        assert!(read_all(&image([layer])) == expected);
    }

    // The whole way: compressed target, configuration, program.
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (stored, index) = indexed_gzip(&tar, 9_999, true);
    std::fs::write(path("ext4.fs.meta"), turbo(size, &own, &remote, 0)).unwrap();
    std::fs::write(path("layer.tar.gz"), stored).unwrap();
    std::fs::write(path("gzip.meta"), index).unwrap();
    std::fs::write(path("layer.tar"), &tar).unwrap();
    let config = |lower: &str| {
        std::fs::write(path("config.v1.json"), format!("{{\"lowers\": [{{\"file\": \"ext4.fs.meta\", {lower}}}]}}"))
            .unwrap();
    };
    for lower in [r#""targetFile": "layer.tar.gz", "gzipIndex": "gzip.meta""#, r#""targetFile": "layer.tar""#] {
        config(lower);
        run_ok(&["export", "--force", "--config", &path("config.v1.json"), &path("raw")]);
        assert!(std::fs::read(path("raw")).unwrap() == expected);
    }
    for (lower, key) in [
        (r#""targetFile": "layer.tar.gz""#, "lowers[0].gzipIndex"),
        (r#""targetFile": "layer.tar", "gzipIndex": "gzip.meta""#, "lowers[0].gzipIndex"),
    ] {
        config(lower);
        let output = run(&["export", "--force", "--config", &path("config.v1.json"), &path("raw")]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && said.contains(key), "{said}");
    }
}

#[test]
fn what_lies_far_beyond_the_tar_is_refused() {
    let tar = plain(100_100);
    let meta = turbo(4096, &[Write::Data { at: 0, bytes: vec![1; 512] }], &[(1, 2, 300)], 0);
    let error = Layer::open_turbo(Arc::new(meta), Arc::new(tar), "meta").unwrap_err().to_string();
    assert!(error.contains("moffset 300"), "{error}");
}
