//! `layerd mount`.

use super::print_json;
use crate::MountError;
use crate::attach::{How, Mode};
use crate::mount::{Handover, Kind, Mounted, Request, mount};
use clap::error::{Error, ErrorKind};
use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches};
use fs3_client::{RefName, StoreDir};
use std::ffi::OsString;
use std::path::PathBuf;

/// Mount images as one root
///
/// The layers of the images are stacked in the order given, the first image at the bottom, and mounted at MOUNTPOINT:
/// read-only, or with a writable layer on top. Nothing is copied or unpacked, so it takes milliseconds whatever the
/// size of the images. Needs root.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "layerd mount [OPTIONS] --store <DIR> <NAME:TAG>... <MOUNTPOINT>",
    after_help = "Examples:\n  \
    layerd mount --store /srv/store debian:12 /mnt/root\n  \
    layerd mount --store /srv/store debian:12 tools/python:3.13 team/repo:main /mnt/root --rw /var/lib/sandbox/1\n  \
    layerd umount /mnt/root\n\n\
    What is written goes to DIR/upper of `--rw DIR` and stays there; the same DIR continues where it left off."
)]
pub(super) struct Mount {
    /// The store that has the images: a directory made by `dsec-convert`
    #[arg(long, value_name = "DIR")]
    store: PathBuf,
    #[command(flatten)]
    pub(super) places: Places,
    /// Make the root writable; what is written goes to DIR (on a local disk, made if need be)
    #[arg(long, value_name = "DIR")]
    rw: Option<PathBuf>,
    /// Check the digest of every blob first (reads all of them; without, lengths and structure are checked)
    #[arg(long)]
    verify: bool,
    /// What the kernel reads the layers from
    #[arg(long, value_enum, default_value_t, value_name = "HOW")]
    attach: Mode,
    /// How overlayfs is given the layers
    #[arg(long, value_enum, default_value_t, hide = true)]
    handover: Handover,
    /// Print what was mounted as JSON
    #[arg(long)]
    json: bool,
}

/// Image names, and the mountpoint behind them.
///
/// To clap they are one list, split here: it takes a list and a last argument behind it only where no option stands
/// between the two, and `layerd mount a:1 --rw DIR /mnt` is too natural to be refused.
#[derive(Debug)]
pub(super) struct Places {
    pub(super) images: Vec<RefName>,
    pub(super) mountpoint: PathBuf,
}

impl clap::Args for Places {
    fn augment_args(command: Command) -> Command {
        command.arg(
            Arg::new("places")
                .help("The images, bottom first; the last of all is MOUNTPOINT, an existing directory")
                .required(true)
                .action(ArgAction::Append)
                .num_args(1..)
                .value_name("NAME:TAG")
                .value_parser(clap::value_parser!(OsString)),
        )
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Places {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let mut places: Vec<OsString> = matches.get_many("places").into_iter().flatten().cloned().collect();
        let mountpoint = places.pop().unwrap_or_default().into();
        if places.is_empty() {
            let text = "a mountpoint is needed behind the names: layerd mount --store DIR NAME:TAG... MOUNTPOINT\n";
            return Err(Error::raw(ErrorKind::TooFewValues, text));
        }
        let parse = |name: &OsString| {
            name.to_string_lossy().parse().map_err(|e| Error::raw(ErrorKind::ValueValidation, format!("{e}\n")))
        };
        Ok(Self { images: places.iter().map(parse).collect::<Result<_, _>>()?, mountpoint })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Mount {
    pub(super) fn run(self) -> Result<(), MountError> {
        let store = StoreDir::open(&self.store)?;
        let request = Request {
            images: self.places.images,
            mountpoint: self.places.mountpoint,
            writable: self.rw,
            attach: self.attach,
            handover: self.handover,
            verify: self.verify,
        };
        let mounted = mount(&store, &request)?;
        for warning in &mounted.warnings {
            warn(warning);
        }
        if self.json {
            print_json(&mounted);
        } else {
            print_text(&mounted);
        }
        Ok(())
    }
}

#[allow(clippy::print_stderr)]
fn warn(text: &str) {
    eprintln!("warning: {text}");
}

#[allow(clippy::print_stdout)]
fn print_text(mounted: &Mounted) {
    let layers = match mounted.layers.len() {
        1 => "1 layer".to_owned(),
        n => format!("{n} layers"),
    };
    let kind = match mounted.kind {
        Kind::Overlay => "overlayfs",
        Kind::Erofs => "EROFS",
    };
    let through = if mounted.layers.iter().any(|layer| layer.attached == How::Loop) { ", loop devices" } else { "" };
    let writable = match &mounted.writable {
        Some(dir) => format!("writable, changes in {}", dir.join("upper").display()),
        None => "read-only".to_owned(),
    };
    println!("{}: {layers} ({kind}{through}), {writable}", mounted.mountpoint.display());
}
