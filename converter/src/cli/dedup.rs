//! The options of deduplication against other images, and `dsec-convert dictionary`.

use super::{STORE_HELP, Told, output, store_parser};
use anyhow::bail;
use clap::{Args as ClapArgs, Subcommand};
use converter::blob::foreign::Limits;
use converter::dictionary::tables::Tables;
use converter::dictionary::{Dedup, Dictionary, Empty, stored};
use converter::entry::Warning;
use fs3_client::{RefName, Store, StoreLocation};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

/// What of other images a layer may refer to.
#[derive(Debug, Clone, ClapArgs)]
pub(super) struct DedupArgs {
    /// Refer to chunks that the store has instead of storing them again: `tables` finds them in the chunk tables of its
    /// images, for any number of writers; `db` in a RocksDB (beside the store, or in DIR), for one writer at a time.
    /// What a layer becomes then depends on what the store had
    #[arg(long, value_name = "none|tables|db[:DIR]", default_value = "none")]
    dedup: Mode,
    /// With `--dedup tables`: look only into these images
    #[arg(long, value_name = "NAME:TAG", value_delimiter = ',')]
    dedup_against: Vec<RefName>,
    /// With `--dedup tables`: memory for the index, 24 bytes a chunk. If it is too little, blobs that few layers refer to
    /// are left out
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = output::parse_size)]
    dedup_memory: u64,
    /// Read each chunk back and compare it before it is referred to, instead of trusting the store's chunk tables
    #[arg(long)]
    dedup_verify: bool,
    /// Refer to at most this many blobs of other layers because of equal chunks; chunks of others are copied
    #[arg(long, value_name = "N", default_value_t = Limits::default().devices,
          value_parser = clap::value_parser!(u16).range(0..=65_000))]
    max_devices: u16,
    /// Refer to a blob only if that saves so many bytes
    #[arg(long, value_name = "SIZE", default_value = "256KiB", value_parser = output::parse_size)]
    min_saved: u64,
}

/// How chunks are found.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Mode {
    None,
    Tables,
    Db(Option<PathBuf>),
}

impl FromStr for Mode {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once(':') {
            None if text == "none" => Ok(Self::None),
            None if text == "tables" => Ok(Self::Tables),
            None if text == "db" => Ok(Self::Db(None)),
            Some(("db", dir)) if !dir.is_empty() => Ok(Self::Db(Some(dir.into()))),
            _ => Err("it is none, tables, db or db:DIR"),
        }
    }
}

impl DedupArgs {
    /// Makes ready what these options ask for, with what is to be said about it.
    pub(super) fn open(&self, store: &Store) -> anyhow::Result<(Option<Dedup>, Vec<Warning>)> {
        if !self.dedup_against.is_empty() && self.dedup != Mode::Tables {
            bail!(Told::usage("--dedup-against goes with --dedup tables".to_owned()));
        }
        let (dictionary, warnings): (Arc<dyn Dictionary>, _) = match &self.dedup {
            Mode::None => return Ok((None, Vec::new())),
            Mode::Tables => {
                let found = stored(store, &self.dedup_against)?;
                let (tables, loaded, mut more) = Tables::new(store, &found, self.dedup_memory)?;
                if loaded.left_out > 0 {
                    let message = format!(
                        "--dedup-memory has no room for the chunks of {} of {} blobs; those are not deduplicated against",
                        loaded.left_out,
                        loaded.left_out + loaded.blobs
                    );
                    more.push(Warning::new(b"", message));
                }
                (Arc::new(tables), [found.warnings, more].concat())
            }
            Mode::Db(dir) => (open_db(&dictionary_dir(dir.as_deref(), &store.location())?)?, Vec::new()),
        };
        Ok((Some(self.with(dictionary)), warnings))
    }

    /// What these options ask for, with a dictionary that knows nothing: enough to look for finished layers.
    pub(super) fn dry(&self) -> Option<Dedup> {
        (self.dedup != Mode::None).then(|| self.with(Arc::new(Empty)))
    }

    fn with(&self, dictionary: Arc<dyn Dictionary>) -> Dedup {
        let mut against: Vec<String> = self.dedup_against.iter().map(ToString::to_string).collect();
        against.sort();
        against.dedup();
        let limits = Limits { devices: self.max_devices, saved: self.min_saved };
        Dedup { dictionary, limits, verify: self.dedup_verify, against }
    }
}

/// `given`, or the place beside a store that is a directory.
fn dictionary_dir(given: Option<&Path>, store: &StoreLocation) -> anyhow::Result<PathBuf> {
    match (given, store) {
        (Some(dir), _) => Ok(dir.to_owned()),
        (None, StoreLocation::Dir(path)) => {
            let mut dir = std::path::absolute(path)?.components().collect::<PathBuf>().into_os_string();
            dir.push(".dict");
            Ok(dir.into())
        }
        (None, _) => {
            bail!(Told::usage(format!("a database has no place beside {store}: say where it is, on a local disk")))
        }
    }
}

#[cfg(not(feature = "dictionary"))]
const WITHOUT: &str =
    "this dsec-convert was built without RocksDB (cargo feature `dictionary`); `--dedup tables` needs none";

#[cfg(feature = "dictionary")]
fn open_db(path: &Path) -> anyhow::Result<Arc<dyn Dictionary>> {
    Ok(Arc::new(converter::dictionary::db::Db::open(path)?))
}

#[cfg(not(feature = "dictionary"))]
fn open_db(_path: &Path) -> anyhow::Result<Arc<dyn Dictionary>> {
    bail!(WITHOUT)
}

/// Arguments of `dictionary`.
#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make the dictionary anew from the chunk tables of the store's images
    Rebuild(Of),
    /// Count what the dictionary holds
    Stat(Of),
}

#[derive(Debug, ClapArgs)]
struct Of {
    /// The store that it is about.
    #[arg(help = STORE_HELP, value_parser = store_parser())]
    store: StoreLocation,
    /// Where the dictionary is [default: STORE.dict]
    #[arg(long, value_name = "DIR")]
    dictionary: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Runs `dictionary`.
#[cfg(not(feature = "dictionary"))]
pub(super) fn run(_args: &Args) -> anyhow::Result<()> {
    bail!(WITHOUT)
}

/// Runs `dictionary`.
#[cfg(feature = "dictionary")]
pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    use converter::dictionary::db::{Db, Stat, rebuild};
    use std::io::Write as _;

    #[derive(serde::Serialize)]
    struct Report {
        dictionary: String,
        #[serde(flatten)]
        stat: Stat,
        warnings: Vec<Warning>,
    }

    let (Command::Rebuild(of) | Command::Stat(of)) = &args.command;
    let path = dictionary_dir(of.dictionary.as_deref(), &of.store)?;
    let store = super::open_store(&of.store)?;
    let (stat, warnings) = match &args.command {
        Command::Rebuild(_) => rebuild(&path, &store)?,
        Command::Stat(_) if path.is_dir() => (Db::open(&path)?.stat()?, Vec::new()),
        Command::Stat(_) => bail!("there is no dictionary in {}", path.display()),
    };
    let report = Report { dictionary: path.display().to_string(), stat, warnings };
    output::print(|out| {
        if of.json {
            return output::json(out, &report);
        }
        report.warnings.iter().for_each(|warning| eprintln!("warning: {}", warning.message));
        let Stat { blobs, incomplete, chunks, bytes } = report.stat;
        let size = output::size(bytes);
        writeln!(out, "{}: {chunks} chunks of {blobs} blobs ({incomplete} incomplete), {size}", report.dictionary)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_words() {
        let mode = |text: &str| text.parse::<Mode>().ok();
        assert_eq!(mode("none"), Some(Mode::None));
        assert_eq!(mode("tables"), Some(Mode::Tables));
        assert_eq!(mode("db"), Some(Mode::Db(None)));
        assert_eq!(mode("db:a:b"), Some(Mode::Db(Some("a:b".into()))));
        for text in ["", "db:", "table", "none:x"] {
            assert_eq!(mode(text), None, "{text}");
        }
    }

    #[test]
    fn a_database_has_a_place_beside_a_directory_only() {
        let dir = |store: &str| dictionary_dir(None, &store.parse().unwrap()).ok();
        assert_eq!(dir("/a/store"), Some("/a/store.dict".into()));
        assert_eq!(dir("/a/store/"), Some("/a/store.dict".into()));
        assert_eq!((dir("s3://bucket/p"), dir("3fs:/m/p")), (None, None));
        assert_eq!(dictionary_dir(Some(Path::new("/d")), &"s3://bucket/p".parse().unwrap()).ok(), Some("/d".into()));
    }
}
