//! A disk as one file, for hosts whose kernel has no ublk: to be loop-mounted, or given to QEMU or Firecracker.
//!
//! The mount point is a regular file, and the root of the file system is that file: nothing else is in it. Reads and writes
//! go past the page cache, since whoever uses a disk has a cache above it; writes to different places go side by side.
//! `fsync` is a flush, `fallocate` with a hole a discard, with zeros zeros.

use crate::engine::{Device, EngineError};
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, INodeNo, KernelConfig,
    LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyOpen, ReplyWrite, Request, WriteFlags,
};
use rustix::mount::UnmountFlags;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// How long the kernel may remember what a file is: nothing about it changes.
const TTL: Duration = Duration::from_secs(3600);

/// The file system whose root is the disk.
struct OneFile {
    device: Arc<Device>,
    made: SystemTime,
}

impl OneFile {
    fn attributes(&self) -> FileAttr {
        let size = self.device.size();
        // Whose it is does not change.
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let allocated = self.device.stat().map_or(size, |stat| stat.allocated);
        FileAttr {
            ino: INodeNo::ROOT,
            size,
            blocks: allocated.div_ceil(512),
            atime: self.made,
            mtime: self.made,
            ctime: self.made,
            crtime: self.made,
            kind: FileType::RegularFile,
            perm: if self.device.is_read_only() { 0o400 } else { 0o600 },
            nlink: 1,
            uid,
            gid,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

fn number(what: &str, error: &EngineError) -> Errno {
    let errno = error.errno();
    if errno == libc::EIO {
        tracing::warn!(%error, "{what}");
    } else {
        // Whoever asked is told, and may ask as often as it likes.
        tracing::debug!(%error, "{what}");
    }
    Errno::from_i32(errno)
}

fn answer(what: &str, result: Result<(), EngineError>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(number(what, &error)),
    }
}

impl Filesystem for OneFile {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // What the kernel does not know it refuses, and goes on with less.
        let _ = config.set_max_background(128);
        let _ = config.set_congestion_threshold(96);
        let _ = config.set_max_write(1 << 20);
        Ok(())
    }

    fn getattr(&self, _req: &Request, _ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attributes());
    }

    fn setattr(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<fuser::TimeOrNow>,
        _mtime: Option<fuser::TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        // A disk keeps its size; times are nobody's business.
        if size.is_some_and(|size| size != self.device.size()) {
            return reply.error(Errno::EPERM);
        }
        reply.attr(&TTL, &self.attributes());
    }

    fn open(&self, _req: &Request, _ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if self.device.is_read_only() && flags.0 & libc::O_ACCMODE != libc::O_RDONLY {
            return reply.error(Errno::EROFS);
        }
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);
    }

    fn read(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let len = u64::from(size).min(self.device.size().saturating_sub(offset));
        // At most what was asked for, which the kernel bounds.
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
        match self.device.read(&mut bytes, offset) {
            Ok(()) => reply.data(&bytes),
            Err(error) => reply.error(number("a read failed", &error)),
        }
    }

    fn write(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if offset.checked_add(data.len() as u64).is_none_or(|end| end > self.device.size()) {
            return reply.error(Errno::ENOSPC);
        }
        match self.device.write(data, offset, false) {
            // What a request has, the kernel bounds.
            Ok(()) => reply.written(u32::try_from(data.len()).unwrap_or(u32::MAX)),
            Err(error) => reply.error(number("a write failed", &error)),
        }
    }

    fn flush(&self, _req: &Request, _ino: INodeNo, _fh: FileHandle, _lock_owner: LockOwner, reply: ReplyEmpty) {
        // Somebody closes the file, which promises nothing.
        reply.ok();
    }

    fn fsync(&self, _req: &Request, _ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        answer("a flush failed", self.device.flush(), reply);
    }

    fn fallocate(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let len = length.min(self.device.size().saturating_sub(offset));
        let keeps = mode & libc::FALLOC_FL_KEEP_SIZE;
        match mode & !libc::FALLOC_FL_KEEP_SIZE {
            // A hole must read as zeros, so its ends are written where they are no whole sectors.
            libc::FALLOC_FL_PUNCH_HOLE if keeps != 0 => {
                answer("a discard failed", self.device.write_zeroes(offset, len, false), reply);
            }
            libc::FALLOC_FL_ZERO_RANGE if keeps != 0 || len == length => {
                answer("zeroing failed", self.device.write_zeroes(offset, len, false), reply);
            }
            _ => reply.error(Errno::EOPNOTSUPP),
        }
    }
}

/// Takes away what a server that was killed left at `file`: a mount that answers nobody. Whether there was one.
///
/// # Errors
/// What the system says.
pub fn clear(file: &Path) -> io::Result<bool> {
    match rustix::fs::stat(file) {
        Err(rustix::io::Errno::NOTCONN) => {
            rustix::mount::unmount(file, UnmountFlags::DETACH)?;
            Ok(true)
        }
        _ => Ok(false),
    }
}

/// A disk that is shown as a file.
#[derive(Debug)]
pub struct Exposed {
    session: BackgroundSession,
    unmounter: Unmounter,
}

/// Takes away the file of a disk, from any thread.
#[derive(Debug, Clone)]
pub struct Unmounter {
    file: PathBuf,
}

impl Unmounter {
    /// Tries to: `false` if somebody has the file open. With `detach` it is not asked for, and the disk is served until they
    /// are done.
    ///
    /// # Errors
    /// What the system says.
    pub fn unmount(&self, detach: bool) -> io::Result<bool> {
        let flags = if detach { UnmountFlags::DETACH } else { UnmountFlags::empty() };
        match rustix::mount::unmount(&self.file, flags) {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::BUSY) => Ok(false),
            // It is gone already.
            Err(rustix::io::Errno::INVAL) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }
}

impl Exposed {
    /// Shows `device` as `file`, a regular file, whose contents are hidden meanwhile; `threads` requests are served at once.
    ///
    /// # Errors
    /// The file is none, or the system does not mount it.
    pub fn new(device: Arc<Device>, file: &Path, threads: usize) -> io::Result<Self> {
        let file = file.canonicalize()?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let mut config = Config::default();
        let access = if device.is_read_only() { MountOption::RO } else { MountOption::RW };
        let name = MountOption::FSName("ublk-overlaybd".to_owned());
        config.mount_options = vec![name, access, MountOption::NoAtime];
        config.n_threads = Some(threads.max(1));
        config.clone_fd = true;
        let session = fuser::spawn_mount(OneFile { device, made: SystemTime::now() }, &file, &config)?;
        Ok(Self { session, unmounter: Unmounter { file } })
    }

    /// What takes the file away.
    #[must_use]
    pub fn unmounter(&self) -> Unmounter {
        self.unmounter.clone()
    }

    /// Waits until the file is taken away and all requests have ended.
    ///
    /// # Errors
    /// What serving it ended with.
    pub fn wait(self) -> io::Result<()> {
        self.session.join()
    }
}
