//! Buffers that the kernel copies requests' bytes into and out of, and that go to other threads while a request is served.
#![allow(unsafe_code)]

use libublk::helpers::IoBuf;
use std::fmt;

/// A page-aligned buffer. Its memory is used only once it is touched.
pub(super) struct Buffer(IoBuf<u8>);

// SAFETY: the buffer owns its memory, which nothing else points to but the kernel: this uses it only between the commit
// of one request and the arrival of the next, during which time the buffer stays with the queue's thread.
unsafe impl Send for Buffer {}

impl Buffer {
    pub(super) fn new(bytes: usize) -> Self {
        Self(IoBuf::new(bytes))
    }

    /// For the calls that make the buffer known to the queue.
    pub(super) const fn inner(&self) -> &IoBuf<u8> {
        &self.0
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.0.as_slice()
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.as_mut_slice()
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.0.len()).finish()
    }
}
