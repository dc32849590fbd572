//! A supervisor, for where there is no systemd: it starts the daemon again when it dies.

use std::io;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};
use tokio::process::Child;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Before the first restart; it doubles with every one, up to the longest.
const FIRST: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_secs(5);
/// A daemon that lived so long starts again at once.
const LONG_ENOUGH: Duration = Duration::from_secs(30);

/// How long to wait before the daemon is started again, by how long it lived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    next: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { next: FIRST }
    }
}

impl Patience {
    /// After a life of `lived`.
    pub fn after(&mut self, lived: Duration) -> Duration {
        if lived >= LONG_ENOUGH {
            self.next = FIRST;
        }
        let wait = self.next;
        self.next = (self.next * 2).min(LONGEST);
        wait
    }
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

/// Runs `daemon`, again and again, until it is told to end or ends by itself with 0 or 2 (a wrong call: no use). Signals
/// go on to the daemon. Returns how it ended.
///
/// # Errors
/// When it cannot be started at all.
pub fn supervise(daemon: &mut Command) -> io::Result<ExitStatus> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut signals = Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        };
        let mut daemon = tokio::process::Command::from(std::mem::replace(daemon, Command::new("")));
        let mut patience = Patience::default();
        loop {
            let born = Instant::now();
            let mut child = daemon.spawn()?;
            let (status, told) = watch(&mut child, &mut signals).await?;
            if told || matches!(status.code(), Some(0 | 2)) {
                return Ok(status);
            }
            let wait = patience.after(born.elapsed());
            tracing::error!("the daemon ended ({status}); it is started again in {wait:?}");
            let told = tokio::select! {
                () = tokio::time::sleep(wait) => false,
                _ = signals.terminate.recv() => true,
                _ = signals.interrupt.recv() => true,
            };
            if told {
                return Ok(status);
            }
        }
    })
}

/// Waits for its end, and hands signals on; whether it was told to end.
async fn watch(child: &mut Child, signals: &mut Signals) -> io::Result<(ExitStatus, bool)> {
    use rustix::process::{Pid, Signal, kill_process};
    let mut told = false;
    loop {
        let hand_on = tokio::select! {
            status = child.wait() => return Ok((status?, told)),
            _ = signals.terminate.recv() => Signal::TERM,
            _ = signals.interrupt.recv() => Signal::INT,
            _ = signals.hangup.recv() => Signal::HUP,
        };
        told |= hand_on != Signal::HUP;
        let pid = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        if let Some(pid) = pid {
            // It may have ended meanwhile.
            let _ = kill_process(pid, hand_on);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_grows_and_is_won_back() {
        let mut patience = Patience::default();
        let waits: Vec<_> = (0..10).map(|_| patience.after(Duration::ZERO).as_millis()).collect();
        assert_eq!(waits, [20, 40, 80, 160, 320, 640, 1280, 2560, 5000, 5000]);
        assert_eq!(patience.after(LONG_ENOUGH), FIRST);
    }

    #[test]
    fn what_dies_is_started_again_and_what_ends_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let script =
            format!("echo x >> {0}; test $(wc -l < {0}) -ge 4 || kill -9 $$", dir.path().join("lives").display());
        let status = supervise(Command::new("sh").args(["-c", &script])).unwrap();
        assert!(status.success());
        assert_eq!(std::fs::read_to_string(dir.path().join("lives")).unwrap().lines().count(), 4);
        assert_eq!(supervise(Command::new("sh").args(["-c", "exit 2"])).unwrap().code(), Some(2));
    }
}
