//! A read, layer by layer.

use super::{Chain, EngineError, local};
use crate::format::lsmt::SECTOR;
use crate::index::Kind;
use crate::upper::Whole;

/// A part of the disk that no layer so far had, and where its bytes go in the buffer.
struct Hole {
    /// First byte of the disk.
    offset: u64,
    start: usize,
    end: usize,
}

impl Hole {
    /// Its sectors.
    fn sectors(&self) -> std::ops::Range<u64> {
        let end = self.offset + (self.end - self.start) as u64;
        self.offset / SECTOR..end.div_ceil(SECTOR)
    }
}

impl Chain {
    /// Fills `buf` from byte `offset`; `false` if that needed a backend and `wait` is not set.
    pub(super) fn read(&self, buf: &mut [u8], offset: u64, wait: bool) -> Result<bool, EngineError> {
        // Most reads are of one piece of one layer, and nothing is allocated for them.
        let end = offset + buf.len() as u64;
        let sectors = offset / SECTOR..end.div_ceil(SECTOR);
        let skip = offset - sectors.start * SECTOR;
        if buf.is_empty() {
            return Ok(true);
        }
        for top in self.uppers() {
            let (whole, _reading) = top.upper.whole(&sectors);
            match whole {
                Whole::Hole => {}
                Whole::Mapped(Kind::Zero) => {
                    buf.fill(0);
                    return Ok(true);
                }
                Whole::Mapped(Kind::Data { moffset, .. }) => {
                    let read = top.upper.read_data(buf, moffset * SECTOR + skip);
                    return read.map(|()| true).map_err(|error| local(top.upper.name(), error));
                }
                Whole::Several => return self.read_pieces(buf, offset, wait),
            }
        }
        match self.stack.lookup(sectors.clone()).next() {
            Some(piece) if piece.end() == sectors.end => self.read_lower(buf, piece.kind, skip, wait),
            _ => self.read_pieces(buf, offset, wait),
        }
    }

    /// Fills `buf` with what lies `skip` bytes behind the beginning of a piece of the lower layers.
    fn read_lower(&self, buf: &mut [u8], kind: Option<Kind>, skip: u64, wait: bool) -> Result<bool, EngineError> {
        let Some(Kind::Data { layer, moffset }) = kind else {
            buf.fill(0);
            return Ok(true);
        };
        let (data, place) = (&self.data[usize::from(layer)], moffset * SECTOR + skip);
        if wait {
            data.read_exact_at(buf, place)?;
            return Ok(true);
        }
        Ok(data.try_read_at(buf, place)?)
    }

    /// The same for any number of pieces of any layers.
    fn read_pieces(&self, buf: &mut [u8], offset: u64, wait: bool) -> Result<bool, EngineError> {
        let mut holes = vec![Hole { offset, start: 0, end: buf.len() }];
        for top in self.uppers() {
            if holes.is_empty() {
                return Ok(true);
            }
            let mut below = Vec::new();
            for hole in &holes {
                // Gone before any lower layer is read, which may take long: it keeps the data of this one from being freed.
                let (pieces, _reading) = top.upper.lookup(hole.sectors());
                each_piece(hole, pieces.into_iter(), |part, kind, skip| {
                    match kind {
                        None => below.push(part),
                        Some(Kind::Zero) => buf[part.start..part.end].fill(0),
                        Some(Kind::Data { moffset, .. }) => {
                            let place = moffset * SECTOR + skip;
                            let read = top.upper.read_data(&mut buf[part.start..part.end], place);
                            read.map_err(|error| local(top.upper.name(), error))?;
                        }
                    }
                    Ok(true)
                })?;
            }
            holes = below;
        }
        for hole in &holes {
            let ready = each_piece(hole, self.stack.lookup(hole.sectors()), |part, kind, skip| {
                self.read_lower(&mut buf[part.start..part.end], kind, skip, wait)
            })?;
            if !ready {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Calls `each` with the part of `hole` that a piece covers, what stands behind it, and how many bytes of the piece's data
/// come before; until it says `false`.
fn each_piece(
    hole: &Hole,
    pieces: impl Iterator<Item = crate::index::Piece>,
    mut each: impl FnMut(Hole, Option<Kind>, u64) -> Result<bool, EngineError>,
) -> Result<bool, EngineError> {
    let end = hole.offset + (hole.end - hole.start) as u64;
    let mut at = hole.offset;
    let mut start = hole.start;
    for piece in pieces {
        let last = end.min(piece.end() * SECTOR);
        // Within the buffer.
        let stop = start + usize::try_from(last - at).unwrap_or(usize::MAX);
        if !each(Hole { offset: at, start, end: stop }, piece.kind, at - piece.start * SECTOR)? {
            return Ok(false);
        }
        (at, start) = (last, stop);
    }
    Ok(true)
}
