//! Loop devices that free themselves. This is the crate's only unsafe code: no safe binding has these calls.
#![allow(unsafe_code)]

use crate::MountError;
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// `<linux/loop.h>`: `LOOP_CONFIGURE`.
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
/// `<linux/loop.h>`: `LOOP_CTL_GET_FREE`.
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
/// `<linux/loop.h>`: `LO_FLAGS_READ_ONLY`.
const READ_ONLY: u32 = 1;
/// `<linux/loop.h>`: `LO_FLAGS_AUTOCLEAR`: the device is free when its last user closes it.
const AUTOCLEAR: u32 = 4;
/// How often another process may take the free device before us.
const TRIES: u32 = 200;

/// `struct loop_info64`.
#[repr(C)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

// The sizes in the kernel's header, on every architecture.
const _: () = assert!(size_of::<LoopInfo>() == 232 && size_of::<LoopConfig>() == 304);

/// A read-only loop device. It goes when neither this nor a mount has it open.
#[derive(Debug)]
pub(crate) struct LoopDevice {
    path: PathBuf,
    _open: File,
}

impl LoopDevice {
    /// A loop device over `backing`; `name` is what tools show for it.
    pub(crate) fn over(backing: &File, name: &Path) -> Result<Self, MountError> {
        let control_path = Path::new("/dev/loop-control");
        let control = OpenOptions::new()
            .read(true)
            .write(true)
            .open(control_path)
            .map_err(MountError::io("open", control_path))?;
        for attempt in 0..TRIES {
            let number =
                free_device(control.as_raw_fd()).map_err(MountError::io("ask for a free device at", control_path))?;
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = match File::open(&path) {
                Ok(device) => device,
                // The node of a new device may come a moment later.
                Err(e) if e.kind() == io::ErrorKind::NotFound && attempt + 1 < TRIES => {
                    std::thread::sleep(Duration::from_millis(5));
                    continue;
                }
                Err(e) => return Err(MountError::io("open", &path)(e)),
            };
            match configure(device.as_raw_fd(), backing.as_raw_fd(), name) {
                Ok(()) => return Ok(Self { path, _open: device }),
                // Another process was quicker.
                Err(Errno::BUSY) => std::thread::sleep(Duration::from_micros(u64::from(attempt) * 100)),
                Err(e) => return Err(MountError::io("set up", &path)(e)),
            }
        }
        Err(MountError::io("get a device from", control_path)(Errno::BUSY))
    }

    /// `/dev/loopN`.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

fn free_device(control: RawFd) -> Result<i32, Errno> {
    // SAFETY: `control` is an open descriptor of the loop control device; the call takes no argument and touches no
    // memory of ours.
    let number = unsafe { libc::ioctl(control, LOOP_CTL_GET_FREE as _) };
    if number < 0 { Err(last_errno()) } else { Ok(number) }
}

fn configure(device: RawFd, backing: RawFd, name: &Path) -> Result<(), Errno> {
    let mut file_name = [0; 64];
    let name = name.as_os_str().as_bytes();
    let length = name.len().min(file_name.len() - 1);
    file_name[..length].copy_from_slice(&name[..length]);
    let config = LoopConfig {
        fd: u32::try_from(backing).map_err(|_| Errno::BADF)?,
        block_size: 0,
        info: LoopInfo {
            device: 0,
            inode: 0,
            rdevice: 0,
            offset: 0,
            size_limit: 0,
            number: 0,
            encrypt_type: 0,
            encrypt_key_size: 0,
            flags: READ_ONLY | AUTOCLEAR,
            file_name,
            crypt_name: [0; 64],
            encrypt_key: [0; 32],
            init: [0; 2],
        },
        reserved: [0; 8],
    };
    // SAFETY: `device` is an open descriptor of a loop device; `config` has the layout of the kernel's
    // `struct loop_config` (sizes asserted above), lives across the call, and the kernel only reads it.
    let result = unsafe { libc::ioctl(device, LOOP_CONFIGURE as _, &raw const config) };
    if result < 0 { Err(last_errno()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt as _;

    #[test]
    fn privileged_devices_free_themselves() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("blob");
        std::fs::write(&path, vec![7; 8192]).unwrap();
        let file = File::open(&path).unwrap();
        let device = LoopDevice::over(&file, &path).expect("this test needs root and loop devices");
        assert_eq!(std::fs::read(device.path()).unwrap(), vec![7; 8192]);
        let writable = OpenOptions::new().write(true).open(device.path());
        assert!(writable.and_then(|file| file.write_at(b"x", 0)).is_err(), "it is read-only");
        let name = device.path().file_name().unwrap().to_owned();
        let backing = Path::new("/sys/block").join(name).join("loop/backing_file");
        assert_eq!(std::fs::read_to_string(&backing).unwrap().trim_end(), path.to_str().unwrap());
        drop(device);
        let ours = || std::fs::read_to_string(&backing).is_ok_and(|text| text.trim_end() == path.to_str().unwrap());
        // Clearing is the kernel's deferred work.
        for _ in 0..200 {
            if !ours() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("the device was not freed");
    }
}
