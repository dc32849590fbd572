//! Removing what dead writers left in `tmp/`.
//!
//! When does a file there have no writer any more?
//!
//! * *Made in this boot of this machine*: when its lock can be had, since the kernel drops a lock with its process. On
//!   3FS a lock ends at the mount, of which a machine may have several; there the rule for other machines holds.
//! * *Made in an earlier boot of this machine*: when it was last written before the present boot began. A machine that
//!   was cloned with its identity may be alive and look like this one, but then it writes now, or has a lease.
//! * *Made elsewhere*: when it was last written a day ago.
//!
//! In the last two cases it stays as long as its writer's lease lives, whatever its age.

use super::staged::no_locks_here;
use super::{Rules, StoreDir, StoreError};
use crate::host::{self, NO_MACHINE, Writer};
use std::collections::HashSet;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// How old a file of another machine has to be, if its writer has no lease.
const ELSEWHERE: Duration = Duration::from_secs(24 * 3600);

/// What a [`StoreDir::sweep`] found in `tmp/`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Swept {
    /// Leftovers removed.
    pub removed: usize,
    /// Files whose writer lives.
    pub alive: usize,
    /// Files of other machines or earlier boots, of which nothing is certain; and names that no writer of ours makes.
    pub foreign: usize,
}

/// What is known of a file by its name and its age.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// Its lock tells.
    Locked,
    /// Nobody writes it.
    Dead,
    /// Somebody may.
    Unknown,
}

/// What a verdict depends on, besides the file.
struct Here<'l> {
    boot: &'l str,
    machine: &'l str,
    booted: Option<SystemTime>,
    now: SystemTime,
    rules: Rules,
    /// Writers that have a lease.
    leased: HashSet<(String, u32)>,
}

impl Here<'_> {
    fn judge(&self, writer: &Writer, modified: SystemTime) -> Verdict {
        if writer.boot == self.boot && self.rules == Rules::Posix {
            return Verdict::Locked;
        }
        if self.leased.contains(&(writer.boot.clone(), writer.pid)) {
            return Verdict::Unknown;
        }
        let earlier_boot = writer.machine == self.machine && self.machine != NO_MACHINE && writer.boot != self.boot;
        let before = self.booted.is_some_and(|booted| modified < booted);
        let old = self.now.duration_since(modified).is_ok_and(|age| age >= ELSEWHERE);
        if (earlier_boot && before) || old { Verdict::Dead } else { Verdict::Unknown }
    }
}

impl StoreDir {
    /// Removes what dead writers left in `tmp/`. A living writer's file is never touched, so this may run at any time,
    /// beside any number of writers and other sweeps.
    ///
    /// # Errors
    /// What the system says; files that vanish meanwhile are not errors.
    pub fn sweep(&self) -> Result<Swept, StoreError> {
        let tmp = self.tmp();
        let mut swept = Swept::default();
        let entries = match fs::read_dir(&tmp) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(swept),
            Err(e) => return Err(StoreError::io("list", &tmp, e)),
        };
        let here = Here {
            boot: host::boot(),
            machine: host::machine(),
            booted: host::booted(),
            now: SystemTime::now(),
            rules: self.rules(),
            leased: self.leases(true)?.into_iter().map(|lease| (lease.boot, lease.pid)).collect(),
        };
        for entry in entries {
            let entry = entry.map_err(|e| StoreError::io("list", &tmp, e))?;
            let writer = entry.file_name().to_str().and_then(Writer::of);
            let (Some(writer), true) = (writer, entry.file_type().is_ok_and(|kind| kind.is_file())) else {
                swept.foreign += 1;
                continue;
            };
            let modified = match entry.metadata().and_then(|meta| meta.modified()) {
                Ok(modified) => modified,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(StoreError::io("stat", &entry.path(), e)),
            };
            let removed = match here.judge(&writer, modified) {
                Verdict::Unknown => {
                    swept.foreign += 1;
                    continue;
                }
                Verdict::Locked => remove_unlocked(&entry.path()),
                Verdict::Dead => fs::remove_file(entry.path()).map(|()| true),
            };
            match removed {
                Ok(true) => swept.removed += 1,
                Ok(false) => swept.alive += 1,
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(StoreError::io("remove", &entry.path(), e)),
            }
        }
        Ok(swept)
    }
}

/// Removes the file unless its writer lives; tells whether it did.
pub(super) fn remove_unlocked(path: &Path) -> io::Result<bool> {
    // The lock is held until the file is gone.
    let file = File::open(path)?;
    if !can_lock(&file)? {
        return Ok(false);
    }
    fs::remove_file(path)?;
    Ok(true)
}

/// Whether the file's writer is dead.
pub(super) fn is_unlocked(path: &Path) -> io::Result<bool> {
    can_lock(&File::open(path)?)
}

fn can_lock(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(e)) if no_locks_here(&e) => Ok(false),
        Err(TryLockError::Error(e)) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts() {
        let now = SystemTime::now();
        let ago = |seconds| now - Duration::from_secs(seconds);
        let here = |rules| Here {
            boot: "now",
            machine: "this",
            booted: Some(ago(1000)),
            now,
            rules,
            leased: HashSet::from([("leased".to_owned(), 7)]),
        };
        let judge = |rules, boot: &str, machine: &str, pid, age| {
            here(rules).judge(&Writer { boot: boot.to_owned(), machine: machine.to_owned(), pid }, ago(age))
        };
        let (posix, fs3) = (Rules::Posix, Rules::Fs3);
        let day = ELSEWHERE.as_secs();
        assert_eq!(judge(posix, "now", "this", 1, 0), Verdict::Locked);
        assert_eq!(judge(posix, "now", "other", 1, 10 * day), Verdict::Locked);
        assert_eq!(judge(posix, "before", "this", 1, 1001), Verdict::Dead);
        assert_eq!(judge(posix, "before", "this", 1, 999), Verdict::Unknown, "a clone of this machine writes now");
        assert_eq!(judge(posix, "leased", "this", 7, 10 * day), Verdict::Unknown);
        assert_eq!(judge(posix, "leased", "this", 8, 1001), Verdict::Dead, "another process of that boot");
        assert_eq!(judge(posix, "x", "other", 1, 1001), Verdict::Unknown);
        assert_eq!(judge(posix, "x", "other", 1, day), Verdict::Dead);
        assert_eq!(judge(posix, "leased", "other", 7, 10 * day), Verdict::Unknown);
        assert_eq!(judge(fs3, "now", "this", 1, 1001), Verdict::Unknown, "its lock may be on another mount");
        assert_eq!(judge(fs3, "now", "this", 1, day), Verdict::Dead);
        let nameless = Here { machine: NO_MACHINE, ..here(posix) };
        let writer = Writer { boot: "x".to_owned(), machine: NO_MACHINE.to_owned(), pid: 1 };
        assert_eq!(nameless.judge(&writer, ago(1001)), Verdict::Unknown);
    }
}
