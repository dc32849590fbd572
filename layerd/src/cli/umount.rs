//! `layerd umount`.

use super::print_json;
use crate::MountError;
use crate::umount::umount;
use std::path::PathBuf;

/// Unmount a root that `layerd mount` mounted
///
/// The layers and loop devices under it go with it. The directory of its writable layer stays. Anything else that is
/// mounted there is left alone. Needs root.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  layerd umount /mnt/root\n  layerd umount --lazy /mnt/root")]
pub(super) struct Umount {
    /// Where it is mounted
    mountpoint: PathBuf,
    /// Detach it at once, even in use; it ends when its last user does
    #[arg(long)]
    lazy: bool,
    /// Print what was unmounted as JSON
    #[arg(long)]
    json: bool,
}

impl Umount {
    #[allow(clippy::print_stdout)]
    pub(super) fn run(self) -> Result<(), MountError> {
        let unmounted = umount(&self.mountpoint, self.lazy)?;
        if self.json {
            print_json(&unmounted);
        } else {
            println!("{}: unmounted", unmounted.mountpoint.display());
        }
        Ok(())
    }
}
