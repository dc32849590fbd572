//! Why an entry cannot be part of a tree.

use super::{FOLLOW_MAX, SYMLINK_MAX};

/// Why an entry cannot be part of a tree. All of these are faults of the layer.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// The path or link leaves the layer's root.
    #[error("entry `{path}`: {what} has a `..` component, which could lead out of the image")]
    Escapes {
        /// Of the entry.
        path: String,
        /// `its path` or `its link target`.
        what: &'static str,
    },
    /// A component is too long, or holds a NUL.
    #[error("entry `{path}`: name `{name}` {what}")]
    Name {
        /// Of the entry.
        path: String,
        /// The component.
        name: String,
        /// What is wrong.
        what: &'static str,
    },
    /// A parent is not a directory.
    #[error("entry `{path}`: its parent `{parent}` is not a directory in this layer")]
    ParentNotDirectory {
        /// Of the entry.
        path: String,
        /// The component that is something else.
        parent: String,
    },
    /// Symbolic links lead in a circle.
    #[error("entry `{path}`: more than {FOLLOW_MAX} symbolic links among its parents")]
    SymlinkLoop {
        /// Of the entry.
        path: String,
    },
    /// Only a directory can be the root.
    #[error("entry `{path}` would replace the root with something that is not a directory")]
    Root {
        /// As the source has it.
        path: String,
    },
    /// An entry whose name is empty.
    #[error("an entry has an empty name")]
    EmptyName,
    /// A whiteout of nothing.
    #[error("entry `{path}` is a whiteout that names no file")]
    InvalidWhiteout {
        /// Of the entry.
        path: String,
    },
    /// Hard link to a directory.
    #[error("entry `{path}` is a hard link to the directory `{target}`")]
    LinkToDirectory {
        /// Of the entry.
        path: String,
        /// The link target.
        target: String,
    },
    /// A symbolic link that is empty or longer than the kernel can follow.
    #[error("entry `{path}`: a symbolic link of {len} bytes (must be 1 to {SYMLINK_MAX})")]
    SymlinkLength {
        /// Of the entry.
        path: String,
        /// Its length.
        len: usize,
    },
    /// A device number that Linux does not have.
    #[error("entry `{path}`: device {major}:{minor} is out of range (major to 4095, minor to 1048575)")]
    Device {
        /// Of the entry.
        path: String,
        /// Major number.
        major: u64,
        /// Minor number.
        minor: u64,
    },
    /// Too many of something.
    #[error("entry `{path}`: the layer has more than {limit} {what}")]
    TooMany {
        /// Of the entry.
        path: String,
        /// What is counted.
        what: &'static str,
        /// How many are allowed.
        limit: u64,
    },
}
