//! One object of a layer as a source names it: the vocabulary between whoever reads a source ([`crate::tar`], a
//! directory walk) and whoever builds a tree of it ([`crate::tree`]).
//!
//! A source calls an [`EntrySink`] with an entry, then its data, then the end of that entry. Nothing here interprets
//! names: paths, link targets and xattr names are the source's bytes.

/// A point in time: seconds since 1970 (negative before) plus `nanos` in `0..1_000_000_000`, counted forward.
/// So 1.25 s before the epoch is `secs: -2, nanos: 750_000_000`, as the kernel's `timespec64` has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Timestamp {
    /// Whole seconds since the epoch, rounded towards minus infinity.
    pub secs: i64,
    /// Nanoseconds past `secs`.
    pub nanos: u32,
}

/// One extended attribute: full name (`user.mime_type`) and raw value.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Xattr {
    /// Name with its namespace prefix, without a trailing NUL.
    pub name: Vec<u8>,
    /// Value; may be empty.
    pub value: Vec<u8>,
}

/// What kind of object an [`Entry`] is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file; data events follow.
    Regular {
        /// Logical length in bytes, holes included.
        size: u64,
        /// Whether data may be missing (holes); then the data events' offsets jump.
        sparse: bool,
    },
    /// Another name for the object at `target` (a path as the source has it).
    HardLink {
        /// The link name, uninterpreted.
        target: Vec<u8>,
    },
    /// A symbolic link.
    Symlink {
        /// Its text, uninterpreted.
        target: Vec<u8>,
    },
    /// A directory.
    Directory,
    /// A character device.
    CharDevice {
        /// Major number as the source has it (not yet known to be in range).
        major: u64,
        /// Minor number.
        minor: u64,
    },
    /// A block device.
    BlockDevice {
        /// Major number.
        major: u64,
        /// Minor number.
        minor: u64,
    },
    /// A named pipe.
    Fifo,
    /// A Unix socket (no tar has it; directories do).
    Socket,
}

/// One object of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Where in the layer, uninterpreted: may be absolute, may hold `.`, `..` and doubled slashes.
    pub path: Vec<u8>,
    /// What it is.
    pub kind: EntryKind,
    /// Permission bits including setuid, setgid and sticky (`0o7777`).
    pub mode: u16,
    /// Owner, by number.
    pub uid: u32,
    /// Group, by number.
    pub gid: u32,
    /// Modification time.
    pub mtime: Timestamp,
    /// Extended attributes in any order; names are unique.
    pub xattrs: Vec<Xattr>,
}

/// Receives a layer, entry by entry.
///
/// Contract: `entry` first; then, for [`EntryKind::Regular`] only, zero or more `data` calls with rising,
/// non-overlapping offsets inside the entry's size (consecutive unless it is sparse; never empty); then `end_entry`
/// exactly once. All calls come from one thread. After an error nothing more is called.
pub trait EntrySink {
    /// What the sink fails with.
    type Error;

    /// A new object begins.
    ///
    /// # Errors
    /// Whatever makes the sink refuse the entry.
    fn entry(&mut self, entry: Entry) -> Result<(), Self::Error>;

    /// `bytes` belong at `offset` of the current regular file.
    ///
    /// # Errors
    /// As the sink defines, such as a failed write.
    fn data(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Self::Error>;

    /// The current object is complete.
    ///
    /// # Errors
    /// As the sink defines.
    fn end_entry(&mut self) -> Result<(), Self::Error>;
}

/// Something odd that did not stop the conversion; `entry` names where.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Warning {
    /// The entry's path, printable (bytes that are not UTF-8 escaped), or empty for the layer itself.
    pub entry: String,
    /// What was odd and what was done, one sentence without a full stop.
    pub message: String,
}

impl Warning {
    /// A warning about the entry at `path`.
    #[must_use]
    pub fn new(path: &[u8], message: impl Into<String>) -> Self {
        Self { entry: printable(path), message: message.into() }
    }
}

/// `bytes` for a message: valid UTF-8 as it is, control characters and other bytes as `\xNN`, cut at 300 characters.
#[must_use]
pub fn printable(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    let mut out = String::new();
    let mut length = 0;
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            if length >= 300 {
                out.push('…');
                return out;
            }
            length += 1;
            match c {
                '\\' => out.push_str("\\\\"),
                c if c.is_control() => {
                    let mut utf8 = [0u8; 4];
                    for byte in c.encode_utf8(&mut utf8).bytes() {
                        let _ = write!(out, "\\x{byte:02x}");
                    }
                }
                c => out.push(c),
            }
        }
        for byte in chunk.invalid() {
            length += 1;
            let _ = write!(out, "\\x{byte:02x}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printable_names() {
        assert_eq!(printable(b"etc/passwd"), "etc/passwd");
        assert_eq!(printable(b"caf\xe9\n"), "caf\\xe9\\x0a");
        assert_eq!(printable(&[b'a'; 400]).chars().count(), 301);
    }
}
