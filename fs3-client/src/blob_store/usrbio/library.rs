//! The client library of 3FS, loaded at run time, behind calls that are safe.
//!
//! It is loaded once and never unloaded: its static constructors start threads and size a table by the hard limit of
//! open files. Its structs and functions are in [`super::abi`].
#![allow(unsafe_code)]

use super::abi::{
    Cqe, DeregFd, ExtractMountPoint, IoEntries, Ior, IorCall, IorCreate4, Iov, IovCall, IovCreate, IsHf3fs, PrepIo,
    RegFd, SubmitIos, WaitForIos,
};
use std::ffi::{CStr, CString, OsStr, OsString, c_int};
use std::fs::File;
use std::io;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, SystemTime};

/// Longest mount point that the structs hold.
const MOUNT_POINT: usize = 256;

/// The library's functions, all of which were found.
#[derive(Debug)]
pub(super) struct Library {
    name: OsString,
    is_hf3fs: IsHf3fs,
    extract_mount_point: ExtractMountPoint,
    iovcreate: IovCreate,
    iovunlink: IovCall,
    iovdestroy: IovCall,
    iorcreate4: IorCreate4,
    iordestroy: IorCall,
    reg_fd: RegFd,
    dereg_fd: DeregFd,
    io_entries: IoEntries,
    prep_io: PrepIo,
    submit_ios: SubmitIos,
    wait_for_ios: WaitForIos,
}

static LOADED: Mutex<Vec<&'static Library>> = Mutex::new(Vec::new());

/// Loads the library of this name or path, unless it is loaded already.
///
/// # Errors
/// The loader's words.
pub(super) fn load(name: &OsStr) -> Result<&'static Library, String> {
    use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};
    let mut all = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(library) = all.iter().find(|library| library.name == name) {
        return Ok(library);
    }
    // SAFETY: the library's constructors run here. Which one it is, is the operator's word, as with any program.
    let loaded = unsafe { Loaded::open(Some(name), RTLD_NOW | RTLD_LOCAL) }.map_err(|e| e.to_string())?;
    macro_rules! function {
        ($name:literal) => {
            // SAFETY: the header declares the function of this name with the type of the field it goes to.
            *unsafe { loaded.get(concat!($name, "\0").as_bytes()) }.map_err(|e| e.to_string())?
        };
    }
    let library = Library {
        name: name.to_owned(),
        is_hf3fs: function!("hf3fs_is_hf3fs"),
        extract_mount_point: function!("hf3fs_extract_mount_point"),
        iovcreate: function!("hf3fs_iovcreate"),
        iovunlink: function!("hf3fs_iovunlink"),
        iovdestroy: function!("hf3fs_iovdestroy"),
        iorcreate4: function!("hf3fs_iorcreate4"),
        iordestroy: function!("hf3fs_iordestroy"),
        reg_fd: function!("hf3fs_reg_fd"),
        dereg_fd: function!("hf3fs_dereg_fd"),
        io_entries: function!("hf3fs_io_entries"),
        prep_io: function!("hf3fs_prep_io"),
        submit_ios: function!("hf3fs_submit_ios"),
        wait_for_ios: function!("hf3fs_wait_for_ios"),
    };
    // Dropping it would unload the library.
    std::mem::forget(loaded);
    let library: &'static Library = Box::leak(Box::new(library));
    all.push(library);
    Ok(library)
}

impl Library {
    /// What it was loaded by.
    pub(super) fn name(&self) -> &OsStr {
        &self.name
    }

    /// The mount point of the 3FS that `path` is on.
    pub(super) fn mount_of(&self, path: &Path) -> Option<CString> {
        let path = CString::new(path.as_os_str().as_bytes()).ok()?;
        let mut point = vec![0u8; MOUNT_POINT];
        let size = c_int::try_from(point.len()).ok()?;
        // SAFETY: `point` has `size` bytes and `path` is a C string; the library writes no more than fits.
        let len = unsafe { (self.extract_mount_point)(point.as_mut_ptr().cast(), size, path.as_ptr()) };
        if len <= 0 || len > size {
            return None;
        }
        CStr::from_bytes_until_nul(&point).ok().filter(|point| !point.is_empty()).map(CStr::to_owned)
    }

    /// Whether the descriptor is on a 3FS whose daemon is there. This asks the daemon, and so may take for ever.
    pub(super) fn is_alive(&self, file: BorrowedFd<'_>) -> bool {
        // SAFETY: the descriptor is open.
        unsafe { (self.is_hf3fs)(file.as_raw_fd()) }
    }

    /// Registers a file, which transfers need.
    ///
    /// # Errors
    /// `EBADF` when it is on no 3FS.
    pub(super) fn register(&'static self, file: File) -> io::Result<Registered> {
        // SAFETY: the descriptor is open; `Registered` gives it back before it is closed.
        let mut registered = unsafe { (self.reg_fd)(file.as_raw_fd(), 0) };
        if registered == libc::EINVAL {
            // The library takes nothing back whose daemon has gone, and so has a file under this number that was closed
            // since. Now that the number is this file's, it takes it.
            // SAFETY: as above; whatever was registered by this number is closed, since the number is ours.
            registered = unsafe {
                (self.dereg_fd)(file.as_raw_fd());
                (self.reg_fd)(file.as_raw_fd(), 0)
            };
        }
        match registered {
            // An errno, unlike elsewhere.
            errno @ 1.. => Err(io::Error::from_raw_os_error(errno)),
            _ => Ok(Registered { file: ManuallyDrop::new(file), library: self }),
        }
    }

    /// A ring for reads, with its buffer.
    ///
    /// # Errors
    /// What the library says.
    pub(super) fn ring(&'static self, mount: &CStr, entries: c_int, bytes: usize) -> io::Result<Ring> {
        let (mut iov, mut ior) = (Box::new(MaybeUninit::<Iov>::zeroed()), Box::new(MaybeUninit::<Ior>::zeroed()));
        // SAFETY: the struct is the library's to write, and the mount point a C string.
        check(unsafe { (self.iovcreate)(iov.as_mut_ptr(), mount.as_ptr(), bytes, 0, -1) })?;
        // SAFETY: it was written; and all zeros were one before.
        let mut iov = unsafe { iov.assume_init() };
        // The memory stays. Without its name it is gone with the process, however that ends.
        // SAFETY: made by this library.
        unsafe { (self.iovunlink)(&raw mut *iov) };
        // No depth and no timeout: with either, a batch that is not full may never be taken. No flags: a ring with
        // flags leaves its link behind.
        // SAFETY: as for the buffer.
        let made = check(unsafe { (self.iorcreate4)(ior.as_mut_ptr(), mount.as_ptr(), entries, true, 0, 0, -1, 0) });
        if let Err(error) = made {
            // SAFETY: made by this library, and nothing uses it.
            unsafe { (self.iovdestroy)(&raw mut *iov) };
            return Err(error);
        }
        // SAFETY: it was written.
        let ior = unsafe { ior.assume_init() };
        let ring = Ring { ior, iov, library: self };
        if ring.iov.base.is_null() || ring.iov.size < bytes {
            return Err(io::Error::other("the library made a buffer of another size"));
        }
        Ok(ring)
    }
}

fn check(returned: c_int) -> io::Result<c_int> {
    if returned < 0 { Err(io::Error::from_raw_os_error(returned.saturating_neg())) } else { Ok(returned) }
}

/// A registered file. Dropped, it is given back, then closed, by a thread of its own: both ask the mount's daemon, who may
/// never answer.
#[derive(Debug)]
pub(super) struct Registered {
    file: ManuallyDrop<File>,
    library: &'static Library,
}

impl Registered {
    /// The library that has it.
    pub(super) const fn library(&self) -> &'static Library {
        self.library
    }
}

impl AsFd for Registered {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: taken this once, and not used again.
        let file = unsafe { ManuallyDrop::take(&mut self.file) };
        if let Err(mpsc::SendError((library, file))) = closer().send((self.library, file)) {
            give_back(library, file);
        }
    }
}

fn give_back(library: &Library, file: File) {
    // SAFETY: registered, and still open: the file is closed after this.
    unsafe { (library.dereg_fd)(file.as_raw_fd()) };
    drop(file);
}

/// To the thread that gives files back. It lives as long as the process, as the library does.
fn closer() -> &'static mpsc::Sender<(&'static Library, File)> {
    static CLOSER: OnceLock<mpsc::Sender<(&'static Library, File)>> = OnceLock::new();
    CLOSER.get_or_init(|| {
        let (sender, files) = mpsc::channel();
        // Without a thread the receiver is gone, and who drops a file gives it back.
        let work = move || files.into_iter().for_each(|(library, file)| give_back(library, file));
        let _ = thread::Builder::new().name("usrbio-closer".to_owned()).spawn(work);
        sender
    })
}

/// What became of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Done {
    /// What it was queued with.
    pub(super) token: u64,
    /// Bytes, or an errno below 0.
    pub(super) result: i64,
}

/// A ring and its buffer. Dropped, both are destroyed: only when nothing is on its way.
///
/// It is not `Send`: the library has no locks, so one thread makes and uses it.
#[derive(Debug)]
pub(super) struct Ring {
    ior: Box<Ior>,
    iov: Box<Iov>,
    library: &'static Library,
}

impl Ring {
    /// How many transfers may be on their way.
    pub(super) fn entries(&self) -> usize {
        // SAFETY: made by this library.
        usize::try_from(unsafe { (self.library.io_entries)(&raw const *self.ior) }).unwrap_or(0)
    }

    /// Queues a read of `len` bytes at `offset` into the buffer at `at`.
    ///
    /// # Errors
    /// What the library says; `InvalidInput` when the place is not in the buffer.
    pub(super) fn prepare(
        &mut self,
        file: &Registered,
        offset: u64,
        (at, len): (usize, usize),
        token: u64,
    ) -> io::Result<()> {
        let offset = usize::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        if at > self.iov.size || len > self.iov.size - at {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let userdata = ptr::without_provenance(usize::try_from(token).map_err(|_| io::ErrorKind::InvalidInput)?);
        // SAFETY: ring and buffer live, the place is inside of the buffer, and the file is registered. The daemon may
        // write to the place until the transfer is done: the caller gives it to nobody else before.
        check(unsafe {
            let place = self.iov.base.add(at).cast();
            let fd = file.file.as_raw_fd();
            (self.library.prep_io)(
                &raw const *self.ior,
                &raw const *self.iov,
                true,
                place,
                fd,
                offset,
                len as u64,
                userdata,
            )
        })
        .map(drop)
    }

    /// Tells the daemon that something is queued.
    ///
    /// # Errors
    /// What the library says.
    pub(super) fn submit(&mut self) -> io::Result<()> {
        // SAFETY: the ring lives.
        check(unsafe { (self.library.submit_ios)(&raw const *self.ior) }).map(drop)
    }

    /// Waits for at least so many transfers, or for `most` time; what is done is put behind `done`.
    ///
    /// The library's time is an absolute one of the clock on the wall, which may be set: so waits are short, and
    /// deadlines are kept by another clock.
    ///
    /// # Errors
    /// What the library says. That time is over is none.
    pub(super) fn wait(&mut self, least: c_int, most: Duration, done: &mut Vec<Done>) -> io::Result<()> {
        const ROOM: usize = 64;
        let until = SystemTime::now() + most;
        let until = until.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let until = libc::timespec {
            tv_sec: libc::time_t::try_from(until.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: until.subsec_nanos().into(),
        };
        let mut cqes = [Cqe { index: 0, reserved: 0, result: 0, userdata: ptr::null() }; ROOM];
        let room = c_int::try_from(ROOM).unwrap_or(c_int::MAX);
        // SAFETY: the ring lives, and there is room for as many as are said.
        let count = check(unsafe {
            (self.library.wait_for_ios)(&raw const *self.ior, cqes.as_mut_ptr(), room, least, &raw const until)
        })?;
        let count = usize::try_from(count).unwrap_or(0).min(ROOM);
        done.extend(cqes[..count].iter().map(|cqe| Done { token: cqe.userdata.addr() as u64, result: cqe.result }));
        Ok(())
    }

    /// The bytes of the buffer from `at`.
    ///
    /// # Panics
    /// When there are not so many.
    pub(super) fn copy(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at <= self.iov.size && len <= self.iov.size - at, "a place outside of the buffer");
        let mut bytes = Vec::with_capacity(len);
        // SAFETY: the place is inside of the buffer, whose memory lives as long as the ring, the vector has room for as
        // many, and they are initialised by the copy. The transfer into the place is done, so nobody writes there.
        unsafe {
            ptr::copy_nonoverlapping(self.iov.base.add(at), bytes.as_mut_ptr(), len);
            bytes.set_len(len);
        }
        bytes
    }

    /// Gives ring and buffer up without destroying them, since the daemon may still write: bytes that are lost by it.
    pub(super) fn leak(self) -> usize {
        let size = self.iov.size;
        std::mem::forget(self);
        size
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: made by this library, destroyed this once, the ring before its buffer.
        unsafe {
            (self.library.iordestroy)(&raw mut *self.ior);
            (self.library.iovdestroy)(&raw mut *self.iov);
        }
    }
}

/// Calls a function of a library under test that takes a number and gives one.
#[cfg(test)]
pub(super) fn call_for_tests(library: &OsStr, function: &str, with: c_int) -> c_int {
    use libloading::os::unix::{Library as Loaded, Symbol};
    // SAFETY: the test made this library, and its functions of that name have that type.
    unsafe {
        let loaded = Loaded::new(library).expect("the library of a test");
        let function: Symbol<unsafe extern "C" fn(c_int) -> c_int> = loaded.get(function.as_bytes()).expect(function);
        let answer = function(with);
        // As everywhere here, it is never unloaded.
        std::mem::forget(loaded);
        answer
    }
}
