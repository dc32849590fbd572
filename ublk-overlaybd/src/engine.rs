//! A disk that is read and written: sealed layers, and a writable one on top.
//!
//! ```text
//! write   range lock -> place in the log -> write there -> map            (no lock of the disk's is held meanwhile)
//! read    map of the writable layer -> holes: layers being sealed -> holes: the merged index of the lower layers
//! ```
//!
//! Requests come from any number of threads. [`Device::try_read`] never waits for a backend; [`Device::read`] may, and
//! then holds up nobody else. Which layers there are is one shared pointer: a request takes it once and keeps to it, so
//! that the layers can change under running requests, see [`seal`](crate::seal).
//!
//! Damaged blocks of compressed layers are dropped from the cache and fetched again, three times at most, where they are
//! decoded ([`crate::backend::ZFile`]); what is left after that is an error here. [`EngineError::errno`] is the one place
//! that makes an error number of anything.

mod background;
mod locate;
mod locks;
mod read;

pub use background::{Background, Upkeep};
pub use locate::{Located, Place};

use crate::backend::{ReadError, Source};
use crate::format::lsmt::{MAX_LENGTH, SECTOR};
use crate::image::{Image, ImageError};
use crate::index::{Index, IndexError, Kind, Stack};
use crate::layer::Layer;
use crate::upper::{Stat, Upper, UpperError};
use locks::RangeLocks;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The caller's fault.
    #[error("bytes {start} to {end} are not all of the disk, which has {size}")]
    OutOfRange {
        /// First byte.
        start: u64,
        /// Byte after the last.
        end: u64,
        /// Size of the disk.
        size: u64,
    },
    /// There is no writable layer.
    #[error("the disk is read-only")]
    ReadOnly,
    /// A lower layer cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The writable layer cannot.
    #[error(transparent)]
    Upper(#[from] UpperError),
    /// There are too many layers.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// The layers are no disk.
    #[error(transparent)]
    Image(#[from] ImageError),
}

impl EngineError {
    /// The number that whoever made the request gets.
    #[must_use]
    pub fn errno(&self) -> i32 {
        use rustix::io::Errno;
        let errno = match self {
            Self::OutOfRange { .. } => Errno::INVAL,
            Self::ReadOnly => Errno::ROFS,
            Self::Upper(error) if error.is_no_space() => Errno::NOSPC,
            Self::Read(_) | Self::Upper(_) | Self::Index(_) | Self::Image(_) => Errno::IO,
        };
        errno.raw_os_error()
    }
}

/// A writable layer with those who are writing to it.
#[derive(Debug)]
struct Top {
    upper: Arc<Upper>,
    writers: AtomicUsize,
}

/// The layers at one moment.
#[derive(Debug, Clone)]
struct Chain {
    stack: Arc<Stack>,
    /// The data of the stack's layers, the bottom one first.
    data: Vec<Arc<dyn Source>>,
    /// Writable layers that take no more writes and are not sealed yet, the newest first.
    frozen: Vec<Arc<Top>>,
    top: Option<Arc<Top>>,
}

impl Chain {
    /// The writable layers, the newest first.
    fn uppers(&self) -> impl DoubleEndedIterator<Item = &Arc<Top>> {
        self.top.iter().chain(&self.frozen)
    }
}

/// A write in progress, which keeps its layer from being sealed.
struct Writing {
    top: Arc<Top>,
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.top.writers.fetch_sub(1, Ordering::Release);
    }
}

/// A disk. See the [module](self).
///
/// All its methods take `&self`, and may be called from any number of threads at once; those of a queue that must not wait use
/// [`try_read`](Self::try_read) or [`locate`](Self::locate), and leave [`read`](Self::read),
/// [`flush`](Self::flush), writes with `fua` and writes of parts of sectors to others: these wait for disks or backends. Other
/// writes and discards wait for writes that overlap them, and for a flush when 65,536 entries wait for one or space runs out.
#[derive(Debug)]
pub struct Device {
    size: AtomicU64,
    chain: RwLock<Arc<Chain>>,
    locks: RangeLocks,
    /// Kept, so that others that come find them open.
    _lowers: Image,
}

impl Device {
    /// Stacks `layers`, the bottom one first, and puts `upper` over them. Without it the disk is read-only.
    ///
    /// # Errors
    /// Too many layers, or nobody says how large the disk is.
    pub fn new(layers: &[Arc<Layer>], upper: Option<Upper>) -> Result<Self, EngineError> {
        Self::over(&Image::sized_or_not(layers.to_vec())?, upper)
    }

    /// The same over layers that are stacked already, which any number of disks share (see
    /// [`Shelf`](crate::image::Shelf)).
    ///
    /// # Errors
    /// Nobody says how large the disk is.
    pub fn over(lowers: &Image, upper: Option<Upper>) -> Result<Self, EngineError> {
        let size = upper.iter().map(|upper| upper.header().virtual_size).chain([lowers.size()]).find(|&size| size > 0);
        let size = size.ok_or(EngineError::Image(ImageError::NoSize))?;
        let data = lowers.layers().iter().map(|layer| Arc::clone(layer.data())).collect();
        let top = upper.map(|upper| Arc::new(Top { upper: Arc::new(upper), writers: AtomicUsize::new(0) }));
        let chain = Chain { stack: Arc::clone(lowers.stack()), data, frozen: Vec::new(), top };
        let (chain, locks) = (RwLock::new(Arc::new(chain)), RangeLocks::default());
        Ok(Self { size: AtomicU64::new(size), chain, locks, _lowers: lowers.clone() })
    }

    /// Bytes of the disk.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Makes the disk larger, durably: what is new reads as the layers below have it, mostly zeros.
    ///
    /// # Errors
    /// There is no writable layer, it would shrink or not be whole sectors, or the layer's files cannot be written.
    pub fn grow(&self, size: u64) -> Result<(), EngineError> {
        let writing = self.begin_write()?;
        let before = self.size();
        if size < before || !size.is_multiple_of(SECTOR) {
            return Err(EngineError::OutOfRange { start: 0, end: size, size: before });
        }
        writing.top.upper.grow(size)?;
        self.size.fetch_max(size, Ordering::AcqRel);
        Ok(())
    }

    /// Whether writes are refused.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.chain().top.is_none()
    }

    /// Figures of the writable layer.
    #[must_use]
    pub fn stat(&self) -> Option<Stat> {
        self.chain().top.as_ref().map(|top| top.upper.stat())
    }

    /// How many lower layers it has, sealed ones among them.
    #[must_use]
    pub fn lower_layers(&self) -> usize {
        self.chain().data.len()
    }

    fn chain(&self) -> Arc<Chain> {
        Arc::clone(&self.chain.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn change<T>(&self, change: impl FnOnce(&mut Chain) -> T) -> T {
        let mut place = self.chain.write().unwrap_or_else(PoisonError::into_inner);
        let mut chain = Chain::clone(&place);
        let result = change(&mut chain);
        *place = Arc::new(chain);
        result
    }

    fn check(&self, offset: u64, len: u64) -> Result<Range<u64>, EngineError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.size() => Ok(offset..end),
            end => Err(EngineError::OutOfRange { start: offset, end: end.unwrap_or(u64::MAX), size: self.size() }),
        }
    }

    /// Fills `buf` from byte `offset`. It may wait for a backend.
    ///
    /// # Errors
    /// The range is not all of the disk, or a layer cannot be read.
    pub fn read(&self, buf: &mut [u8], offset: u64) -> Result<(), EngineError> {
        self.check(offset, buf.len() as u64)?;
        self.chain().read(buf, offset, true).map(drop)
    }

    /// The same without waiting for a backend: `false` if that were needed, and then what `buf` holds means nothing.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    pub fn try_read(&self, buf: &mut [u8], offset: u64) -> Result<bool, EngineError> {
        self.check(offset, buf.len() as u64)?;
        self.chain().read(buf, offset, false)
    }

    fn begin_write(&self) -> Result<Writing, EngineError> {
        // Counted under the lock, so that whoever replaces the layer knows all its writers.
        let chain = self.chain.read().unwrap_or_else(PoisonError::into_inner);
        let top = Arc::clone(chain.top.as_ref().ok_or(EngineError::ReadOnly)?);
        top.writers.fetch_add(1, Ordering::Acquire);
        Ok(Writing { top })
    }

    /// Writes `bytes` at byte `offset`; durable on return if `fua`, else with the next [`flush`](Self::flush). Writes that
    /// do not overlap run side by side.
    ///
    /// # Errors
    /// The range is not all of the disk, the disk is read-only, full, or its files cannot be written.
    pub fn write(&self, bytes: &[u8], offset: u64, fua: bool) -> Result<(), EngineError> {
        let range = self.check(offset, bytes.len() as u64)?;
        if range.is_empty() {
            return Ok(());
        }
        let sectors = range.start / SECTOR..range.end.div_ceil(SECTOR);
        let locked = self.locks.lock(sectors.clone());
        let writing = self.begin_write()?;
        let upper = &writing.top.upper;
        let slots = if range.start.is_multiple_of(SECTOR) && range.end.is_multiple_of(SECTOR) {
            upper.write(sectors.start, bytes)?
        } else {
            upper.write(sectors.start, &self.with_edges(bytes, offset, &sectors)?)?
        };
        drop(locked);
        if fua {
            upper.flush_to(slots)?;
        }
        Ok(())
    }

    /// Whether the next write may have to wait for a sync, since many writes wait for one.
    #[must_use]
    pub fn is_write_slow(&self) -> bool {
        self.chain().top.as_ref().is_some_and(|top| top.upper.is_crowded())
    }

    /// `bytes` with what is before and after them in the first and the last sector. Whoever calls has locked the sectors.
    fn with_edges(&self, bytes: &[u8], offset: u64, sectors: &Range<u64>) -> Result<Vec<u8>, EngineError> {
        let len = usize::try_from((sectors.end - sectors.start) * SECTOR).unwrap_or(usize::MAX);
        let mut whole = vec![0; len];
        let chain = self.chain();
        chain.read(&mut whole[..512], sectors.start * SECTOR, true)?;
        if len > 512 {
            chain.read(&mut whole[len - 512..], (sectors.end - 1) * SECTOR, true)?;
        }
        // Less than a sector.
        let at = usize::try_from(offset - sectors.start * SECTOR).unwrap_or(usize::MAX);
        whole[at..][..bytes.len()].copy_from_slice(bytes);
        Ok(whole)
    }

    /// Makes `len` bytes from `offset` on read as zeros, and frees what there was.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub fn write_zeroes(&self, offset: u64, len: u64, fua: bool) -> Result<(), EngineError> {
        let range = self.check(offset, len)?;
        let (first, last) = (range.start.next_multiple_of(SECTOR), range.end / SECTOR * SECTOR);
        let zeros = [0; 512];
        // Less than a sector at either end.
        let zero = |range: Range<u64>| {
            self.write(&zeros[..usize::try_from(range.end - range.start).unwrap_or(0)], range.start, false)
        };
        if first > last {
            zero(range)?;
        } else {
            zero(range.start..first)?;
            self.zero_sectors(first / SECTOR..last / SECTOR)?;
            zero(last..range.end)?;
        }
        if fua { self.flush() } else { Ok(()) }
    }

    /// Tells that nobody needs the contents of `len` bytes from `offset` on. The whole sectors among them read as zeros
    /// then, and what they held is freed.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub fn discard(&self, offset: u64, len: u64) -> Result<(), EngineError> {
        let range = self.check(offset, len)?;
        self.zero_sectors(range.start.div_ceil(SECTOR)..range.end / SECTOR)
    }

    fn zero_sectors(&self, sectors: Range<u64>) -> Result<(), EngineError> {
        let mut at = sectors.start;
        while at < sectors.end {
            // As much as one entry of the index says. What reads as zeros already needs none.
            let part = at..sectors.end.min((at / u64::from(MAX_LENGTH) + 1) * u64::from(MAX_LENGTH));
            let _locked = self.locks.lock(part.clone());
            let writing = self.begin_write()?;
            if self.chain().has_data(part.clone()) {
                writing.top.upper.zero(part.start, part.end - part.start)?;
            }
            at = part.end;
        }
        Ok(())
    }

    /// Makes everything durable that was written before it was called.
    ///
    /// # Errors
    /// A file cannot be written or synced; see [`Upper::flush`].
    pub fn flush(&self) -> Result<(), EngineError> {
        // The oldest first: what lies below is never newer than what lies over it.
        for top in self.chain().uppers().rev() {
            top.upper.flush()?;
        }
        Ok(())
    }

    /// Frees the space of what was overwritten, in data and index; returns how many bytes of data. For a thread that has
    /// time, see [`Background`].
    ///
    /// # Errors
    /// See [`Upper::reclaim`] and [`Upper::renew`].
    pub fn reclaim(&self) -> Result<u64, EngineError> {
        // Those being sealed are left alone: their maps are being read.
        let Some(top) = self.chain().top.clone() else { return Ok(0) };
        top.upper.renew()?;
        Ok(top.upper.reclaim()?)
    }

    /// Puts a new, empty writable layer on top, which takes all writes that come from now on; the one before it takes no
    /// more, and is returned when the last write to it has ended. Requests go on meanwhile: they are held up for the time
    /// that it takes to exchange one pointer, however much is mapped.
    ///
    /// # Errors
    /// There is no writable layer.
    pub(crate) fn push(&self, upper: Upper) -> Result<Arc<Upper>, EngineError> {
        let new = Arc::new(Top { upper: Arc::new(upper), writers: AtomicUsize::new(0) });
        let old = self.change(|chain| {
            let old = chain.top.take().ok_or(EngineError::ReadOnly)?;
            chain.frozen.insert(0, Arc::clone(&old));
            chain.top = Some(new);
            Ok::<_, EngineError>(old)
        });
        let old = old?;
        while old.writers.load(Ordering::Acquire) > 0 {
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(Arc::clone(&old.upper))
    }

    /// Makes the oldest layer that takes no more writes the topmost of the lower ones: `index` is its, sorted, and `data`
    /// its data.
    ///
    /// # Errors
    /// There are too many layers.
    pub(crate) fn settle(&self, index: Arc<Index>, data: Arc<dyn Source>) -> Result<(), EngineError> {
        // Outside the lock: nobody else changes the stack.
        let stack = Arc::new(self.chain().stack.over(index)?);
        self.change(|chain| {
            chain.stack = stack;
            chain.data.push(data);
            chain.frozen.pop();
        });
        Ok(())
    }
}

impl Chain {
    /// Whether any sector of the range is data somewhere.
    fn has_data(&self, range: Range<u64>) -> bool {
        let mut holes = vec![range];
        for top in self.uppers() {
            let mut below = Vec::new();
            for hole in holes {
                for piece in top.upper.lookup(hole).0 {
                    match piece.kind {
                        Some(Kind::Data { .. }) => return true,
                        Some(Kind::Zero) => {}
                        None => below.push(piece.start..piece.end()),
                    }
                }
            }
            holes = below;
        }
        holes.into_iter().any(|hole| self.stack.lookup(hole).any(|piece| matches!(piece.kind, Some(Kind::Data { .. }))))
    }
}

/// An error of the system about a writable layer's data.
fn local(name: &str, source: io::Error) -> EngineError {
    ReadError::Local { what: name.to_owned(), source }.into()
}

#[cfg(test)]
mod tests;
