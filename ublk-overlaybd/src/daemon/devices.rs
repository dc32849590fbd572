//! Devices by name: each operation whole, one at a time for a device, and as durable as it says.

mod info;
mod recovery;
mod upkeep;

use super::disk::{Open, OpenError, Opener, sentence};
use super::events::Events;
use super::identity::Identity;
use super::protocol::{DeviceInfo, DeviceSpec, FailureCode, Happened, Sealed, State};
use super::table::{self, Record, Stage, Table, TableError};
use crate::engine::{Device as Engine, EngineError};
use crate::seal::{Chain, SealError};
use crate::ublk::device::{self, Device, DeviceError, Service, Shape, Start};
use crate::ublk::disk::Disk;
use crate::ublk::support::Support;
pub use recovery::{Found, Recovered};
use std::collections::BTreeMap;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Why an operation did not happen.
#[derive(Debug, thiserror::Error)]
pub enum OperationError {
    /// It was asked for wrongly.
    #[error("{0}")]
    Invalid(String),
    /// There is no such device.
    #[error("there is no device `{0}`")]
    NotFound(String),
    /// Something else is in the way.
    #[error("device `{name}`: {why}")]
    Conflict {
        /// Which device.
        name: String,
        /// What is in the way.
        why: String,
    },
    /// Not here.
    #[error("device `{name}`: {why}")]
    Unsupported {
        /// Which device.
        name: String,
        /// What is missing.
        why: &'static str,
    },
    /// Requests that were under way did not end.
    #[error("device `{name}`: requests that were under way did not end within {after:?}")]
    Busy {
        /// Which device.
        name: String,
        /// The deadline.
        after: Duration,
    },
    /// There is no disk.
    #[error("device `{name}`: {source}")]
    Open {
        /// Which device.
        name: String,
        /// Why.
        source: OpenError,
    },
    /// The kernel did not do it.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The table cannot be written.
    #[error(transparent)]
    Table(#[from] TableError),
    /// Sealing failed.
    #[error(transparent)]
    Seal(#[from] SealError),
    /// The disk failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A file's identity cannot be found out.
    #[error("device `{name}`: cannot look at its files")]
    Identity {
        /// Which device.
        name: String,
        /// What the system said.
        source: std::io::Error,
    },
}

impl OperationError {
    /// Its kind, for programs.
    #[must_use]
    pub fn code(&self) -> FailureCode {
        match self {
            Self::Invalid(_) => FailureCode::Invalid,
            Self::Open { source, .. } if source.is_corrupt() => FailureCode::Corrupt,
            Self::Open { source, .. } if source.is_asked() => FailureCode::Invalid,
            Self::Open { source: OpenError::Upper(crate::upper::UpperError::Busy(_)), .. } => FailureCode::Conflict,
            Self::Open { source: OpenError::Chain(SealError::Upper(crate::upper::UpperError::Busy(_))), .. } => {
                FailureCode::Conflict
            }
            Self::Device(DeviceError::Size { .. }) => FailureCode::Invalid,
            Self::NotFound(_) => FailureCode::NotFound,
            Self::Conflict { .. } => FailureCode::Conflict,
            Self::Unsupported { .. } | Self::Device(DeviceError::Unsupported(_)) => FailureCode::Unsupported,
            Self::Busy { .. } | Self::Device(DeviceError::TimedOut { .. }) => FailureCode::TimedOut,
            _ => FailureCode::Failed,
        }
    }

    /// What may help.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Conflict { why, .. } if why.contains("in use") => Some("unmount it first, or remove it with `force`"),
            Self::Open { source, .. } if source.is_asked() => None,
            Self::Open { source: OpenError::Digest { .. }, .. } => {
                Some("the file is not what was published: fetch it again")
            }
            _ => None,
        }
    }
}

/// What devices are given where nothing is said, and who may open their nodes.
#[derive(Debug, Clone, Copy)]
pub struct Defaults {
    /// The form.
    pub shape: Shape,
    /// Devices there may be.
    pub most: usize,
    /// User, group and permissions of `/dev/ublkbN`.
    pub node: Option<(u32, u32, u32)>,
    /// The deadline of a request.
    pub request: Duration,
    /// The deadline of an operation.
    pub operation: Duration,
}

/// A device that serves.
struct Live {
    device: Device,
    engine: Option<Arc<Engine>>,
    disk: Arc<dyn Disk>,
    chain: Mutex<Option<Chain>>,
    /// When it serves again in any case.
    held_until: Mutex<Option<Instant>>,
}

struct Slot {
    /// Held by the operation that is under way.
    operation: Mutex<()>,
    now: Mutex<Now>,
}

/// A device as it is.
#[derive(Clone)]
struct Now {
    record: Record,
    state: State,
    live: Option<Arc<Live>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All devices of a daemon.
pub struct Devices {
    service: Service,
    support: Support,
    table: Table,
    opener: Opener,
    defaults: Defaults,
    boot: String,
    slots: Mutex<BTreeMap<String, Arc<Slot>>>,
    recovered: Mutex<Recovered>,
    /// For those who watch.
    pub events: Events,
}

impl std::fmt::Debug for Devices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Devices").field("names", &lock(&self.slots).keys()).finish_non_exhaustive()
    }
}

impl Devices {
    /// No devices yet: [`survey`](Self::survey) finds those that a daemon left.
    ///
    /// # Errors
    /// When this boot of the kernel has no name.
    pub fn new(
        service: Service,
        support: Support,
        table: Table,
        opener: Opener,
        defaults: Defaults,
    ) -> std::io::Result<Self> {
        Ok(Self {
            service,
            support,
            table,
            opener,
            defaults,
            boot: table::boot()?,
            slots: Mutex::default(),
            recovered: Mutex::default(),
            events: Events::default(),
        })
    }

    /// The right to operate on a device, once whatever is under way with it has ended.
    fn turn<'s>(&self, name: &str, slot: &'s Slot) -> Result<MutexGuard<'s, ()>, OperationError> {
        let until = Instant::now() + self.defaults.operation;
        loop {
            let turn = lock(&slot.operation);
            if lock(&slot.now).state != State::Recovering {
                return Ok(turn);
            }
            drop(turn);
            if Instant::now() > until {
                let why = "it is still being taken over".to_owned();
                return Err(OperationError::Conflict { name: name.to_owned(), why });
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn slot(&self, name: &str) -> Result<Arc<Slot>, OperationError> {
        lock(&self.slots).get(name).cloned().ok_or_else(|| OperationError::NotFound(name.to_owned()))
    }

    /// Whether devices can grow here.
    #[must_use]
    pub fn resizes(&self) -> bool {
        self.support.resizes()
    }

    /// Makes a device, and returns when its node is there. One that exists and is the same is given as it is.
    ///
    /// # Errors
    /// Nothing is left of it then.
    pub fn add(&self, name: &str, spec: &DeviceSpec) -> Result<DeviceInfo, OperationError> {
        if !table::is_name(name) {
            let why = "letters, digits, `.`, `_` and `-` make a name, up to 200 of them, and no `.` first";
            return Err(OperationError::Invalid(format!("`{name}` is no name of a device: {why}")));
        }
        let open_error = |source| OperationError::Open { name: name.to_owned(), source };
        Opener::check(&spec.disk).map_err(open_error)?;
        let shape = self.shape(spec)?;
        loop {
            let mut slots = lock(&self.slots);
            if let Some(slot) = slots.get(name).cloned() {
                drop(slots);
                // Whatever is under way with it ends first.
                let _turn = self.turn(name, &slot)?;
                let now = lock(&slot.now).clone();
                if lock(&self.slots).get(name).is_none_or(|there| !Arc::ptr_eq(there, &slot)) {
                    continue;
                }
                if now.record.spec != *spec {
                    let why = "it exists, and is made of something else".to_owned();
                    return Err(OperationError::Conflict { name: name.to_owned(), why });
                }
                return Ok(info::of(&now));
            }
            if slots.len() >= self.defaults.most {
                let why = format!("there are {} devices already, as many as are allowed", slots.len());
                return Err(OperationError::Conflict { name: name.to_owned(), why });
            }
            let record = Record::new(name.to_owned(), spec.clone(), shape, self.boot.clone(), self.table.id());
            let now = Now { record: record.clone(), state: State::Adding, live: None };
            let slot = Arc::new(Slot { operation: Mutex::new(()), now: Mutex::new(now) });
            let operation = lock(&slot.operation);
            slots.insert(name.to_owned(), Arc::clone(&slot));
            drop(slots);
            let made = self.make(record, &slot);
            if made.is_err() {
                if let Err(error) = self.table.remove(name) {
                    tracing::error!("a record of nothing stays: {}", sentence(&error));
                }
                lock(&self.slots).remove(name);
            }
            drop(operation);
            return made;
        }
    }

    fn shape(&self, spec: &DeviceSpec) -> Result<Shape, OperationError> {
        let shape = spec.shape.unwrap_or(self.defaults.shape);
        shape.check().map_err(OperationError::Invalid)?;
        Ok(shape)
    }

    fn make(&self, mut record: Record, slot: &Slot) -> Result<DeviceInfo, OperationError> {
        let name = record.name.clone();
        self.table.put(&record)?;
        let identity = |source| OperationError::Identity { name: name.clone(), source };
        let before = Identity::of(&record.spec.disk).map_err(identity)?;
        let open = self.opener.open(&record.spec.disk, true);
        let open = open.map_err(|source| OperationError::Open { name: name.clone(), source })?;
        let after = Identity::of(&record.spec.disk).map_err(identity)?;
        if let Some(file) = before.difference(&after) {
            let why = format!("{} was replaced while it was opened", file.display());
            return Err(OperationError::Conflict { name, why });
        }
        record.identity = Some(after);
        self.table.put(&record)?;
        let start = Start::Add { mark: record.mark };
        let device = self.service.start(start, record.shape, Arc::clone(&open.disk))?;
        record.number = Some(device.id());
        record.stage = Stage::Live;
        // It is promised from here on.
        if let Err(error) = self.table.put(&record) {
            if let Err(error) = device.stop() {
                tracing::error!("{}", sentence(&error));
            }
            return Err(error.into());
        }
        self.node(&device.path());
        let now = self.live(slot, record, device, open);
        self.events.tell(
            Happened::Added,
            Some(&name),
            now.live.as_ref().map(|l| l.device.path().display().to_string()),
        );
        Ok(info::of(&now))
    }

    fn live(&self, slot: &Slot, record: Record, device: Device, open: Open) -> Now {
        let Open { disk, engine, chain } = open;
        let live = Live { device, engine, disk, chain: Mutex::new(chain), held_until: Mutex::new(None) };
        let now = Now { record, state: State::Live, live: Some(Arc::new(live)) };
        *lock(&slot.now) = now.clone();
        now
    }

    /// Waits for a node, and gives it to whom it shall belong. Where `/dev` is nobody's, there may be none.
    fn node(&self, path: &Path) {
        let until = Instant::now() + self.defaults.operation / 4;
        while !path.exists() {
            if Instant::now() > until {
                tracing::warn!("{} does not appear: is /dev a devtmpfs, or is there a udev?", path.display());
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
        if let Some((user, group, mode)) = self.defaults.node {
            use std::os::unix::fs::{PermissionsExt as _, chown};
            let given = chown(path, Some(user), Some(group))
                .and_then(|()| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)));
            if let Err(error) = given {
                tracing::warn!("{}: cannot give it to {user}:{group}: {error}", path.display());
            }
        }
    }

    /// A device as it is.
    ///
    /// # Errors
    /// There is none.
    pub fn stat(&self, name: &str) -> Result<DeviceInfo, OperationError> {
        Ok(info::of(&lock(&self.slot(name)?.now)))
    }

    /// All devices, by name.
    #[must_use]
    pub fn list(&self) -> Vec<DeviceInfo> {
        let slots: Vec<_> = lock(&self.slots).values().cloned().collect();
        slots.iter().map(|slot| info::of(&lock(&slot.now))).collect()
    }

    /// Removes a device. One that is mounted, or open for itself alone, only with `force`: who uses it gets errors.
    ///
    /// # Errors
    /// When it is in use, or the kernel does not let it go; asking again goes on.
    pub fn remove(&self, name: &str, force: bool) -> Result<(), OperationError> {
        let slot = self.slot(name)?;
        let _turn = self.turn(name, &slot)?;
        if lock(&self.slots).get(name).is_none_or(|there| !Arc::ptr_eq(there, &slot)) {
            return Err(OperationError::NotFound(name.to_owned()));
        }
        let Now { mut record, live, .. } = lock(&slot.now).clone();
        let path = live.map(|live| live.device.path());
        if let Some(path) = path.filter(|path| !force && is_in_use(path)) {
            let why = format!("{} is in use", path.display());
            return Err(OperationError::Conflict { name: name.to_owned(), why });
        }
        record.stage = Stage::Removing;
        self.table.put(&record)?;
        let live = {
            let mut now = lock(&slot.now);
            now.record = record.clone();
            now.state = State::Removing;
            now.live.take()
        };
        if let Some(live) = live {
            live.device.resume();
            let disk = Arc::clone(&live.disk);
            // Others may be looking at it for a moment.
            let until = Instant::now() + self.defaults.operation;
            let mut live = Some(live);
            while let Some(shared) = live.take() {
                match Arc::try_unwrap(shared) {
                    Ok(alone) => alone.device.stop()?,
                    Err(_) if Instant::now() > until => {
                        return Err(OperationError::Busy { name: name.to_owned(), after: self.defaults.operation });
                    }
                    Err(shared) => {
                        live = Some(shared);
                        thread::sleep(Duration::from_millis(1));
                    }
                }
            }
            if !disk.is_read_only()
                && let Err(errno) = disk.perform(&mut crate::ublk::disk::Operation::Flush)
            {
                tracing::error!("device `{name}`: its last flush failed: {errno}");
            }
        } else if let Some(number) = record.number
            && device::mark(number, self.defaults.operation)? == Some(record.mark)
        {
            device::remove(number, self.defaults.operation)?;
        }
        self.table.remove(name)?;
        lock(&self.slots).remove(name);
        self.events.tell(Happened::Removed, Some(name), None);
        Ok(())
    }

    /// The live device of that name, and the right to change it.
    fn on<T>(
        &self,
        name: &str,
        work: impl FnOnce(&Slot, &Live) -> Result<T, OperationError>,
    ) -> Result<T, OperationError> {
        let slot = self.slot(name)?;
        let _turn = self.turn(name, &slot)?;
        let now = lock(&slot.now).clone();
        let Some(live) = now.live else {
            let why = "it does not serve".to_owned();
            return Err(OperationError::Conflict { name: name.to_owned(), why });
        };
        work(&slot, &live)
    }

    /// Seals the writable layer of a device's chain, and puts a new one over it, while it is in use.
    ///
    /// # Errors
    /// See [`Chain::seal`].
    pub fn seal(&self, name: &str) -> Result<Sealed, OperationError> {
        self.on(name, |_, live| {
            let mut chain = lock(&live.chain);
            let (Some(chain), Some(engine)) = (&mut *chain, &live.engine) else {
                let why = "only the writable layer of a `chain` can be sealed";
                return Err(OperationError::Unsupported { name: name.to_owned(), why });
            };
            // One that failed is finished first.
            chain.finish(engine, |_| ())?;
            chain.seal(engine, |_| ())?;
            let layers: Vec<PathBuf> = chain.layers().collect();
            let layer = layers.last().cloned().unwrap_or_default();
            self.events.tell(Happened::Sealed, Some(name), Some(layer.display().to_string()));
            Ok(Sealed { layer, layers })
        })
    }

    /// Makes a device's disk larger.
    ///
    /// # Errors
    /// On a kernel that cannot, and for what has no writable layer.
    pub fn resize(&self, name: &str, size: u64) -> Result<DeviceInfo, OperationError> {
        self.on(name, |slot, live| {
            let unsupported = |why| Err(OperationError::Unsupported { name: name.to_owned(), why });
            let Some(engine) = live.engine.as_ref().filter(|engine| !engine.is_read_only()) else {
                return unsupported("only a disk with a writable layer can grow");
            };
            if !self.support.resizes() {
                return unsupported("devices of this kernel cannot change their size: Linux 6.16 or later can");
            }
            let before = engine.size();
            if size < before || !size.is_multiple_of(512) {
                let why = format!("`size` is {size}: it must be a multiple of 512, and not less than {before}");
                return Err(OperationError::Invalid(why));
            }
            // The disk first: no request may come that it does not know.
            engine.grow(size)?;
            live.device.resize(size)?;
            self.events.tell(Happened::Resized, Some(name), Some(format!("{size} bytes")));
            Ok(info::of(&lock(&slot.now)))
        })
    }

    /// Holds a device's requests, and flushes what was answered, so that its files are one moment's. It goes on by itself
    /// after `hold`.
    ///
    /// # Errors
    /// When what is under way does not end within that time, or cannot be flushed; then it goes on at once.
    pub fn quiesce(&self, name: &str, hold: Duration) -> Result<DeviceInfo, OperationError> {
        let most = self.defaults.request / 2;
        if hold.is_zero() || hold > most {
            let why = format!("`hold_ms` is {}: 1 to {} will do", hold.as_millis(), most.as_millis());
            return Err(OperationError::Invalid(why));
        }
        self.on(name, |slot, live| {
            *lock(&live.held_until) = Some(Instant::now() + hold);
            let held = live.device.quiesce(hold);
            let flushed = if held && !live.disk.is_read_only() {
                live.engine.as_ref().map_or(Ok(()), |engine| engine.flush())
            } else {
                Ok(())
            };
            if !held || flushed.is_err() {
                live.device.resume();
                *lock(&live.held_until) = None;
            }
            flushed?;
            if !held {
                return Err(OperationError::Busy { name: name.to_owned(), after: hold });
            }
            self.events.tell(Happened::Quiesced, Some(name), None);
            Ok(info::of(&lock(&slot.now)))
        })
    }

    /// Serves what a quiesced device holds. One that holds nothing goes on as it is.
    ///
    /// # Errors
    /// There is no such device, or it does not serve.
    pub fn resume(&self, name: &str) -> Result<DeviceInfo, OperationError> {
        self.on(name, |slot, live| {
            let was_held = live.device.is_quiesced();
            live.device.resume();
            *lock(&live.held_until) = None;
            if was_held {
                self.events.tell(Happened::Resumed, Some(name), None);
            }
            Ok(info::of(&lock(&slot.now)))
        })
    }

    /// Flushes all devices: before an end that is asked for.
    pub fn flush_all(&self) {
        let slots: Vec<_> = lock(&self.slots).values().cloned().collect();
        for slot in slots {
            let now = lock(&slot.now).clone();
            if let Some(engine) = now.live.as_ref().and_then(|live| live.engine.as_ref())
                && let Err(error) = engine.flush()
            {
                tracing::error!("device `{}`: cannot flush: {}", now.record.name, sentence(&error));
            }
        }
    }
}

/// Whether somebody has the device mounted, or for itself alone.
fn is_in_use(path: &Path) -> bool {
    let alone = i32::try_from(rustix::fs::OFlags::EXCL.bits()).unwrap_or(0);
    let opened = std::fs::File::options().read(true).custom_flags(alone).open(path);
    opened.is_err_and(|error| error.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error()))
}
