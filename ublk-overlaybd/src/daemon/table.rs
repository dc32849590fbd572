//! What survives the daemon: a record for each device.
//!
//! A record is a file of its own, `devices/NAME.json` in the state directory, which is written beside, synced and renamed;
//! so each is old or new, and one that is damaged costs one device.

use super::protocol::DeviceSpec;
use crate::daemon::identity::Identity;
use crate::ublk::device::Shape;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

const VERSION: u32 = 1;
/// Characters of a name: with its ending it must be a file's name.
const LONGEST_NAME: usize = 200;

/// Why the table cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// Somebody has it.
    #[error("{0}: another daemon has this state directory")]
    InUse(PathBuf),
    /// This machine's fault.
    #[error("{path}: cannot {doing}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// A record is none.
    #[error("{path}: {why}")]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

fn io(path: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> TableError {
    let path = path.to_owned();
    move |source| TableError::Io { path, doing, source }
}

/// Whether the kernel may know the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// The kernel was or will be asked for it, and nobody was told of it yet.
    Adding,
    /// It was promised.
    Live,
    /// Somebody wants it gone.
    Removing,
}

/// A device, as the next daemon must know it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    version: u32,
    /// Its name, which is the file's too.
    pub name: String,
    /// What it was asked to be.
    pub spec: DeviceSpec,
    /// The form that the kernel's device has.
    pub shape: Shape,
    /// Whether the kernel may know it.
    pub stage: Stage,
    /// The table's number above 32 random bits; the kernel's device has it too, as the flags that it keeps for its server.
    pub mark: u64,
    /// The kernel's number, once it is known.
    pub number: Option<u32>,
    /// What it is made of, so that it is never continued with something else.
    pub identity: Option<Identity>,
    /// `/proc/sys/kernel/random/boot_id`: devices of an earlier boot are gone.
    pub boot: String,
}

impl Record {
    /// A new device that the kernel does not know yet.
    #[must_use]
    pub fn new(name: String, spec: DeviceSpec, shape: Shape, boot: String, table: u32) -> Self {
        let mark = u64::from(table) << 32 | u64::from(random());
        Self { version: VERSION, name, spec, shape, stage: Stage::Adding, mark, number: None, identity: None, boot }
    }
}

fn random() -> u32 {
    let (high, _) = uuid::Uuid::new_v4().as_u64_pair();
    // The upper half has all its bits from the generator.
    u32::try_from(high >> 32).unwrap_or(0)
}

/// Whether a device may have this name: letters, digits, `.`, `_` and `-`, and no `.` first.
#[must_use]
pub fn is_name(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
    !name.is_empty() && name.len() <= LONGEST_NAME && !name.starts_with('.') && name.chars().all(allowed)
}

/// This boot of the kernel.
///
/// # Errors
/// When `/proc` is not there.
pub fn boot() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// The records of a daemon, which has their directory to itself.
#[derive(Debug)]
pub struct Table {
    dir: PathBuf,
    id: u32,
    _lock: File,
}

impl Table {
    /// Opens the table in `state`, and gives its records; and what could not be read.
    ///
    /// # Errors
    /// When another daemon has it, or the directory cannot be made or read.
    pub fn open(state: &Path) -> Result<(Self, Vec<Record>, Vec<TableError>), TableError> {
        let dir = state.join("devices");
        fs::create_dir_all(&dir).map_err(io(&dir, "make it"))?;
        let path = state.join("lock");
        let lock = File::options().create(true).truncate(false).write(true).open(&path);
        let lock = lock.map_err(io(&path, "open it"))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::AGAIN) => return Err(TableError::InUse(state.to_owned())),
            Err(error) => return Err(io(&path, "lock it")(error.into())),
        }
        let id = id(&state.join("id"))?;
        let (mut records, mut damaged) = (Vec::new(), Vec::new());
        for entry in fs::read_dir(&dir).map_err(io(&dir, "list it"))? {
            let path = entry.map_err(io(&dir, "list it"))?.path();
            match path.extension().and_then(|e| e.to_str()) {
                Some("json") => match read(&path) {
                    Ok(record) => records.push(record),
                    Err(error) => damaged.push(error),
                },
                // What was being written when a daemon died.
                Some("new") => fs::remove_file(&path).map_err(io(&path, "remove it"))?,
                _ => {}
            }
        }
        records.sort_by(|a, b| a.name.cmp(&b.name));
        Ok((Self { dir, id, _lock: lock }, records, damaged))
    }

    /// Its number: random, and never another.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Whether a device with this mark was made by a daemon with this table.
    #[must_use]
    pub fn is_mine(&self, mark: u64) -> bool {
        mark >> 32 == u64::from(self.id)
    }

    fn place(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.json"))
    }

    /// Writes a record, durably.
    ///
    /// # Errors
    /// When it cannot be written; the one that was there before stays.
    pub fn put(&self, record: &Record) -> Result<(), TableError> {
        let path = self.place(&record.name);
        let mut bytes = serde_json::to_vec_pretty(record).map_err(|e| io(&path, "write it")(e.into()))?;
        bytes.push(b'\n');
        replace(&path, &bytes)
    }

    /// Removes a record, durably. One that is not there is removed.
    ///
    /// # Errors
    /// When it cannot be.
    pub fn remove(&self, name: &str) -> Result<(), TableError> {
        let path = self.place(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io(&path, "remove it")(error)),
            _ => {}
        }
        sync(&self.dir)
    }
}

fn sync(dir: &Path) -> Result<(), TableError> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io(dir, "sync it"))
}

/// Writes a file beside, and puts it in place, durably.
fn replace(path: &Path, bytes: &[u8]) -> Result<(), TableError> {
    let beside = path.with_extension("new");
    let mut file = File::create(&beside).map_err(io(&beside, "make it"))?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    written.map_err(io(&beside, "write it"))?;
    fs::rename(&beside, path).map_err(io(path, "rename it"))?;
    sync(path.parent().unwrap_or(Path::new(".")))
}

/// The table's number, from its file; made where there is none.
fn id(path: &Path) -> Result<u32, TableError> {
    match fs::read_to_string(path) {
        Ok(text) => {
            let damaged =
                || TableError::Damaged { path: path.to_owned(), why: "8 hexadecimal digits are missing".into() };
            u32::from_str_radix(text.trim(), 16).map_err(|_| damaged())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let id = random();
            replace(path, format!("{id:08x}\n").as_bytes())?;
            Ok(id)
        }
        Err(error) => Err(io(path, "read it")(error)),
    }
}

fn read(path: &Path) -> Result<Record, TableError> {
    let damaged = |why: String| TableError::Damaged { path: path.to_owned(), why };
    let bytes = fs::read(path).map_err(io(path, "read it"))?;
    let record: Record = serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
    if record.version != VERSION {
        return Err(damaged(format!("version is {}, and {VERSION} is known", record.version)));
    }
    if path.file_stem().and_then(|stem| stem.to_str()) != Some(&record.name) || !is_name(&record.name) {
        return Err(damaged(format!("name is `{}`, and the file has another", record.name)));
    }
    Ok(record)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(name: &str) -> Record {
        Record::new(name.to_owned(), DeviceSpec::default(), Shape::default(), "this".to_owned(), 0xabcd)
    }

    #[test]
    fn names() {
        assert!(is_name("vm-1.disk_0") && is_name(&"x".repeat(LONGEST_NAME)));
        for name in ["", ".x", "a/b", "ä", "a b", &"x".repeat(LONGEST_NAME + 1)] {
            assert!(!is_name(name), "{name}");
        }
    }

    #[test]
    fn records_outlive_the_table_and_only_one_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let (table, records, damaged) = Table::open(dir.path()).unwrap();
        assert!(records.is_empty() && damaged.is_empty());
        let mut b = record("b");
        table.put(&b).unwrap();
        b.stage = Stage::Live;
        b.number = Some(3);
        table.put(&b).unwrap();
        table.put(&record("a")).unwrap();
        table.put(&record("gone")).unwrap();
        table.remove("gone").unwrap();
        table.remove("gone").unwrap();
        assert!(matches!(Table::open(dir.path()), Err(TableError::InUse(_))));
        drop(table);
        // A daemon died while it wrote, and somebody edited.
        fs::write(dir.path().join("devices/c.new"), "{").unwrap();
        fs::write(dir.path().join("devices/d.json"), "{\"version\": 1}").unwrap();
        fs::copy(dir.path().join("devices/b.json"), dir.path().join("devices/e.json")).unwrap();
        let (_table, records, damaged) = Table::open(dir.path()).unwrap();
        assert_eq!(records.iter().map(|r| r.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(records[1], b);
        let said: Vec<_> = damaged.iter().map(ToString::to_string).collect();
        assert_eq!(damaged.len(), 2, "{said:?}");
        assert!(!dir.path().join("devices/c.new").exists());
    }

    #[test]
    fn marks_differ() {
        assert_ne!(record("a").mark, record("a").mark);
        assert_eq!(record("a").mark >> 32, 0xabcd);
        let dir = tempfile::tempdir().unwrap();
        let id = Table::open(dir.path()).unwrap().0.id();
        let again = Table::open(dir.path()).unwrap().0;
        assert_eq!(again.id(), id);
        assert!(again.is_mine(u64::from(id) << 32 | 5) && !again.is_mine(5));
    }
}
