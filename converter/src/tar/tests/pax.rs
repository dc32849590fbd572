//! PAX records: xattrs, ACLs, global headers, and headers that are none.

use super::*;
use crate::tar::tests::archive::pax_record;

fn with_records(records: &[Record]) -> Read {
    read(&Tar::new().pax(records).bare(Header::file(b"f")).end())
}

#[test]
fn x01_binary_values() {
    let capability = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let odd = b"\n20 path=evil\n=\0\n";
    let member = with_records(&[(b"SCHILY.xattr.security.capability", capability), (b"SCHILY.xattr.user.odd", odd)])
        .silent()
        .one();
    assert_eq!(member.xattrs(), [(&b"security.capability"[..], &capability[..]), (b"user.odd", odd)]);
    assert_eq!(member.path(), b"f");
}

#[test]
fn x02_empty_xattr_value() {
    let member = with_records(&[(b"SCHILY.xattr.user.overlay.origin", b""), (b"path", b""), (b"size", b"")]).silent();
    let member = member.one();
    assert_eq!(member.xattrs(), [(&b"user.overlay.origin"[..], &b""[..])]);
    assert_eq!(member.path(), b"f");
}

#[test]
fn x04_order_makes_no_difference() {
    let (a, b): (Record, Record) = ((b"SCHILY.xattr.user.a", b"1"), (b"SCHILY.xattr.user.b", b"2"));
    assert_eq!(with_records(&[a, b]), with_records(&[b, a]));
}

#[test]
fn repeated_xattr_the_last_holds() {
    let member = with_records(&[(b"SCHILY.xattr.user.a", b"1"), (b"SCHILY.xattr.user.a", b"2")]).silent().one();
    assert_eq!(member.xattrs(), [(&b"user.a"[..], &b"2"[..])]);
}

#[test]
fn x05_libarchive_xattrs() {
    let member = with_records(&[
        (b"LIBARCHIVE.xattr.user.a%3Db", b"dmFs"),
        (b"LIBARCHIVE.xattr.user.p%25q", b"/wo9AA"),
        (b"LIBARCHIVE.xattr.user.%C3%A9", b"Zg=="),
    ])
    .silent()
    .one();
    let want: [(&[u8], &[u8]); 3] = [(b"user.a=b", b"val"), (b"user.p%q", b"\xff\n=\0"), (b"user.\xc3\xa9", b"f")];
    assert_eq!(member.xattrs(), want);
}

#[test]
fn x05_both_forms_agree() {
    // As bsdtar writes them: the same escapes in both keywords.
    let member = with_records(&[(b"LIBARCHIVE.xattr.user.%C3%A9%3D", b"Zm8"), (b"SCHILY.xattr.user.%C3%A9%3D", b"fo")])
        .silent()
        .one();
    assert_eq!(member.xattrs(), [(&b"user.\xc3\xa9="[..], &b"fo"[..])]);
    // Unescaped in one of them.
    let read = with_records(&[(b"LIBARCHIVE.xattr.user.%C3%A9", b"Zm8"), (b"SCHILY.xattr.user.\xc3\xa9", b"fo")]);
    assert_eq!(read.silent().one().xattrs(), [(&b"user.\xc3\xa9"[..], &b"fo"[..])]);
    let differ = with_records(&[(b"LIBARCHIVE.xattr.user.a", b"Zm8"), (b"SCHILY.xattr.user.a", b"other")]);
    differ.warned("differ");
    assert_eq!(differ.one().xattrs(), [(&b"user.a"[..], &b"other"[..])]);
}

#[test]
fn x05_gnu_tar_escapes() {
    let member =
        with_records(&[(b"SCHILY.xattr.user.a%3Db", b"1"), (b"SCHILY.xattr.user.%25%C3", b"2")]).silent().one();
    assert_eq!(member.xattrs(), [(&b"user.%%C3"[..], &b"2"[..]), (b"user.a=b", b"1")]);
}

#[test]
fn xattrs_that_are_none() {
    let read = with_records(&[
        (b"SCHILY.xattr.", b"nameless"),
        (b"LIBARCHIVE.xattr.user.nul%00", b"Zm8"),
        (b"LIBARCHIVE.xattr.user.bad", b"?"),
    ]);
    read.warned("is not base64");
    read.warned("the xattr name \"\" is impossible");
    read.warned("user.nul\\x00");
    assert!(read.one().xattrs().is_empty());
}

const ACL: &[u8] = b"user::rwx\nuser:1000:rwx\ngroup::r-x\nmask::rwx\nother::r-x\n";

#[test]
fn x06_acls_become_binary() {
    let member = read(&Tar::new().pax(&[(b"SCHILY.acl.access", ACL)]).bare(Header::file(b"f").mode(0o4775)).end());
    let member = member.silent().one();
    let value = hex::decode("0200000001000700ffffffff02000700e803000004000500ffffffff10000700ffffffff20000500ffffffff");
    assert_eq!(member.xattrs(), [(&b"system.posix_acl_access"[..], &value.unwrap()[..])]);
    assert_eq!(member.entry.mode, 0o4775);
    let dir = Tar::new()
        .pax(&[(b"SCHILY.acl.default", b"user::rwx,group::r-x,group:tty:r-x:5,mask::r-x,other::r-x")])
        .bare(Header::new(b'5', b"d"))
        .end();
    let member = read(&dir).silent().one();
    let value = hex::decode("0200000001000700ffffffff04000500ffffffff080005000500000010000500ffffffff20000500ffffffff");
    assert_eq!(member.xattrs(), [(&b"system.posix_acl_default"[..], &value.unwrap()[..])]);
}

#[test]
fn x06_acl_sets_the_mode_and_minimal_is_none() {
    let read = with_records(&[(b"SCHILY.acl.access", ACL)]);
    read.warned("mode disagrees");
    assert_eq!(read.one().entry.mode, 0o775);
    // libarchive's mode: the group's entry, not the mask
    let archive = Tar::new().pax(&[(b"SCHILY.acl.access", ACL)]).bare(Header::file(b"f").mode(0o755)).end();
    assert_eq!(self::read(&archive).silent().one().entry.mode, 0o775);
    let member = with_records(&[(b"SCHILY.acl.access", b"user::rw-,group::r--,other::r--")]).silent().one();
    assert!(member.xattrs().is_empty());
    assert_eq!(member.entry.mode, 0o644);
}

#[test]
fn x06_binary_wins_and_names_are_reported() {
    let named = b"user::rwx\nuser:daemon:r--\ngroup::r-x\nmask::r-x\nother::r-x\n";
    let binary = (&b"SCHILY.xattr.system.posix_acl_access"[..], &b"\x02\0\0\0"[..]);
    let member = with_records(&[(b"SCHILY.acl.access", named), binary]).silent().one();
    assert_eq!(member.xattrs(), [(&b"system.posix_acl_access"[..], binary.1)]);
    let read = with_records(&[(b"SCHILY.acl.access", named)]);
    read.warned("f: its access ACL was left out: its entry \"user:daemon:r--\" has a name but no numeric id");
    assert!(read.one().xattrs().is_empty());
    let read = with_records(&[(b"SCHILY.acl.default", ACL)]);
    read.warned("only directories");
    assert!(read.one().xattrs().is_empty());
}

#[test]
fn t08_global_records() {
    let archive = Tar::new()
        .global(&[(b"comment", b"a commit id")])
        .bare(Header::file(b"one"))
        .global(&[(b"mtime", b"15.5"), (b"uid", b"7")])
        .bare(Header::file(b"two"))
        .pax(&[(b"mtime", b"16")])
        .bare(Header::file(b"three"))
        .pax(&[(b"mtime", b"")])
        .bare(Header::file(b"four").octal(136, 12, 99))
        .global(&[(b"uid", b"")])
        .bare(Header::file(b"five"))
        .global(&[(b"SCHILY.xattr.user.g", b"1"), (b"path", b"all")])
        .bare(Header::file(b"six"))
        .pax(&[(b"SCHILY.xattr.user.g", b""), (b"path", b"")])
        .bare(Header::file(b"seven"))
        .end();
    let read = read(&archive).silent();
    assert_eq!(read.paths(), ["one", "two", "three", "four", "five", "all", "seven"]);
    let seen: Vec<_> = read.members.iter().map(|m| (m.entry.uid, m.entry.mtime.secs, m.entry.mtime.nanos)).collect();
    assert_eq!(
        seen,
        [
            (0, 0, 0),
            (7, 15, 500_000_000),
            (7, 16, 0),
            (7, 99, 0),
            (0, 15, 500_000_000),
            (0, 15, 500_000_000),
            (0, 15, 500_000_000)
        ]
    );
    assert_eq!(read.members[5].xattrs(), [(&b"user.g"[..], &b"1"[..])]);
    assert_eq!(read.members[6].xattrs(), [(&b"user.g"[..], &b""[..])]);
}

#[test]
fn global_sizes_are_ignored() {
    let archive = Tar::new().global(&[(b"size", b"5000")]).with(Header::file(b"f"), b"data").end();
    let read = read(&archive);
    read.warned("for all entries was ignored");
    assert_eq!(read.one().content(), b"data");
}

#[test]
fn global_records_are_bounded() {
    let value = [b'v'; 40_000];
    let archive = Tar::new()
        .global(&[(b"SCHILY.xattr.user.a", &value)])
        .global(&[(b"SCHILY.xattr.user.b", &value)])
        .bare(Header::file(b"f"))
        .end();
    assert!(refusal(&archive).contains("a sum of all global PAX records' bytes of 80012 exceeds the limit of 65536"));
}

#[test]
fn extended_header_before_a_global_one_stays() {
    let archive = Tar::new().pax(&[(b"path", b"long")]).global(&[(b"comment", b"x")]).bare(Header::file(b"f")).end();
    assert_eq!(read(&archive).silent().paths(), ["long"]);
}

#[test]
fn nul_in_a_path_is_refused() {
    let bad = |records: &[Record]| refusal(&Tar::new().pax(records).bare(Header::file(b"f")).end());
    assert_eq!(bad(&[(b"path", b"a\0b")]), "tar header at byte 0: bad PAX header: path \"a\\x00b\" holds a NUL");
    assert_eq!(
        bad(&[(b"path", b"name"), (b"linkpath", b"a\0")]),
        "tar entry \"name\": bad PAX header: linkpath \"a\\x00\" holds a NUL"
    );
    assert!(bad(&[(b"SCHILY.xattr.user\0", b"x")]).contains("is no keyword"));
    assert!(bad(&[(b"", b"x")]).contains("is no keyword"));
    assert!(bad(&[(b"uid", b"12a")]).contains("uid \"12a\" is no number"));
}

#[test]
fn malformed_records() {
    for (body, why) in [
        (&b"path=x\n"[..], "does not begin with its length"),
        (b"12path=x\n", "does not begin with its length"),
        (b" 12 path=abc\n", "does not begin with its length"),
        (b"99 path=abc\n", "longer than the header"),
        (b"0 \n", "newline"),
        (b"3 a\n", "newline"),
        (b"12 path=abc!", "newline"),
        (b"12 path abc\n", "no equals sign"),
        (b"99999999999999999999 path=abc\n", "does not begin with its length"),
        (b"12 path=abc\nx", "does not begin with its length"),
    ] {
        let archive = Tar::new().with(Header::new(b'x', b"x"), body).bare(Header::file(b"f")).end();
        let refusal = refusal(&archive);
        assert!(refusal.contains(why), "{}: {refusal}", String::from_utf8_lossy(body));
    }
    // NULs that a writer counted in are no record.
    let filled = [pax_record(b"path", b"abc"), vec![0; 30]].concat();
    let archive = Tar::new().with(Header::new(b'x', b"x"), &filled).bare(Header::file(b"f")).end();
    assert_eq!(read(&archive).silent().paths(), ["abc"]);
}

#[test]
fn solaris_extended_header() {
    let archive = Tar::new().with(Header::new(b'X', b"x"), &pax_record(b"path", b"abc")).bare(Header::file(b"f")).end();
    assert_eq!(read(&archive).silent().paths(), ["abc"]);
}

#[test]
fn foreign_charset_and_selinux_are_reported() {
    let read = with_records(&[(b"hdrcharset", b"ISO-IR 8859 1 1998"), (b"RHT.security.selinux", b"x:y")]);
    read.warned("ISO-IR 8859 1 1998");
    read.warned("SELinux");
}
