//! Where archives, members and fields end.

use super::*;

fn two_files() -> Tar {
    Tar::new().with(Header::file(b"a"), b"first").with(Header::file(b"b"), &[7; 1000])
}

#[test]
fn ordinary() {
    let read = read(&two_files().end()).silent();
    assert_eq!(read.paths(), ["a", "b"]);
    assert_eq!(read.members[0].content(), b"first");
    assert_eq!(read.members[1].content(), [7; 1000]);
    assert_eq!(*read.members[1].kind(), EntryKind::Regular { size: 1000, sparse: false });
}

#[test]
fn data_is_lent_in_whole_buffers() {
    let archive = Tar::new().with(Header::file(b"a"), &vec![1; 1 << 20]).end();
    let mut input = &archive[..];
    let mut parser = Parser::new(Limits::default());
    assert!(matches!(parser.next(&mut input), Ok(Some(Event::Entry(_)))));
    let Ok(Some(Event::Data { offset: 0, bytes })) = parser.next(&mut input) else { panic!("no data") };
    assert_eq!(bytes.len(), 1 << 20);
    assert!(std::ptr::eq(bytes, &raw const archive[512..512 + (1 << 20)]), "a slice of the input, not a copy");
    assert_eq!(parser.next(&mut input), Ok(Some(Event::EndEntry)));
    assert_eq!(parser.next(&mut input), Ok(None));
    assert_eq!(parser.finish(), Ok(()));
}

#[test]
fn l01_the_same_file_twice() {
    let header = Header::new(b'1', b"foo").link(b"foo");
    let read = read(&Tar::new().with(Header::file(b"foo"), b"").bare(header).end()).silent();
    assert_eq!(read.paths(), ["foo", "foo"]);
    assert_eq!(*read.members[1].kind(), EntryKind::HardLink { target: b"foo".to_vec() });
}

#[test]
fn t03_no_end_blocks() {
    let read = read(&two_files().0);
    assert_eq!(read.paths(), ["a", "b"]);
    read.warned("no end-of-archive");
}

#[test]
fn t03_no_padding_either() {
    let read = read(&Tar::new().bare(Header::file(b"a").size(5)).raw(b"first").0);
    assert_eq!(read.members[0].content(), b"first");
    read.warned("no end-of-archive");
}

#[test]
fn t03_nothing_at_all() {
    let read = read(b"");
    assert!(read.members.is_empty());
    read.warned("no end-of-archive");
}

#[test]
fn t03_one_zero_block() {
    let archive = two_files().raw(&[0; 512]).0;
    read(&archive).warned("one zero block instead of two");
}

#[test]
fn lone_zero_block_ends_the_archive() {
    let read = read(&two_files().raw(&[0; 512]).with(Header::file(b"c"), b"hidden").end());
    assert_eq!(read.paths(), ["a", "b"]);
    read.warned("lone zero block");
}

#[test]
fn what_follows_the_end_is_swallowed() {
    let archive = [two_files().end(), two_files().end(), b"garbage".to_vec()].concat();
    assert_eq!(read(&archive).silent().paths(), ["a", "b"]);
}

#[test]
fn t04_cut_in_a_member() {
    let archive = Tar::new().with(Header::file(b"etc/conf"), &[1; 4096]).end();
    assert_eq!(refusal(&archive[..2048]), "tar entry \"etc/conf\": the archive ends in the middle of it");
    assert_eq!(refusal(&archive[..512]), "tar entry \"etc/conf\": the archive ends in the middle of it");
    assert_eq!(refusal(&archive[..511]), "tar header at byte 0: the archive ends in the middle of it");
    assert_eq!(refusal(&archive[..4607]), "tar entry \"etc/conf\": the archive ends in the middle of it");
}

#[test]
fn t04_every_cut_is_refused_or_a_prefix() {
    let archive = Tar::new()
        .pax(&[(b"path", b"long/one")])
        .with(Header::file(b"x"), b"body")
        .long(b'L', b"other")
        .with(Header::file(b"x").gnu(), b"more")
        .0;
    for length in 0..archive.len() {
        match read_cut(&archive[..length], 4096) {
            Ok(read) => {
                let want: &[&str] = match length {
                    0 => &[],
                    1..3076 => &["long/one"],
                    _ => &["long/one", "other"],
                };
                assert_eq!(read.paths(), want, "{length} bytes");
                read.warned("no end-of-archive");
            }
            Err(error) => assert!(matches!(error, TarError::Truncated { .. }), "{length} bytes: {error}"),
        }
    }
    let whole = (0..archive.len()).filter(|&length| read_cut(&archive[..length], 4096).is_ok()).count();
    // Nothing; after the first body up to the end of its padding; after the second body.
    assert_eq!(whole, 1 + (2048 - 1540 + 1) + (4096 - 3588));
}

#[test]
fn cut_after_an_extended_header() {
    let archive = two_files().pax(&[(b"path", b"lost")]).0;
    assert_eq!(refusal(&archive), "tar header at byte 2560: the archive ends in the middle of it");
    let read = read(&Tar(archive).end());
    assert_eq!(read.paths(), ["a", "b"]);
    read.warned("belongs to no entry");
}

#[test]
fn wrong_checksum() {
    let mut archive = two_files().end();
    archive[1024 + 3] ^= 1;
    assert_eq!(
        refusal(&archive),
        "tar header at byte 1024: wrong checksum, so this is not a tar archive or a damaged one"
    );
    assert!(refusal(&[b'x'; 512]).contains("checksum"));
}

#[test]
fn signed_checksum() {
    let name = b"caf\xe9\xff\xfe";
    let archive = Tar::new().raw(&Header::file(name).block_signed()).end();
    assert_ne!(Header::file(name).block_signed(), Header::file(name).block());
    assert_eq!(read(&archive).one().path(), name);
    assert_eq!(read(&Tar::new().bare(Header::file(name)).end()).one().path(), name);
}

#[test]
fn an_error_stays() {
    // The second fails with its padding still to come.
    for bad in [vec![1; 512], Tar::new().with(Header::new(b'x', b"x"), b"bad").0] {
        let mut parser = Parser::new(Limits::default());
        let mut input = &bad[..bad.len().min(515)];
        let error = parser.next(&mut input).unwrap_err();
        assert_eq!(parser.next(&mut &b""[..]), Err(error.clone()));
        assert_eq!(parser.next(&mut &two_files().end()[..]), Err(error.clone()));
        assert_eq!(parser.finish(), Err(error));
    }
}

#[test]
fn warnings_are_bounded() {
    let mut archive = Tar::new();
    for _ in 0..20 {
        archive = archive.bare(Header::new(b'?', b"odd"));
    }
    let mut parser = Parser::new(Limits { warnings: 3, ..Limits::default() });
    drive(&mut parser, &mut &archive.end()[..], &mut Sink::default()).unwrap();
    let warnings = parser.take_warnings();
    assert_eq!(warnings.len(), 4);
    assert_eq!(warnings[3].message, "17 further warnings were dropped");
    assert!(parser.take_warnings().is_empty());
}
