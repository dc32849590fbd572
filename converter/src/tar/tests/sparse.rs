//! T09: sparse files in every spelling. GNU tar's own output of the same is in the integration tests.

use super::*;

/// 100 bytes at 0, 200 at 1000, the file being 5000 long.
fn content() -> Vec<u8> {
    let mut file = vec![0; 5000];
    file[..100].fill(1);
    file[1000..1200].fill(2);
    file
}

fn archived() -> Vec<u8> {
    [vec![1; 100], vec![2; 200]].concat()
}

fn check(archive: Vec<u8>) {
    let read = read(&archive).silent();
    assert_eq!(read.paths(), ["real/name", "next"]);
    let member = &read.members[0];
    assert_eq!(*member.kind(), EntryKind::Regular { size: 5000, sparse: true });
    assert_eq!(member.data, [(0, vec![1; 100]), (1000, vec![2; 200])], "holes are no events");
    assert_eq!(member.content(), content());
    assert_eq!(read.members[1].content(), b"x");
}

fn next(archive: Tar) -> Vec<u8> {
    archive.with(Header::file(b"next"), b"x").end()
}

fn entry(header: Header, at: usize, offset: u64, length: u64) -> Header {
    header.octal(at, 12, offset).octal(at + 12, 12, length)
}

fn gnu_header() -> Header {
    let header = Header::new(b'S', b"real/name").gnu().octal(483, 12, 5000);
    entry(entry(entry(header, 386, 0, 100), 410, 1000, 200), 434, 5000, 0)
}

#[test]
fn t09_gnu() {
    check(next(Tar::new().with(gnu_header(), &archived())));
}

#[test]
fn t09_pax_0_0() {
    let records: &[Record] = &[
        (b"GNU.sparse.size", b"5000"),
        (b"GNU.sparse.numblocks", b"3"),
        (b"GNU.sparse.offset", b"0"),
        (b"GNU.sparse.numbytes", b"100"),
        (b"GNU.sparse.offset", b"1000"),
        (b"GNU.sparse.numbytes", b"200"),
        (b"GNU.sparse.offset", b"5000"),
        (b"GNU.sparse.numbytes", b"0"),
    ];
    check(next(Tar::new().pax(records).with(Header::file(b"real/name"), &archived())));
}

const PAX_0_1: &[Record] = &[
    (b"GNU.sparse.size", b"5000"),
    (b"GNU.sparse.numblocks", b"2"),
    (b"GNU.sparse.name", b"real/name"),
    (b"GNU.sparse.map", b"0,100,1000,200"),
    (b"path", b"GNUSparseFile.0/name"),
];

#[test]
fn t09_pax_0_1() {
    check(next(Tar::new().pax(PAX_0_1).with(Header::file(b"name"), &archived())));
}

const PAX_1_0: &[Record] = &[
    (b"path", b"GNUSparseFile.0/name"),
    (b"GNU.sparse.major", b"1"),
    (b"GNU.sparse.minor", b"0"),
    (b"GNU.sparse.name", b"real/name"),
    (b"GNU.sparse.realsize", b"5000"),
];

fn text_map(map: &[u8]) -> Vec<u8> {
    Tar::new().body(map).raw(&archived()).0
}

#[test]
fn t09_pax_1_0() {
    check(next(Tar::new().pax(PAX_1_0).with(Header::file(b"name"), &text_map(b"2\n0\n100\n1000\n200\n"))));
}

#[test]
fn t09_star() {
    let header = Header::new(b'S', b"real/name").put(508, b"tar\0").octal(452, 12, 5000);
    let inline = entry(entry(header.clone(), 356, 0, 100), 380, 1000, 200);
    check(next(Tar::new().with(inline, &archived())));
    let mut extension = [0u8; 512];
    extension[..12].copy_from_slice(b"00000000000\0");
    extension[12..24].copy_from_slice(b"00000000144\0");
    extension[24..36].copy_from_slice(b"00000001750\0");
    extension[36..48].copy_from_slice(b"00000000310\0");
    let archive = Tar::new()
        .pax(&[(b"SCHILY.realsize", b"5000")])
        .bare(header.octal(452, 12, 0).size(300))
        .raw(&extension)
        .body(&archived());
    check(next(archive));
}

#[test]
fn t09_gnu_extension_blocks() {
    let segments: Vec<(u64, u64)> = (0..60).map(|i| (i * 1000, 10)).collect();
    let mut header = Header::new(b'S', b"f").gnu().octal(483, 12, 60_000).put(482, b"\x01");
    for (i, &(offset, length)) in segments[..4].iter().enumerate() {
        header = entry(header, 386 + 24 * i, offset, length);
    }
    let mut archive = Tar::new().bare(header.size(600));
    let blocks: Vec<_> = segments[4..].chunks(21).collect();
    for (i, block) in blocks.iter().enumerate() {
        let mut bytes = [0u8; 512];
        for (i, (offset, length)) in block.iter().enumerate() {
            bytes[24 * i..24 * (i + 1)].copy_from_slice(format!("{offset:011o}\0{length:011o}\0").as_bytes());
        }
        bytes[504] = u8::from(i + 1 < blocks.len());
        archive = archive.raw(&bytes);
    }
    let data: Vec<u8> = (0..60).flat_map(|i| [i; 10]).collect();
    let member = read(&archive.clone().body(&data).end()).silent().one();
    let want: Vec<(u64, Vec<u8>)> = (0..60u8).map(|i| (u64::from(i) * 1000, vec![i; 10])).collect();
    assert_eq!(member.data, want);
    assert!(refusal(&archive.0).contains("tar entry \"f\": the archive ends"));
}

#[test]
fn t09_long_text_map() {
    let map = format!("500\n{}", (0..500).map(|i| format!("{}\n1\n", i * 100_000)).collect::<String>());
    let data = Tar::new().body(map.as_bytes()).raw(&[9; 500]).0;
    let records = [&PAX_1_0[..4], &[(b"GNU.sparse.realsize", b"50000000")]].concat();
    let member = read(&Tar::new().pax(&records).with(Header::file(b"x"), &data).end()).silent().one();
    assert_eq!(member.data.len(), 500);
    assert_eq!(member.data[499], (49_900_000, vec![9]));
}

#[test]
fn t09_only_holes_and_no_holes() {
    let hole = entry(Header::new(b'S', b"f").gnu().octal(483, 12, 1000), 386, 1000, 0);
    let member = read(&Tar::new().with(hole, b"").end()).silent().one();
    assert_eq!(member.kind(), &EntryKind::Regular { size: 1000, sparse: true });
    assert!(member.data.is_empty());
    let full = entry(Header::new(b'S', b"f").gnu().octal(483, 12, 4), 386, 0, 4);
    let member = read(&Tar::new().with(full, b"full").end()).silent().one();
    assert_eq!(member.kind(), &EntryKind::Regular { size: 4, sparse: false });
    assert_eq!(member.content(), b"full");
}

#[test]
fn t09_pax_size_is_that_of_the_archive() {
    let records = [PAX_0_1, &[(b"size", b"300")]].concat();
    check(next(Tar::new().pax(&records).bare(Header::file(b"name").size(77)).body(&archived())));
}

#[test]
fn t09_maps_that_lie() {
    let gnu = |segments: &[(u64, u64)], real: u64, archived: usize| {
        let mut header = Header::new(b'S', b"f").gnu().octal(483, 12, real);
        for (i, &(offset, length)) in segments.iter().enumerate() {
            header = entry(header, 386 + 24 * i, offset, length);
        }
        refusal(&Tar::new().with(header, &vec![1; archived]).end())
    };
    assert!(gnu(&[(0, 100), (50, 100)], 1000, 200).contains("tar entry \"f\": bad sparse map: the segment at 50"));
    assert!(gnu(&[(500, 10), (0, 10)], 1000, 20).contains("the segment at 0"));
    assert!(gnu(&[(995, 10)], 1000, 10).contains("it reaches to 1005, the file only to 1000"));
    assert!(gnu(&[(0, 10)], 1000, 11).contains("hold 10 bytes, but the archive has 11"));
    assert!(gnu(&[(0, 10)], 1000, 9).contains("hold 10 bytes, but the archive has 9"));
    let binary = Header::new(b'S', b"f").gnu().octal(483, 12, 9).binary(386, 12, i64::MAX).binary(398, 12, i64::MAX);
    assert!(refusal(&Tar::new().with(binary, b"x").end()).contains("ends past any file"));
    let negative = Header::new(b'S', b"f").gnu().binary(483, 12, -1);
    assert!(refusal(&Tar::new().with(negative, b"").end()).contains("is no number"));
    let ustar = Header::new(b'S', b"f");
    assert!(refusal(&Tar::new().with(ustar, b"").end()).contains("neither GNU's nor star's"));
}

#[test]
fn t09_records_that_lie() {
    let pax =
        |records: &[Record], body: &[u8]| refusal(&Tar::new().pax(records).with(Header::file(b"name"), body).end());
    let without = |records: &[Record<'static>], keyword: &[u8]| -> Vec<Record<'static>> {
        records.iter().copied().filter(|record| record.0 != keyword).collect()
    };
    assert!(pax(&without(PAX_0_1, b"GNU.sparse.size"), &archived()).contains("real size is missing"));
    assert!(pax(&without(PAX_1_0, b"GNU.sparse.minor"), &archived()).contains("its format 1.? is not known"));
    assert!(pax(&without(PAX_0_1, b"GNU.sparse.map"), b"").contains("0 segments where 2 are announced"));
    for (map, why) in
        [(&b"0,100,1000"[..], "without a length"), (b"0,,5,6", "no number"), (b"5,1,0,1", "begins before")]
    {
        assert!(pax(&[(b"GNU.sparse.size", b"5000"), (b"GNU.sparse.map", map)], &archived()).contains(why));
    }
    assert!(pax(&[(b"GNU.sparse.numbytes", b"1")], b"").contains("without a GNU.sparse.offset"));
    let twice: &[Record] = &[(b"GNU.sparse.offset", b"1"), (b"GNU.sparse.offset", b"2")];
    assert!(pax(twice, b"").contains("twice"));
    assert!(pax(&twice[..1], b"").contains("lacks"));
}

#[test]
fn t09_text_maps_that_lie() {
    let text = |map: &[u8]| refusal(&Tar::new().pax(PAX_1_0).with(Header::file(b"x"), &text_map(map)).end());
    assert!(text(b"1\n0\n100\n").contains("tar entry \"real/name\": bad sparse map: its segments hold 100 bytes"));
    assert!(text(b"2\n0\n100\n50\n200\n").contains("begins before"));
    assert!(text(b"3000000\n").contains("a number of sparse segments of 3000000 exceeds the limit of 1048576"));
    assert!(text(b"2\n0\nx\n").contains("decimal"));
    assert!(text(b"2\n0\n").contains("decimal"), "the block's filling is no number");
    let empty = Tar::new().pax(PAX_1_0).with(Header::file(b"x"), b"").end();
    assert!(refusal(&empty).contains("no room"));
    let long = format!("200\n{}", "0\n0\n".repeat(200));
    let short = Tar::new().pax(PAX_1_0).bare(Header::file(b"x").size(100)).body(long.as_bytes()).end();
    assert!(refusal(&short).contains("does not fit"));
}
