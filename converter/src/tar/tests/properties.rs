//! Random archives, sound and broken.

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;

use super::*;
use crate::entry::{Timestamp, Xattr};
use crate::fuzzing;

/// An entry and its data, as the writer below can put it.
#[derive(Debug, Clone)]
struct Wanted {
    entry: Entry,
    data: Vec<u8>,
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![vec(1u8.., 1..120), vec(b'a'..=b'f', 1..20), vec(b'x'..=b'z', 200..400)]
}

fn kind(data: usize) -> impl Strategy<Value = EntryKind> {
    let size = data as u64;
    prop_oneof![
        4 => Just(EntryKind::Regular { size, sparse: false }),
        1 => Just(EntryKind::Directory),
        1 => Just(EntryKind::Fifo),
        1 => name().prop_map(|target| EntryKind::Symlink { target }),
        1 => name().prop_map(|target| EntryKind::HardLink { target }),
        1 => (0..1u64 << 40, 0..1u64 << 20).prop_map(|(major, minor)| EntryKind::CharDevice { major, minor }),
        1 => (0..256u64, 0..256u64).prop_map(|(major, minor)| EntryKind::BlockDevice { major, minor }),
    ]
}

fn wanted() -> impl Strategy<Value = Wanted> {
    let xattr_name = vec(prop_oneof![b'!'..=b'~', Just(b'%'), Just(b'='), 0x80u8..], 1..12);
    let xattrs = btree_map(xattr_name, vec(any::<u8>(), 0..40), 0..4);
    let owner = (0u16..0o10000, any::<u32>(), any::<u32>());
    (name(), vec(any::<u8>(), 0..2000), owner, any::<i64>(), 0u32..1_000_000_000, xattrs).prop_flat_map(
        |(path, data, (mode, uid, gid), secs, nanos, xattrs)| {
            kind(data.len()).prop_map(move |kind| {
                let xattrs = xattrs.iter().map(|(name, value)| Xattr { name: name.clone(), value: value.clone() });
                let mtime = Timestamp { secs: secs >> 8, nanos };
                let entry = Entry { path: path.clone(), kind, mode, uid, gid, mtime, xattrs: xattrs.collect() };
                let file = matches!(entry.kind, EntryKind::Regular { .. });
                Wanted { entry, data: if file { data.clone() } else { Vec::new() } }
            })
        },
    )
}

fn pax_time(time: Timestamp) -> String {
    let nanos = i128::from(time.secs) * 1_000_000_000 + i128::from(time.nanos);
    let sign = if nanos < 0 { "-" } else { "" };
    format!("{sign}{}.{:09}", nanos.unsigned_abs() / 1_000_000_000, nanos.unsigned_abs() % 1_000_000_000)
}

fn escape(name: &[u8]) -> Vec<u8> {
    name.iter()
        .flat_map(|byte| match byte {
            b'%' => b"%25".to_vec(),
            b'=' => b"%3D".to_vec(),
            byte => vec![*byte],
        })
        .collect()
}

/// Writes `wanted` with everything in PAX records, or with what can be in GNU's way.
fn write(archive: Tar, wanted: &Wanted, gnu: bool) -> Tar {
    let entry = &wanted.entry;
    let (typeflag, link, device): (u8, &[u8], _) = match &entry.kind {
        EntryKind::Regular { .. } => (b'0', b"", None),
        EntryKind::HardLink { target } => (b'1', target, None),
        EntryKind::Symlink { target } => (b'2', target, None),
        EntryKind::CharDevice { major, minor } => (b'3', b"", Some((*major, *minor))),
        EntryKind::BlockDevice { major, minor } => (b'4', b"", Some((*major, *minor))),
        EntryKind::Directory => (b'5', b"", None),
        EntryKind::Fifo | EntryKind::Socket => (b'6', b"", None),
    };
    let mut header = Header::new(typeflag, b"short").mode(entry.mode.into());
    let mut records: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
    if let Some((major, minor)) = device {
        header = header.binary(329, 8, major.cast_signed()).binary(337, 8, minor.cast_signed());
    }
    for xattr in &entry.xattrs {
        records.push(([b"SCHILY.xattr.", &escape(&xattr.name)[..]].concat(), xattr.value.clone()));
    }
    let mut archive = archive;
    if gnu {
        header = header.gnu().binary(108, 8, entry.uid.into()).binary(116, 8, entry.gid.into());
        archive = archive.long(b'L', &entry.path);
        if !link.is_empty() {
            archive = archive.long(b'K', link);
        }
    } else {
        records.push((b"path".to_vec(), entry.path.clone()));
        records.push((b"linkpath".to_vec(), link.to_vec()));
        records.push((b"uid".to_vec(), entry.uid.to_string().into_bytes()));
        records.push((b"gid".to_vec(), entry.gid.to_string().into_bytes()));
    }
    if entry.mtime.nanos == 0 && gnu {
        header = header.binary(136, 12, entry.mtime.secs);
    } else {
        records.push((b"mtime".to_vec(), pax_time(entry.mtime).into_bytes()));
    }
    let records: Vec<(&[u8], &[u8])> = records.iter().map(|(keyword, value)| (&keyword[..], &value[..])).collect();
    let archive = if records.is_empty() { archive } else { archive.pax(&records) };
    archive.with(header, &wanted.data)
}

fn fuzz(seed: u64, archive: &[u8]) {
    fuzzing::tar::tar(&[&seed.to_le_bytes()[..], archive].concat());
}

/// Sound archives of every kind of member, for mutation.
fn seeds() -> Vec<Vec<u8>> {
    let sparse = Header::new(b'S', b"sparse").gnu().octal(483, 12, 5000).put(482, b"\x01");
    let sparse = sparse.octal(386, 12, 0).octal(398, 12, 100);
    let gnu = Tar::new().bare(Header::new(b'V', b"label").gnu()).long(b'L', &[b'l'; 300]).long(b'K', b"target");
    let gnu = gnu.bare(Header::new(b'2', b"x").gnu()).with(Header::new(b'D', b"d").gnu(), b"Yf\0\0");
    let gnu = gnu.bare(sparse.size(100)).raw(&[0; 512]).body(&[1; 100]).with(Header::file(b"f"), b"data");
    let pax = Tar::new().global(&[(b"mtime", b"1.5")]).pax(&[
        (b"path", b"some/path"),
        (b"SCHILY.xattr.user.a", b"b"),
        (b"LIBARCHIVE.xattr.user.a", b"Yg"),
        (b"SCHILY.acl.access", b"user::rwx,user:7:r--,group::r-x,mask::r,other::---"),
    ]);
    let pax = pax.with(Header::file(b"f"), &[3; 700]);
    let map: &[Record] = &[(b"GNU.sparse.size", b"900"), (b"GNU.sparse.map", b"1,2,800,1")];
    let pax = pax.pax(map).with(Header::file(b"g"), b"abc");
    let text: &[Record] = &[(b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0"), (b"GNU.sparse.realsize", b"90")];
    let pax = pax.pax(text).with(Header::file(b"h"), &Tar::new().body(b"1\n5\n3\n").raw(b"xyz").0);
    vec![gnu.end(), pax.end()]
}

/// Puts right the checksums of all blocks that begin like a header, so that mutations get past them.
fn repair(archive: &mut [u8]) {
    for block in archive.as_chunks_mut::<512>().0 {
        if block[257..].starts_with(b"ustar") {
            block[148..156].fill(b' ');
            let sum: u64 = block.iter().map(|&byte| u64::from(byte)).sum();
            block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
    }
}

#[test]
fn the_seeds_are_sound() {
    for archive in seeds() {
        read(&archive);
        fuzz(7, &archive);
    }
}

const KEYWORDS: &[&[u8]] = &[
    b"path",
    b"size",
    b"mtime",
    b"uid",
    b"GNU.sparse.map",
    b"GNU.sparse.size",
    b"GNU.sparse.major",
    b"GNU.sparse.minor",
    b"GNU.sparse.offset",
    b"GNU.sparse.numbytes",
    b"SCHILY.acl.access",
    b"SCHILY.xattr.user.a",
    b"LIBARCHIVE.xattr.user.a",
    b"GNU.sparse.realsize",
];

proptest! {
    #[test]
    fn entries_come_back(wanted in vec((wanted(), any::<bool>()), 0..6)) {
        let archive = wanted.iter().fold(Tar::new(), |archive, (wanted, gnu)| write(archive, wanted, *gnu)).end();
        let read = read_cut(&archive, archive.len()).unwrap();
        prop_assert_eq!(read.members.len(), wanted.len());
        for (member, (wanted, _)) in read.members.iter().zip(&wanted) {
            prop_assert_eq!(&member.entry, &wanted.entry);
            if matches!(member.kind(), EntryKind::Regular { .. }) {
                prop_assert_eq!(member.content(), &wanted.data[..]);
            }
        }
    }

    #[test]
    fn cuts_make_no_difference(wanted in vec((wanted(), any::<bool>()), 1..5), seed: u64) {
        let archive = wanted.iter().fold(Tar::new(), |archive, (wanted, gnu)| write(archive, wanted, *gnu)).end();
        fuzz(seed, &archive);
    }

    #[test]
    fn any_bytes(seed: u64, archive in vec(any::<u8>(), 0..3000)) {
        fuzz(seed, &archive);
    }

    #[test]
    fn mutated_archives(
        seed: u64,
        which in 0..2usize,
        repaired: bool,
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut archive = seeds().remove(which);
        for (at, byte) in &changes {
            *at.get_mut(&mut archive) = *byte;
        }
        if repaired {
            repair(&mut archive);
        }
        if let Some(cut) = cut {
            archive.truncate(cut.index(archive.len()));
        }
        fuzz(seed, &archive);
    }

    #[test]
    fn any_records(seed: u64, body in vec(prop_oneof![
        vec(any::<u8>(), 0..30),
        (prop::sample::select(KEYWORDS), prop_oneof!["[0-9]{0,4}", "[0-9,]{0,12}", "-?[0-9.]{1,8}", "[a-z:,-]{0,20}"])
            .prop_map(|(keyword, value)| archive::pax_record(keyword, value.as_bytes())),
    ], 0..6), global: bool, data in vec(any::<u8>(), 0..600)) {
        let typeflag = if global { b'g' } else { b'x' };
        let archive = Tar::new().with(Header::new(typeflag, b"h"), &body.concat()).with(Header::file(b"f"), &data).end();
        fuzz(seed, &archive);
    }
}
