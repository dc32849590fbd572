//! The compressed bytes, read ahead in one fixed buffer.

use std::io::{self, Read};

/// Large enough that a read costs little beside inflating it, small enough to stay in the second-level cache.
const BUFFER: usize = 128 << 10;

pub(super) struct Input<R> {
    reader: R,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    ended: bool,
    taken: u64,
}

impl<R> Input<R> {
    pub(super) fn into_inner(self) -> R {
        self.reader
    }

    /// Bytes taken from the reader so far.
    pub(super) fn taken(&self) -> u64 {
        self.taken
    }

    /// Offset in the stream of the next byte that will be consumed.
    pub(super) fn position(&self) -> u64 {
        self.taken - (self.end - self.start) as u64
    }

    /// Marks `n` bytes of what `filled` returned as used.
    pub(super) fn consume(&mut self, n: usize) {
        self.start = (self.start + n).min(self.end);
    }
}

impl<R: Read> Input<R> {
    pub(super) fn new(reader: R) -> Self {
        Self { reader, buffer: vec![0; BUFFER].into_boxed_slice(), start: 0, end: 0, ended: false, taken: 0 }
    }

    /// Up to `n` bytes from here on without consuming them; fewer only at the end. `n` is small.
    pub(super) fn peek(&mut self, n: usize) -> io::Result<&[u8]> {
        if self.end - self.start < n {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            while self.end < n && self.read_more()? {}
        }
        let available = (self.end - self.start).min(n);
        Ok(&self.buffer[self.start..self.start + available])
    }

    /// Bytes that are there, after reading more if there were none; empty only at the end.
    pub(super) fn filled(&mut self) -> io::Result<&[u8]> {
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
            self.read_more()?;
        }
        Ok(&self.buffer[self.start..self.end])
    }

    /// The next byte, or `None` at the end.
    pub(super) fn byte(&mut self) -> io::Result<Option<u8>> {
        let byte = self.filled()?.first().copied();
        self.consume(usize::from(byte.is_some()));
        Ok(byte)
    }

    /// Reads into `buf`, past the buffer when that is empty.
    pub(super) fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.start == self.end {
            return self.read_into(Some(buf));
        }
        let n = buf.len().min(self.end - self.start);
        buf[..n].copy_from_slice(&self.buffer[self.start..self.start + n]);
        self.start += n;
        Ok(n)
    }

    /// Appends to the buffer, which has room; whether there was anything.
    fn read_more(&mut self) -> io::Result<bool> {
        let n = self.read_into(None)?;
        self.end += n;
        Ok(n != 0)
    }

    fn read_into(&mut self, buf: Option<&mut [u8]>) -> io::Result<usize> {
        if self.ended {
            return Ok(0);
        }
        let target = buf.unwrap_or(&mut self.buffer[self.end..]);
        loop {
            match self.reader.read(target) {
                Ok(n) => {
                    self.ended = n == 0;
                    self.taken += n as u64;
                    return Ok(n);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }
}
