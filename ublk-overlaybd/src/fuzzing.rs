//! Bodies of the fuzz targets in `fuzz/`: each takes any bytes, must neither panic nor allocate without bound, and panics
//! if an invariant that it states does not hold. They are here so that property tests run the same code on stable Rust.

use crate::backend::{Gzip, Source};
use crate::engine::Device;
use crate::format::lsmt::SECTOR;
use crate::format::trace::Trace;
use crate::image::Image;
use crate::image::spec::ImageSpec;
use crate::index::Kind;
use crate::layer::Layer;
use crate::upper::{Limits, Upper, sidecar_path};
use std::path::Path;
use std::sync::Arc;

/// Pieces of a disk that are read.
const PIECES: usize = 64;
/// Bytes that are read of a piece.
const MOST: u64 = 64 << 10;

/// Any bytes as a finished layer: if it opens, its index is in order and all that it maps lies in its data, and reading
/// gives bytes or an error.
pub fn layer(data: &[u8]) {
    if let Ok(layer) = Layer::open(Arc::new(data.to_vec()), "fuzzed") {
        look_at(layer);
    }
}

/// Any bytes as the files of a writable layer, which the first four bytes cut in two.
///
/// # Panics
/// Where files cannot be written, too.
pub fn pair(data: &[u8]) {
    let Some((cut, rest)) = data.split_first_chunk::<4>() else { return };
    let cut = usize::try_from(u32::from_le_bytes(*cut)).unwrap_or(usize::MAX).min(rest.len());
    let file = |bytes: &[u8]| {
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
        std::io::Write::write_all(&mut file, bytes).expect("a written file");
        file
    };
    let (data, index) = (file(&rest[..cut]), file(&rest[cut..]));
    for index in [Some(index.path()), None] {
        if let Ok(layer) = Layer::open_pair(data.path(), index) {
            look_at(layer);
        }
    }
}

fn look_at(layer: Layer) {
    let (mut last, end) = (0, layer.data().size().div_ceil(SECTOR));
    for extent in layer.index().iter() {
        assert!(extent.start >= last && extent.len > 0, "the index is not in order");
        last = extent.end();
        if let Kind::Data { layer, moffset } = extent.kind {
            assert!(layer == 0 && moffset + extent.len <= end, "a mapping leaves the data");
        }
    }
    let Ok(image) = Image::new(vec![Arc::new(layer)]) else { return };
    let mut buf = Vec::new();
    for piece in image.stack().lookup(0..image.sectors()).take(PIECES) {
        let start = piece.start * SECTOR;
        let len = (piece.len * SECTOR).min(MOST).min(image.size() - start);
        buf.resize(usize::try_from(len).unwrap_or(0), 0xFF);
        let result = image.read_exact_at(&mut buf, start);
        let zero = !matches!(piece.kind, Some(Kind::Data { .. }));
        assert!(!zero || (result.is_ok() && buf.iter().all(|&b| b == 0)), "what is not mapped is not zero");
    }
}

/// A writable layer whose data, index and log go on with any bytes behind their headers, which the first four bytes cut in
/// three: it opens, reads, takes a write, and opened again it says the same and has nothing left to repair.
///
/// # Panics
/// Where files cannot be written, too.
pub fn upper(data: &[u8]) {
    const SIZE: u64 = 1 << 20;
    let Some((cuts, rest)) = data.split_first_chunk::<4>() else { return };
    let first = usize::from(u16::from_le_bytes([cuts[0], cuts[1]])).min(rest.len());
    let (data, rest) = rest.split_at(first);
    let (index, log) = rest.split_at(usize::from(u16::from_le_bytes([cuts[2], cuts[3]])).min(rest.len()));
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (data_path, index_path) = (dir.path().join("data"), dir.path().join("index"));
    let open = || Upper::open_pair(&data_path, &index_path, Limits::default()).expect("it opens whatever is behind");
    drop(Upper::create(&data_path, &index_path, SIZE, Limits::default()).expect("a new layer"));
    for (path, bytes) in [(&data_path, data), (&index_path, index), (&sidecar_path(&data_path), log)] {
        let mut file = std::fs::File::options().append(true).open(path).expect("a file");
        std::io::Write::write_all(&mut file, bytes).expect("a written file");
    }
    let extents = |upper: &Upper| upper.to_index().expect("what was read can be written").iter().collect::<Vec<_>>();
    let upper = open();
    upper.write(3, &[0x77; 512]).expect("a write");
    upper.flush().expect("a flush");
    upper.reclaim().expect("what is garbage is freed");
    let before = extents(&upper);
    drop(upper);
    let upper = open();
    assert_eq!(upper.recovered().dropped, None, "something was left to repair");
    assert_eq!(extents(&upper), before, "it says something else");
    let device = Device::new(&[], Some(upper)).expect("a disk");
    let mut sector = [0; 512];
    device.read(&mut sector, 3 * SECTOR).expect("a read");
    assert_eq!(sector, [0x77; 512]);
    let mut all = vec![0; 1 << 20];
    device.read(&mut all, 0).expect("all that is mapped can be read");
}

/// Any bytes as a gzip file and its index, which the first four bytes cut in two.
pub fn gzip(data: &[u8]) {
    let Some((cut, rest)) = data.split_first_chunk::<4>() else { return };
    let cut = usize::try_from(u32::from_le_bytes(*cut)).unwrap_or(usize::MAX).min(rest.len());
    let (stored, index) = rest.split_at(cut);
    let Ok(file) = Gzip::open(Arc::new(stored.to_vec()), Arc::new(index.to_vec()), "fuzzed") else { return };
    let size = file.size();
    let mut buf = vec![0; 4096];
    for part in 0..8 {
        let start = size / 8 * part;
        let len = usize::try_from(size - start).unwrap_or(4096).min(4096);
        let _ = file.read_exact_at(&mut buf[..len], start);
    }
}

/// Any bytes as a trace: what parses is written and parsed to the same.
pub fn trace(data: &[u8]) {
    if let Ok(trace) = Trace::parse(data) {
        let again = Trace::parse(&trace.encode());
        // A list without a file in it is written as nothing.
        assert!(again.as_ref() == Ok(&trace) || trace == Trace::Files(Vec::new()), "it changed: {again:?}");
    }
}

/// Any bytes as a configuration.
pub fn spec(data: &[u8]) {
    let _ = ImageSpec::parse(data, "fuzzed", Path::new("/"));
}
