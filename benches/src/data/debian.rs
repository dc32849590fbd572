//! The bottom layer: a small Debian with a compiler and what builds usually call.

use super::pack;
use crate::tool;
use anyhow::Result;
use std::path::Path;

const PACKAGES: &str = "build-essential,git,python3,curl,ca-certificates,openssh-client,vim-tiny,less,procps,iproute2";

/// Bootstraps the packages straight into a tar (sorted by name, as mmdebstrap does).
pub(super) fn build(_work: &Path, out: &Path) -> Result<()> {
    bootstrap(PACKAGES, true, out)
}

/// As [`build`], with other packages, and without the updates since the release if `patched` is false.
pub(super) fn bootstrap(packages: &str, patched: bool, out: &Path) -> Result<()> {
    tool::require("mmdebstrap", "mmdebstrap")?;
    let mut command = pack::quiet("mmdebstrap");
    command.args(["--quiet", "--variant=apt", "--format=tar"]).arg(format!("--include={packages}"));
    if !patched {
        command.arg(r#"--setup-hook=sed -i -e '/-security/d' -e '/-updates/d' "$1"/etc/apt/sources.list"#);
    }
    command.args(["bookworm", "-"]).env("SOURCE_DATE_EPOCH", pack::EPOCH);
    pack::compress(&mut command, out)
}
