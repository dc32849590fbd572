//! Where a range lies, for those who submit reads by a ring of their own.

use super::{Chain, Device, EngineError, Top};
use crate::backend::Source;
use crate::format::lsmt::SECTOR;
use crate::index::Kind;
use crate::upper::{Held, Whole};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Where a range of a disk is.
#[derive(Debug)]
pub enum Place {
    /// Nowhere: it reads as zeros.
    Zero,
    /// All of it in one local file, as it is.
    File(Located),
    /// In several places, or compressed, or not here: [`Device::try_read`] and [`Device::read`] read it.
    Elsewhere,
}

/// Bytes in a local file, which stay where they are until this is dropped: keep it as long as the read takes, and not longer.
#[derive(Debug)]
pub struct Located {
    owner: Owner,
    offset: u64,
}

#[derive(Debug)]
enum Owner {
    Upper { top: Arc<Top>, _held: Held },
    Lower { data: Arc<dyn Source>, range: Range<u64> },
}

impl Located {
    /// The file, open for reading without `O_DIRECT`.
    #[must_use]
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.owner {
            Owner::Upper { top, .. } => top.upper.data().descriptor(),
            Owner::Lower { data, range } => data.locate(range.clone()).map(|(descriptor, _)| descriptor),
        }
    }

    /// Where in the file the first byte is.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

impl Device {
    /// Where `len` bytes from byte `offset` are. A read of a [`Place::File`] that gives fewer bytes has met damage, and is
    /// done again by [`read`](Device::read), which says what is wrong.
    ///
    /// # Errors
    /// The range is not all of the disk.
    pub fn locate(&self, offset: u64, len: u64) -> Result<Place, EngineError> {
        let range = self.check(offset, len)?;
        Ok(self.chain().locate(&range))
    }
}

impl Chain {
    fn locate(&self, range: &Range<u64>) -> Place {
        let sectors = range.start / SECTOR..range.end.div_ceil(SECTOR);
        let skip = range.start - sectors.start * SECTOR;
        for top in self.uppers() {
            match top.upper.hold(&sectors) {
                (Whole::Hole, _) => {}
                (Whole::Mapped(Kind::Zero), _) => return Place::Zero,
                (Whole::Mapped(Kind::Data { moffset, .. }), held) => {
                    if top.upper.data().descriptor().is_none() {
                        return Place::Elsewhere;
                    }
                    let owner = Owner::Upper { top: Arc::clone(top), _held: held };
                    return Place::File(Located { owner, offset: moffset * SECTOR + skip });
                }
                (Whole::Several, _) => return Place::Elsewhere,
            }
        }
        let Some(piece) = self.stack.lookup(sectors.clone()).next().filter(|piece| piece.end() == sectors.end) else {
            return Place::Elsewhere;
        };
        let Some(Kind::Data { layer, moffset }) = piece.kind else { return Place::Zero };
        let data = &self.data[usize::from(layer)];
        let start = moffset * SECTOR + skip;
        let range = start..start + (range.end - range.start);
        match data.locate(range.clone()) {
            Some((_, offset)) => Place::File(Located { owner: Owner::Lower { data: Arc::clone(data), range }, offset }),
            None => Place::Elsewhere,
        }
    }
}
