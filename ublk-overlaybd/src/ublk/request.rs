//! What the kernel asks, decoded: pure.

use super::disk::Operation;
use rustix::io::Errno;

/// Bytes of a sector, in which the kernel counts.
const SECTOR: u64 = 512;
/// `UBLK_IO_OP_*` and `UBLK_IO_F_*` of `linux/ublk_cmd.h`.
const OP_MASK: u32 = 0xff;
const OP_READ: u32 = 0;
const OP_WRITE: u32 = 1;
const OP_FLUSH: u32 = 2;
const OP_DISCARD: u32 = 3;
const OP_WRITE_ZEROES: u32 = 5;
const FLAG_FUA: u32 = 1 << 13;
const FLAG_NO_UNMAP: u32 = 1 << 15;

/// An I/O descriptor of the kernel: `struct ublksrv_io_desc`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Descriptor {
    pub(super) op_flags: u32,
    pub(super) sectors: u32,
    pub(super) start: u64,
}

/// What is asked, without its buffer, so that it can go to another thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request {
    Read { at: u64, len: usize },
    Write { at: u64, len: usize, durable: bool },
    Flush,
    Discard { at: u64, len: u64 },
    WriteZeroes { at: u64, len: u64, keep: bool, durable: bool },
}

impl Request {
    /// Checks a descriptor against a disk of `size` bytes and buffers of `buffer` bytes.
    ///
    /// # Errors
    /// `OPNOTSUPP` for an operation that the device does not announce, `IO` for a range that is not on it.
    pub(super) fn of(descriptor: Descriptor, size: u64, buffer: usize) -> Result<Self, Errno> {
        let Descriptor { op_flags, sectors, start } = descriptor;
        let durable = op_flags & FLAG_FUA != 0;
        let op = op_flags & OP_MASK;
        if op == OP_FLUSH {
            return Ok(Self::Flush);
        }
        let at = start.checked_mul(SECTOR).ok_or(Errno::IO)?;
        let bytes = u64::from(sectors) * SECTOR;
        if at.checked_add(bytes).is_none_or(|end| end > size) {
            return Err(Errno::IO);
        }
        let len = usize::try_from(bytes).ok().filter(|len| *len <= buffer).ok_or(Errno::IO);
        match op {
            OP_READ => Ok(Self::Read { at, len: len? }),
            OP_WRITE => Ok(Self::Write { at, len: len?, durable }),
            OP_DISCARD => Ok(Self::Discard { at, len: bytes }),
            OP_WRITE_ZEROES => Ok(Self::WriteZeroes { at, len: bytes, keep: op_flags & FLAG_NO_UNMAP != 0, durable }),
            _ => Err(Errno::OPNOTSUPP),
        }
    }

    /// With the buffer that its bytes are in, or go to.
    pub(super) fn with(self, buffer: &mut [u8]) -> Operation<'_> {
        match self {
            Self::Read { at, len } => Operation::Read { at, into: &mut buffer[..len] },
            Self::Write { at, len, durable } => Operation::Write { at, from: &buffer[..len], durable },
            Self::Flush => Operation::Flush,
            Self::Discard { at, len } => Operation::Discard { at, len },
            Self::WriteZeroes { at, len, keep, durable } => Operation::WriteZeroes { at, len, keep, durable },
        }
    }

    /// Whether it may wait for a backend, rather than for the local disk alone.
    pub(super) const fn is_read(self) -> bool {
        matches!(self, Self::Read { .. })
    }

    /// What the kernel is told when it went well: the bytes that were moved.
    pub(super) fn answer(self) -> i32 {
        match self {
            // At most a buffer's length, which the kernel gave as 32 bits.
            Self::Read { len, .. } | Self::Write { len, .. } => i32::try_from(len).unwrap_or(i32::MAX),
            Self::Discard { len, .. } | Self::WriteZeroes { len, .. } => i32::try_from(len).unwrap_or(i32::MAX),
            Self::Flush => 0,
        }
    }
}

/// What the kernel is told of an error.
pub(super) fn refusal(errno: Errno) -> i32 {
    -errno.raw_os_error()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(op_flags: u32, start: u64, sectors: u32) -> Result<Request, Errno> {
        Request::of(Descriptor { op_flags, sectors, start }, 1 << 20, 64 << 10)
    }

    #[test]
    fn descriptors_are_read_as_the_header_draws_them() {
        assert_eq!(ask(0, 8, 16), Ok(Request::Read { at: 4096, len: 8192 }));
        assert_eq!(ask(1 | 1 << 13, 0, 1), Ok(Request::Write { at: 0, len: 512, durable: true }));
        assert_eq!(ask(2, 0, 0), Ok(Request::Flush));
        assert_eq!(ask(3, 2047, 1), Ok(Request::Discard { at: 1_048_064, len: 512 }));
        let zeroes = Request::WriteZeroes { at: 512, len: 1_048_064, keep: true, durable: false };
        assert_eq!(ask(5 | 1 << 15, 1, 2047), Ok(zeroes));
        assert_eq!(ask(7, 0, 1), Err(Errno::OPNOTSUPP), "zones are not announced");
    }

    #[test]
    fn nothing_beyond_the_disk_or_the_buffer_is_touched() {
        assert_eq!(ask(0, 2048, 1), Err(Errno::IO));
        assert_eq!(ask(0, 2040, 16), Err(Errno::IO));
        assert_eq!(ask(1, u64::MAX, 1), Err(Errno::IO));
        assert_eq!(ask(1, u64::MAX / 512, 1), Err(Errno::IO));
        assert_eq!(ask(0, 0, 129), Err(Errno::IO), "longer than the buffer");
        assert_eq!(ask(3, 0, 2048), Ok(Request::Discard { at: 0, len: 1 << 20 }), "which needs none");
    }

    #[test]
    fn answers_are_the_bytes_that_were_moved() {
        assert_eq!(ask(0, 8, 16).unwrap().answer(), 8192);
        assert_eq!(ask(2, 0, 0).unwrap().answer(), 0);
        assert_eq!(refusal(Errno::NOSPC), -28);
    }
}
