//! Interned sets of extended attributes, and which attributes EROFS can hold.

use crate::entry::Xattr;
use crate::erofs::format::XATTR_PREFIXES;
use std::collections::HashMap;

/// Index of a set in [`XattrSets`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct SetId(u32);

impl SetId {
    /// The empty set.
    pub const EMPTY: Self = Self(0);

    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Distinct sets of extended attributes, each sorted by name, so that the order in the source does not show (X04).
#[derive(Debug)]
pub struct XattrSets {
    sets: Vec<Box<[Xattr]>>,
    index: HashMap<Box<[Xattr]>, SetId>,
    bytes: u64,
}

impl Default for XattrSets {
    fn default() -> Self {
        Self { sets: vec![Box::default()], index: HashMap::from([(Box::default(), SetId::EMPTY)]), bytes: 0 }
    }
}

impl XattrSets {
    /// The set of `xattrs`; of a name that comes twice the last value counts.
    ///
    /// # Panics
    /// When there are 2^32 different sets.
    pub fn intern(&mut self, mut xattrs: Vec<Xattr>) -> SetId {
        if xattrs.is_empty() {
            return SetId::EMPTY;
        }
        xattrs.reverse();
        xattrs.sort_by(|a, b| a.name.cmp(&b.name));
        xattrs.dedup_by(|a, b| a.name == b.name);
        let set = xattrs.into_boxed_slice();
        if let Some(id) = self.index.get(&set) {
            return *id;
        }
        // Twice, since the index has its own.
        self.bytes += 2 * set.iter().map(|x| (x.name.len() + x.value.len()) as u64).sum::<u64>();
        let id = SetId(u32::try_from(self.sets.len()).expect("fewer than 2^32 sets"));
        self.sets.push(set.clone());
        self.index.insert(set, id);
        id
    }

    /// Number of sets; the ids are those below it.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.sets.len()
    }

    /// All sets, by their ids.
    pub(crate) fn all(&self) -> impl ExactSizeIterator<Item = &[Xattr]> {
        self.sets.iter().map(|set| &**set)
    }

    /// Whether any set has an attribute of this name.
    pub(crate) fn any_has(&self, name: &[u8]) -> bool {
        self.sets.iter().any(|set| set.iter().any(|x| x.name == name))
    }

    /// Bytes of all sets' names and values, as they are kept.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The attributes of a set, sorted by name.
    ///
    /// # Panics
    /// When `id` is of another collection.
    #[must_use]
    pub fn get(&self, id: SetId) -> &[Xattr] {
        &self.sets[id.0 as usize]
    }

    /// A set with `name` set to `value` besides what `id` has.
    pub fn with(&mut self, id: SetId, name: &[u8], value: &[u8]) -> SetId {
        let mut xattrs: Vec<Xattr> = self.get(id).iter().filter(|x| x.name != name).cloned().collect();
        xattrs.push(Xattr { name: name.to_vec(), value: value.to_vec() });
        self.intern(xattrs)
    }
}

/// Splits a name into EROFS' prefix number and the rest.
#[must_use]
pub fn split_prefix(name: &[u8]) -> Option<(u8, &[u8])> {
    XATTR_PREFIXES.iter().find_map(|(index, prefix)| {
        let rest = name.strip_prefix(*prefix)?;
        // `user.` alone names nothing; the ACL names stand for themselves and nothing longer.
        (rest.is_empty() != prefix.ends_with(b".")).then_some((*index, rest))
    })
}

/// Why EROFS cannot hold an attribute, or `None` when it can.
#[must_use]
pub fn unrepresentable(xattr: &Xattr) -> Option<&'static str> {
    match split_prefix(&xattr.name) {
        None => Some("its namespace is none of user, trusted, security and the POSIX ACLs"),
        Some((_, rest)) if rest.len() > 255 => Some("its name is longer than 255 bytes"),
        Some(_) if xattr.name.contains(&0) => Some("its name holds a NUL"),
        Some(_) if xattr.value.len() > usize::from(u16::MAX) => Some("its value is longer than 65,535 bytes"),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn x(name: &str, value: &str) -> Xattr {
        Xattr { name: name.into(), value: value.into() }
    }

    #[test]
    fn x04_order_does_not_matter() {
        let mut sets = XattrSets::default();
        let a = sets.intern(vec![x("user.b", "1"), x("user.a", "2")]);
        assert_eq!(sets.intern(vec![x("user.a", "2"), x("user.b", "1")]), a);
        assert_eq!(sets.get(a)[0].name, b"user.a");
        assert_eq!(sets.get(SetId::EMPTY), []);
        assert_eq!(sets.with(SetId::EMPTY, b"user.a", b"2"), sets.intern(vec![x("user.a", "2")]));
        let twice = sets.intern(vec![x("user.a", "old"), x("user.a", "new")]);
        assert_eq!(sets.get(twice)[0].value, b"new");
    }

    #[test]
    fn prefixes() {
        assert_eq!(split_prefix(b"user.mime"), Some((1, &b"mime"[..])));
        assert_eq!(split_prefix(b"system.posix_acl_access"), Some((2, &b""[..])));
        assert_eq!(split_prefix(b"security.capability"), Some((6, &b"capability"[..])));
        for bad in [&b"user."[..], b"system.nfs4_acl", b"btrfs.compression", b"", b"system.posix_acl_accessx"] {
            assert_eq!(split_prefix(bad), None);
        }
    }
}
