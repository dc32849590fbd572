//! Names and link targets, in all the places where formats keep them.

use super::*;

#[test]
fn t01_root() {
    let member = read(&Tar::new().bare(Header::new(b'5', b"/").mode(0o711)).end()).silent().one();
    assert_eq!((member.path(), member.kind(), member.entry.mode), (&b"/"[..], &EntryKind::Directory, 0o711));
}

#[test]
fn t02_empty_name() {
    let member = read(&Tar::new().bare(Header::new(b'5', b"")).end()).one();
    assert_eq!((member.path(), member.kind()), (&b""[..], &EntryKind::Directory));
}

#[test]
fn t08_slash_only_path() {
    let member = read(&Tar::new().pax(&[(b"path", b"///")]).bare(Header::new(b'5', b"x")).end()).silent().one();
    assert_eq!(member.path(), b"///");
}

#[test]
fn t13_names_that_are_not_utf8() {
    let name = b"caf\xe9";
    let archive = Tar::new()
        .bare(Header::file(name))
        .long(b'L', name)
        .bare(Header::file(b"x").gnu())
        .pax(&[(b"path", name)])
        .bare(Header::file(b"x"))
        .pax(&[(b"hdrcharset", b"BINARY"), (b"path", name), (b"linkpath", name)])
        .bare(Header::new(b'2', b"x"))
        .end();
    let read = read(&archive).silent();
    assert_eq!(read.members.len(), 4);
    assert!(read.members.iter().all(|member| member.path() == name));
    assert_eq!(*read.members[3].kind(), EntryKind::Symlink { target: name.to_vec() });
}

#[test]
fn t16_name_and_prefix_lengths() {
    for (prefix, name) in [(0, 99), (0, 100), (1, 1), (154, 100), (155, 99), (155, 100)] {
        let (prefix, name) = (vec![b'p'; prefix], vec![b'n'; name]);
        let header = Header::file(&name).put(345, &prefix);
        let want = if prefix.is_empty() { name.clone() } else { [&prefix[..], b"/", &name].concat() };
        assert_eq!(read(&Tar::new().bare(header).end()).silent().one().path(), want);
    }
    for length in [100, 101, 255, 256, 512, 4000] {
        let name = vec![b'n'; length];
        let gnu = Tar::new().long(b'L', &name).bare(Header::file(&[b'n'; 100]).gnu()).end();
        assert_eq!(read(&gnu).silent().one().path(), name);
        let pax = Tar::new().pax(&[(b"path", &name)]).bare(Header::file(b"cut")).end();
        assert_eq!(read(&pax).silent().one().path(), name);
    }
}

#[test]
fn t16_link_names() {
    let long = [b't'; 300];
    for typeflag in [b'1', b'2'] {
        let target = |archive: Vec<u8>| match read(&archive).silent().one().entry.kind {
            EntryKind::HardLink { target } if typeflag == b'1' => target,
            EntryKind::Symlink { target } if typeflag == b'2' => target,
            other => panic!("{other:?}"),
        };
        let full = Header::new(typeflag, b"l").link(&[b't'; 100]);
        assert_eq!(target(Tar::new().bare(full.clone()).end()), [b't'; 100]);
        assert_eq!(target(Tar::new().long(b'K', &long).bare(full.clone().gnu()).end()), long);
        assert_eq!(target(Tar::new().pax(&[(b"linkpath", &long)]).bare(full).end()), long);
    }
}

#[test]
fn t16_megabyte_pax_block() {
    let value = vec![b'v'; 1 << 20];
    let archive = Tar::new().pax(&[(b"SCHILY.xattr.user.big", &value)]).bare(Header::file(b"f")).end();
    assert_eq!(read(&archive).silent().one().xattrs(), [(&b"user.big"[..], &value[..])]);
}

#[test]
fn t16_giants_are_refused_before_they_are_read() {
    for (typeflag, what) in [(b'L', "long name"), (b'K', "long link"), (b'x', "PAX header"), (b'g', "global PAX")] {
        let archive = Tar::new().bare(Header::new(typeflag, b"giant").gnu().size(1 << 30)).0;
        let mut parser = Parser::new(Limits::default());
        let error = parser.next(&mut &archive[..]).unwrap_err();
        assert!(matches!(&error, TarError::Limit { found: 0x4000_0000, .. }), "{error}");
        assert!(error.to_string().contains(what) && error.to_string().contains("byte 0"), "{error}");
        assert_eq!(parser.held_bytes(), 0);
    }
}

#[test]
fn long_names_end_at_nul() {
    let archive = Tar::new().long(b'L', b"name\0junk").bare(Header::file(b"x").gnu()).end();
    assert_eq!(read(&archive).one().path(), b"name");
}

#[test]
fn repeated_extensions_the_last_holds() {
    let archive = Tar::new()
        .long(b'L', b"first")
        .long(b'K', b"to-first")
        .long(b'L', b"second")
        .long(b'K', b"to-second")
        .bare(Header::new(b'2', b"x").gnu())
        .pax(&[(b"path", b"first"), (b"linkpath", b"to-first")])
        .pax(&[(b"linkpath", b"to-second")])
        .bare(Header::new(b'2', b"bar"))
        .bare(Header::file(b"plain"))
        .end();
    let read = read(&archive).silent();
    assert_eq!(read.paths(), ["second", "bar", "plain"]);
    for member in &read.members[..2] {
        assert_eq!(*member.kind(), EntryKind::Symlink { target: b"to-second".to_vec() });
    }
}

#[test]
fn pax_before_gnu_name() {
    let archive = Tar::new().pax(&[(b"path", b"pax")]).long(b'L', b"gnu").bare(Header::file(b"header").gnu()).end();
    let read = read(&archive);
    read.warned("long name says \"gnu\"");
    assert_eq!(read.one().path(), b"pax");
}

#[test]
fn prefix_only_where_the_layout_has_one() {
    let header = Header::file(b"name").put(345, b"some/where");
    let path = |header: Header| read(&Tar::new().bare(header).end()).one().entry.path;
    assert_eq!(path(header.clone()), b"some/where/name");
    assert_eq!(path(header.clone().v7()), b"name");
    // star: 131 bytes of prefix, then times
    let star = Header::file(b"name").put(345, &[b'p'; 131]).put(476, b"12345670123\0").put(508, b"tar\0");
    assert_eq!(path(star), [&[b'p'; 131][..], b"/name"].concat());
    // GNU: times there
    let gnu = Header::file(b"name").gnu().put(345, b"12575676024\x0012575676024\0");
    assert_eq!(path(gnu), b"name");
    // Go before 1.8 wrote a prefix under GNU magic
    assert_eq!(path(header.gnu()), b"some/where/name");
    assert_eq!(path(Header::file(b"name").gnu().put(345, b"some\xff")), b"name");
}

#[test]
fn t08_empty_pax_header_name() {
    let archive = Tar::new().with(Header::new(b'x', b""), b"12 path=abc\n").bare(Header::file(b"x")).end();
    assert_eq!(read(&archive).silent().one().path(), b"abc");
}
