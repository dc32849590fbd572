//! Directory blocks: arrays of fixed-size entries, then their names; sorted bytewise, `.` and `..` included.

use super::format::{BLOCK_SIZE, Dirent, FileType};
use zerocopy::IntoBytes as _;

const ENTRY: usize = size_of::<Dirent>();
const BLOCK: usize = BLOCK_SIZE as usize;

/// One name as a directory block has it.
#[derive(Debug, Clone, Copy)]
pub struct Name<'n> {
    /// The name.
    pub name: &'n [u8],
    /// The node it leads to.
    pub nid: u64,
    /// What that is.
    pub file_type: FileType,
}

/// Puts `.` and `..` among names that are sorted bytewise: not in front, since `!` and `#` sort before `.`.
pub fn with_dots<'n>(
    names: impl Iterator<Item = Name<'n>> + Clone,
    itself: u64,
    parent: u64,
) -> impl Iterator<Item = Name<'n>> + Clone {
    let dot = |name: &'static [u8], nid| Name { name, nid, file_type: FileType::Directory };
    let mut dots = [dot(b".", itself), dot(b"..", parent)].into_iter().peekable();
    let mut names = names.peekable();
    std::iter::from_fn(move || match (dots.peek(), names.peek()) {
        (Some(dot), Some(name)) if name.name < dot.name => names.next(),
        (Some(_), _) => dots.next(),
        (None, _) => names.next(),
    })
}

/// Bytes of a directory with these name lengths (in order, dots included): whole blocks, and what the last one holds.
pub fn packed_size(lengths: impl Iterator<Item = usize>) -> u64 {
    let (mut full, mut used) = (0u64, 0usize);
    for len in lengths {
        if used + ENTRY + len > BLOCK {
            full += 1;
            used = 0;
        }
        used += ENTRY + len;
    }
    full * BLOCK as u64 + used as u64
}

/// Calls `emit` with each block's bytes: all but the last padded with zeros to the block size.
///
/// # Errors
/// What `emit` fails with.
pub fn pack<'n, E>(
    names: impl Iterator<Item = Name<'n>>,
    mut emit: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut block: Vec<Name<'n>> = Vec::new();
    let mut used = 0;
    let mut out = Vec::with_capacity(BLOCK);
    for name in names {
        if used + ENTRY + name.name.len() > BLOCK {
            encode(&block, &mut out);
            out.resize(BLOCK, 0);
            emit(&out)?;
            block.clear();
            used = 0;
        }
        used += ENTRY + name.name.len();
        block.push(name);
    }
    encode(&block, &mut out);
    emit(&out)
}

fn encode(names: &[Name<'_>], out: &mut Vec<u8>) {
    out.clear();
    let mut offset = names.len() * ENTRY;
    for name in names {
        let entry = Dirent {
            nid: name.nid.into(),
            name_offset: u16::try_from(offset).expect("inside a block").into(),
            file_type: name.file_type as u8,
            reserved: 0,
        };
        out.extend_from_slice(entry.as_bytes());
        offset += name.name.len();
    }
    for name in names {
        out.extend_from_slice(name.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&'static [u8]]) -> Vec<Name<'static>> {
        list.iter().map(|name| Name { name, nid: 7, file_type: FileType::Regular }).collect()
    }

    #[test]
    fn dots_are_sorted_in() {
        let list = names(&[b"!", b"#x", b".!", b".a", b"a"]);
        let sorted: Vec<&[u8]> = with_dots(list.into_iter(), 1, 2).map(|n| n.name).collect();
        assert_eq!(sorted, [&b"!"[..], b"#x", b".", b".!", b"..", b".a", b"a"]);
        assert!(sorted.is_sorted());
    }

    #[test]
    fn size_is_what_is_packed() {
        for count in [0, 1, 10, 15, 16, 17, 340, 5000] {
            let list: Vec<String> = (0..count).map(|i| format!("{i:0250}")).collect();
            let iter = list.iter().map(|n| Name { name: n.as_bytes(), nid: 0, file_type: FileType::Regular });
            let all = with_dots(iter, 0, 0);
            let mut bytes = Vec::new();
            pack(all.clone(), |b| {
                bytes.extend_from_slice(b);
                Ok::<_, ()>(())
            })
            .unwrap();
            assert_eq!(bytes.len() as u64, packed_size(all.map(|n| n.name.len())), "{count}");
        }
    }
}
