//! An image's bytes on their way to the disk and to their hash, in order.

use crossbeam_channel::{Receiver, Sender, bounded};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

/// Bytes that go on together.
pub(super) const PIECE: usize = 1 << 20;
/// Pieces that are under way at once.
const PIECES: usize = 3;
/// Images of fewer bytes are not worth a thread.
const LARGE: u64 = 4 << 20;

/// Takes bytes in order.
#[derive(Debug)]
pub(super) struct Output {
    buffer: Vec<u8>,
    flushed: u64,
    way: Way,
}

#[derive(Debug)]
enum Way {
    /// Kept, to be written at the end.
    Whole,
    /// To another thread, which gives buffers back.
    Thread { full: Sender<Vec<u8>>, empty: Receiver<Vec<u8>> },
}

/// Lets `fill` write an image of `size` bytes, and puts it into `file`. Returns the hash of the bytes.
pub(super) fn to_file<E: From<io::Error>>(
    file: &File,
    size: u64,
    fill: impl FnOnce(&mut Output) -> Result<(), E>,
) -> Result<blake3::Hasher, E> {
    let mut hash = blake3::Hasher::new();
    if size < LARGE {
        let mut output = Output { buffer: Vec::new(), flushed: 0, way: Way::Whole };
        fill(&mut output)?;
        hash.update(&output.buffer);
        file.write_all_at(&output.buffer, 0)?;
        return Ok(hash);
    }
    let (full, filled) = bounded::<Vec<u8>>(PIECES);
    let (back, empty) = bounded::<Vec<u8>>(PIECES);
    (0..PIECES).for_each(|_| drop(back.send(Vec::with_capacity(PIECE))));
    std::thread::scope(|scope| {
        let writer = scope.spawn(move || -> io::Result<blake3::Hasher> {
            let mut at = 0;
            for mut piece in filled {
                file.write_all_at(&piece, at)?;
                hash.update(&piece);
                at += piece.len() as u64;
                piece.clear();
                // Nobody wants it back when all is filled.
                let _ = back.send(piece);
            }
            Ok(hash)
        });
        let mut output = Output { buffer: Vec::with_capacity(PIECE), flushed: 0, way: Way::Thread { full, empty } };
        let outcome = fill(&mut output).and_then(|()| Ok(output.flush()?));
        drop(output);
        // What the writer failed with comes first: it is why no more could be sent.
        let hash = writer.join().map_err(|_| io::Error::other("the thread that writes the image panicked"))??;
        outcome.map(|()| hash)
    })
}

impl Output {
    /// How many bytes there are so far.
    pub(super) fn position(&self) -> u64 {
        self.flushed + self.buffer.len() as u64
    }

    fn room(&mut self, len: usize) -> io::Result<()> {
        if self.buffer.len() + len > PIECE { self.flush() } else { Ok(()) }
    }

    pub(super) fn put(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let take = bytes.len().min(PIECE);
            self.room(take)?;
            self.buffer.extend_from_slice(&bytes[..take]);
            bytes = &bytes[take..];
        }
        Ok(())
    }

    /// Adds `len` bytes, at most a piece, that `fill` puts in place.
    pub(super) fn put_with(&mut self, len: usize, fill: impl FnOnce(&mut [u8]) -> io::Result<()>) -> io::Result<()> {
        self.room(len)?;
        let at = self.buffer.len();
        self.buffer.resize(at + len, 0);
        fill(&mut self.buffer[at..])
    }

    pub(super) fn pad_to(&mut self, offset: u64) -> io::Result<()> {
        while self.position() < offset {
            let take = usize::try_from((offset - self.position()).min(PIECE as u64)).expect("at most 1 MiB");
            self.room(take)?;
            self.buffer.resize(self.buffer.len() + take, 0);
        }
        debug_assert_eq!(self.position(), offset, "the plan's places overlap");
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if let Way::Thread { full, empty } = &self.way {
            let gone = || io::Error::from(io::ErrorKind::BrokenPipe);
            let fresh = empty.recv().map_err(|_| gone())?;
            self.flushed += self.buffer.len() as u64;
            full.send(std::mem::replace(&mut self.buffer, fresh)).map_err(|_| gone())?;
        }
        Ok(())
    }
}
