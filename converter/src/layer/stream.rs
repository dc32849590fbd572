//! A layer that is a tar stream: one thread reads, hashes and inflates; the other hashes the plain bytes, parses them
//! and fills the data blob. A few buffers go round between the two, so memory does not depend on the layer.

use super::read::BlobOut;
use super::sink::Sink;
use super::{LayerError, Options};
use crate::entry::Warning;
use crate::source::{LayerOrigin, SourceLayer};
use crate::tar::{DriveError, Parser, drive};
use crate::unpack::{HashingReader, Limits, Unpacker, declared_as};
use crossbeam_channel::{Receiver, Sender, bounded};
use fs3_client::Digest;
use std::fs::File;
use std::io::{self, Read, Seek as _, SeekFrom};
use std::path::Path;

/// Bytes handed from thread to thread at a time: enough to make switching cheap, small enough for a core's cache.
const BUFFER: usize = 256 << 10;
/// Buffers of one layer.
const BUFFERS: usize = 4;

/// A plain buffer and how much of it is filled.
type Filled = (Vec<u8>, usize);

/// What the inflating thread found out: (digest, length) of the stored bytes, and an oddity of their media type.
type Judged = ((Digest, u64), Option<String>);

pub(super) fn stream(
    layer: &SourceLayer,
    options: &Options,
    sink: &mut Sink,
    out: &mut BlobOut<'_>,
    read: &(dyn Fn(u64) + Sync),
    warnings: &mut Vec<Warning>,
) -> Result<(Digest, u64), LayerError> {
    let reader = Counted { inner: open(&layer.origin)?, read };
    let (filled_in, filled) = bounded::<Filled>(BUFFERS);
    let (free_in, free) = bounded::<Vec<u8>>(BUFFERS);
    std::thread::scope(|scope| {
        let inflating = scope.spawn(move || inflate(reader, layer, options, &filled_in, &free));
        let parsed = parse(&filled, &free_in, sink, out);
        // A damaged blob shows as a nonsensical tar before its digest is known. Where there is a digest to judge it
        // by, the rest is read, so that the message says what is really wrong.
        if parsed.is_err() && layer.digest.is_some() {
            while let Ok((buffer, _)) = filled.recv() {
                let _ = free_in.send(buffer);
            }
        }
        drop((filled, free_in));
        let judged = inflating.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let mut parser = match (parsed, judged.as_ref().err()) {
            (Ok(parser), None) => parser,
            // The parser's own verdict, unless the bytes it got were damaged or cut short.
            (Err(e), None | Some(LayerError::Cancelled)) => return Err(e),
            (_, Some(_)) => return Err(judged.expect_err("it was one")),
        };
        let (source, oddity) = judged?;
        parser.finish()?;
        warnings.append(&mut parser.take_warnings());
        warnings.extend(oddity.map(|message| Warning::new(b"", message)));
        Ok(source)
    })
}

fn inflate<R: Read>(
    reader: R,
    layer: &SourceLayer,
    options: &Options,
    filled: &Sender<Filled>,
    free: &Receiver<Vec<u8>>,
) -> Result<Judged, LayerError> {
    let limits = Limits { plain_bytes: options.max_plain, ..Limits::default() };
    let mut unpacker = Unpacker::new(HashingReader::new(reader), limits)?;
    let mut made = 0;
    loop {
        let mut buffer = if made < BUFFERS {
            made += 1;
            vec![0; BUFFER]
        } else {
            free.recv().map_err(|_| LayerError::Cancelled)?
        };
        let len = unpacker.read(&mut buffer)?;
        if len == 0 {
            break;
        }
        filled.send((buffer, len)).map_err(|_| LayerError::Cancelled)?;
    }
    let oddity = declared_as(&layer.media_type, unpacker.compression());
    let source = unpacker.into_inner().verify(layer.digest.as_ref(), layer.size)?;
    Ok((source, oddity))
}

fn parse(
    filled: &Receiver<Filled>,
    free: &Sender<Vec<u8>>,
    sink: &mut Sink,
    out: &mut BlobOut<'_>,
) -> Result<Parser, LayerError> {
    let mut parser = Parser::new(crate::tar::Limits::default());
    while let Ok((buffer, len)) = filled.recv() {
        let plain = &buffer[..len];
        let mut input = plain;
        drive(&mut parser, &mut input, sink).map_err(|e| match e {
            DriveError::Tar(e) => LayerError::Tar(e),
            DriveError::Sink(e) => e,
        })?;
        out.drain(plain, sink.blob.segments())?;
        let _ = free.send(buffer);
    }
    Ok(parser)
}

fn open(origin: &LayerOrigin) -> Result<Box<dyn Read + Send>, LayerError> {
    let fail = |op, path: &Path, source| LayerError::Source { op, path: path.to_owned(), source };
    Ok(match origin {
        LayerOrigin::Range { path, offset, len } => {
            let mut file = File::open(path).map_err(|e| fail("open", path, e))?;
            file.seek(SeekFrom::Start(*offset)).map_err(|e| fail("read", path, e))?;
            Box::new(file.take(*len))
        }
        LayerOrigin::Stdin => Box::new(io::stdin()),
        LayerOrigin::Dir(path) => return Err(fail("read as a tar", path, io::ErrorKind::IsADirectory.into())),
    })
}

/// Reports what is read through it.
struct Counted<'r, R> {
    inner: R,
    read: &'r (dyn Fn(u64) + Sync),
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        (self.read)(n as u64);
        Ok(n)
    }
}
