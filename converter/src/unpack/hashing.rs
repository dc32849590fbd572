//! Hashing what passes through a reader.

use fs3_client::{Digest, Hasher};
use std::io::{self, Read};

/// A stream that is not what its descriptor says.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum VerifyError {
    /// Another length.
    #[error("it has {found} bytes, its descriptor says {expected}")]
    Size {
        /// The descriptor's size.
        expected: u64,
        /// Bytes there were.
        found: u64,
    },
    /// Other bytes.
    #[error("its digest is {found}, its descriptor says {expected}")]
    Digest {
        /// The descriptor's digest.
        expected: Digest,
        /// That of the bytes.
        found: Digest,
    },
}

impl VerifyError {
    /// Judges a stream by its digest and length. `None` is not checked.
    ///
    /// # Errors
    /// When length (judged first, being the clearer message) or digest differ.
    pub fn judge(found: (Digest, u64), expected: Option<&Digest>, size: Option<u64>) -> Result<(), Self> {
        match (size, expected) {
            (Some(size), _) if size != found.1 => Err(Self::Size { expected: size, found: found.1 }),
            (_, Some(&expected)) if expected != found.0 => Err(Self::Digest { expected, found: found.0 }),
            _ => Ok(()),
        }
    }
}

/// A reader that computes SHA-256 and length of all that is read through it.
#[derive(Debug)]
pub struct HashingReader<R> {
    inner: R,
    hasher: Hasher,
}

impl<R> HashingReader<R> {
    /// Nothing was read yet.
    pub fn new(inner: R) -> Self {
        Self { inner, hasher: Hasher::default() }
    }

    /// Bytes that passed.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.hasher.len()
    }

    /// Digest and length of all that passed. The stream's own only when it was read to its end.
    #[must_use]
    pub fn finish(self) -> (Digest, u64) {
        let len = self.hasher.len();
        (self.hasher.finish(), len)
    }

    /// Judges a stream that was read to its end; returns its digest and length. `None` is not checked.
    ///
    /// # Errors
    /// When length (judged first, being the clearer message) or digest differ.
    pub fn verify(self, expected: Option<&Digest>, size: Option<u64>) -> Result<(Digest, u64), VerifyError> {
        let found = self.finish();
        VerifyError::judge(found, expected, size)?;
        Ok(found)
    }
}

impl<R: Read> Read for HashingReader<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        self.hasher.update(&buf[..n]);
        Ok(n)
    }
}
