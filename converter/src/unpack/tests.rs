use super::*;
use fs3_client::Digest;
use proptest::prelude::*;
use std::io::Write as _;

/// Hands out at most the given numbers of bytes, in turn.
struct Dribble<'a> {
    data: &'a [u8],
    sizes: &'a [usize],
    turn: usize,
}

impl Read for Dribble<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let size = self.sizes[self.turn % self.sizes.len()].max(1);
        self.turn += 1;
        if self.turn.is_multiple_of(3) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let n = size.min(buf.len()).min(self.data.len());
        buf[..n].copy_from_slice(&self.data[..n]);
        self.data = &self.data[n..];
        Ok(n)
    }
}

fn unpack_limited(data: &[u8], limits: Limits) -> Result<Vec<u8>, UnpackError> {
    let mut unpacker = Unpacker::new(HashingReader::new(data), limits)?;
    let mut buf = vec![0; 300_000];
    let mut plain = Vec::new();
    loop {
        let n = unpacker.read(&mut buf)?;
        plain.extend_from_slice(&buf[..n]);
        if n < buf.len() {
            break;
        }
    }
    assert_eq!(unpacker.read(&mut buf).unwrap(), 0);
    assert_eq!(unpacker.plain_bytes(), plain.len() as u64);
    unpacker.into_inner().verify(Some(&Digest::of(data)), Some(data.len() as u64)).expect("read to its end");
    Ok(plain)
}

fn unpack(data: &[u8]) -> Result<Vec<u8>, UnpackError> {
    unpack_limited(data, Limits::default())
}

fn gzip(plain: &[u8]) -> Vec<u8> {
    let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::new(6));
    out.write_all(plain).unwrap();
    out.finish().unwrap()
}

fn gzip_named(plain: &[u8], name: &str) -> Vec<u8> {
    let mut out = flate2::GzBuilder::new()
        .filename(name)
        .comment("a comment")
        .extra(vec![7; 300])
        .write(Vec::new(), flate2::Compression::new(1));
    out.write_all(plain).unwrap();
    out.finish().unwrap()
}

fn zstd_frame(plain: &[u8]) -> Vec<u8> {
    let mut out = ::zstd::Encoder::new(Vec::new(), 3).unwrap();
    out.include_checksum(true).unwrap();
    out.write_all(plain).unwrap();
    out.finish().unwrap()
}

fn skippable(kind: u8, len: u32) -> Vec<u8> {
    let mut out = vec![0x50 | kind, 0x2a, 0x4d, 0x18];
    out.extend_from_slice(&len.to_le_bytes());
    out.resize(8 + len as usize, 0x55);
    out
}

/// Bytes that compress somewhat: runs, repeats and noise.
fn sample(len: usize) -> Vec<u8> {
    let mut x = 0x9e37_79b9_u32;
    let mut out: Vec<u8> = Vec::with_capacity(len + 64);
    while out.len() < len {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let [a, b, c, d] = x.to_le_bytes();
        let back = usize::from(u16::from_le_bytes([b, c])) % 33_000 + 1;
        if d < 100 && back < out.len() {
            let from = out.len() - back;
            for i in 0..usize::from(a) % 60 + 3 {
                out.push(out[from + i]);
            }
        } else {
            out.extend_from_slice(&[a, b, c, d]);
        }
    }
    out.truncate(len);
    out
}

#[test]
fn every_format_gives_the_plain_bytes() {
    for len in [0, 1, 511, 70_000, 1_500_000] {
        let plain = sample(len);
        assert_eq!(unpack(&plain).unwrap(), plain);
        assert_eq!(unpack(&gzip(&plain)).unwrap(), plain);
        assert_eq!(unpack(&gzip_named(&plain, "layer.tar")).unwrap(), plain);
        assert_eq!(unpack(&zstd_frame(&plain)).unwrap(), plain);
    }
}

// Case T05.
#[test]
fn gzip_members_follow_each_other() {
    let plain = sample(400_000);
    let mut members = gzip(&plain[..131_072]);
    members.extend(gzip(b""));
    members.extend(gzip(b""));
    members.extend(gzip_named(&plain[131_072..131_073], "x"));
    members.extend(gzip(&plain[131_073..]));
    members.extend(gzip(b""));
    assert_eq!(unpack(&members).unwrap(), plain);
    // Zero padding is tolerated, whatever its length; other bytes behind it are not.
    for zeros in [1, 2, 511, 300_000] {
        let mut padded = members.clone();
        padded.resize(members.len() + zeros, 0);
        assert_eq!(unpack(&padded).unwrap(), plain);
        let at = padded.len() as u64;
        padded.push(1);
        assert!(matches!(unpack(&padded), Err(UnpackError::TrailingGarbage { at: found, .. }) if found == at));
    }
    for garbage in [&b"junk"[..], b"\x1f\x8c", b"x"] {
        let bad = [&members[..], garbage].concat();
        let at = members.len() as u64;
        assert!(matches!(unpack(&bad), Err(UnpackError::TrailingGarbage { at: found, .. }) if found == at));
    }
    for cut in [&b"\x1f"[..], b"\x1f\x8b", b"\x1f\x8b\x08\x00\x00\x00\x00"] {
        let bad = [&members[..], cut].concat();
        assert!(matches!(unpack(&bad), Err(UnpackError::Truncated { part: "header", .. })));
    }
}

#[test]
fn zstd_frames_follow_each_other() {
    let plain = sample(400_000);
    let stream = [
        skippable(0, 0),
        zstd_frame(&plain[..200_000]),
        skippable(0xf, 70_000),
        zstd_frame(b""),
        zstd_frame(&plain[200_000..]),
        skippable(3, 5),
    ]
    .concat();
    assert_eq!(unpack(&stream).unwrap(), plain);
    assert_eq!(unpack(&skippable(1, 9)).unwrap(), b"");
    let at = stream.len() as u64;
    let garbage = [&stream[..], b"more than four"].concat();
    assert!(matches!(unpack(&garbage), Err(UnpackError::TrailingGarbage { at: found, .. }) if found == at));
    for cut in [1, 4, 5, 9] {
        let e = unpack(&stream[..stream.len() - cut]).unwrap_err();
        assert!(matches!(e, UnpackError::Truncated { format: Compression::Zstd, .. }), "{cut}: {e}");
    }
}

#[test]
fn wrong_trailers_are_named() {
    let plain = sample(100_000);
    let good = gzip(&plain);
    let flip = |from_end: usize| {
        let mut bad = good.clone();
        let at = bad.len() - from_end;
        bad[at] ^= 1;
        unpack(&bad).unwrap_err()
    };
    assert!(matches!(flip(8), UnpackError::Checksum { what: "CRC-32", .. }));
    assert!(matches!(flip(4), UnpackError::Checksum { what: "length (ISIZE)", .. }));
    let mut bad = zstd_frame(&plain);
    *bad.last_mut().unwrap() ^= 1;
    let e = unpack(&bad).unwrap_err();
    assert!(e.to_string().contains("checksum"), "{e}");
}

#[test]
fn header_checksums_and_flags() {
    let body = gzip(b"x");
    // FHCRC: the CRC-16 of the ten header bytes, from an independent CRC.
    let mut header = body[..10].to_vec();
    header[3] = 2;
    let mut crc = flate2::Crc::new();
    crc.update(&header);
    let sum = u16::try_from(crc.sum() & 0xffff).unwrap();
    let with = |sum: u16| [&header[..], &sum.to_le_bytes(), &body[10..]].concat();
    assert_eq!(unpack(&with(sum)).unwrap(), b"x");
    assert!(matches!(unpack(&with(sum ^ 1)), Err(UnpackError::Checksum { what: "header CRC-16", .. })));
    for (at, value, text) in [(2, 7, "method 7"), (3, 0x20, "reserved")] {
        let mut bad = body.clone();
        bad[at] = value;
        let e = unpack(&bad).unwrap_err().to_string();
        assert!(e.contains(text), "{e}");
    }
}

#[test]
fn every_cut_is_an_error() {
    let plain = sample(3000);
    for (packed, format) in [(gzip_named(&plain, "n"), Compression::Gzip), (zstd_frame(&plain), Compression::Zstd)] {
        for cut in 4..packed.len() {
            let e = unpack(&packed[..cut]).expect_err("a cut stream is no stream");
            assert!(matches!(e, UnpackError::Truncated { format: f, .. } if f == format), "{cut}: {e}");
        }
    }
}

#[test]
fn formats_by_magic() {
    let cases: [(&[u8], Format); 12] = [
        (b"", Format::Plain),
        (b"\x1f", Format::Plain),
        (b"\x1f\x8b", Format::Gzip),
        (b"\x28\xb5\x2f\xfd", Format::Zstd),
        (b"\x5e\x2a\x4d\x18", Format::Zstd),
        (b"\xfd7zXZ\0", Format::Xz),
        (b"BZh91AY&SY", Format::Bzip2),
        (b"BZh9, a name", Format::Plain),
        (b"\x04\x22\x4d\x18", Format::Lz4),
        (b"\x5d\0\0\x80\0", Format::Lzma),
        (b"LZIP\x01", Format::Lzip),
        (b"\x1f\x9d\x90", Format::Compress),
    ];
    for (head, format) in cases {
        assert_eq!(magic::detect(head), format, "{}", crate::entry::printable(head));
    }
    let e = Unpacker::new(&b"\xfd7zXZ\0..."[..], Limits::default()).unwrap_err();
    assert!(e.to_string().contains("xz"));
    // A tar whose first member's name begins like bzip2.
    let mut header = [0u8; 512];
    header[..10].copy_from_slice(b"BZh91AY&SY");
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|&b| u32::from(b)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    assert_eq!(magic::detect(&header), Format::Plain);
    assert_eq!(unpack(&header).unwrap(), header);
}

#[test]
fn limits_stop_bombs() {
    let bomb = gzip(&vec![0; 4 << 20]);
    let exact = Limits { plain_bytes: 4 << 20, ..Limits::default() };
    assert_eq!(unpack_limited(&bomb, exact).unwrap().len(), 4 << 20);
    let less = Limits { plain_bytes: (4 << 20) - 1, ..Limits::default() };
    assert!(matches!(unpack_limited(&bomb, less), Err(UnpackError::TooLarge { .. })));
    let limits = Limits { unjudged_bytes: 1 << 20, ..Limits::default() };
    assert!(unpack_limited(&bomb, limits).is_ok(), "gzip never exceeds the ratio");
    let bomb = zstd_frame(&vec![0; 4 << 20]);
    assert!(matches!(unpack_limited(&bomb, limits), Err(UnpackError::Bomb { .. })));
    assert_eq!(unpack_limited(&vec![0; 4 << 20], less).unwrap().len(), 4 << 20, "plain bytes are not limited");
}

#[test]
fn windows_are_bounded() {
    // Magic, then a frame header descriptor without single-segment, and a window descriptor of 2^(10 + exponent).
    let frame = |log: u8| [0x28, 0xb5, 0x2f, 0xfd, 0, (log - 10) << 3, 1, 0, 0];
    assert_eq!(unpack(&frame(27)).unwrap(), b"");
    assert!(matches!(unpack(&frame(28)), Err(UnpackError::Window)));
}

#[test]
fn unpackers_move_between_threads() {
    let packed = gzip(b"hello");
    let mut unpacker = Unpacker::new(std::io::Cursor::new(packed), Limits::default()).unwrap();
    let mut buf = [0; 3];
    assert_eq!(unpacker.read(&mut buf).unwrap(), 3);
    let rest = std::thread::spawn(move || {
        let mut buf = [0; 3];
        let n = unpacker.read(&mut buf).unwrap();
        buf[..n].to_vec()
    });
    assert_eq!(rest.join().unwrap(), b"lo");
}

#[test]
fn errors_stick_and_readers_errors_pass() {
    let mut bad = gzip(b"hello");
    bad.truncate(15);
    let mut unpacker = Unpacker::new(&bad[..], Limits::default()).unwrap();
    assert!(unpacker.read(&mut [0; 100]).is_err());
    assert!(matches!(unpacker.read(&mut [0; 100]), Err(UnpackError::AlreadyFailed)));
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::from_raw_os_error(5))
        }
    }
    let e = Unpacker::new(Broken, Limits::default()).unwrap_err();
    assert!(matches!(&e, UnpackError::Read(e) if e.raw_os_error() == Some(5)));
}

// Case M02.
#[test]
fn declared_and_found() {
    assert_eq!(declared_as("application/vnd.oci.image.layer.v1.tar+gzip", Compression::Gzip), None);
    assert_eq!(declared_as("application/vnd.docker.image.rootfs.diff.tar.gzip", Compression::Gzip), None);
    assert!(
        declared_as("application/vnd.oci.image.layer.v1.tar", Compression::Gzip).unwrap().contains("taken as gzip")
    );
    assert!(declared_as("application/vnd.oci.image.layer.v1.tar+zstd", Compression::None).is_some());
    assert_eq!(declared_as("text/plain", Compression::None), None);
}

#[test]
fn hashing_judges_size_then_digest() {
    let read = |data: &[u8]| {
        let mut reader = HashingReader::new(data.to_vec().leak() as &[u8]);
        io::copy(&mut reader, &mut io::sink()).unwrap();
        reader
    };
    let (right, wrong) = (Digest::of(b"abc"), Digest::of(b"abd"));
    assert_eq!(read(b"abc").verify(Some(&right), Some(3)).unwrap(), (right, 3));
    assert_eq!(read(b"abc").verify(None, None).unwrap(), (right, 3));
    let size = read(b"abc").verify(Some(&wrong), Some(4)).unwrap_err();
    assert_eq!(size, VerifyError::Size { expected: 4, found: 3 });
    let digest = read(b"abc").verify(Some(&wrong), Some(3)).unwrap_err();
    assert_eq!(digest, VerifyError::Digest { expected: wrong, found: right });
}

#[test]
fn the_callers_buffer_is_not_overrun() {
    let packed = gzip(&sample(400_000));
    for len in [1, 2, 7, 255, 258, 259, 4096, 65_535] {
        let mut unpacker = Unpacker::new(&packed[..], Limits::default()).unwrap();
        let mut buf = vec![0xa5; len + 64];
        while unpacker.read(&mut buf[..len]).unwrap() == len {
            assert!(buf[len..].iter().all(|&b| b == 0xa5), "{len}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn splits_do_not_matter(
        len in 0usize..200_000,
        cuts in prop::collection::vec(0usize..200_000, 0..5),
        reads in prop::collection::vec(1usize..70_000, 2..6),
        buffers in prop::collection::vec(1usize..90_000, 1..6),
        zstd in any::<bool>(),
        small in any::<bool>(),
    ) {
        let plain = sample(len);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(len)).chain([0, len]).collect();
        cuts.sort_unstable();
        let pack = if zstd { zstd_frame } else { gzip };
        let packed: Vec<u8> = cuts.windows(2).flat_map(|w| pack(&plain[w[0]..w[1]])).collect();
        let shrink = |sizes: Vec<usize>| -> Vec<usize> {
            sizes.into_iter().map(|s| if small { s % 300 + 1 } else { s }).collect()
        };
        let (reads, buffers) = (shrink(reads), shrink(buffers));
        let input = Dribble { data: &packed, sizes: &reads, turn: 0 };
        let mut unpacker = Unpacker::new(input, Limits::default()).unwrap();
        let mut found = Vec::new();
        let mut buf = vec![0; 90_000];
        for size in buffers.iter().cycle() {
            let n = unpacker.read(&mut buf[..*size]).unwrap();
            found.extend_from_slice(&buf[..n]);
            if n < *size {
                break;
            }
        }
        prop_assert!(found == plain);
        prop_assert!(unpacker.into_inner().data.is_empty());
    }

    #[test]
    fn any_bytes_behind_a_magic(
        magic in prop::sample::select(vec![
            &b"\x1f\x8b\x08\x00\0\0\0\0\0\0"[..], b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\x51\x2a\x4d\x18", b"",
        ]),
        tail in prop::collection::vec(any::<u8>(), 0..3000),
    ) {
        crate::fuzzing::unpack::unpack(&[magic, &tail].concat());
    }

    #[test]
    fn flipped_bits_never_give_other_bytes(
        len in 1usize..20_000, at in any::<prop::sample::Index>(), bit in 0u8..8, zstd in any::<bool>(),
    ) {
        let plain = sample(len);
        let mut packed = if zstd { zstd_frame(&plain) } else { gzip(&plain) };
        let at = at.index(packed.len());
        packed[at] ^= 1 << bit;
        crate::fuzzing::unpack::unpack(&packed);
        if let Ok(found) = unpack(&packed) {
            // A flip may hit a header field that carries no data, or the magic (then the stream is plain).
            prop_assert!(found == plain || found == packed);
        }
    }
}
