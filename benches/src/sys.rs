//! What a process used, from the kernel: the crate's calls into libc.
#![allow(unsafe_code)]

use std::io;
use std::process::ExitStatus;
use std::time::Duration;

/// Processor time and memory of a finished child.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Used {
    /// User and system time of the child and of all its descendants that were waited for.
    pub(crate) cpu: Duration,
    /// Largest resident set of any one of these processes, in bytes.
    ///
    /// Never below ours at the time of the start: a child is a copy of us until it runs its own program. So the process
    /// that measures must stay small, and leave all work to children.
    pub(crate) peak_rss: u64,
}

/// Waits for a child and says what it used.
///
/// Takes the `Child`, since its process id is free for others afterwards.
///
/// # Errors
/// When the kernel refuses, which it does only for a process that is not ours.
pub(crate) fn wait(child: std::process::Child) -> io::Result<(ExitStatus, Used)> {
    use std::os::unix::process::ExitStatusExt as _;
    let pid = i32::try_from(child.id()).map_err(io::Error::other)?;
    let mut status = 0;
    // SAFETY: all-zero bytes are a valid `rusage`, which holds only integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    loop {
        // SAFETY: both pointers are to live, writable locals of the right types.
        let got = unsafe { libc::wait4(pid, &raw mut status, 0, &raw mut usage) };
        if got == pid {
            break;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    Ok((ExitStatus::from_raw(status), used(&usage)))
}

/// Processor time of the calling thread so far, user and system, to the nanosecond.
pub(crate) fn thread_cpu() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a live, writable local of the right type.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(failed, 0, "clock_gettime fails only for a bad pointer or clock");
    Duration::from_secs(time.tv_sec.unsigned_abs()) + Duration::from_nanos(time.tv_nsec.unsigned_abs())
}

/// Processor time of this process so far, all threads, user and system.
pub(crate) fn own_cpu() -> Duration {
    // SAFETY: all-zero bytes are a valid `rusage`, which holds only integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live, writable local of the right type.
    let failed = unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    assert_eq!(failed, 0, "getrusage fails only for a bad pointer or selector");
    used(&usage).cpu
}

fn used(usage: &libc::rusage) -> Used {
    let time = |t: libc::timeval| {
        Duration::from_secs(t.tv_sec.unsigned_abs()) + Duration::from_micros(t.tv_usec.unsigned_abs())
    };
    Used { cpu: time(usage.ru_utime) + time(usage.ru_stime), peak_rss: usage.ru_maxrss.unsigned_abs() * 1024 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_child_is_charged_for_its_own_time_and_memory() {
        let busy = "a=$(head -c 30000000 /dev/zero | tr '\\0' x); echo ${#a} >/dev/null";
        let (status, used) = wait(Command::new("sh").args(["-c", busy]).spawn().unwrap()).unwrap();
        assert!(status.success());
        assert!(used.peak_rss > 30_000_000, "{used:?}");
        assert!(used.cpu > Duration::from_millis(1), "{used:?}");
        let (status, small) = wait(Command::new("false").spawn().unwrap()).unwrap();
        assert_eq!(status.code(), Some(1));
        assert!(small.cpu < used.cpu, "{small:?}");
    }

    #[test]
    fn thread_time_counts_work_and_not_sleep() {
        let before = thread_cpu();
        std::thread::sleep(Duration::from_millis(30));
        let slept = thread_cpu() - before;
        let start = std::time::Instant::now();
        while start.elapsed() < Duration::from_millis(60) {
            std::hint::black_box(start.elapsed());
        }
        assert!(slept < Duration::from_millis(20), "{slept:?}");
        assert!(thread_cpu() - before > slept, "spinning costs processor time");
    }
}
