//! Taking a root away again.

use crate::MountError;
use crate::mount::table::{self, Mount};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a busy mount is waited for.
const PATIENCE: Duration = Duration::from_secs(1);
/// The most users of a busy mount that are named.
const USERS_NAMED: usize = 5;

/// What was unmounted.
#[derive(Debug, serde::Serialize)]
pub struct Unmounted {
    /// Where it was.
    pub mountpoint: PathBuf,
    /// `overlay` or `erofs`.
    pub kind: String,
    /// The writable layer's `upper` directory, which stays.
    pub upper: Option<PathBuf>,
    /// Whether it was only detached, and ends when its last user does.
    pub lazy: bool,
}

/// Unmounts the root at `path`; its layers and loop devices go with it. With `lazy`, it is detached at once and ends
/// when its last user does. Otherwise a busy one is waited for, up to a second.
///
/// # Errors
/// [`MountError::Mountpoint`] when nothing of ours is mounted there, [`MountError::Busy`] when it is in use.
pub fn umount(path: &Path, lazy: bool) -> Result<Unmounted, MountError> {
    let canonical = fs::canonicalize(path).map_err(MountError::io("find", path))?;
    let fail = |why: String| MountError::Mountpoint { path: path.to_owned(), why };
    let mounts = table::read()?;
    // The last one is the topmost.
    let mount = mounts.iter().rev().find(|mount| mount.target == canonical);
    let mount = mount.ok_or_else(|| fail("nothing is mounted there".to_owned()))?;
    if !mount.is_ours() {
        let (kind, source) = (&mount.fs_type, mount.source.display());
        return Err(fail(format!("what is mounted there ({kind} of {source}) is not a root that layerd mounted")));
    }
    let how = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match unmount_patiently(&canonical, how | UnmountFlags::NOFOLLOW) {
        Ok(()) => Ok(Unmounted { mountpoint: canonical, kind: mount.fs_type.clone(), upper: mount.upper_dir(), lazy }),
        Err(Errno::BUSY) => Err(MountError::Busy { users: users(&canonical, &mounts), path: path.to_owned() }),
        Err(errno) => {
            Err(MountError::Kernel { what: format!("unmount {}", path.display()), errno, log: String::new() })
        }
    }
}

/// Unmounts, and waits a moment where the mount is busy: processes that were just killed let go of it late, and so do
/// children between `fork` and `exec`, which hold every file that their parent had open.
fn unmount_patiently(path: &Path, flags: UnmountFlags) -> Result<(), Errno> {
    let start = Instant::now();
    loop {
        match unmount(path, flags) {
            Err(Errno::BUSY) if start.elapsed() < PATIENCE => std::thread::sleep(PATIENCE / 50),
            done => return done,
        }
    }
}

/// Who uses the mount at `path`: mounts below it, and processes with their root, working directory, program or an open
/// file in it. Only what we may see; a hint, not the truth.
fn users(path: &Path, mounts: &[Mount]) -> Vec<String> {
    let below = mounts.iter().filter(|mount| mount.target != path && mount.target.starts_with(path));
    let mut users: Vec<String> = below.map(|mount| format!("{} is mounted below it", mount.target.display())).collect();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        if let Some(how) = how_used(&process.path(), path) {
            let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            users.push(format!("process {pid} ({}) {how}", name.trim_end()));
        }
    }
    if users.len() > USERS_NAMED {
        let more = users.len() - USERS_NAMED;
        users.truncate(USERS_NAMED);
        users.push(format!("and {more} more"));
    }
    users
}

fn how_used(process: &Path, path: &Path) -> Option<&'static str> {
    let inside = |link: &Path| fs::read_link(link).is_ok_and(|target| target.starts_with(path));
    for (link, how) in [("root", "has it as its root"), ("cwd", "works in it"), ("exe", "runs a program of it")] {
        if inside(&process.join(link)) {
            return Some(how);
        }
    }
    let open = fs::read_dir(process.join("fd")).into_iter().flatten().flatten().any(|entry| inside(&entry.path()));
    open.then_some("has a file of it open")
}
