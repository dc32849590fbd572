//! A strict check of an image's structure.
//!
//! Reads every inode, directory entry, xattr header and chunk index once, no file data.

use super::super::format::{FileType, SEGMENT_SIZE};
use super::{Data, DirEntry, Image, Inode, ReadError, Visit};
use crate::entry::printable;
use crate::read_at::ReadAt;
use std::collections::HashMap;

/// Findings after which the rest are only counted.
const MAX_FINDINGS: usize = 1000;

/// How bad a [`Finding`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Sound EROFS that our writer would not make (a chunk across a segment, fragments, …).
    Foreign,
    /// Wrong: a kernel would refuse it, or show wrong names, attributes or bytes.
    Broken,
}

/// One thing that is wrong with an image.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// The inode it is about.
    pub nid: Option<u64>,
    /// A path of that inode, printable, or empty for the image itself.
    pub path: String,
    /// What is wrong, one sentence without a full stop.
    pub what: String,
}

/// What is known of a device that an image is used with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its length in blocks of the image.
    pub blocks: u64,
    /// Whether chunks follow one another in it without regard to the boundaries of segments, as in the blobs of layers
    /// that were compressed: such a blob cannot be cut there, whether or not any of its chunks is compressed.
    pub packed: bool,
}

/// All findings of [`check`], and what was counted on the way.
#[derive(Debug, Clone, Default)]
pub struct Checked {
    /// What is wrong; at most 1,000 are kept, and then one that says how many more there were.
    pub findings: Vec<Finding>,
    /// Distinct inodes in the tree.
    pub inodes: u64,
    /// Names in the tree, the root not counted.
    pub names: u64,
}

/// Checks the whole structure of `image` against the devices it is to be used with, in device order.
pub fn check<R: ReadAt>(image: &Image<R>, devices: &[DeviceInfo]) -> Vec<Finding> {
    check_counting(image, devices, &mut |_, _| ()).findings
}

/// As [`check`]; calls `on_chunk` with each piece of file data that lies on an extra device: the device, (first block,
/// number of blocks).
pub fn check_counting<R: ReadAt>(
    image: &Image<R>,
    devices: &[DeviceInfo],
    on_chunk: &mut dyn FnMut(u16, (u64, u64)),
) -> Checked {
    let mut checker =
        Checker { image, devices, on_chunk, links: HashMap::new(), checked: Checked::default(), dropped: 0 };
    checker.superblock();
    checker.tree();
    checker.finish()
}

struct Links {
    expected: u32,
    found: u32,
    path: String,
}

struct Checker<'a, R> {
    image: &'a Image<R>,
    devices: &'a [DeviceInfo],
    on_chunk: &'a mut dyn FnMut(u16, (u64, u64)),
    /// Hard link counts of files that say they have several names.
    links: HashMap<u64, Links>,
    checked: Checked,
    dropped: u64,
}

impl<R: ReadAt> Checker<'_, R> {
    fn push(&mut self, severity: Severity, nid: Option<u64>, path: &[u8], what: String) {
        if self.checked.findings.len() < MAX_FINDINGS {
            self.checked.findings.push(Finding { severity, nid, path: printable(path), what });
        } else {
            self.dropped += 1;
        }
    }

    fn broken(&mut self, nid: u64, path: &[u8], what: impl Into<String>) {
        self.push(Severity::Broken, Some(nid), path, what.into());
    }

    fn error(&mut self, path: &[u8], e: &ReadError) {
        let (severity, nid) = match e {
            ReadError::Unsupported { nid, .. } => (Severity::Foreign, Some(*nid)),
            ReadError::Inode { nid, .. } => (Severity::Broken, Some(*nid)),
            _ => (Severity::Broken, None),
        };
        self.push(severity, nid, path, e.to_string());
    }

    fn superblock(&mut self) {
        let sb = self.image.superblock();
        let (bits, blocks, size) = (sb.block_bits, sb.blocks, self.image.size());
        if blocks.checked_mul(1 << bits).is_none_or(|bytes| bytes > size) {
            let what = format!("superblock: blocks: {blocks} blocks, but the image has only {size} bytes");
            self.push(Severity::Broken, None, b"", what);
        } else if size >> bits != blocks {
            let what = format!("superblock: blocks: {blocks} blocks, but the image has {size} bytes");
            self.push(Severity::Foreign, None, b"", what);
        }
        if sb.checksum.is_none() {
            self.push(Severity::Foreign, None, b"", "superblock: it has no checksum".to_owned());
        }
        let table = self.image.devices();
        if table.len() != self.devices.len() {
            let what = format!("the device table has {} devices, {} are given", table.len(), self.devices.len());
            self.push(Severity::Broken, None, b"", what);
        }
        let sizes: Vec<(u64, u64)> =
            table.iter().zip(self.devices).map(|(slot, given)| (slot.blocks, given.blocks)).collect();
        for (id, (expected, given)) in (1u32..).zip(sizes).filter(|(_, (a, b))| a != b) {
            let severity = if given < expected { Severity::Broken } else { Severity::Foreign };
            let what = format!("device {id}: the device table says {expected} blocks, it has {given}");
            self.push(severity, None, b"", what);
        }
    }

    fn tree(&mut self) {
        let mut walk = self.image.walk();
        loop {
            // The borrow of a visit ends before the walk's path is asked for.
            let failed = match walk.next() {
                None => break self.checked.inodes = walk.inodes(),
                Some(Ok(visit)) => {
                    self.visit(&visit);
                    None
                }
                Some(Err(e)) => Some(e),
            };
            if let Some(e) = failed {
                let path = walk.path().to_vec();
                self.error(&path, &e);
            }
        }
    }

    fn visit(&mut self, visit: &Visit<'_>) {
        let Visit { path, inode, .. } = *visit;
        if let Some(entry) = visit.entry {
            self.checked.names += 1;
            if entry.file_type != inode.file_type() {
                let what = format!("the entry's type is {:?}, the inode's {:?}", entry.file_type, inode.file_type());
                self.broken(inode.nid, path, what);
            }
        }
        if visit.first {
            self.inode(path, inode);
        }
        if inode.is_dir() {
            self.directory(path, inode, visit.parent);
        } else if inode.nlink != 1 {
            let links = self.links.entry(inode.nid).or_insert_with(|| Links {
                expected: inode.nlink,
                found: 0,
                path: printable(path),
            });
            links.found += 1;
        } else if !visit.first {
            self.broken(inode.nid, path, "the inode has several names, but its nlink is 1");
        }
    }

    fn inode(&mut self, path: &[u8], inode: &Inode) {
        if inode.mtime.nanos >= 1_000_000_000 {
            self.broken(inode.nid, path, format!("the mtime has {} nanoseconds", inode.mtime.nanos));
        }
        if let Err(e) = self.image.locate_xattrs(inode) {
            self.error(path, &e);
        }
        if inode.file_type() == FileType::Symlink {
            match self.image.read_link(inode) {
                Ok(text) if text.contains(&0) => self.broken(inode.nid, path, "the link's text has a NUL"),
                Ok(_) => {}
                Err(e) => self.error(path, &e),
            }
        }
        self.data(path, inode);
    }

    fn data(&mut self, path: &[u8], inode: &Inode) {
        let bits = self.image.superblock().block_bits;
        let segment = SEGMENT_SIZE >> bits;
        let mut crossing = 0u64;
        for chunk in self.image.chunks(inode) {
            let chunk = match chunk {
                Ok(chunk) => chunk,
                Err(e) => return self.error(path, &e),
            };
            let (device, block, blocks) = match chunk.data {
                Data::Hole | Data::Inline { .. } => continue,
                Data::Block { device, block } => (device, block, chunk.len.div_ceil(1 << bits)),
                Data::Compressed { device, block, blocks, .. } => (device, block, u64::from(blocks)),
            };
            if device == 0 {
                if self.image.is_table_or_superblock(block << bits, blocks << bits) {
                    return self.broken(inode.nid, path, "its data overlaps the superblock or the device table");
                }
                continue;
            }
            let known = self.devices.get(usize::from(device) - 1);
            let cut = known.is_none_or(|d| !d.packed);
            crossing += u64::from(cut && block / segment != (block + blocks - 1) / segment);
            if known.is_some_and(|d| block + blocks > d.blocks) {
                let what = format!("{blocks} blocks from block {block} are not on device {device} as it is");
                return self.broken(inode.nid, path, what);
            }
            (self.on_chunk)(device, (block, blocks));
        }
        if crossing > 0 {
            let what = format!("{crossing} chunks cross a boundary of {SEGMENT_SIZE} bytes of their device");
            self.push(Severity::Foreign, Some(inode.nid), path, what);
        }
    }

    fn directory(&mut self, path: &[u8], inode: &Inode, parent: u64) {
        let Ok(entries) = self.image.dir(inode) else { return };
        let (mut dot, mut dot_dot, mut children) = (None, None, 0u64);
        let mut previous: Option<DirEntry> = None;
        for entry in entries {
            // The walk itself reports what cannot be read.
            let Ok(entry) = entry else { return };
            match entry.name.as_slice() {
                b"." => dot = Some(entry.nid),
                b".." => dot_dot = Some(entry.nid),
                _ => children += u64::from(entry.file_type == FileType::Directory),
            }
            if let Some(previous) = previous.filter(|p| p.name >= entry.name) {
                let (a, b) = (printable(&previous.name), printable(&entry.name));
                self.broken(inode.nid, path, format!("the names `{a}` and `{b}` are not in order"));
            }
            if entry.is_dot() && entry.file_type != FileType::Directory {
                self.broken(inode.nid, path, format!("`{}` is not a directory entry", printable(&entry.name)));
            }
            previous = Some(entry);
        }
        for (name, found, expected) in [(".", dot, inode.nid), ("..", dot_dot, parent)] {
            match found {
                None if name == "." && inode.dot_omitted => {}
                None => self.broken(inode.nid, path, format!("the directory has no `{name}`")),
                Some(nid) if nid != expected => {
                    self.broken(inode.nid, path, format!("`{name}` is inode {nid}, not {expected}"));
                }
                Some(_) => {}
            }
        }
        // 1 stands for "not counted", as on other file systems.
        let nlink = u64::from(inode.nlink);
        if nlink != children + 2 && nlink != 1 {
            self.broken(inode.nid, path, format!("nlink is {nlink}, with {children} directories in it"));
        }
    }

    fn finish(mut self) -> Checked {
        let mut wrong: Vec<(u64, Links)> =
            std::mem::take(&mut self.links).into_iter().filter(|(_, links)| links.expected != links.found).collect();
        wrong.sort_unstable_by_key(|(nid, _)| *nid);
        for (nid, links) in wrong {
            let what = format!("nlink is {}, but the inode has {} names", links.expected, links.found);
            self.broken(nid, b"", what);
            if let Some(last) = self.checked.findings.last_mut().filter(|f| f.nid == Some(nid)) {
                last.path = links.path;
            }
        }
        let (said, found) = (self.image.superblock().inodes, self.checked.inodes);
        if said != found {
            let what = format!("superblock: inos: {said} inodes, but {found} are in the tree");
            self.push(Severity::Broken, None, b"", what);
        }
        if self.dropped > 0 {
            let what = format!("{} more findings are not listed", self.dropped);
            self.checked.findings.push(Finding { severity: Severity::Broken, nid: None, path: String::new(), what });
        }
        self.checked
    }
}
