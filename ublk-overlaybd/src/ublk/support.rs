//! What this kernel's ublk can do, and whether it is to be trusted.

use libublk::ctrl::UblkCtrl;
use libublk::sys;
use std::path::Path;

/// The control device.
const CONTROL: &str = "/dev/ublk-control";

/// What the kernel said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Support {
    features: u64,
}

/// Why there are no devices on this kernel.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Unsupported {
    /// No driver.
    #[error("this kernel ({release}) has no {CONTROL}: load the module `ublk_drv`, or use `ublk-overlaybd fuse`")]
    NoDriver {
        /// As `uname -r` has it.
        release: String,
    },
    /// A driver that does not answer.
    #[error("the ublk driver of this kernel ({release}) does not answer: {CONTROL} needs root or a udev rule")]
    NoAnswer {
        /// As `uname -r` has it.
        release: String,
    },
    /// A kernel that crashes.
    #[error("ublk crashes kernel {release} when a device is added: update it, or use `ublk-overlaybd fuse`")]
    KnownBad {
        /// As `uname -r` has it.
        release: String,
    },
    /// Too old.
    #[error(
        "the ublk driver of this kernel ({release}) cannot keep devices when their process dies: Linux 6.3 or later"
    )]
    NoRecovery {
        /// As `uname -r` has it.
        release: String,
    },
}

impl Support {
    /// Asks the kernel.
    ///
    /// # Errors
    /// When it cannot have devices that survive their process.
    pub fn probe() -> Result<Self, Unsupported> {
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        if is_known_bad(&release) {
            return Err(Unsupported::KnownBad { release });
        }
        if !Path::new(CONTROL).exists() {
            return Err(Unsupported::NoDriver { release });
        }
        match UblkCtrl::get_features() {
            Some(features) => Self::of(features, release),
            None => Err(Unsupported::NoAnswer { release }),
        }
    }

    fn of(features: u64, release: String) -> Result<Self, Unsupported> {
        let support = Self { features };
        let recovery = sys::UBLK_F_USER_RECOVERY | sys::UBLK_F_USER_RECOVERY_REISSUE;
        if support.has(recovery) { Ok(support) } else { Err(Unsupported::NoRecovery { release }) }
    }

    fn has(self, flags: u32) -> bool {
        self.features & u64::from(flags) == u64::from(flags)
    }

    /// What there is to be said against this kernel, which is used all the same.
    #[must_use]
    pub fn doubt(self) -> Option<String> {
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        may_crash_at_a_death(&release).then(|| {
            format!(
                "the ublk driver of kernel {release} may crash when a daemon is killed in the middle of requests: Linux 6.15 \
                 or later does not"
            )
        })
    }

    /// Whether a live device can change its size.
    #[must_use]
    pub fn resizes(self) -> bool {
        self.has(sys::UBLK_F_UPDATE_SIZE)
    }

    /// What devices are asked for: to outlive their process, and to have what was under way served again.
    pub(super) fn flags(self) -> u64 {
        let mut flags = sys::UBLK_F_USER_RECOVERY | sys::UBLK_F_USER_RECOVERY_REISSUE;
        // A kernel ignores what it does not know, and then the library waits for ever: ask for nothing that is not there.
        if self.has(sys::UBLK_F_QUIESCE) {
            flags |= sys::UBLK_F_QUIESCE;
        }
        flags.into()
    }
}

/// Whether the driver may use a command after it is freed when its server dies, as all did before 6.15.
fn may_crash_at_a_death(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let version = (numbers.next().and_then(Result::ok), numbers.next().and_then(Result::ok));
    version < (Some(6), Some(15))
}

/// Releases on which adding a device crashes the kernel.
fn is_known_bad(release: &str) -> bool {
    ["6.18.4", "6.18.5"].iter().any(|bad| {
        let rest = release.strip_prefix(bad);
        rest.is_some_and(|rest| !rest.starts_with(|next: char| next.is_ascii_digit()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_bad_kernels_are_told_by_their_whole_number() {
        assert!(is_known_bad("6.18.4") && is_known_bad("6.18.5-amd64"));
        assert!(!is_known_bad("6.18.44-fc") && !is_known_bad("6.18.50") && !is_known_bad("6.12.4"));
    }

    #[test]
    fn kernels_that_may_crash_at_a_death_are_told() {
        assert!(may_crash_at_a_death("6.12.117+deb12-amd64") && may_crash_at_a_death("6.14.0"));
        assert!(!may_crash_at_a_death("6.15.0") && !may_crash_at_a_death("7.2.11-amd64"));
    }

    #[test]
    fn a_driver_without_recovery_is_refused_by_a_sentence() {
        let refused = Support::of(0x06, "5.19.0".into()).unwrap_err();
        assert!(refused.to_string().contains("5.19.0") && refused.to_string().contains("6.3"), "{refused}");
        let old = Support::of(0x1fe, "6.12.117".into()).unwrap();
        assert!(!old.resizes() && old.flags() & u64::from(sys::UBLK_F_QUIESCE) == 0);
        let new = Support::of(0x1f_ffff, "7.3.4".into()).unwrap();
        assert!(new.resizes() && new.flags() & u64::from(sys::UBLK_F_QUIESCE) != 0);
    }
}
