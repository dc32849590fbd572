//! Other people's programs: where they are, and what to install when they are not.

use anyhow::{Result, bail};
use std::path::PathBuf;

/// The program of that name in `PATH`.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
}

/// Fails with the Debian package to install when a program is missing.
pub(crate) fn require(name: &str, package: &str) -> Result<()> {
    if find(name).is_none() {
        bail!("`{name}` is not installed: apt-get install {package}");
    }
    Ok(())
}
