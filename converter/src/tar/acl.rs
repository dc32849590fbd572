//! POSIX ACLs: the text of `SCHILY.acl.access` and `.default` to the binary that Linux keeps in
//! `system.posix_acl_access` and `_default` (`include/uapi/linux/posix_acl_xattr.h`, version 2).
//!
//! star writes `user:lisa:rwx:502`, with the numeric id last; so does libarchive. GNU tar writes what the C library
//! prints: `user:lisa:rwx`, without the number unless the user had no name. Names mean nothing in a layer (its
//! passwd file may not even be in it), so an ACL that needs one is not converted at all, rather than in part.

use crate::entry::printable;

const VERSION: u32 = 2;
const UNDEFINED_ID: u32 = u32::MAX;

// The tags, in the order in which the kernel wants entries.
const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

/// An ACL, valid as the kernel's `posix_acl_valid` wants it, sorted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Acl {
    entries: Vec<(u16, u32, u16)>,
}

impl Acl {
    /// Reads the text form; the error says why it cannot be converted.
    pub(super) fn parse(text: &[u8]) -> Result<Self, String> {
        let mut entries = Vec::new();
        for line in text.split(|byte| matches!(byte, b'\n' | b',')) {
            let line = line.split(|&byte| byte == b'#').next().unwrap_or_default().trim_ascii();
            if !line.is_empty() {
                entries.push(entry(line)?);
            }
        }
        entries.sort_unstable();
        let count = |tag| entries.iter().filter(|entry| entry.0 == tag).count();
        if [USER_OBJ, GROUP_OBJ, OTHER].into_iter().any(|tag| count(tag) != 1) {
            return Err("it lacks one of its user::, group:: and other:: entries, or has it twice".into());
        }
        let named = count(USER) + count(GROUP);
        if count(MASK) > 1 || (named > 0 && count(MASK) == 0) {
            return Err("it must have exactly one mask:: entry".into());
        }
        if entries.windows(2).any(|pair| matches!(pair, [a, b] if (a.0, a.1) == (b.0, b.1))) {
            return Err("it names a user or a group twice".into());
        }
        Ok(Self { entries })
    }

    /// Whether permission bits say the same: such an access ACL is not stored.
    pub(super) fn is_mode(&self) -> bool {
        self.entries.len() == 3
    }

    /// The permission bits that go with this as an access ACL (the group's are the mask).
    pub(super) fn mode(&self) -> u16 {
        let perm = |tag| self.entries.iter().find(|entry| entry.0 == tag).map(|entry| entry.2);
        let group = perm(MASK).or(perm(GROUP_OBJ)).unwrap_or(0);
        perm(USER_OBJ).unwrap_or(0) << 6 | group << 3 | perm(OTHER).unwrap_or(0)
    }

    /// The xattr's value.
    pub(super) fn to_xattr(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(4 + 8 * self.entries.len());
        out.extend(VERSION.to_le_bytes());
        for &(tag, id, perm) in &self.entries {
            out.extend(tag.to_le_bytes());
            out.extend(perm.to_le_bytes());
            out.extend(id.to_le_bytes());
        }
        out
    }
}

/// `tag:[qualifier]:perms[:id]`, or `mask:perms` and `other:perms` as some systems print them.
fn entry(line: &[u8]) -> Result<(u16, u32, u16), String> {
    let bad = || format!("its entry \"{}\" is no ACL entry", printable(line));
    let fields: Vec<&[u8]> = line.splitn(5, |&byte| byte == b':').map(<[u8]>::trim_ascii).collect();
    let (tag, named) = match *fields.first().ok_or_else(bad)? {
        b"user" | b"u" => (USER_OBJ, USER),
        b"group" | b"g" => (GROUP_OBJ, GROUP),
        b"mask" | b"m" => (MASK, 0),
        b"other" | b"o" => (OTHER, 0),
        _ => return Err(bad()),
    };
    let (qualifier, perms, id) = match *fields.as_slice() {
        [_, perms] if named == 0 => (&[][..], perms, None),
        [_, qualifier, perms] => (qualifier, perms, None),
        [_, qualifier, perms, id] if !qualifier.is_empty() => (qualifier, perms, Some(id)),
        _ => return Err(bad()),
    };
    let perms = permissions(perms).ok_or_else(bad)?;
    if qualifier.is_empty() {
        return Ok((tag, UNDEFINED_ID, perms));
    }
    if named == 0 {
        return Err(bad());
    }
    let number = id.unwrap_or(qualifier);
    let id = super::numbers::decimal(number).and_then(|id| u32::try_from(id).ok()).filter(|&id| id != UNDEFINED_ID);
    match id {
        Some(id) => Ok((named, id, perms)),
        None => Err(format!("its entry \"{}\" has a name but no numeric id", printable(line))),
    }
}

fn permissions(text: &[u8]) -> Option<u16> {
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0, |bits, byte| {
        Some(match byte {
            b'r' => bits | 4,
            b'w' => bits | 2,
            b'x' => bits | 1,
            b'-' => bits,
            _ => return None,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn x06_star_and_numeric_text() {
        let star = b"user::rw-,group::r--,other::r--,user:lisa:r--:502,user:1000:rwx,mask::rwx";
        let gnu = b"user::rw-\nuser:502:r--\t#effective:r--\nuser:1000:rwx\ngroup::r--\nmask::rwx\nother::r--\n";
        let acl = Acl::parse(star).unwrap();
        assert_eq!(acl, Acl::parse(gnu).unwrap());
        assert_eq!(acl.mode(), 0o674);
        assert!(!acl.is_mode());
        let want =
            "0200000001000600ffffffff02000400f601000002000700e803000004000400ffffffff10000700ffffffff20000400ffffffff";
        assert_eq!(hex::encode(acl.to_xattr()), want);
    }

    #[test]
    fn x06_minimal_is_only_a_mode() {
        let acl = Acl::parse(b"u::rwx,g::r-x,o:--x").unwrap();
        assert!(acl.is_mode());
        assert_eq!(acl.mode(), 0o751);
    }

    #[test]
    fn x06_never_half_done() {
        for (text, why) in [
            (&b"user::rwx,user:daemon:r--,group::r-x,mask::rwx,other::r-x"[..], "no numeric id"),
            (b"user::rwx,user:5:r--,group::r-x,other::r-x", "mask::"),
            (b"user::rwx,group::r-x", "lacks"),
            (b"", "lacks"),
            (b"user::rwx,user::rwx,group::r-x,other::r-x", "twice"),
            (b"user::rwx,user:5:r--,user:5:rw-,group::r-x,mask::r,other::r-x", "twice"),
            (b"user::rwz,group::r-x,other::r-x", "rwz"),
            (b"user::,group::r-x,other::r-x", "no ACL entry"),
            (b"owner@:rwx::allow", "no ACL entry"),
            (b"user::rwx,user:5:r--:4294967295,group::r-x,mask::r,other::r-x", "no numeric id"),
        ] {
            let error = Acl::parse(text).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
