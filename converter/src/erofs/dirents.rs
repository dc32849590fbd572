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

/// Packs directories one after the other.
#[derive(Debug, Default)]
pub struct Packer {
    /// The names of the block at hand, and its bytes.
    names: Vec<u8>,
    entries: Vec<(u64, u16, FileType)>,
    out: Vec<u8>,
}

impl Packer {
    /// Calls `emit` with each block's bytes: all but the last padded with zeros to the block size.
    ///
    /// # Errors
    /// What `emit` fails with.
    pub fn pack<'n, E>(
        &mut self,
        names: impl Iterator<Item = Name<'n>>,
        mut emit: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.names.clear();
        self.entries.clear();
        for name in names {
            if (self.entries.len() + 1) * ENTRY + self.names.len() + name.name.len() > BLOCK {
                self.encode();
                self.out.resize(BLOCK, 0);
                emit(&self.out)?;
            }
            let start = u16::try_from(self.names.len()).expect("inside a block");
            self.entries.push((name.nid, start, name.file_type));
            self.names.extend_from_slice(name.name);
        }
        self.encode();
        emit(&self.out)
    }

    fn encode(&mut self) {
        self.out.clear();
        let names_at = u16::try_from(self.entries.len() * ENTRY).expect("inside a block");
        for (nid, start, file_type) in self.entries.drain(..) {
            let entry = Dirent {
                nid: nid.into(),
                name_offset: (names_at + start).into(),
                file_type: file_type as u8,
                reserved: 0,
            };
            self.out.extend_from_slice(entry.as_bytes());
        }
        self.out.append(&mut self.names);
    }
}

/// As [`Packer::pack`], for one directory.
///
/// # Errors
/// What `emit` fails with.
pub fn pack<'n, E>(names: impl Iterator<Item = Name<'n>>, emit: impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
    Packer::default().pack(names, emit)
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
