//! A layer that is a directory of this machine, read as it lies there.
//!
//! Names are not interpreted (a file may be called `.wh.x`), owners are numbers, holes stay holes, and everything is
//! read through descriptors of its parent, so that nothing is followed out of the directory. Entries come in tree
//! order. File systems mounted below are part of it, as for `tar` without `--one-file-system`.

use super::LayerError;
use super::out::BlobOut;
use super::sink::Sink;
use crate::entry::{Entry, EntryKind, EntrySink as _, Timestamp, Warning, Xattr};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use std::collections::HashMap;
use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

const BUFFER: usize = 256 << 10;
/// Directories kept open at a time: trees may be deeper than a process may have files.
const OPEN_LEVELS: usize = 64;

struct Walker<'w, 's, 'f> {
    root: &'w Path,
    sink: &'w mut Sink<'f>,
    out: &'w mut BlobOut<'s>,
    read: &'w mut dyn FnMut(u64),
    warnings: &'w mut Vec<Warning>,
    /// First path of each inode that has several.
    links: HashMap<(u64, u64), Vec<u8>>,
    /// Of the object at hand, from the root.
    path: Vec<u8>,
    buffer: Vec<u8>,
}

/// A directory whose names are still to be visited, in reverse order.
struct Level {
    /// `None` while the walk is more than [`OPEN_LEVELS`] below.
    directory: Option<OwnedFd>,
    /// Device and inode number, by which it is known again.
    id: (u64, u64),
    names: Vec<CString>,
    /// Length of its path.
    base: usize,
}

pub(super) fn walk(
    root: &Path,
    sink: &mut Sink<'_>,
    out: &mut BlobOut<'_>,
    read: &mut dyn FnMut(u64),
    warnings: &mut Vec<Warning>,
) -> Result<(), LayerError> {
    let mut walker =
        Walker { root, sink, out, read, warnings, links: HashMap::new(), path: Vec::new(), buffer: vec![0; BUFFER] };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(root, flags, Mode::empty()).map_err(|e| walker.fail("open", e.into()))?;
    let stat = rustix::fs::fstat(&directory).map_err(|e| walker.fail("stat", e.into()))?;
    walker.put(&directory, c".", &stat, EntryKind::Directory)?;
    walker.sink.end_entry()?;
    let mut levels = vec![walker.level(directory, &stat)?];
    while let Some(level) = levels.last_mut() {
        walker.path.truncate(level.base);
        let Some(name) = level.names.pop() else {
            let done = levels.pop().expect("it is the last one");
            if let Some(above) = levels.last_mut() {
                walker.come_back(&done, above)?;
            }
            continue;
        };
        let directory = level.directory.take().expect("the last level is open");
        if !walker.path.is_empty() {
            walker.path.push(b'/');
        }
        walker.path.extend_from_slice(name.as_bytes());
        let below = walker.visit(&directory, &name)?;
        level.directory = Some(directory);
        if let Some(below) = below {
            levels.push(below);
            if let Some(far) = levels.len().checked_sub(OPEN_LEVELS + 1) {
                levels[far].directory = None;
            }
        }
    }
    Ok(())
}

impl Walker<'_, '_, '_> {
    fn here(&self) -> PathBuf {
        if self.path.is_empty() { self.root.to_owned() } else { self.root.join(OsStr::from_bytes(&self.path)) }
    }

    fn fail(&self, op: &'static str, source: io::Error) -> LayerError {
        LayerError::Source { op, path: self.here(), source }
    }

    /// Opens `above` again, from the directory in it that is done with.
    fn come_back(&self, done: &Level, above: &mut Level) -> Result<(), LayerError> {
        if above.directory.is_some() {
            return Ok(());
        }
        let below = done.directory.as_ref().expect("the last level is open");
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory =
            rustix::fs::openat(below, c"..", flags, Mode::empty()).map_err(|e| self.fail("leave", e.into()))?;
        let stat = rustix::fs::fstat(&directory).map_err(|e| self.fail("stat", e.into()))?;
        if (stat.st_dev, stat.st_ino) != above.id {
            return Err(LayerError::Changed { path: self.here(), what: "was moved" });
        }
        above.directory = Some(directory);
        Ok(())
    }

    fn level(&self, directory: OwnedFd, stat: &Stat) -> Result<Level, LayerError> {
        let mut names = Vec::new();
        let entries = Dir::read_from(&directory).map_err(|e| self.fail("list", e.into()))?;
        for entry in entries {
            let entry = entry.map_err(|e| self.fail("list", e.into()))?;
            let name = entry.file_name();
            if name != c"." && name != c".." {
                names.push(name.to_owned());
            }
        }
        names.sort_unstable_by(|a, b| b.as_bytes().cmp(a.as_bytes()));
        Ok(Level { directory: Some(directory), id: (stat.st_dev, stat.st_ino), names, base: self.path.len() })
    }

    fn visit(&mut self, parent: &OwnedFd, name: &CString) -> Result<Option<Level>, LayerError> {
        let stat =
            rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).map_err(|e| self.fail("stat", e.into()))?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind != FileType::Directory && stat.st_nlink > 1 {
            let id = (stat.st_dev, stat.st_ino);
            if let Some(first) = self.links.get(&id) {
                let link = EntryKind::HardLink { target: first.clone() };
                self.put(parent, name, &stat, link)?;
                self.sink.end_entry()?;
                return Ok(None);
            }
            self.links.insert(id, self.path.clone());
        }
        let device = || (u64::from(rustix::fs::major(stat.st_rdev)), u64::from(rustix::fs::minor(stat.st_rdev)));
        let entry = match kind {
            FileType::Directory => EntryKind::Directory,
            FileType::RegularFile => EntryKind::Regular { size: stat.st_size.cast_unsigned(), sparse: true },
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(parent, name, Vec::new())
                    .map_err(|e| self.fail("read the link", e.into()))?;
                EntryKind::Symlink { target: target.into_bytes() }
            }
            FileType::CharacterDevice => {
                let (major, minor) = device();
                EntryKind::CharDevice { major, minor }
            }
            FileType::BlockDevice => {
                let (major, minor) = device();
                EntryKind::BlockDevice { major, minor }
            }
            FileType::Fifo => EntryKind::Fifo,
            FileType::Socket => EntryKind::Socket,
            FileType::Unknown => return Err(self.fail("name the type of", io::ErrorKind::Unsupported.into())),
        };
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match kind {
            FileType::RegularFile => {
                // Not to wait for a writer, should it be a pipe by now.
                let flags = flags | OFlags::NONBLOCK;
                let file = rustix::fs::openat(parent, name, flags | OFlags::NOATIME, Mode::empty())
                    .or_else(|_| rustix::fs::openat(parent, name, flags, Mode::empty()))
                    .map_err(|e| self.fail("open", e.into()))?;
                self.same(&file, &stat)?;
                self.put(parent, name, &stat, entry)?;
                self.contents(&File::from(file), stat.st_size.cast_unsigned())?;
                self.sink.end_entry()?;
                self.out.drain(b"", b"", self.sink.blob.segments())?;
                Ok(None)
            }
            FileType::Directory => {
                let directory = rustix::fs::openat(parent, name, flags | OFlags::DIRECTORY, Mode::empty())
                    .map_err(|e| self.fail("open", e.into()))?;
                self.same(&directory, &stat)?;
                self.put(parent, name, &stat, entry)?;
                self.sink.end_entry()?;
                self.level(directory, &stat).map(Some)
            }
            _ => {
                self.put(parent, name, &stat, entry)?;
                self.sink.end_entry()?;
                Ok(None)
            }
        }
    }

    /// What was opened must be what was looked at.
    fn same(&self, opened: &OwnedFd, stat: &Stat) -> Result<(), LayerError> {
        let now = rustix::fs::fstat(opened).map_err(|e| self.fail("stat", e.into()))?;
        if (now.st_dev, now.st_ino, now.st_size) == (stat.st_dev, stat.st_ino, stat.st_size)
            || FileType::from_raw_mode(now.st_mode) == FileType::Directory && now.st_ino == stat.st_ino
        {
            Ok(())
        } else {
            Err(LayerError::Changed { path: self.here(), what: "was replaced" })
        }
    }

    fn put(&mut self, parent: &OwnedFd, name: &std::ffi::CStr, stat: &Stat, kind: EntryKind) -> Result<(), LayerError> {
        let xattrs = match kind {
            EntryKind::HardLink { .. } => Vec::new(),
            _ => self.xattrs(parent, name)?,
        };
        let path = if self.path.is_empty() { b".".to_vec() } else { self.path.clone() };
        let nanos = u32::try_from(stat.st_mtime_nsec).unwrap_or(0);
        self.sink.entry(Entry {
            path,
            kind,
            mode: u16::try_from(stat.st_mode & 0o7777).unwrap_or(0),
            uid: stat.st_uid,
            gid: stat.st_gid,
            mtime: Timestamp { secs: stat.st_mtime, nanos },
            xattrs,
        })
    }

    fn xattrs(&mut self, parent: &OwnedFd, name: &std::ffi::CStr) -> Result<Vec<Xattr>, LayerError> {
        // There is no `*xattrat` before Linux 6.13; the parent's descriptor in /proc is the same thing.
        let mut path = format!("/proc/self/fd/{}/", parent.as_fd().as_raw_fd()).into_bytes();
        path.extend_from_slice(name.to_bytes());
        let path = CString::new(path).map_err(|_| self.fail("name", io::ErrorKind::InvalidInput.into()))?;
        let mut list = vec![0u8; 64 << 10];
        let len = match rustix::fs::llistxattr(&path, &mut list[..]) {
            Ok(len) => len,
            Err(rustix::io::Errno::NOTSUP) => 0,
            Err(e) => return Err(self.fail("list the extended attributes of", e.into())),
        };
        let mut xattrs = Vec::new();
        for name in list[..len].split(|b| *b == 0).filter(|n| !n.is_empty()) {
            let c_name = CString::new(name).map_err(|_| self.fail("name", io::ErrorKind::InvalidInput.into()))?;
            let mut value = vec![0u8; 64 << 10];
            match rustix::fs::lgetxattr(&path, &c_name, &mut value[..]) {
                Ok(len) => {
                    value.truncate(len);
                    xattrs.push(Xattr { name: name.to_vec(), value });
                }
                // Gone since it was listed, or a namespace that is listed but not to be read.
                Err(rustix::io::Errno::NODATA | rustix::io::Errno::NOTSUP | rustix::io::Errno::PERM) => {
                    let what =
                        format!("extended attribute `{}` cannot be read; left out", crate::entry::printable(name));
                    self.warnings.push(Warning::new(&self.path, what));
                }
                Err(e) => return Err(self.fail("read an extended attribute of", e.into())),
            }
        }
        Ok(xattrs)
    }

    /// Reads `size` bytes, where there are any: holes are skipped.
    fn contents(&mut self, file: &File, size: u64) -> Result<(), LayerError> {
        let mut at = 0;
        while at < size {
            let (start, end) = match next_data(file, at) {
                Ok(Some((start, end))) => (start, end.min(size)),
                Ok(None) => break,
                Err(e) => return Err(self.fail("find the data of", e)),
            };
            at = start;
            while at < end {
                let want = usize::try_from((end - at).min(BUFFER as u64)).expect("at most the buffer");
                let read = file.read_at(&mut self.buffer[..want], at).map_err(|e| self.fail("read", e))?;
                if read == 0 {
                    return Err(LayerError::Changed { path: self.here(), what: "became shorter" });
                }
                let buffer = std::mem::take(&mut self.buffer);
                let stored = self.sink.data(at, &buffer[..read]);
                self.buffer = buffer;
                stored?;
                self.out.drain(b"", b"", self.sink.blob.segments())?;
                (self.read)(read as u64);
                at += read as u64;
            }
        }
        let now = file.metadata().map_err(|e| self.fail("stat", e))?.len();
        if now == size { Ok(()) } else { Err(LayerError::Changed { path: self.here(), what: "changed its size" }) }
    }
}

/// The next stretch of data at or after `at`; `None` when only a hole is left.
fn next_data(file: &File, at: u64) -> io::Result<Option<(u64, u64)>> {
    use rustix::fs::SeekFrom;
    match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(start) => {
            let end = rustix::fs::seek(file, SeekFrom::Hole(start))?;
            Ok(Some((start, end)))
        }
        Err(rustix::io::Errno::NXIO) => Ok(None),
        // A file system that does not know holes: all is data.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOTSUP) => Ok(Some((at, u64::MAX))),
        Err(e) => Err(e.into()),
    }
}
