//! Types, ids, times and devices of the header.

use super::*;

fn one(header: Header) -> Member {
    read(&Tar::new().bare(header).end()).one()
}

fn regular(size: u64) -> EntryKind {
    EntryKind::Regular { size, sparse: false }
}

#[test]
fn typeflags() {
    for (typeflag, name, want) in [
        (b'0', &b"a"[..], regular(0)),
        (b'7', b"a", regular(0)),
        (0, b"a", regular(0)),
        (0, b"a/", EntryKind::Directory),
        (b'5', b"a", EntryKind::Directory),
        (b'6', b"a", EntryKind::Fifo),
        (b'1', b"a", EntryKind::HardLink { target: b"t".to_vec() }),
        (b'2', b"a", EntryKind::Symlink { target: b"t".to_vec() }),
    ] {
        let header = Header::new(typeflag, name).link(b"t");
        let read = read(&Tar::new().bare(header).end()).silent();
        assert_eq!(*read.one().kind(), want, "typeflag {typeflag}");
    }
}

#[test]
fn directory_by_slash_in_v7_has_no_body() {
    let archive = Tar::new().bare(Header::new(0, b"dir/").v7()).with(Header::new(0, b"dir/f").v7(), b"x").end();
    let read = read(&archive).silent();
    assert_eq!(*read.members[0].kind(), EntryKind::Directory);
    assert_eq!(read.members[1].content(), b"x");
}

#[test]
fn regular_file_with_a_slash() {
    let read = read(&Tar::new().with(Header::file(b"odd/"), b"data").end());
    read.warned("named like a directory");
    assert_eq!(read.one().content(), b"data");
}

#[test]
fn unknown_typeflag_is_a_file() {
    let read = read(&Tar::new().with(Header::new(b'Z', b"odd"), b"data").with(Header::file(b"next"), b"").end());
    assert_eq!(read.paths(), ["odd", "next"]);
    read.warned("odd: typeflag \"Z\" is not known");
    assert_eq!(read.members[0].content(), b"data");
}

#[test]
fn sizes_of_what_has_no_data_are_ignored() {
    for typeflag in *b"123456" {
        let header = Header::new(typeflag, b"a").link(b"t").octal(329, 8, 1).octal(337, 8, 3).size(1000);
        let read = read(&Tar::new().bare(header).with(Header::file(b"next"), b"data").end());
        assert_eq!(read.paths(), ["a", "next"]);
        read.warned("a: its size was ignored");
    }
}

#[test]
fn dumpdir_is_a_directory() {
    let archive =
        Tar::new().with(Header::new(b'D', b"d/").gnu(), b"Yfile\0\0").with(Header::file(b"d/file"), b"x").end();
    let read = read(&archive).silent();
    assert_eq!(*read.members[0].kind(), EntryKind::Directory);
    assert_eq!(read.members[1].content(), b"x");
    let cut = Tar::new().bare(Header::new(b'D', b"d/").gnu().size(9)).0;
    assert_eq!(refusal(&cut), "tar entry \"d/\": the archive ends in the middle of it");
}

#[test]
fn t08_volume_label() {
    let read = read(&Tar::new().bare(Header::new(b'V', b"backup").gnu()).with(Header::file(b"f"), b"x").end());
    assert_eq!(read.paths(), ["f"]);
    read.warned("backup: a volume label was ignored");
}

#[test]
fn multivolume_is_refused() {
    let archive = Tar::new().with(Header::new(b'M', b"big/file").gnu(), b"rest").end();
    assert_eq!(refusal(&archive), "tar entry \"big/file\": a file continued from another volume is not supported");
    let pax = Tar::new().pax(&[(b"GNU.volume.offset", b"512")]).bare(Header::file(b"f")).end();
    assert!(refusal(&pax).contains("another volume"));
}

#[test]
fn t18_modes() {
    for (bits, want) in [(0o4755, 0o4755), (0o7777, 0o7777), (0o100_644, 0o644), (0, 0), (0o2_000, 0o2000)] {
        assert_eq!(one(Header::file(b"f").mode(bits)).entry.mode, want);
    }
}

#[test]
fn t14_big_ids() {
    for id in [2_097_151, 2_097_152, 2_000_000_000, 4_294_967_294] {
        let header = Header::file(b"f").binary(108, 8, id).binary(116, 8, id).put(265, b"root").put(297, b"root");
        let entry = one(header).entry;
        assert_eq!((i64::from(entry.uid), i64::from(entry.gid)), (id, id));
        let text = id.to_string().into_bytes();
        let archive = Tar::new()
            .pax(&[(b"uid", &text), (b"gid", &text), (b"uname", b"root"), (b"gname", b"root")])
            .bare(Header::file(b"f").put(108, b"!!!").put(116, b"junk"))
            .end();
        let entry = read(&archive).silent().one().entry;
        assert_eq!((i64::from(entry.uid), i64::from(entry.gid)), (id, id));
    }
}

#[test]
fn t14_ids_out_of_range() {
    let refused = |header| refusal(&Tar::new().bare(header).end());
    assert_eq!(
        refused(Header::file(b"f").binary(108, 8, 1 << 32)),
        "tar entry \"f\": the uid field holds no valid number: \"4294967296\""
    );
    assert!(refused(Header::file(b"f").binary(116, 8, -1)).contains("the gid field"));
    assert!(refused(Header::file(b"f").put(108, b"root\0")).contains("the uid field holds no valid number: \"root"));
    let pax = Tar::new().pax(&[(b"gid", b"4294967296")]).bare(Header::file(b"f")).end();
    assert!(refusal(&pax).contains("\"f\": the gid field"));
}

#[test]
fn blank_fields_are_zero() {
    let header = Header::file(b"f").put(108, b"        ").put(116, &[0; 8]).put(136, &[0; 12]);
    let entry = one(header).entry;
    assert_eq!((entry.uid, entry.gid, entry.mtime), (0, 0, <_>::default()));
}

#[test]
fn t07_negative_and_fractional_times() {
    let time = |header: Header, mtime: Option<&[u8]>| {
        let archive = match mtime {
            Some(mtime) => Tar::new().pax(&[(b"mtime", mtime)]),
            None => Tar::new(),
        };
        let mtime = read(&archive.bare(header).end()).silent().one().entry.mtime;
        (mtime.secs, mtime.nanos)
    };
    let file = || Header::file(b"f").octal(136, 12, 99);
    assert_eq!(time(file(), None), (99, 0));
    assert_eq!(time(file().binary(136, 12, -1), None), (-1, 0));
    assert_eq!(time(file().binary(136, 12, i64::MIN), None), (i64::MIN, 0));
    assert_eq!(time(file().binary(136, 12, 1 << 40), None), (1 << 40, 0));
    assert_eq!(time(file(), Some(b"123.5")), (123, 500_000_000));
    assert_eq!(time(file(), Some(b"-1.25")), (-2, 750_000_000));
    assert_eq!(time(file(), Some(b"0.000000001")), (0, 1));
    assert_eq!(time(file(), Some(b"-6795364579")), (-6_795_364_579, 0));
    assert_eq!(time(file(), Some(b"")), (99, 0));
}

#[test]
fn t19_nul_filled_times() {
    let archive = Tar::new()
        .pax(&[(b"mtime", &[0; 20]), (b"atime", &[0; 20]), (b"path", b"Files/x"), (b"ctime", b"1.5")])
        .bare(Header::file(b"x").octal(136, 12, 99))
        .end();
    let read = read(&archive);
    read.warned("Files/x: PAX mtime");
    read.warned("Files/x: PAX atime");
    assert_eq!(read.warnings.len(), 2);
    assert_eq!(read.one().entry.mtime.secs, 99);
}

#[test]
fn t21_device_numbers() {
    let device = |typeflag, major, minor| {
        one(Header::new(typeflag, b"d").binary(329, 8, major).binary(337, 8, minor)).entry.kind
    };
    assert_eq!(device(b'3', 1, 3), EntryKind::CharDevice { major: 1, minor: 3 });
    assert_eq!(device(b'3', 0, 0), EntryKind::CharDevice { major: 0, minor: 0 });
    assert_eq!(device(b'3', 4_294_967_295, 1), EntryKind::CharDevice { major: 4_294_967_295, minor: 1 });
    assert_eq!(device(b'4', 259, 1_048_575), EntryKind::BlockDevice { major: 259, minor: 1_048_575 });
    let negative = Tar::new().bare(Header::new(b'3', b"d").binary(329, 8, -1)).end();
    assert!(refusal(&negative).contains("\"d\": the devmajor field"));
    let pax = Tar::new()
        .pax(&[(b"SCHILY.devmajor", b"300"), (b"SCHILY.devminor", b"70000"), (b"SCHILY.dev", b"junk")])
        .bare(Header::new(b'4', b"d").put(329, b"junk").put(337, b"junk"))
        .end();
    assert_eq!(*read(&pax).silent().one().kind(), EntryKind::BlockDevice { major: 300, minor: 70_000 });
    // Only devices have these fields: elsewhere they may be junk.
    assert_eq!(*one(Header::file(b"f").put(329, b"junk").put(337, b"junk")).kind(), regular(0));
}

#[test]
fn t06_t15_sizes() {
    let archive = Tar::new().pax(&[(b"size", b"1000")]).bare(Header::file(b"f")).body(&[5; 1000]).end();
    assert_eq!(read(&archive).silent().one().content(), [5; 1000]);
    let smaller = Tar::new().pax(&[(b"size", b"3")]).bare(Header::file(b"f").size(1000)).body(b"abc").end();
    assert_eq!(read(&smaller).silent().one().content(), b"abc");
    let unusable = Tar::new().pax(&[(b"size", b"3")]).bare(Header::file(b"f").put(124, b"junk")).body(b"abc").end();
    assert_eq!(read(&unusable).silent().one().content(), b"abc");
    for (header, size) in [
        (Header::file(b"f").octal(124, 12, 0o77_777_777_777), 0o77_777_777_777),
        (Header::file(b"f").binary(124, 12, 9 << 30), 9 << 30),
        (Header::file(b"f").binary(124, 12, i64::MAX), i64::MAX as u64),
    ] {
        let mut parser = Parser::new(Limits::default());
        let archive = Tar::new().bare(header).raw(b"begin").0;
        let mut input = &archive[..];
        let Ok(Some(Event::Entry(entry))) = parser.next(&mut input) else { panic!("no entry") };
        assert_eq!(entry.kind, regular(size));
        assert_eq!(parser.next(&mut input), Ok(Some(Event::Data { offset: 0, bytes: b"begin" })));
        assert_eq!(parser.next(&mut input), Ok(None));
        assert!(matches!(parser.finish(), Err(TarError::Truncated { .. })));
    }
}

#[test]
fn t15_offsets_past_4_gib() {
    let mut parser = Parser::new(Limits::default());
    let archive = Tar::new().bare(Header::file(b"f").binary(124, 12, (4 << 30) + 10)).0;
    assert!(matches!(parser.next(&mut &archive[..]), Ok(Some(Event::Entry(_)))));
    let piece = vec![0; 1 << 24];
    let mut total = 0;
    for _ in 0..=256 {
        let mut input = &piece[..];
        let Ok(Some(Event::Data { offset, bytes })) = parser.next(&mut input) else { panic!("no data") };
        assert_eq!(offset, total);
        total += bytes.len() as u64;
    }
    assert_eq!(total, (4 << 30) + 10);
    assert_eq!(parser.next(&mut &b""[..]), Ok(Some(Event::EndEntry)));
    // The rest of the last piece was padding and more: the parser was only given it once.
    assert_eq!(parser.next(&mut &b""[..]), Ok(None));
    assert_eq!(parser.finish(), Ok(()));
}

#[test]
fn sizes_that_are_none() {
    for header in [Header::file(b"f").binary(124, 12, -1), Header::file(b"f").put(124, b"12x45678901\0")] {
        assert!(refusal(&Tar::new().bare(header).end()).contains("tar entry \"f\": the size field"));
    }
    let long = Tar::new().bare(Header::new(b'L', b"x").binary(124, 12, -5)).end();
    assert!(refusal(&long).contains("tar header at byte 0: the size field"));
    let pax = Tar::new().pax(&[(b"size", b"-1")]).bare(Header::file(b"f")).end();
    assert!(refusal(&pax).contains("size \"-1\" is no number"));
}
