//! A read, layer by layer.

use super::{Chain, EngineError, local};
use crate::format::lsmt::SECTOR;
use crate::index::Kind;
use std::sync::Arc;

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
                let buf = &mut buf[part.start..part.end];
                match kind {
                    None | Some(Kind::Zero) => buf.fill(0),
                    Some(Kind::Data { layer, moffset }) => {
                        let (data, place) = (Arc::clone(&self.data[usize::from(layer)]), moffset * SECTOR + skip);
                        if wait {
                            data.read_exact_at(buf, place)?;
                        } else {
                            return Ok(data.try_read_at(buf, place)?);
                        }
                    }
                }
                Ok(true)
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
