//! The file that names what was sealed and what is written to, and the steps of a seal.

use super::{SealError, Step, UpperData};
use crate::engine::Device;
use crate::index::Index;
use crate::layer::Layer;
use crate::upper::{Files, Limits, Upper, UpperError, journal_path, sidecar_path};
use crate::write::publish::NewFile;
use crate::write::seal::ending;
use serde::{Deserialize, Serialize};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const VERSION: u32 = 1;

/// A writable layer's two files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pair {
    data: PathBuf,
    index: PathBuf,
}

/// What the file says. Paths are relative to its directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    version: u32,
    /// Sealed layers, the bottom one first.
    layers: Vec<PathBuf>,
    /// The pair that becomes the next of them.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    sealing: Option<Pair>,
    /// The pair that is written to.
    upper: Pair,
    /// Number of the next pair.
    next: u64,
}

/// The writable layers of a disk, one over the other, and the file that names them.
///
/// It may be sent and shared between threads; a seal is one thread's at a time (`&mut self`), and no request needs the chain:
/// put it behind a lock of its own, and never wait for that lock where requests are served, since
/// [`seal`](Self::seal) returns only when the old layer's index is on the disk.
#[derive(Debug)]
pub struct Chain {
    path: PathBuf,
    state: State,
    limits: Limits,
    /// What is being sealed.
    old: Option<Arc<Upper>>,
}

impl Chain {
    /// Begins a chain in the file at `path`, which does not exist, with an empty pair beside it, for a disk of
    /// `virtual_size` bytes (0 is that of the layer below).
    ///
    /// # Errors
    /// The file exists, or the pair cannot be made.
    pub fn create(path: &Path, virtual_size: u64, limits: Limits) -> Result<(Self, Upper), SealError> {
        let upper = pair(0);
        let state = State { version: VERSION, layers: Vec::new(), sealing: None, upper, next: 1 };
        let chain = Self { path: path.to_owned(), state, limits, old: None };
        let upper = chain.new_upper(&chain.state.upper, virtual_size)?;
        chain.save(false)?;
        Ok((chain, upper))
    }

    /// Opens what the file at `path` names: the sealed layers, the bottom one first, and the writable one. A seal that was
    /// interrupted is finished.
    ///
    /// # Errors
    /// The file cannot be read or is no chain, or a layer cannot be opened.
    pub fn open(path: &Path, limits: Limits) -> Result<(Self, Vec<Arc<Layer>>, Upper), SealError> {
        let io = |source| SealError::Io { path: path.to_owned(), doing: "read it", source };
        let bytes = std::fs::read(path).map_err(io)?;
        let wrong = |why: String| SealError::Chain { path: path.to_owned(), why };
        let state: State = serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
        if state.version != VERSION {
            return Err(wrong(format!("version is {}, and {VERSION} is known", state.version)));
        }
        let mut chain = Self { path: path.to_owned(), state, limits, old: None };
        if let Some(pair) = chain.state.sealing.clone() {
            let files = Files::open(&chain.place(&pair.data), &chain.place(&pair.index))?;
            let upper = Upper::open(Files { is_being_sealed: true, ..files }, limits)?;
            end(&upper)?;
            drop(upper);
            chain.list(&pair, |_| ())?;
        }
        let layers = chain.state.layers.iter().map(|layer| Ok(Arc::new(Layer::open_file(&chain.place(layer))?)));
        let layers = layers.collect::<Result<_, SealError>>()?;
        let upper =
            Upper::open_pair(&chain.place(&chain.state.upper.data), &chain.place(&chain.state.upper.index), limits)?;
        Ok((chain, layers, upper))
    }

    /// The sealed layers' files, the bottom one first.
    pub fn layers(&self) -> impl Iterator<Item = PathBuf> + '_ {
        self.state.layers.iter().map(|layer| self.place(layer))
    }

    /// Seals the writable layer of `device` and puts a new one over it, see the [module](super). Returns when all of it is
    /// done; requests go on meanwhile. `watch` is told of each step.
    ///
    /// # Errors
    /// Where the seal fails before [`Step::Switched`] nothing has changed. Where it fails later the disk goes on with the
    /// old pair below the new one, and [`finish`](Self::finish) tries again.
    pub fn seal(&mut self, device: &Device, watch: impl Fn(Step)) -> Result<(), SealError> {
        if self.old.is_some() {
            return Err(SealError::Unfinished);
        }
        let new = pair(self.state.next);
        let upper = self.new_upper(&new, device.size())?;
        watch(Step::Created);
        let before = self.state.clone();
        let old = std::mem::replace(&mut self.state.upper, new);
        self.state.sealing = Some(old);
        self.state.next += 1;
        let named = self.save(true);
        if named.is_err() {
            // It may have its name all the same: then the new pair is empty, which is the same disk, and so it stays until
            // the next seal names both anew.
            self.state = before;
            return named;
        }
        watch(Step::Named);
        self.old = Some(device.push(upper)?);
        watch(Step::Switched);
        self.finish(device, watch)
    }

    /// Does what is left of a seal that failed after the switch. Does nothing where there was none.
    ///
    /// # Errors
    /// As for [`seal`](Self::seal).
    pub fn finish(&mut self, device: &Device, watch: impl Fn(Step)) -> Result<(), SealError> {
        let (Some(old), Some(pair)) = (self.old.clone(), self.state.sealing.clone()) else { return Ok(()) };
        old.retire();
        old.flush()?;
        old.reclaim()?;
        watch(Step::Drained);
        let index = end(&old)?;
        watch(Step::Ended);
        device.settle(index, Arc::new(UpperData::new(old)))?;
        self.old = None;
        self.list(&pair, watch)
    }

    /// Step 5.
    fn list(&mut self, pair: &Pair, watch: impl Fn(Step)) -> Result<(), SealError> {
        self.state.layers.push(pair.data.clone());
        self.state.sealing = None;
        self.save(true)?;
        watch(Step::Listed);
        let data = self.place(&pair.data);
        for path in [self.place(&pair.index), sidecar_path(&data), journal_path(&data)] {
            match std::fs::remove_file(&path) {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(SealError::Io { path, doing: "remove it", source });
                }
                _ => {}
            }
        }
        watch(Step::Cleaned);
        Ok(())
    }

    fn place(&self, path: &Path) -> PathBuf {
        self.path.parent().unwrap_or(Path::new("")).join(path)
    }

    fn new_upper(&self, pair: &Pair, virtual_size: u64) -> Result<Upper, SealError> {
        let (data, index) = (self.place(&pair.data), self.place(&pair.index));
        // What an interrupted seal made: its number was not taken, so nothing names it.
        for path in [&index, &sidecar_path(&data), &journal_path(&data), &data] {
            match std::fs::remove_file(path) {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(SealError::Io { path: path.clone(), doing: "remove it", source });
                }
                _ => {}
            }
        }
        Ok(Upper::create(&data, &index, virtual_size, self.limits)?)
    }

    fn save(&self, replace: bool) -> Result<(), SealError> {
        let io = |source| SealError::Io { path: self.path.clone(), doing: "write it", source };
        let mut bytes = serde_json::to_vec_pretty(&self.state).map_err(|error| io(error.into()))?;
        bytes.push(b'\n');
        let new = NewFile::create(&self.path, replace)?;
        new.file().write_all(&bytes).map_err(io)?;
        Ok(new.publish()?)
    }
}

fn pair(number: u64) -> Pair {
    Pair { data: format!("upper-{number}.data").into(), index: format!("upper-{number}.index").into() }
}

/// Makes the data of `upper`, which takes no more writes, a sealed layer, and gives its index.
fn end(upper: &Upper) -> Result<Arc<Index>, SealError> {
    upper.flush()?;
    let index = upper.to_index()?;
    let (start, bytes) = ending(&index, &upper.header(), upper.data_end())?;
    let what = upper.name();
    upper.data().write_all_at(&bytes, start).map_err(UpperError::io(what, "write its ending"))?;
    upper.data().sync().map_err(UpperError::io(what, "sync its ending"))?;
    Ok(Arc::new(index))
}
