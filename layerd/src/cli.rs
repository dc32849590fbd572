//! The command line.

mod mount;
mod umount;

use crate::MountError;
use clap::{Parser, Subcommand};
use fs3_client::StoreError;
use std::process::ExitCode;

/// Exit code when something failed.
const FAILED: u8 = 1;
/// Exit code when stored data is not what it should be. (2 is clap's, for a command line that makes no sense.)
const CORRUPT: u8 = 3;

/// Mounts layered images as the roots of sandboxes.
#[derive(Debug, Parser)]
#[command(
    name = "layerd",
    version,
    propagate_version = true,
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 the stored data is damaged.\n\
                  Images are made by `dsec-convert`, see `dsec-convert help convert`."
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Mount(mount::Mount),
    Umount(umount::Umount),
}

impl Cli {
    /// Does what was asked, and prints what came of it.
    #[must_use]
    #[allow(clippy::print_stderr)]
    pub fn run(self) -> ExitCode {
        let done = match self.command {
            Command::Mount(mount) => mount.run(),
            Command::Umount(umount) => umount.run(),
        };
        let Err(error) = done else { return ExitCode::SUCCESS };
        eprintln!("error: {error}");
        if let Some(hint) = hint(&error) {
            eprintln!("hint: {hint}");
        }
        ExitCode::from(if error.is_corrupt() { CORRUPT } else { FAILED })
    }
}

fn hint(error: &MountError) -> Option<&'static str> {
    let denied = match error {
        MountError::Io { source, .. } | MountError::Store(StoreError::Io { source, .. }) => {
            source.kind() == std::io::ErrorKind::PermissionDenied
        }
        _ => false,
    };
    if denied && !rustix::process::geteuid().is_root() {
        return Some("mounting needs root (CAP_SYS_ADMIN)");
    }
    error.hint()
}

#[allow(clippy::print_stdout)]
fn print_json(value: &impl serde::Serialize) {
    println!("{}", serde_json::to_string_pretty(value).expect("plain data always serialises"));
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_last_of_the_names_is_the_mountpoint() {
        let parse = |line: &str| Cli::try_parse_from(line.split(' '));
        for line in [
            "mount --store s a:1 b:2 c /mnt",
            "mount a:1 b:2 c --store s /mnt",
            "mount a:1 --rw d b:2 c /mnt --store s",
        ] {
            let Command::Mount(mount) = parse(&format!("layerd {line}")).unwrap().command else { panic!() };
            assert_eq!(mount.places.images.len(), 3);
            assert_eq!(mount.places.mountpoint, std::path::Path::new("/mnt"));
        }
        for wrong in ["mount --store s /mnt", "mount a:1 /mnt", "mount --store s"] {
            assert_eq!(parse(&format!("layerd {wrong}")).unwrap_err().exit_code(), 2);
        }
        assert!(parse("layerd mount --store s A:1 /mnt").unwrap_err().to_string().contains("expected NAME:TAG"));
    }

    #[test]
    fn commands_in_the_documents_are_commands() {
        let workspace = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut parsed = 0;
        for page in ["README.md", "layerd/README.md", "docs/mounting.md"] {
            let text = std::fs::read_to_string(workspace.join(page)).unwrap();
            for line in text.lines().filter(|line| line.starts_with("layerd ")) {
                let words = line.split_whitespace().take_while(|word| !word.starts_with('#'));
                if let Err(e) = Cli::try_parse_from(words) {
                    panic!("{page}: `{line}`: {e}");
                }
                parsed += 1;
            }
        }
        assert!(parsed >= 6, "only {parsed} commands were found");
    }
}
