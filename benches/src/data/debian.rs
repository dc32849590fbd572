//! The bottom layer: a small Debian with a compiler and what builds usually call.

use super::pack;
use crate::tool;
use anyhow::Result;
use std::path::Path;

const PACKAGES: &str = "build-essential,git,python3,curl,ca-certificates,openssh-client,vim-tiny,less,procps,iproute2";

/// Bootstraps the packages straight into a tar (sorted by name, as mmdebstrap does).
pub(super) fn build(_work: &Path, out: &Path) -> Result<()> {
    tool::require("mmdebstrap", "mmdebstrap")?;
    let mut command = pack::quiet("mmdebstrap");
    command.args(["--quiet", "--variant=apt", "--format=tar"]).arg(format!("--include={PACKAGES}"));
    command.args(["bookworm", "-"]).env("SOURCE_DATE_EPOCH", pack::EPOCH);
    pack::compress(&mut command, out)
}
