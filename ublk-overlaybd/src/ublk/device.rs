//! The life of a device: added or taken over, stopped, removed; every step within a deadline.

use super::disk::Disk;
use super::gate::Gate;
use super::offload::Offload;
use super::queue::{self, Counters, Threads};
use super::support::{Support, Unsupported};
use libublk::ctrl::{UblkCtrl, UblkCtrlBuilder};
use libublk::io::UblkDev;
use libublk::{UblkError, UblkFlags, sys};
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

/// Bytes of a sector.
const SECTOR: u64 = 512;
/// Stack of a device's threads.
const STACK: usize = 512 << 10;

/// The form of a device. It must be the same when it is taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Hardware queues, each with a thread.
    pub queues: u16,
    /// Requests of a queue that can be under way.
    pub depth: u16,
    /// Bytes of the largest request, a multiple of the page size.
    pub request: u32,
}

impl Default for Shape {
    fn default() -> Self {
        Self { queues: 1, depth: 64, request: 256 << 10 }
    }
}

impl Shape {
    /// Whether the kernel takes it.
    ///
    /// # Errors
    /// A sentence that names the key.
    pub fn check(self) -> Result<(), String> {
        let Self { queues, depth, request } = self;
        if !(1..=32).contains(&queues) {
            return Err(format!("shape.queues is {queues}: 1 to 32 will do"));
        }
        if !(1..=4096).contains(&depth) {
            return Err(format!("shape.depth is {depth}: 1 to 4096 will do"));
        }
        if !(4096..=1 << 20).contains(&request) || !request.is_multiple_of(4096) {
            return Err(format!("shape.request is {request}: a multiple of 4096 up to 1048576 will do"));
        }
        Ok(())
    }
}

/// How to come by a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// A new one, by the kernel's choice of number. The kernel keeps `mark` with it, see [`mark`].
    Add {
        /// What whoever takes it over knows it by.
        mark: u64,
    },
    /// One that a process left behind, with what it had not answered.
    Recover {
        /// The kernel's number.
        number: u32,
        /// What it was made with. A device of that number with another mark is somebody else's.
        mark: u64,
    },
}

/// Why something did not happen to a device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// Not on this kernel.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The kernel refused.
    #[error("ublk device {id}: cannot {what}: {source}")]
    Refused {
        /// Its number, or `new`.
        id: String,
        /// As a verb.
        what: &'static str,
        /// What the kernel or the library says.
        source: Kernel,
    },
    /// No answer in time.
    #[error("ublk device {id}: it did not {what} within {after:?}; see the kernel's log for what holds it up")]
    TimedOut {
        /// Its number, or `new`.
        id: String,
        /// As a verb.
        what: &'static str,
        /// The deadline.
        after: Duration,
    },
    /// A disk that no device can be made of.
    #[error("a disk of {size} bytes cannot be a block device: {why}")]
    Size {
        /// Its bytes.
        size: u64,
        /// Why.
        why: &'static str,
    },
}

/// What the kernel said.
#[derive(Debug)]
pub struct Kernel(UblkError);

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            UblkError::UringIOError(code) | UblkError::OtherError(code) if *code < 0 => {
                write!(f, "{}", std::io::Error::from_raw_os_error(-code))
            }
            UblkError::IOError(error) => write!(f, "{error}"),
            other => write!(f, "{other}"),
        }
    }
}

impl std::error::Error for Kernel {}

/// What is done to all devices of a process in the same way.
#[derive(Clone)]
pub struct Service {
    support: Support,
    threads: Threads,
    /// For each step of a device's life.
    deadline: Duration,
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service").field("support", &self.support).finish_non_exhaustive()
    }
}

impl Service {
    /// Requests that wait have at most `threads` threads and the time `request`; a device has `deadline` to start and
    /// to stop.
    #[must_use]
    pub fn new(support: Support, threads: usize, request: Duration, deadline: Duration) -> Self {
        let threads = Threads {
            reads: Arc::new(Offload::new(threads, request)),
            writes: Arc::new(Offload::new(threads, request)),
        };
        Self { support, threads, deadline }
    }

    /// Makes `disk` a block device, and returns when it is there.
    ///
    /// # Errors
    /// When the kernel refuses or does not answer in time. Nothing is left of a new device then, as far as the kernel
    /// allows.
    pub fn start(&self, start: Start, shape: Shape, disk: Arc<dyn Disk>) -> Result<Device, DeviceError> {
        let size = disk.size();
        if size == 0 || !size.is_multiple_of(SECTOR) {
            return Err(DeviceError::Size { size, why: "it is no multiple of 512, or nothing" });
        }
        let (told, tell) = mpsc::channel();
        let (order, orders) = mpsc::channel();
        let counters = Arc::new(Counters::default());
        let gate = Arc::new(Gate::default());
        let runner = Runner {
            start,
            shape,
            disk,
            support: self.support,
            threads: self.threads.clone(),
            counters: Arc::clone(&counters),
            gate: Arc::clone(&gate),
        };
        let name = match start {
            Start::Add { .. } => "new".to_owned(),
            Start::Recover { number, .. } => number.to_string(),
        };
        let thread = thread::Builder::new().name("ublk-device".into()).stack_size(STACK);
        let spawned = thread.spawn(move || runner.run(&told, &orders));
        let refused = |source| DeviceError::Refused { id: name.clone(), what: "start", source: Kernel(source) };
        let thread = spawned.map_err(|error| refused(UblkError::IOError(error)))?;
        let (mut id, mut what) = (None, "start");
        loop {
            match tell.recv_timeout(self.deadline) {
                Ok(Told::Asks(asked)) => what = asked,
                Ok(Told::Made(made)) => id = Some(made),
                Ok(Told::Live(id)) => {
                    notice_death_soon(id);
                    let thread = Some(thread);
                    return Ok(Device { id, orders: order, thread, deadline: self.deadline, counters, gate });
                }
                Ok(Told::Failed(what, source)) => {
                    let id = id.map_or(name, |id: u32| id.to_string());
                    return Err(DeviceError::Refused { id, what, source: Kernel(source) });
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    // Whatever it waits for: without its device, it ends.
                    if let (Start::Add { .. }, Some(id)) = (start, id) {
                        remove(id, self.deadline).unwrap_or_else(|error| tracing::error!("{error}"));
                    }
                    let id = id.map_or(name, |id: u32| id.to_string());
                    return Err(DeviceError::TimedOut { id, what, after: self.deadline });
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => return Err(refused(UblkError::QueueIsDown)),
            }
        }
    }
}

/// Milliseconds after which the kernel looks at a request that has no answer.
const LOOK_AFTER: &str = "1000";

/// Makes the kernel look soon at requests that wait. It goes on waiting if the process lives; but before Linux 6.15, when all
/// requests that a queue can have are with a process that dies, this is how it finds out: by itself after 30 seconds.
fn notice_death_soon(id: u32) {
    let path = format!("/sys/block/ublkb{id}/queue/io_timeout");
    if let Err(error) = std::fs::write(&path, LOOK_AFTER) {
        tracing::warn!("{path}: {error}; if the daemon dies under full load, the device may wait half a minute");
    }
}

/// What a device's thread tells.
enum Told {
    /// What it asks of the kernel now, as a verb.
    Asks(&'static str),
    /// There is a device, which does not serve yet.
    Made(u32),
    /// It serves.
    Live(u32),
    /// It came to nothing.
    Failed(&'static str, UblkError),
}

/// What a device's thread is told.
enum Order {
    /// End it, and remove the device.
    Stop,
    /// Another size, in bytes.
    Resize(u64, mpsc::Sender<Result<(), UblkError>>),
}

/// A device that is being served.
pub struct Device {
    id: u32,
    orders: mpsc::Sender<Order>,
    thread: Option<thread::JoinHandle<()>>,
    deadline: Duration,
    counters: Arc<Counters>,
    gate: Arc<Gate>,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Device {
    /// Its number: that of `/dev/ublkbN`.
    #[must_use]
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// Its block device.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        format!("/dev/ublkb{}", self.id).into()
    }

    /// What it has done.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Tells the kernel that the disk has another size.
    ///
    /// # Errors
    /// When the kernel refuses, or has no such call.
    pub fn resize(&self, size: u64) -> Result<(), DeviceError> {
        let id = || self.id.to_string();
        let (answer, answered) = mpsc::channel();
        let gone = |_| DeviceError::Refused { id: id(), what: "resize", source: Kernel(UblkError::QueueIsDown) };
        self.orders.send(Order::Resize(size, answer)).map_err(|_| gone(()))?;
        match answered.recv_timeout(self.deadline) {
            Ok(done) => {
                done.map_err(|source| DeviceError::Refused { id: id(), what: "resize", source: Kernel(source) })
            }
            Err(_) => Err(DeviceError::TimedOut { id: id(), what: "resize", after: self.deadline }),
        }
    }

    /// Holds the requests that come from now on, and returns when those before have been answered; whether that was
    /// within `longest`. They are held in any case, until [`resume`](Self::resume).
    #[must_use]
    pub fn quiesce(&self, longest: Duration) -> bool {
        self.gate.close(longest)
    }

    /// Serves what was held, and all that comes.
    pub fn resume(&self) {
        self.gate.open();
    }

    /// Whether requests are held.
    #[must_use]
    pub fn is_quiesced(&self) -> bool {
        self.gate.is_closed()
    }

    /// Ends and removes it: who still uses it gets errors.
    ///
    /// # Errors
    /// When that takes too long, because something holds the device.
    pub fn stop(mut self) -> Result<(), DeviceError> {
        let _ = self.orders.send(Order::Stop);
        let Some(thread) = self.thread.take() else { return Ok(()) };
        // What is held would hold up the end.
        self.gate.open();
        let (done, ended) = mpsc::channel();
        let id = self.id;
        thread::spawn(move || {
            let _ = thread.join();
            let _ = done.send(());
        });
        ended.recv_timeout(self.deadline).map_err(|_| DeviceError::TimedOut {
            id: id.to_string(),
            what: "stop",
            after: self.deadline,
        })
    }
}

/// Removes a device that nobody serves.
///
/// # Errors
/// When the kernel refuses or does not answer in time. One that is not there is removed already.
pub fn remove(id: u32, deadline: Duration) -> Result<(), DeviceError> {
    let (done, ended) = mpsc::channel();
    thread::spawn(move || {
        let number = i32::try_from(id).unwrap_or(i32::MAX);
        let removed = UblkCtrl::new_simple(number).and_then(|control| {
            control.kill_dev()?;
            control.del_dev()
        });
        let _ = done.send(removed);
    });
    match ended.recv_timeout(deadline) {
        Ok(Ok(_) | Err(UblkError::UringIOError(NOT_THERE))) => Ok(()),
        Ok(Err(source)) => Err(DeviceError::Refused { id: id.to_string(), what: "be removed", source: Kernel(source) }),
        Err(_) => Err(DeviceError::TimedOut { id: id.to_string(), what: "go away", after: deadline }),
    }
}

/// `-ENODEV`.
const NOT_THERE: i32 = -19;

/// The mark of the device with this number: see [`Start::Add`]. None where there is no such device.
///
/// # Errors
/// When the kernel refuses or does not answer in time.
pub fn mark(id: u32, deadline: Duration) -> Result<Option<u64>, DeviceError> {
    let (done, ended) = mpsc::channel();
    thread::spawn(move || {
        let control = UblkCtrl::new_simple(i32::try_from(id).unwrap_or(i32::MAX));
        let _ = done.send(control.map(|control| control.dev_info().ublksrv_flags));
    });
    match ended.recv_timeout(deadline) {
        Ok(Ok(mark)) => Ok(Some(mark)),
        Ok(Err(UblkError::UringIOError(NOT_THERE))) => Ok(None),
        Ok(Err(source)) => Err(DeviceError::Refused { id: id.to_string(), what: "be asked", source: Kernel(source) }),
        Err(_) => Err(DeviceError::TimedOut { id: id.to_string(), what: "answer", after: deadline }),
    }
}

/// Numbers of all devices that this kernel has.
///
/// # Errors
/// When they cannot be listed.
pub fn present() -> std::io::Result<Vec<u32>> {
    let entries = match std::fs::read_dir("/sys/class/ublk-char") {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        found.extend(name.to_str().and_then(|name| name.strip_prefix("ublkc")?.parse::<u32>().ok()));
    }
    found.sort_unstable();
    Ok(found)
}

/// Makes the kernel not look for partitions on the disk of this thread's queue: it trusts no table that an unprivileged
/// thread serves. A scan would be the first read of each device, and a server that dies during it leaves the kernel's
/// START_DEV waiting for an answer (CVE-2025-68823).
fn without_partition_scan() -> rustix::io::Result<()> {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let mut sets = capabilities(None)?;
    sets.effective -= CapabilitySet::SYS_ADMIN;
    set_capabilities(None, sets)
}

/// What a device's own thread has: libublk's control ring is the thread's.
struct Runner {
    start: Start,
    shape: Shape,
    disk: Arc<dyn Disk>,
    support: Support,
    threads: Threads,
    counters: Arc<Counters>,
    gate: Arc<Gate>,
}

impl Runner {
    fn run(self, told: &mpsc::Sender<Told>, orders: &mpsc::Receiver<Order>) {
        if let Err((what, error)) = self.device(told, orders) {
            let _ = told.send(Told::Failed(what, error));
        }
    }

    fn device(
        &self,
        told: &mpsc::Sender<Told>,
        orders: &mpsc::Receiver<Order>,
    ) -> Result<(), (&'static str, UblkError)> {
        let number = |id: u32| i32::try_from(id).unwrap_or(i32::MAX);
        let (id, mark, flags) = match self.start {
            Start::Add { mark } => (-1, mark, UblkFlags::UBLK_DEV_F_ADD_DEV),
            Start::Recover { number: id, mark } => (number(id), mark, UblkFlags::UBLK_DEV_F_RECOVER_DEV),
        };
        let control = UblkCtrlBuilder::default()
            .name("overlaybd")
            .id(id)
            .nr_queues(self.shape.queues)
            .depth(self.shape.depth)
            .io_buf_bytes(self.shape.request)
            .ctrl_flags(self.support.flags())
            .ctrl_target_flags(mark)
            .dev_flags(flags)
            .build()
            .map_err(|error| ("be made", error))?;
        // However this ends, the device is removed only on purpose: what dies is recovered.
        control.disown();
        let id = control.dev_info().dev_id;
        let _ = told.send(Told::Made(id));
        if matches!(self.start, Start::Recover { .. }) {
            if control.dev_info().ublksrv_flags != mark {
                return Err(("be recovered, since it is another's", UblkError::OtherError(NOT_THERE)));
            }
            let _ = told.send(Told::Asks("be given up by the process that died"));
            control.start_user_recover().map_err(|error| ("be recovered", error))?;
        }
        let served = self.serve(&control, id, told, orders);
        if let (Err(_), Start::Add { .. }) = (&served, self.start) {
            let _ = control.kill_dev();
            let _ = control.del_dev();
        }
        served
    }

    fn serve(
        &self,
        control: &UblkCtrl,
        id: u32,
        told: &mpsc::Sender<Told>,
        orders: &mpsc::Receiver<Order>,
    ) -> Result<(), (&'static str, UblkError)> {
        let _ = told.send(Told::Asks("be opened"));
        let device = UblkDev::new("overlaybd".into(), |device| self.parameters(device), control);
        let device = Arc::new(device.map_err(|error| ("be opened", error))?);
        let queues: Vec<_> = (0..device.dev_info.nr_hw_queues).map(|number| self.queue(number, &device)).collect();
        let _ = told.send(Told::Asks("start"));
        let started = control.start_dev(&device);
        if let Err(error) = started {
            let _ = control.kill_dev();
            return Err(("start", error));
        }
        let _ = told.send(Told::Live(id));
        // Until it is told to stop, or nobody is left who could tell it.
        while let Ok(Order::Resize(size, answer)) = orders.recv() {
            let _ = answer.send(control.update_size(size).map(drop));
        }
        let _ = control.kill_dev();
        for queue in queues {
            let _ = queue.join();
        }
        drop(device);
        control.del_dev().map(drop).map_err(|error| ("be removed", error))
    }

    fn queue(&self, number: u16, device: &Arc<UblkDev>) -> thread::JoinHandle<()> {
        let (device, disk) = (Arc::clone(device), Arc::clone(&self.disk));
        let (threads, counters, gate) = (self.threads.clone(), Arc::clone(&self.counters), Arc::clone(&self.gate));
        thread::spawn(move || {
            UblkCtrl::init_queue_thread();
            if let Err(error) = without_partition_scan() {
                tracing::warn!("partitions of the disk will be looked for, which its death may interrupt: {error}");
            }
            if let Err(error) = queue::serve(number, &device, disk, threads, counters, gate) {
                tracing::error!("ublk device {}: queue {number}: {error}", device.dev_info.dev_id);
            }
        })
    }

    /// What the device announces: a cache that is flushed, discards, and zeros.
    fn parameters(&self, device: &mut UblkDev) -> Result<(), UblkError> {
        let size = self.disk.size();
        device.tgt.dev_size = size;
        let mut attributes = sys::UBLK_ATTR_VOLATILE_CACHE | sys::UBLK_ATTR_FUA;
        let mut types = sys::UBLK_PARAM_TYPE_BASIC;
        let mut discard = sys::ublk_param_discard::default();
        if self.disk.is_read_only() {
            attributes = sys::UBLK_ATTR_READ_ONLY;
        } else {
            types |= sys::UBLK_PARAM_TYPE_DISCARD;
            discard = sys::ublk_param_discard {
                discard_granularity: 4096,
                max_discard_sectors: 1 << 21,
                max_write_zeroes_sectors: 1 << 21,
                max_discard_segments: 1,
                ..sys::ublk_param_discard::default()
            };
        }
        device.tgt.params = sys::ublk_params {
            types,
            basic: sys::ublk_param_basic {
                attrs: attributes,
                logical_bs_shift: 9,
                physical_bs_shift: 12,
                io_opt_shift: 12,
                io_min_shift: 12,
                max_sectors: device.dev_info.max_io_buf_bytes / 512,
                dev_sectors: size / SECTOR,
                ..sys::ublk_param_basic::default()
            },
            discard,
            ..sys::ublk_params::default()
        };
        Ok(())
    }
}
