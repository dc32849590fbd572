//! An ext4 file system straight into a layer, the same bytes for the same content.
//!
//! mke2fs does the work, given everything that it would otherwise draw or look up: UUID, hash seed, time. What it still
//! takes from the machine are the access and change times of the files that it copies; they become the time of
//! modification. That needs no checksums, since the file system has none (overlaybd's have none either).

use crate::write::WriteError;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use uuid::Uuid;

/// The file system's block.
const BLOCK: u64 = 4096;
/// The smallest disk that is made.
const LEAST: u64 = 1 << 20;

/// What is asked for.
#[derive(Debug, Clone)]
pub struct Ext4 {
    /// Bytes of the disk.
    pub size: u64,
    /// Its name, 16 bytes at most.
    pub label: String,
    /// Its UUID, which the hash of directories is seeded with too.
    pub uuid: Uuid,
    /// Whether it has a journal.
    pub journal: bool,
    /// Seconds since 1970 that it is made at.
    pub time: u32,
    /// Whether files that are younger get that time too.
    pub clamp: bool,
    /// Features for mke2fs besides, as after its `-O`.
    pub features: Option<String>,
}

/// What it holds.
#[derive(Debug, Clone, Copy)]
pub enum Content<'a> {
    /// Nothing but `lost+found`.
    Nothing,
    /// What is in this directory.
    Dir(&'a Path),
    /// What is in this tar, which may be compressed.
    Tar(&'a Path),
}

/// A UUID of no meaning, for those who do not ask for one.
pub const USUAL_UUID: Uuid = Uuid::from_u128(0x6473_6563_0000_4000_8000_6f76_6572_6264);

/// When file systems are made whose maker does not say: the beginning of the year 2000.
pub const USUAL_TIME: u32 = 946_684_800;

/// Why there is no file system.
#[derive(Debug, thiserror::Error)]
pub enum MkfsError {
    /// What was asked for cannot be.
    #[error("{0}")]
    Asked(String),
    /// A program that is needed cannot be started.
    #[error("cannot run {program} (Debian: {package})")]
    Start {
        /// Which.
        program: &'static str,
        /// What has it.
        package: &'static str,
        /// What the system says.
        source: std::io::Error,
    },
    /// A program that is needed says no.
    #[error("{program}: {said}")]
    Program {
        /// Which.
        program: &'static str,
        /// What it said.
        said: String,
    },
    /// The system says no.
    #[error("{what}")]
    Io {
        /// What was tried.
        what: String,
        /// What it says.
        source: std::io::Error,
    },
    /// What mke2fs made is not what is understood here.
    #[error("what mke2fs made is not understood: {0}")]
    NotUnderstood(String),
    /// The layer was not written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> MkfsError {
    let what = what.into();
    |source| MkfsError::Io { what, source }
}

/// Makes the file system in the empty file at `disk`; what needs room for a while is put beside it.
///
/// # Errors
/// A program is missing, or did not succeed; `disk` then holds nothing of use.
pub fn make(disk: &Path, ext4: &Ext4, content: Content<'_>) -> Result<(), MkfsError> {
    if ext4.size < LEAST || !ext4.size.is_multiple_of(BLOCK) {
        return Err(MkfsError::Asked(format!(
            "a file system of {} bytes is not whole blocks of 4 KiB, or too small",
            ext4.size
        )));
    }
    if ext4.label.len() > 16 || ext4.label.contains('\0') {
        return Err(MkfsError::Asked("a label has 16 bytes at most".to_owned()));
    }
    let unpacked;
    let dir = match content {
        Content::Nothing => None,
        Content::Dir(dir) => Some(dir),
        Content::Tar(tar) => {
            unpacked = unpack(tar, disk.parent().unwrap_or(Path::new(".")), ext4.time)?;
            Some(unpacked.path())
        }
    };
    let file = File::options().read(true).write(true).open(disk).map_err(io(disk.display().to_string()))?;
    file.set_len(ext4.size).map_err(io(disk.display().to_string()))?;
    let uuid = ext4.uuid.to_string();
    let extended = format!(
        "hash_seed={uuid},root_owner=0:0,nodiscard,lazy_itable_init=0,lazy_journal_init=0,assume_storage_prezeroed=1"
    );
    let journal = if ext4.journal { "has_journal" } else { "^has_journal" };
    // No checksums, so that times can be set; and none of what mke2fs.conf may add.
    let mut features = format!(
        "none,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,\
                                huge_file,dir_nlink,extra_isize,{journal}"
    );
    if let Some(more) = &ext4.features {
        features = format!("{features},{more},^metadata_csum,^uninit_bg");
    }
    let mut command = Command::new("mke2fs");
    command.env("PATH", path()).env("LC_ALL", "C").env("TZ", "UTC");
    // Not the machine's own.
    command.env("MKE2FS_CONFIG", "/dev/null").env_remove("MKE2FS_SYNC").env_remove("MKE2FS_DEVICE_SECTSIZE");
    // Zero would be "now".
    command.env("E2FSPROGS_FAKE_TIME", ext4.time.max(1).to_string());
    command.env("SOURCE_DATE_EPOCH", ext4.time.max(1).to_string());
    command.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-i", "16384", "-m", "5", "-e", "continue"]);
    command.args(["-U", &uuid, "-E", &extended, "-O", &features, "-L", &ext4.label]);
    if let Some(dir) = dir {
        command.arg("-d").arg(dir);
    }
    command.arg(disk).arg((ext4.size / BLOCK).to_string());
    run(command, "mke2fs", "e2fsprogs")?;
    settle_times(&file, ext4.time.max(1), ext4.clamp)
}

/// Root's tools are not in everyone's PATH.
fn path() -> std::ffi::OsString {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    std::env::join_paths(dirs).unwrap_or(path)
}

fn run(mut command: Command, program: &'static str, package: &'static str) -> Result<(), MkfsError> {
    let output = command.output().map_err(|source| MkfsError::Start { program, package, source })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(MkfsError::Program { program, said: if said.is_empty() { output.status.to_string() } else { said } })
}

/// Unpacks a tar beside the disk. Directories that it only implies get the time that the file system is made at.
fn unpack(tar: &Path, beside: &Path, time: u32) -> Result<tempfile::TempDir, MkfsError> {
    if !rustix::process::geteuid().is_root() {
        return Err(MkfsError::Asked("only root can unpack a tar with its owners; give a directory".to_owned()));
    }
    let dir = tempfile::Builder::new().prefix(".mkfs-").tempdir_in(beside);
    let dir = dir.map_err(io(format!("cannot make a directory in {}", beside.display())))?;
    let began = std::time::SystemTime::now();
    let mut command = Command::new("tar");
    command.arg("-C").arg(dir.path()).args([
        "--numeric-owner",
        "--same-owner",
        "-p",
        "--xattrs",
        "--xattrs-include=*",
        "-xf",
    ]);
    // A name with a colon would be taken for a machine's.
    command.arg(std::path::absolute(tar).map_err(io(tar.display().to_string()))?).arg("--force-local");
    run(command, "tar", "tar")?;
    let seconds = |time: std::time::SystemTime| time.duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let began = seconds(began);
    let mut left = vec![dir.path().to_owned()];
    while let Some(path) = left.pop() {
        let failed = || io(path.display().to_string());
        for entry in std::fs::read_dir(&path).map_err(failed())? {
            let entry = entry.map_err(failed())?;
            if entry.file_type().map_err(failed())?.is_dir() {
                left.push(entry.path());
            }
        }
        // The unpacking itself touched it, and no entry has said otherwise.
        if seconds(path.metadata().and_then(|about| about.modified()).map_err(failed())?) >= began {
            let to = std::time::UNIX_EPOCH + std::time::Duration::from_secs(time.into());
            let times = std::fs::FileTimes::new().set_modified(to);
            File::open(&path).and_then(|dir| dir.set_times(times)).map_err(failed())?;
        }
    }
    Ok(dir)
}

/// Where things are in the superblock, a group descriptor and an inode.
mod at {
    pub(super) const SUPERBLOCK: u64 = 1024;
    pub(super) const INODES: usize = 0;
    pub(super) const LOG_BLOCK_SIZE: usize = 24;
    pub(super) const INODES_PER_GROUP: usize = 40;
    pub(super) const MAGIC: usize = 56;
    pub(super) const INODE_SIZE: usize = 88;
    pub(super) const FEATURE_INCOMPAT: usize = 96;
    pub(super) const FEATURE_RO_COMPAT: usize = 100;
    pub(super) const DESCRIPTOR_SIZE: usize = 254;

    pub(super) const TABLE_LOW: usize = 8;
    pub(super) const TABLE_HIGH: usize = 40;

    pub(super) const MODE: usize = 0;
    pub(super) const ATIME: usize = 8;
    pub(super) const CTIME: usize = 12;
    pub(super) const MTIME: usize = 16;
    pub(super) const CTIME_EXTRA: usize = 132;
    pub(super) const MTIME_EXTRA: usize = 136;
    pub(super) const ATIME_EXTRA: usize = 140;
    pub(super) const CRTIME: usize = 144;
    pub(super) const CRTIME_EXTRA: usize = 148;
}

const METADATA_CSUM: u32 = 0x400;
const IS_64BIT: u32 = 0x80;

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |chunk| u32::from_le_bytes(*chunk))
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |chunk| u16::from_le_bytes(*chunk))
}

/// Sets every inode's times of access and change to that of modification, and that of creation to `time`.
fn settle_times(file: &File, time: u32, clamp: bool) -> Result<(), MkfsError> {
    let not = |what: &str| MkfsError::NotUnderstood(what.to_owned());
    let read = |at: u64, len: usize| {
        let mut bytes = vec![0; len];
        file.read_exact_at(&mut bytes, at).map_err(io("cannot read what mke2fs made"))?;
        Ok::<_, MkfsError>(bytes)
    };
    let superblock = read(at::SUPERBLOCK, 1024)?;
    if u16_at(&superblock, at::MAGIC) != 0xEF53 || 1024u64 << u32_at(&superblock, at::LOG_BLOCK_SIZE).min(8) != BLOCK {
        return Err(not("its superblock"));
    }
    if u32_at(&superblock, at::FEATURE_RO_COMPAT) & METADATA_CSUM != 0 {
        return Err(not("it has checksums"));
    }
    let wide = u32_at(&superblock, at::FEATURE_INCOMPAT) & IS_64BIT != 0;
    let descriptor_size = if wide { usize::from(u16_at(&superblock, at::DESCRIPTOR_SIZE)) } else { 32 };
    let inode_size = usize::from(u16_at(&superblock, at::INODE_SIZE));
    let (inodes, per_group) = (u32_at(&superblock, at::INODES), u32_at(&superblock, at::INODES_PER_GROUP));
    if inode_size != 256 || !(32..=1024).contains(&descriptor_size) || per_group == 0 {
        return Err(not("its sizes"));
    }
    let groups = inodes.div_ceil(per_group);
    let descriptors = read(BLOCK, groups as usize * descriptor_size)?;
    // A disk of terabytes has gigabytes of inodes that nobody wrote: those are holes.
    for descriptor in descriptors.chunks_exact(descriptor_size) {
        let high = if wide { u32_at(descriptor, at::TABLE_HIGH) } else { 0 };
        let start = (u64::from(high) << 32 | u64::from(u32_at(descriptor, at::TABLE_LOW))) * BLOCK;
        let end = start + u64::from(per_group) * inode_size as u64;
        let mut position = start;
        while position < end {
            let data = match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(position)) {
                Ok(data) => data.max(position) / BLOCK * BLOCK,
                Err(rustix::io::Errno::NXIO) => break,
                Err(error) => return Err(io("cannot look for holes")(error.into())),
            };
            if data >= end {
                break;
            }
            let block = usize::try_from(BLOCK).unwrap_or(4096);
            let mut bytes = read(data, block)?;
            let before = bytes.clone();
            bytes.chunks_exact_mut(inode_size).for_each(|inode| settle_inode(inode, time, clamp));
            if bytes != before {
                file.write_all_at(&bytes, data).map_err(io("cannot write what mke2fs made"))?;
            }
            position = data + BLOCK;
        }
    }
    Ok(())
}

fn settle_inode(inode: &mut [u8], time: u32, clamp: bool) {
    if u16_at(inode, at::MODE) == 0 {
        return;
    }
    // Times before 1970 are negative, and times after 2038 have bits elsewhere.
    let (mut seconds, mut extra) = (u32_at(inode, at::MTIME), u32_at(inode, at::MTIME_EXTRA));
    let epoch = i64::from(extra & 3) << 32;
    if clamp && i64::from(seconds.cast_signed()) + epoch > i64::from(time) {
        (seconds, extra) = (time, 0);
    }
    for (at, value) in [
        (at::ATIME, seconds),
        (at::CTIME, seconds),
        (at::MTIME, seconds),
        (at::CTIME_EXTRA, extra),
        (at::MTIME_EXTRA, extra),
        (at::ATIME_EXTRA, extra),
        (at::CRTIME, time),
        (at::CRTIME_EXTRA, 0),
    ] {
        inode[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
}

/// A file beside `out` for the disk, gone when dropped.
///
/// # Errors
/// The directory cannot be written.
pub fn scratch(out: &Path) -> Result<tempfile::NamedTempFile, MkfsError> {
    let dir = out.parent().filter(|dir| !dir.as_os_str().is_empty()).map_or_else(|| PathBuf::from("."), Path::to_owned);
    let file = tempfile::Builder::new().prefix(".mkfs-").suffix(".raw").tempfile_in(&dir);
    file.map_err(io(format!("cannot make a file in {}", dir.display())))
}
