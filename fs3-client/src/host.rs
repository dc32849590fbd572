//! Which process of which machine this is, as names of files and leases tell it.

use std::fs;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What stands for a machine that has no identity.
pub(crate) const NO_MACHINE: &str = "none";

/// Names this boot of this machine: the start of the kernel's random boot id.
///
/// Where the kernel tells none, nothing can be told apart: then the process stands for itself, and its sweeps remove
/// only what it left itself.
pub(crate) fn boot() -> &'static str {
    static BOOT: OnceLock<String> = OnceLock::new();
    BOOT.get_or_init(|| {
        let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let hex: String = id.chars().filter(char::is_ascii_hexdigit).take(16).collect();
        if hex.len() == 16 { hex } else { format!("p{}x{}", std::process::id(), start()) }
    })
}

/// Names this machine over all its boots: a hash of `/etc/machine-id`, which is not to be told to others as it is
/// (machine-id(5)); `none` where there is no such file. Machines that were cloned may have the same.
pub(crate) fn machine() -> &'static str {
    static MACHINE: OnceLock<String> = OnceLock::new();
    MACHINE.get_or_init(|| {
        let id = fs::read_to_string("/etc/machine-id").unwrap_or_default();
        let id = id.trim();
        if id.len() < 32 {
            return NO_MACHINE.to_owned();
        }
        crate::Digest::of(format!("dsec store {id}").as_bytes()).hex()[..12].to_owned()
    })
}

/// The machine's name, for people.
pub(crate) fn name() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").map_or_else(|_| "unknown".to_owned(), |name| name.trim().to_owned())
}

/// When this boot began, to the second (`btime` of `/proc/stat`).
pub(crate) fn booted() -> Option<SystemTime> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    let seconds = stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(UNIX_EPOCH + Duration::from_secs(seconds))
}

/// Nanoseconds of the clock when the process first asked. Process ids are used again, and this keeps two processes
/// that had the same one from ever making the same name.
fn start() -> u64 {
    static START: OnceLock<u64> = OnceLock::new();
    *START.get_or_init(|| {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| {
            since.as_secs().wrapping_mul(1_000_000_000).wrapping_add(u64::from(since.subsec_nanos()))
        })
    })
}

/// A name that no other process on any machine makes, and this one never again:
/// `<boot>-<machine>.<pid>.<counter>.<purpose>`.
pub(crate) fn new_name(purpose: &str) -> String {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let counter = start().wrapping_add(COUNTER.fetch_add(1, Ordering::Relaxed));
    let purpose: String =
        purpose.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '-' }).take(32).collect();
    format!("{}-{}.{}.{counter:x}.{purpose}", boot(), machine(), std::process::id())
}

/// Who made a name.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Writer {
    /// The machine's boot.
    pub(crate) boot: String,
    /// The machine, or [`NO_MACHINE`].
    pub(crate) machine: String,
    /// The process.
    pub(crate) pid: u32,
}

impl Writer {
    /// This process.
    pub(crate) fn here() -> Self {
        Self { boot: boot().to_owned(), machine: machine().to_owned(), pid: std::process::id() }
    }

    /// Who made `name`; `None` when [`new_name`] did not. Names of version 0.1 have no machine.
    pub(crate) fn of(name: &str) -> Option<Self> {
        let mut parts = name.splitn(4, '.');
        let (place, pid, counter, _purpose) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        u64::from_str_radix(counter, 16).ok()?;
        let (boot, machine) = place.split_once('-').unwrap_or((place, NO_MACHINE));
        (!boot.is_empty()).then(|| pid.parse().ok())?.map(|pid| Self {
            boot: boot.to_owned(),
            machine: machine.to_owned(),
            pid,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_their_writer() {
        let name = new_name("a purpose/with.dots");
        assert_eq!(Writer::of(&name), Some(Writer::here()), "{name}");
        assert!(name.ends_with(".a-purpose-with-dots"), "{name}");
        let old = Writer::of("ffffffffffffffff.1.0.other-machine").unwrap();
        assert_eq!((old.boot.as_str(), old.machine.as_str(), old.pid), ("ffffffffffffffff", NO_MACHINE, 1));
        for foreign in ["README", "", "a.b.c.d", ".1.0.x", "x.1.zz.y", "x.-1.0.y"] {
            assert_eq!(Writer::of(foreign), None, "{foreign}");
        }
        assert!(booted().is_some_and(|time| time < SystemTime::now()));
    }
}
