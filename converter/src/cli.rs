//! The command line of `dsec-convert`.

mod batch;
mod convert;
mod dedup;
mod duration;
mod gc;
mod inspect;
mod list;
mod merge;
mod options;
mod output;
mod registry;
mod transfer;
mod tree;
mod verify;

use anyhow::Context as _;
use clap::builder::{OsStringValueParser, TypedValueParser as _};
use clap::{Parser, Subcommand};
use converter::convert::ConvertError;
use converter::dictionary::DictionaryError;
use converter::erofs::read::ReadError;
use converter::gc::ReachError;
use converter::layer::LayerError;
use converter::manifest::{self, ManifestError, digest_of};
use converter::merge::MergeError;
use converter::source::SourceError;
use converter::transfer::TransferError;
use fs3_client::registry::RegistryError;
use fs3_client::{BlobError, Digest, RefName, RefNameError, Store, StoreError, StoreLocation, StoreOptions};
use std::io;
use std::process::ExitCode;

/// Exit codes, besides 0.
mod exit {
    /// It failed.
    pub(super) const FAILED: u8 = 1;
    /// It was called wrongly.
    pub(super) const USAGE: u8 = 2;
    /// The data is corrupt.
    pub(super) const CORRUPT: u8 = 3;
}

/// Convert OCI images to EROFS layers in a store, and look at them.
#[derive(Debug, Parser)]
#[command(name = "dsec-convert", version, max_term_width = 100, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Convert an image and put it into a store
    Convert(Box<convert::Args>),
    /// Merge layers of images in a store
    ///
    /// Runs of consecutive layers become one layer each, from their metadata images alone: whiteouts are kept, data is
    /// linked and not copied. Layers that other images have too stay as they are.
    Merge(merge::Args),
    /// Convert a list of images, and report on each
    #[command(after_help = batch::HELP)]
    Batch(batch::Args),
    /// List the images of a store
    List(list::Args),
    /// Show an image's layers, or a metadata image's superblock, features, devices and files
    Inspect(inspect::Args),
    /// Check that a store still has an image, whole and unharmed
    #[command(after_help = "Exits with 3 when something is wrong with the image.")]
    Verify(verify::Args),
    /// Send a converted image to a registry, unchanged
    #[command(
        after_help = "What the registry has is not sent again: an interrupted push is taken up by running it again."
    )]
    Push(transfer::PushArgs),
    /// Bring a converted image from a registry or an OCI layout into a store, unchanged
    #[command(
        after_help = "Blobs that the store has are not fetched again: an interrupted pull is taken up by running it again."
    )]
    Pull(transfer::PullArgs),
    /// Write a converted image into an OCI layout, unchanged, for `skopeo copy` and other tools
    Export(transfer::ExportArgs),
    /// Remove what no image of a store needs
    #[command(after_help = "It may run beside any number of writers. Of two at once, one ends and says so.")]
    Gc(gc::Args),
    /// Look after the dictionary of chunks that `convert --dedup db` keeps beside a store
    Dictionary(dedup::Args),
}

/// The data is corrupt, and that was said already.
#[derive(Debug, thiserror::Error)]
#[error("the image is corrupt")]
struct Corrupt;

/// A failure with its own code.
#[derive(Debug, thiserror::Error)]
#[error("{sentence}")]
struct Told {
    sentence: String,
    code: u8,
}

impl Told {
    fn usage(sentence: String) -> Self {
        Self { sentence, code: exit::USAGE }
    }
}

/// Runs the command line; errors go to standard error.
pub(crate) fn run() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            let _ = e.print();
            return if e.use_stderr() { ExitCode::from(exit::USAGE) } else { ExitCode::SUCCESS };
        }
    };
    let result = match cli.command {
        Command::Convert(args) => convert::run(&args),
        Command::Merge(args) => merge::run(&args),
        Command::Batch(args) => batch::run(&args),
        Command::List(args) => list::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Gc(args) => gc::run(&args),
        Command::Push(args) => transfer::push(&args),
        Command::Pull(args) => transfer::pull(&args),
        Command::Export(args) => transfer::export(&args),
        Command::Dictionary(args) => dedup::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads our output has seen enough.
        Err(e) if is_broken_pipe(&e) => ExitCode::SUCCESS,
        Err(e) => report(&e),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().filter_map(|e| e.downcast_ref::<io::Error>()).any(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

fn report(error: &anyhow::Error) -> ExitCode {
    eprintln!("error: {}", sentence(error));
    if let Some(hint) = hint(error) {
        eprintln!("hint: {hint}");
    }
    ExitCode::from(exit_code(error))
}

/// With which code the program ends for it.
fn exit_code(error: &anyhow::Error) -> u8 {
    if let Some(told) = error.downcast_ref::<Told>() {
        return told.code;
    }
    let find = |kind: fn(&(dyn std::error::Error + 'static)) -> bool| error.chain().any(kind);
    let corrupt = error.is::<Corrupt>()
        || find(|e| e.is::<Corrupt>())
        || find(|e| e.downcast_ref::<ReadError>().is_some_and(ReadError::is_corruption))
        || find(|e| e.downcast_ref::<StoreError>().is_some_and(StoreError::is_corrupt))
        || find(|e| e.downcast_ref::<DictionaryError>().is_some_and(DictionaryError::is_corrupt))
        || find(|e| e.downcast_ref::<MergeError>().is_some_and(MergeError::is_corrupt))
        || find(|e| e.downcast_ref::<ConvertError>().is_some_and(ConvertError::is_corrupt))
        || find(|e| e.downcast_ref::<SourceError>().is_some_and(SourceError::is_corrupt))
        || find(|e| e.downcast_ref::<TransferError>().is_some_and(TransferError::is_corrupt))
        || find(|e| e.downcast_ref::<ReachError>().is_some_and(ReachError::is_corrupt))
        || find(|e| matches!(e.downcast_ref::<ManifestError>(), Some(ManifestError::Layer { .. })));
    let usage = find(|e| e.is::<RefNameError>());
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

fn hint(error: &anyhow::Error) -> Option<String> {
    error.chain().find_map(|e| {
        if let Some(e) = registry_error(e) {
            return registry_hint(e);
        }
        if let Some(e) = e.downcast_ref::<StoreError>() {
            return match e {
                StoreError::NoSuchRef { store, .. } => {
                    Some(format!("`dsec-convert list {store}` shows what the store has"))
                }
                StoreError::NotAStore { .. } => Some("`dsec-convert convert … --store STORE` makes a store".to_owned()),
                StoreError::Missing { .. } | StoreError::Corrupt { .. } => {
                    Some("converting the source again writes what is missing".to_owned())
                }
                _ => None,
            };
        }
        if let Some(ConvertError::Layer { error, .. }) = e.downcast_ref::<ConvertError>() {
            let gone = |error: &DictionaryError| matches!(error, DictionaryError::Gone { .. });
            if matches!(&**error, LayerError::Copy(_)) || matches!(&**error, LayerError::Dictionary(e) if gone(e)) {
                let text =
                    "run it again; if it stays so, `--dedup-verify`, `--dedup-against` or `--dedup none` keep what is damaged or gone out of it";
                return Some(text.to_owned());
            }
        }
        match e.downcast_ref::<DictionaryError>() {
            Some(DictionaryError::Busy { .. }) => {
                return Some("wait for it, or use `--dedup tables`, which takes any number of writers".to_owned());
            }
            Some(DictionaryError::Database { .. }) => {
                return Some("`dsec-convert dictionary rebuild STORE` makes it anew".to_owned());
            }
            _ => {}
        }
        match e.downcast_ref::<ReadError>() {
            Some(ReadError::NotErofs { .. } | ReadError::TooShort { .. }) => {
                Some("to look at an image of a store, give the store and NAME:TAG".to_owned())
            }
            _ => None,
        }
    })
}

/// What a registry had against it, where that is what went wrong.
fn registry_error<'e>(error: &'e (dyn std::error::Error + 'static)) -> Option<&'e RegistryError> {
    let source = match (error.downcast_ref(), error.downcast_ref()) {
        (Some(ConvertError::Source(e)), _) | (_, Some(TransferError::Source(e))) => Some(e),
        (_, Some(TransferError::Registry(e))) => return Some(e),
        _ => error.downcast_ref(),
    };
    match source {
        Some(SourceError::Registry(e)) => Some(e),
        _ => None,
    }
}

fn registry_hint(error: &RegistryError) -> Option<String> {
    match error {
        RegistryError::Blob(BlobError::Refused { source, .. }) => {
            let said = source.to_string();
            if said.contains("401") || said.contains("403") || said.contains("gives no token") {
                Some(
                    "`docker login` or `podman login` writes credentials, --authfile names a file with them".to_owned(),
                )
            } else if said.contains("certificate") {
                Some("--ca-file names certificates to trust".to_owned())
            } else {
                None
            }
        }
        RegistryError::Blob(BlobError::Transient { source, .. })
            if source.to_string().contains("InvalidContentType") =>
        {
            Some("--plain-http is for registries without TLS".to_owned())
        }
        _ => None,
    }
}

/// An image of a store: its manifest, and the manifest's own digest and size.
struct Found {
    manifest: manifest::Image,
    digest: Digest,
    size: u64,
}

/// What the help says of a store.
const STORE_HELP: &str = "The store: a directory, 3fs:PATH, or s3://BUCKET/PREFIX (with AWS_ENDPOINT_URL, AWS_REGION, \
                          AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and so on in the environment)";

/// Takes a store's place from the command line.
fn store_parser() -> impl clap::builder::TypedValueParser<Value = StoreLocation> {
    OsStringValueParser::new().try_map(|text| StoreLocation::from_os(&text))
}

fn open_store(location: &StoreLocation) -> anyhow::Result<Store> {
    Ok(Store::open_at(location, &StoreOptions::from_env(&location.to_string()))?)
}

fn find_image(store: &Store, name: &str) -> anyhow::Result<Found> {
    let name: RefName = name.parse()?;
    let descriptor = store.read_ref(&name)?;
    load_manifest(store, &descriptor).with_context(|| name.to_string())
}

/// The store, with a lease on all of an image for as long as the store that is returned lives: no gc takes any of it,
/// whatever becomes of its ref. A store that nothing can be written to is returned as it is.
fn kept(store: &Store, image: &Found, purpose: &str) -> anyhow::Result<Store> {
    let mut all = vec![image.digest, digest_of(&image.manifest.config)?];
    for blob in image.manifest.layers.iter().flat_map(manifest::Layer::descriptors) {
        all.push(digest_of(blob)?);
    }
    let kept = store.writing(purpose).and_then(|kept| kept.claim(&all).map(|()| kept));
    Ok(kept.unwrap_or_else(|error| {
        tracing::warn!("without a lease, so that a gc may take what this reads: {error}");
        store.clone()
    }))
}

fn load_manifest(store: &Store, descriptor: &oci_spec::image::Descriptor) -> anyhow::Result<Found> {
    let digest = digest_of(descriptor)?;
    let bytes = store.read_blob(&digest, descriptor.size())?;
    let manifest = manifest::Image::from_json(&bytes).with_context(|| format!("manifest {digest}"))?;
    Ok(Found { manifest, digest, size: descriptor.size() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn commands_in_the_documents_are_commands() {
        let workspace = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
        let docs = std::fs::read_dir(workspace.join("docs")).unwrap().map(|entry| entry.unwrap().path());
        let pages = [workspace.join("README.md"), workspace.join("converter/README.md")].into_iter().chain(docs);
        let mut parsed = 0;
        for page in pages.filter(|page| page.extension().is_some_and(|e| e == "md")) {
            let text = std::fs::read_to_string(&page).unwrap();
            // As in a shell, or in a list of a pipeline's scripts.
            let lines = text.lines().map(|line| line.trim_start().trim_start_matches("- "));
            for line in lines.filter(|line| line.starts_with("dsec-convert ")) {
                let words = line.split_whitespace();
                let words = words.take_while(|word| !matches!(word.as_bytes()[0], b'#' | b'<' | b'>' | b'|'));
                if let Err(e) = Cli::try_parse_from(words) {
                    panic!("{}: `{line}`: {e}", page.display());
                }
                parsed += 1;
            }
        }
        assert!(parsed >= 10, "only {parsed} commands were found");
    }
}
