//! The command line of `ublk-overlaybd`.

#[cfg(feature = "cache")]
mod blobs;
mod check;
mod commit;
mod create;
#[cfg(feature = "ublk")]
mod device;
mod diff;
mod export;
mod fuse;
mod import;
mod info;
mod layers;
mod ls;
mod map;
mod mkfs;
mod output;
mod progress;
mod seal;
#[cfg(feature = "ublk")]
mod serve;
mod wrapping;

use clap::{Parser, Subcommand};
use std::process::ExitCode;
use ublk_overlaybd::backend::ReadError;
use ublk_overlaybd::image::ImageError;
use ublk_overlaybd::image::spec::SpecError;
use ublk_overlaybd::mkfs::MkfsError;
use ublk_overlaybd::write::WriteError;

/// Exit codes, besides 0.
mod exit {
    /// It failed.
    pub(super) const FAILED: u8 = 1;
    /// It was called wrongly.
    pub(super) const USAGE: u8 = 2;
    /// The data is corrupt.
    pub(super) const CORRUPT: u8 = 3;
}

/// Make, look at, convert and check OverlayBD layers.
#[derive(Debug, Parser)]
#[command(name = "ublk-overlaybd", version, max_term_width = 100, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make an empty writable layer: a data file and an index file
    Create(create::Args),
    /// Make a finished layer of a writable one, or of a finished one in another form
    #[command(after_help = commit::HELP)]
    Commit(commit::Args),
    /// Finish a writable layer as it is: its sorted index and a trailer are put after its data
    Seal(seal::Args),
    /// Make one layer of several
    #[command(after_help = commit::MERGE_HELP)]
    Merge(commit::MergeArgs),
    /// Change the size of a writable layer's disk
    Resize(create::ResizeArgs),
    /// Show what a file is: its wrappers, headers and index
    Info(info::Args),
    /// List the layers in files, directories or a config.v1.json
    Ls(ls::Args),
    /// Check the structure and the checksums of layers
    #[command(after_help = "Exits with 3 when something is wrong with them.")]
    Check(check::Args),
    /// Show which layer holds which range of a disk
    Map(map::Args),
    /// Show the ranges in which two disks differ
    #[command(after_help = diff::HELP)]
    Diff(diff::Args),
    /// Write what a disk reads as to a sparse file
    #[command(after_help = export::HELP)]
    Export(export::Args),
    /// Make a layer of a disk image: raw, or whatever qemu-img reads
    Import(import::Args),
    /// Make a layer with an ext4 file system
    #[command(after_help = mkfs::HELP)]
    Mkfs(mkfs::Args),
    /// Show a disk as one file, to be loop-mounted or given to a virtual machine
    #[command(after_help = fuse::HELP)]
    Fuse(fuse::Args),
    #[cfg(feature = "ublk")]
    #[command(flatten)]
    Daemon(DaemonCommand),
}

/// What needs the daemon, or is it.
#[cfg(feature = "ublk")]
#[derive(Debug, Subcommand)]
enum DaemonCommand {
    /// Serve disks as /dev/ublkbN: the daemon
    #[command(after_help = serve::HELP)]
    Serve(serve::Args),
    /// Run `serve`, and start it again when it dies, where there is no systemd
    Supervise(serve::Args),
    /// Make a device of layers; the same call again gives the same device
    #[command(after_help = device::HELP)]
    Add(device::AddArgs),
    /// List the devices
    List(device::ListArgs),
    /// Show a device
    Stat(device::NameArgs),
    /// Remove devices
    Rm(device::RemoveArgs),
    /// Seal a device's writable layer, and put a new one over it, while it is in use
    Snapshot(device::NameArgs),
    /// Make a device's disk larger, while it is in use
    Grow(device::GrowArgs),
    /// Hold a device's requests, and make its files those of one moment
    Quiesce(device::QuiesceArgs),
    /// Let a quiesced device go on
    Resume(device::NameArgs),
    /// Show the daemon
    Status(device::ListArgs),
    /// Show what happened, a line of JSON each
    Events(device::EventsArgs),
    /// Have the daemon become the program that is at its path now
    Upgrade(device::UpgradeArgs),
}

#[cfg(feature = "ublk")]
impl DaemonCommand {
    fn run(&self) -> anyhow::Result<()> {
        match self {
            Self::Serve(args) => serve::run(args),
            Self::Supervise(args) => serve::supervise(args),
            Self::Add(args) => device::add(args),
            Self::List(args) => device::list(args),
            Self::Stat(args) => device::stat(args),
            Self::Rm(args) => device::remove(args),
            Self::Snapshot(args) => device::snapshot(args),
            Self::Grow(args) => device::grow(args),
            Self::Quiesce(args) => device::quiesce(args),
            Self::Resume(args) => device::resume(args),
            Self::Status(args) => device::status(args),
            Self::Events(args) => device::events(args),
            Self::Upgrade(args) => device::upgrade(args),
        }
    }
}

/// The data is corrupt, and that was said already.
#[derive(Debug, thiserror::Error)]
#[error("the data is corrupt")]
struct Corrupt;

/// Two disks differ, and that was said already.
#[derive(Debug, thiserror::Error)]
#[error("the disks differ")]
struct Differ;

/// Something that was run failed, and said why.
#[cfg(feature = "ublk")]
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Failed(String);

/// It was called wrongly.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Usage(String);

/// Runs the command line; errors go to standard error.
pub(crate) fn run() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            let _ = e.print();
            return if e.use_stderr() { ExitCode::from(exit::USAGE) } else { ExitCode::SUCCESS };
        }
    };
    let result = match &cli.command {
        Command::Create(args) => create::run(args),
        Command::Commit(args) => commit::run(args),
        Command::Seal(args) => seal::run(args),
        Command::Merge(args) => commit::merge(args),
        Command::Resize(args) => create::resize(args),
        Command::Info(args) => info::run(args),
        Command::Ls(args) => ls::run(args),
        Command::Check(args) => check::run(args),
        Command::Map(args) => map::run(args),
        Command::Diff(args) => diff::run(args),
        Command::Export(args) => export::run(args),
        Command::Import(args) => import::run(args),
        Command::Mkfs(args) => mkfs::run(args),
        Command::Fuse(args) => fuse::run(args),
        #[cfg(feature = "ublk")]
        Command::Daemon(command) => command.run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) if e.is::<output::Enough>() => ExitCode::SUCCESS,
        Err(e) if e.is::<Differ>() => ExitCode::from(exit::FAILED),
        Err(e) => report(&e),
    }
}

fn report(error: &anyhow::Error) -> ExitCode {
    eprintln!("error: {}", sentence(error));
    if let Some(hint) = hint(error) {
        eprintln!("hint: {hint}");
    }
    ExitCode::from(exit_code(error))
}

fn exit_code(error: &anyhow::Error) -> u8 {
    let find = |kind: fn(&(dyn std::error::Error + 'static)) -> bool| error.chain().any(kind);
    let corrupt = find(|e| e.is::<Corrupt>())
        || find(|e| e.downcast_ref::<ReadError>().is_some_and(ReadError::is_corrupt))
        || find(|e| e.downcast_ref::<ImageError>().is_some_and(ImageError::is_corrupt))
        || find(|e| e.downcast_ref::<WriteError>().is_some_and(WriteError::is_corrupt))
        || daemon_says(error, exit::CORRUPT);
    let usage = find(|e| e.is::<Usage>())
        || find(|e| matches!(e.downcast_ref(), Some(WriteError::Asked(_))))
        || find(|e| matches!(e.downcast_ref(), Some(MkfsError::Asked(_))))
        || daemon_says(error, exit::USAGE);
    match (usage, corrupt) {
        (true, _) => exit::USAGE,
        (_, true) => exit::CORRUPT,
        _ => exit::FAILED,
    }
}

/// The error and its causes; one that its effect already tells is not told again.
fn sentence(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |told, cause| {
        if told.is_empty() {
            cause
        } else if told.contains(&cause) {
            told
        } else {
            format!("{told}: {cause}")
        }
    })
}

/// Whether what the daemon answered, or what it was told, makes this the exit code.
fn daemon_says(error: &anyhow::Error, code: u8) -> bool {
    #[cfg(feature = "ublk")]
    return error.chain().any(|e| device::exit_code(e) == Some(code));
    #[cfg(not(feature = "ublk"))]
    return {
        let _ = (error, code);
        false
    };
}

fn hint(error: &anyhow::Error) -> Option<String> {
    #[cfg(feature = "ublk")]
    if let Some(hint) = error.chain().find_map(device::hint) {
        return Some(hint);
    }
    error.chain().find_map(known_hint).map(str::to_owned)
}

fn known_hint(e: &(dyn std::error::Error + 'static)) -> Option<&'static str> {
    if let Some(WriteError::Exists(_)) = e.downcast_ref() {
        return Some("--force replaces what exists, where the command has it");
    }
    if let Some(WriteError::TooManyEntries(_)) = e.downcast_ref() {
        return Some("a disk written in larger pieces has fewer mappings; merge fewer layers at a time");
    }
    if let Some(SpecError::Json { source, .. }) = e.downcast_ref()
        && source.is_data()
    {
        return Some("docs/overlaybd.md lists the keys");
    }
    let text = e.to_string();
    if text.contains("so this is the data file of a writable layer") {
        return Some("give it as --upper DATA INDEX, or DATA INDEX, as the command's help says");
    }
    if text.contains("flags do not say sparse") {
        return Some("`-` for the index is for sparse layers alone");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn the_definition_is_sound() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn commands_in_the_documents_are_commands() {
        let workspace = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
        let docs = std::fs::read_dir(workspace.join("docs")).unwrap().map(|entry| entry.unwrap().path());
        let pages = [workspace.join("README.md"), workspace.join("ublk-overlaybd/README.md")].into_iter().chain(docs);
        let mut parsed = 0;
        for page in pages.filter(|page| page.extension().is_some_and(|e| e == "md")) {
            let text = std::fs::read_to_string(&page).unwrap();
            for line in text.lines().map(str::trim_start).filter(|line| line.starts_with("ublk-overlaybd ")) {
                let words = line.split_whitespace();
                let words = words.take_while(|word| !matches!(word.as_bytes()[0], b'#' | b'<' | b'>' | b'|' | b'&'));
                if let Err(e) = Cli::try_parse_from(words) {
                    panic!("{}: `{line}`: {e}", page.display());
                }
                parsed += 1;
            }
        }
        assert!(parsed >= 10, "only {parsed} commands were found");
    }
}
