//! The structs and functions of `hf3fs_usrbio.h`, by hand: nothing of 3FS is needed to build. They have no version;
//! library and daemon come from one build.

use std::ffi::{c_char, c_int, c_void};

/// `struct hf3fs_iov`: a data buffer in shared memory.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Iov {
    pub(super) base: *mut u8,
    iovh: *mut c_void,
    id: [u8; 16],
    mount_point: [c_char; 256],
    pub(super) size: usize,
    block_size: usize,
    numa: c_int,
}

/// `struct hf3fs_ior`: a ring, for one direction.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Ior {
    iov: Iov,
    iorh: *mut c_void,
    mount_point: [c_char; 256],
    for_read: bool,
    io_depth: c_int,
    priority: c_int,
    timeout: c_int,
    flags: u64,
}

/// `struct hf3fs_cqe`: what became of one transfer.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Cqe {
    pub(super) index: i32,
    pub(super) reserved: i32,
    /// Bytes, or an errno below 0.
    pub(super) result: i64,
    pub(super) userdata: *const c_void,
}

pub(super) type IsHf3fs = unsafe extern "C" fn(c_int) -> bool;
/// Length and one, or -1.
pub(super) type ExtractMountPoint = unsafe extern "C" fn(*mut c_char, c_int, *const c_char) -> c_int;
/// 0, or an errno below.
pub(super) type IovCreate = unsafe extern "C" fn(*mut Iov, *const c_char, usize, usize, c_int) -> c_int;
pub(super) type IovCall = unsafe extern "C" fn(*mut Iov);
/// Mount point, entries, for_read, io_depth, timeout, numa, flags. 0, or an errno below.
pub(super) type IorCreate4 =
    unsafe extern "C" fn(*mut Ior, *const c_char, c_int, bool, c_int, c_int, c_int, u64) -> c_int;
pub(super) type IorCall = unsafe extern "C" fn(*mut Ior);
/// 0 or less, or an errno **above** 0.
pub(super) type RegFd = unsafe extern "C" fn(c_int, u64) -> c_int;
pub(super) type DeregFd = unsafe extern "C" fn(c_int);
pub(super) type IoEntries = unsafe extern "C" fn(*const Ior) -> c_int;
/// read, ptr, fd, off, len, userdata. A slot, or an errno below 0. Not thread-safe.
pub(super) type PrepIo =
    unsafe extern "C" fn(*const Ior, *const Iov, bool, *mut c_void, c_int, usize, u64, *const c_void) -> c_int;
/// 0, or an errno below.
pub(super) type SubmitIos = unsafe extern "C" fn(*const Ior) -> c_int;
/// A count, fewer than asked for after the time is over, or an errno below 0.
pub(super) type WaitForIos = unsafe extern "C" fn(*const Ior, *mut Cqe, c_int, c_int, *const libc::timespec) -> c_int;

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    /// As a C compiler lays the header's structs out.
    #[test]
    fn layout_is_that_of_c() {
        assert_eq!((size_of::<Iov>(), size_of::<Ior>(), size_of::<Cqe>()), (312, 600, 24));
        assert_eq!((offset_of!(Iov, base), offset_of!(Iov, iovh), offset_of!(Iov, id)), (0, 8, 16));
        assert_eq!((offset_of!(Iov, mount_point), offset_of!(Iov, size)), (32, 288));
        assert_eq!((offset_of!(Iov, block_size), offset_of!(Iov, numa)), (296, 304));
        assert_eq!((offset_of!(Ior, iov), offset_of!(Ior, iorh), offset_of!(Ior, mount_point)), (0, 312, 320));
        assert_eq!((offset_of!(Ior, for_read), offset_of!(Ior, io_depth)), (576, 580));
        assert_eq!((offset_of!(Ior, priority), offset_of!(Ior, timeout), offset_of!(Ior, flags)), (584, 588, 592));
        assert_eq!((offset_of!(Cqe, index), offset_of!(Cqe, reserved)), (0, 4));
        assert_eq!((offset_of!(Cqe, result), offset_of!(Cqe, userdata)), (8, 16));
    }
}
