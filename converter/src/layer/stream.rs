//! A layer that is a tar stream: one thread reads and inflates; the other hashes stored and plain bytes, parses them
//! and fills the data blob. A few buffers go round between the two, so memory does not depend on the layer.

use super::out::BlobOut;
use super::sink::Sink;
use super::{LayerError, Options};
use crate::entry::Warning;
use crate::source::{LayerOrigin, SourceLayer};
use crate::tar::{DriveError, Parser, drive};
use crate::unpack::{Compression, Limits, UnpackError, Unpacker, VerifyError};
use crossbeam_channel::{Receiver, Sender, bounded};
use fs3_client::Digest;
use std::cell::RefCell;
use std::fs::File;
use std::io::{self, Read, Seek as _, SeekFrom};
use std::path::Path;
use std::rc::Rc;

/// Bytes handed from thread to thread at a time: enough to make switching cheap, small enough for a core's cache.
const BUFFER: usize = 256 << 10;
/// Buffers of one layer.
const BUFFERS: usize = 4;
/// Stored bytes that may wait for the plain ones they become. Some become none: empty gzip members, skippable frames.
const STORED: usize = 1 << 20;

/// A piece of the layer: plain bytes, and the stored bytes that were read for them.
#[derive(Default)]
struct Piece {
    plain: Vec<u8>,
    len: usize,
    stored: Vec<u8>,
}

pub(super) fn stream(
    layer: &SourceLayer,
    options: &Options,
    sink: &mut Sink<'_>,
    out: &mut BlobOut<'_>,
    read: &(dyn Fn(u64) -> io::Result<()> + Sync),
    warnings: &mut Vec<Warning>,
) -> Result<((Digest, u64), Compression), LayerError> {
    let reader = open(&layer.origin)?;
    let (full_in, full) = bounded::<Piece>(BUFFERS);
    let (free_in, free) = bounded::<Piece>(BUFFERS);
    std::thread::scope(|scope| {
        let inflating = scope.spawn(move || {
            let pieces = Pieces { stored: Vec::new(), full: full_in, free, made: 0, cancelled: false };
            let pieces = Rc::new(RefCell::new(pieces));
            let reader = Tee { inner: reader, pieces: Rc::clone(&pieces), read };
            let inflated = inflate(&pieces, reader, layer, options);
            if pieces.borrow().cancelled { Err(LayerError::Cancelled) } else { inflated }
        });
        let parsed = parse(&full, &free_in, sink, out);
        // A damaged blob shows as a nonsensical stream or tar before its digest is known. Where there is a digest to
        // judge it by, the rest is read, so that the message says what is really wrong.
        if parsed.is_err() && layer.digest.is_some() {
            while let Ok(piece) = full.recv() {
                out.hash_stored(&piece.stored);
                let _ = free_in.send(piece);
            }
        }
        drop((full, free_in));
        let inflated = inflating.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let failed = parsed.is_err() || inflated.is_err();
        let unread = matches!(inflated, Err(LayerError::Unpack(UnpackError::Read(_) | UnpackError::Unsupported(_))));
        if failed && !unread && layer.digest.is_some() {
            VerifyError::judge(out.stored(), layer.digest.as_ref(), layer.size)?;
        }
        let (mut parser, compression) = match (parsed, inflated) {
            (Ok(parser), Ok(compression)) => (parser, compression),
            (Err(e), Ok(_) | Err(LayerError::Cancelled)) | (_, Err(e)) => return Err(e),
        };
        VerifyError::judge(out.stored(), layer.digest.as_ref(), layer.size)?;
        parser.finish()?;
        warnings.append(&mut parser.take_warnings());
        Ok((out.stored(), compression))
    })
}

/// What the inflating thread has to hand over, and through what.
struct Pieces {
    /// What was read since the last piece.
    stored: Vec<u8>,
    full: Sender<Piece>,
    free: Receiver<Piece>,
    made: usize,
    /// Nobody takes pieces any more.
    cancelled: bool,
}

impl Pieces {
    /// A piece to fill.
    fn get(&mut self) -> Result<Piece, LayerError> {
        if self.made < BUFFERS {
            self.made += 1;
            return Ok(Piece { plain: vec![0; BUFFER], ..Piece::default() });
        }
        self.free.recv().map_err(|_| self.cancel())
    }

    /// Hands over a piece, and the stored bytes that were read until now.
    fn send(&mut self, mut piece: Piece) -> Result<(), LayerError> {
        piece.stored.clear();
        std::mem::swap(&mut piece.stored, &mut self.stored);
        self.full.send(piece).map_err(|_| self.cancel())
    }

    fn cancel(&mut self) -> LayerError {
        self.cancelled = true;
        LayerError::Cancelled
    }

    /// Takes note of stored bytes. They are handed over alone when too many wait for plain ones.
    fn note(&mut self, stored: &[u8]) -> Result<(), LayerError> {
        self.stored.extend_from_slice(stored);
        if self.stored.len() < STORED {
            return Ok(());
        }
        let mut piece = self.get()?;
        piece.len = 0;
        self.send(piece)
    }
}

/// Reads and inflates the layer; returns how it was compressed.
fn inflate<R: Read>(
    pieces: &RefCell<Pieces>,
    reader: Tee<'_, R>,
    layer: &SourceLayer,
    options: &Options,
) -> Result<Compression, LayerError> {
    let limits = Limits { plain_bytes: options.max_plain, ..Limits::default() };
    let mut unpacker = Unpacker::new(reader, limits)?;
    let compression = unpacker.compression();
    let inflated = inflate_all(pieces, &mut unpacker, options.max_plain);
    if matches!(&inflated, Err(LayerError::Unpack(e)) if !matches!(e, UnpackError::Read(_))) && layer.digest.is_some() {
        read_rest(pieces, unpacker.into_inner())?;
    }
    inflated.map(|()| compression)
}

fn inflate_all<R: Read>(pieces: &RefCell<Pieces>, unpacker: &mut Unpacker<R>, limit: u64) -> Result<(), LayerError> {
    loop {
        let mut piece = pieces.borrow_mut().get()?;
        piece.len = unpacker.read(&mut piece.plain)?;
        // The unpacker bounds what compressed streams expand to; a plain one, as from a pipe, may just never end.
        if unpacker.plain_bytes() > limit {
            return Err(UnpackError::TooLarge { limit }.into());
        }
        let last = piece.len == 0;
        pieces.borrow_mut().send(piece)?;
        if last {
            return Ok(());
        }
    }
}

/// Passes on what is behind the place where a stream proved damaged, for its digest.
fn read_rest<R: Read>(pieces: &RefCell<Pieces>, mut reader: R) -> Result<(), LayerError> {
    loop {
        let mut piece = pieces.borrow_mut().get()?;
        let read = reader.read(&mut piece.plain).map_err(UnpackError::Read)?;
        piece.len = 0;
        pieces.borrow_mut().send(piece)?;
        if read == 0 {
            return Ok(());
        }
    }
}

fn parse(
    full: &Receiver<Piece>,
    free: &Sender<Piece>,
    sink: &mut Sink<'_>,
    out: &mut BlobOut<'_>,
) -> Result<Parser, LayerError> {
    let mut parser = Parser::new(crate::tar::Limits::default());
    while let Ok(piece) = full.recv() {
        let plain = &piece.plain[..piece.len];
        let mut input = plain;
        let driven = drive(&mut parser, &mut input, sink).map_err(|e| match e {
            DriveError::Tar(e) => LayerError::Tar(e),
            DriveError::Sink(e) => e,
        });
        out.drain(&piece.stored, plain, sink.blob.segments())?;
        driven?;
        let _ = free.send(piece);
    }
    Ok(parser)
}

/// Opens a source that is a stream.
pub(crate) fn open(origin: &LayerOrigin) -> Result<Box<dyn Read + Send>, LayerError> {
    let fail = |op, path: &Path, source| LayerError::Source { op, path: path.to_owned(), source };
    Ok(match origin {
        LayerOrigin::Range { path, offset, len } => {
            let mut file = File::open(path).map_err(|e| fail("open", path, e))?;
            file.seek(SeekFrom::Start(*offset)).map_err(|e| fail("read", path, e))?;
            Box::new(file.take(*len))
        }
        LayerOrigin::Remote(remote) => Box::new(remote.open()),
        LayerOrigin::Stdin => Box::new(io::stdin()),
        LayerOrigin::Dir(path) => return Err(fail("read as a tar", path, io::ErrorKind::IsADirectory.into())),
    })
}

/// Keeps a copy of what is read through it, and reports how much, to who may have had enough.
struct Tee<'r, R> {
    inner: R,
    pieces: Rc<RefCell<Pieces>>,
    read: &'r (dyn Fn(u64) -> io::Result<()> + Sync),
}

impl<R: Read> Read for Tee<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        self.pieces.borrow_mut().note(&buf[..n]).map_err(io::Error::other)?;
        (self.read)(n as u64)?;
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unpack::Compression;

    /// A zstd skippable frame: 20 MiB that become nothing.
    #[test]
    fn stored_bytes_without_plain_ones_do_not_pile_up() {
        const FRAME: u32 = 20 << 20;
        let head = [0x184D_2A50u32.to_le_bytes(), FRAME.to_le_bytes()].concat();
        let stream = head.chain(io::repeat(0).take(FRAME.into()));
        let (full_in, full) = bounded::<Piece>(BUFFERS);
        let (free_in, free) = bounded::<Piece>(BUFFERS);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let pieces = Pieces { stored: Vec::new(), full: full_in, free, made: 0, cancelled: false };
                let pieces = Rc::new(RefCell::new(pieces));
                let reader = Tee { inner: stream, pieces: Rc::clone(&pieces), read: &|_| Ok(()) };
                let mut unpacker = Unpacker::new(reader, Limits::default()).unwrap();
                assert_eq!(unpacker.compression(), Compression::Zstd);
                inflate_all(&pieces, &mut unpacker, u64::MAX).unwrap();
            });
            let mut stored = 0;
            while let Ok(piece) = full.recv() {
                assert_eq!(piece.len, 0);
                assert!(piece.stored.len() < STORED + BUFFER, "{} bytes at once", piece.stored.len());
                stored += piece.stored.len();
                let _ = free_in.send(piece);
            }
            assert_eq!(stored, FRAME as usize + 8);
        });
    }
}
