//! Extended attributes as EROFS lays them out: shared ones once, the others beside their inode.

use super::format::{XattrEntry, XattrHeader};
use crate::entry::Xattr;
use crate::tree::xattrs::split_prefix;
use std::collections::HashMap;
use zerocopy::IntoBytes as _;

const HEADER: usize = size_of::<XattrHeader>();

/// Bytes of one attribute's record, padded to 4.
fn record_len(xattr: &Xattr) -> usize {
    let rest = split_prefix(&xattr.name).map_or(0, |(_, rest)| rest.len());
    (size_of::<XattrEntry>() + rest + xattr.value.len()).next_multiple_of(4)
}

/// Bytes of the inline area for `xattrs` when none of them is shared; 0 for none.
#[must_use]
pub fn unshared_area(xattrs: &[Xattr]) -> usize {
    if xattrs.is_empty() { 0 } else { HEADER + xattrs.iter().map(record_len).sum::<usize>() }
}

fn push_record(out: &mut Vec<u8>, xattr: &Xattr) {
    let (index, rest) = split_prefix(&xattr.name).expect("only representable names reach the writer");
    let entry = XattrEntry {
        name_len: u8::try_from(rest.len()).expect("checked: at most 255"),
        name_index: index,
        value_size: u16::try_from(xattr.value.len()).expect("checked: at most 65,535").into(),
    };
    out.extend_from_slice(entry.as_bytes());
    out.extend_from_slice(rest);
    out.extend_from_slice(&xattr.value);
    out.resize(out.len().next_multiple_of(4), 0);
}

/// The shared area of an image, and which attributes are in it.
#[derive(Debug, Default)]
pub struct Shared<'t> {
    ids: HashMap<&'t Xattr, u32>,
    /// The area's bytes.
    pub area: Vec<u8>,
}

impl<'t> Shared<'t> {
    /// Shares every attribute for which that makes the image smaller. `uses` has each set in use with the number of
    /// inodes that have it.
    pub fn choose(uses: impl IntoIterator<Item = (&'t [Xattr], u64)>) -> Self {
        let mut counts: HashMap<&Xattr, u64> = HashMap::new();
        for (set, inodes) in uses {
            for xattr in set {
                *counts.entry(xattr).or_default() += inodes;
            }
        }
        let mut chosen: Vec<&Xattr> = counts
            .into_iter()
            .filter(|(xattr, n)| {
                let len = record_len(xattr) as u64;
                // Shared: one record and a 4-byte id each. Else: a record each.
                *n > 1 && len + 4 * n < len * n
            })
            .map(|(xattr, _)| xattr)
            .collect();
        chosen.sort();
        let mut shared = Self::default();
        for xattr in chosen {
            let Ok(id) = u32::try_from(shared.area.len() / 4) else { break };
            shared.ids.insert(xattr, id);
            push_record(&mut shared.area, xattr);
        }
        shared
    }

    /// An inode's inline area: header, ids of shared attributes, records of the others. Empty for none.
    ///
    /// # Panics
    /// When a set holds an attribute that [`crate::tree::xattrs::unrepresentable`] reports.
    #[must_use]
    pub fn inline_area(&self, set: &[Xattr]) -> Vec<u8> {
        if set.is_empty() {
            return Vec::new();
        }
        // The header counts shared ids in one byte.
        let ids: Vec<u32> = set.iter().filter_map(|x| self.ids.get(x).copied()).take(255).collect();
        let mut header = XattrHeader { name_filter: 0.into(), shared_count: 0, reserved: [0; 7] };
        header.shared_count = u8::try_from(ids.len()).expect("at most 255 were taken");
        let mut out = Vec::with_capacity(HEADER + 4 * ids.len());
        out.extend_from_slice(header.as_bytes());
        for id in &ids {
            out.extend_from_slice(&id.to_le_bytes());
        }
        let mut taken = 0;
        for xattr in set {
            if self.ids.contains_key(xattr) && taken < 255 {
                taken += 1;
            } else {
                push_record(&mut out, xattr);
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn x(name: &str, value: &[u8]) -> Xattr {
        Xattr { name: name.into(), value: value.to_vec() }
    }

    #[test]
    fn sharing_pays_or_is_not_done() {
        let one = [x("user.a", b"")];
        let long = [x("user.long", &[7; 100])];
        let shared = Shared::choose([(&one[..], 2), (&long[..], 2)]);
        // `user.a` is a record of 8 bytes: 8 + 2 * 4 is no less than 2 * 8.
        assert_eq!(shared.ids.len(), 1);
        assert_eq!(shared.area.len(), 4 + 4 + 100);
        assert_eq!(shared.inline_area(&long).len(), 12 + 4);
        assert_eq!(shared.inline_area(&one).len(), unshared_area(&one));
        assert_eq!(shared.inline_area(&[]).len(), 0);
    }

    #[test]
    fn many_shared_ids_overflow_into_records() {
        let set: Vec<Xattr> = (0..300).map(|i| x(&format!("user.{i:03}"), b"0123456789")).collect();
        let shared = Shared::choose([(&set[..], 5)]);
        assert_eq!(shared.ids.len(), 300);
        assert_eq!(shared.inline_area(&set).len(), 12 + 4 * 255 + 45 * record_len(&set[0]));
    }
}
