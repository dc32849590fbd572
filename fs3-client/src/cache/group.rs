//! What the hot path looks at: which chunks of a group are there, and whether somebody is at its bytes.
//!
//! Fillers, and readers by rings of their own, *enter* a group for as long as they touch its part of the file, and
//! eviction *locks* it, which succeeds only when nobody is inside. Who comes while it is locked is turned away at once, to
//! the store: nobody ever waits for an eviction, and no eviction punches a hole under a fill.
//!
//! Other readers only *look*: they write nothing, so that any number of cores may read the same group. They look again
//! after the read, and when the group was locked meanwhile, what they read counts for nothing.

use super::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

const LOCKED: u32 = 1 << 31;
/// How often a group was touched is counted up to this.
const MOST_HEAT: u32 = 3;

/// The state of 64 chunks: a cache line of its own, since readers of neighbours are on other cores.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct Group {
    /// How many are inside, and whether it is locked.
    state: AtomicU32,
    /// How often it was locked.
    evictions: AtomicU32,
    /// Times that it was touched, in the lowest two bits, and the epoch of the last of them above.
    heat: AtomicU32,
    /// Who wants it to stay.
    pins: AtomicU32,
    /// Chunks that are in the file.
    present: AtomicU64,
    /// Of those, the ones that are believed only after their CRC matched.
    suspect: AtomicU64,
    /// Of those that are there, the ones that no table of digests has vouched for.
    unchecked: AtomicU64,
    /// Chunks at which a sequential reader should have more fetched.
    marks: AtomicU64,
}

impl Group {
    /// Enters, unless it is locked. Who has entered calls [`leave`](Self::leave) once.
    #[must_use]
    pub(crate) fn enter(&self) -> bool {
        if self.state.fetch_add(1, Ordering::Acquire) & LOCKED == 0 {
            return true;
        }
        self.leave();
        false
    }

    pub(crate) fn leave(&self) {
        self.state.fetch_sub(1, Ordering::Release);
    }

    /// Locks it, if nobody is inside.
    #[must_use]
    pub(crate) fn lock(&self) -> bool {
        let locked = self.state.compare_exchange(0, LOCKED, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if locked {
            self.evictions.fetch_add(1, Ordering::AcqRel);
        }
        locked
    }

    /// Begins to look, unless it is locked. What is read counts if it is [`the same`](Self::is_same) afterwards.
    ///
    /// Who gets a number from before a lock finds another one after it. Who gets the number of a lock sees the lock, or
    /// that it is over, and then what was emptied under it.
    #[must_use]
    pub(crate) fn look(&self) -> Option<u32> {
        let seen = self.evictions.load(Ordering::Acquire);
        (self.state.load(Ordering::Acquire) & LOCKED == 0).then_some(seen)
    }

    /// Whether it was not locked since the look that gave `seen`.
    #[must_use]
    pub(crate) fn is_same(&self, seen: u32) -> bool {
        // The read comes before.
        fence(Ordering::Acquire);
        self.evictions.load(Ordering::Acquire) == seen
    }

    pub(crate) fn unlock(&self) {
        self.state.fetch_and(!LOCKED, Ordering::Release);
    }

    pub(crate) fn present(&self) -> u64 {
        self.present.load(Ordering::Acquire)
    }

    pub(crate) fn suspect(&self) -> u64 {
        self.suspect.load(Ordering::Acquire)
    }

    pub(crate) fn unchecked(&self) -> u64 {
        self.unchecked.load(Ordering::Acquire)
    }

    /// As the index has it, before anybody reads.
    pub(crate) fn recall(&self, present: u64, unchecked: u64, suspect: u64) {
        self.unchecked.store(unchecked & present, Ordering::Release);
        self.suspect.store(suspect & present, Ordering::Release);
        self.present.store(present, Ordering::Release);
    }

    /// The chunks `bits` are in the file. The caller is inside. Gives those that were not before.
    pub(crate) fn filled(&self, bits: u64, checked: bool) -> u64 {
        self.suspect.fetch_and(!bits, Ordering::AcqRel);
        if checked {
            self.unchecked.fetch_and(!bits, Ordering::AcqRel);
        } else {
            self.unchecked.fetch_or(bits, Ordering::AcqRel);
        }
        bits & !self.present.fetch_or(bits, Ordering::AcqRel)
    }

    /// The CRCs of the chunks `bits` matched.
    pub(crate) fn believed(&self, bits: u64) {
        self.suspect.fetch_and(!bits, Ordering::AcqRel);
    }

    /// The chunks `bits` are not to be read any more. Gives those that were there.
    pub(crate) fn drop_bits(&self, bits: u64) -> u64 {
        bits & self.present.fetch_and(!bits, Ordering::AcqRel)
    }

    /// Empties it, which is locked. Gives what was there.
    pub(crate) fn empty(&self) -> u64 {
        self.marks.store(0, Ordering::Relaxed);
        self.suspect.store(0, Ordering::Relaxed);
        self.unchecked.store(0, Ordering::Relaxed);
        self.present.swap(0, Ordering::AcqRel)
    }

    /// Sets a mark at the chunk `bit`.
    pub(crate) fn mark(&self, bit: u64) {
        self.marks.fetch_or(bit, Ordering::Relaxed);
    }

    /// Whether there is a mark among `bits`, which is then gone.
    pub(crate) fn take_mark(&self, bits: u64) -> bool {
        self.marks.load(Ordering::Relaxed) & bits != 0 && self.marks.fetch_and(!bits, Ordering::Relaxed) & bits != 0
    }

    /// Counts a touch, once an epoch: many small reads in a row are one.
    pub(crate) fn touch(&self, epoch: u32) {
        let heat = self.heat.load(Ordering::Relaxed);
        if heat >> 2 != epoch & (u32::MAX >> 2) {
            let count = ((heat & 3) + 1).min(MOST_HEAT);
            self.heat.store(epoch << 2 | count, Ordering::Relaxed);
        }
    }

    /// It is new in this epoch, and was not touched yet.
    pub(crate) fn cold(&self, epoch: u32) {
        self.heat.store(epoch << 2, Ordering::Relaxed);
    }

    /// How often it was touched, up to three times.
    pub(crate) fn heat(&self) -> u32 {
        self.heat.load(Ordering::Relaxed) & 3
    }

    /// Counts one touch less.
    pub(crate) fn cool(&self) {
        let heat = self.heat.load(Ordering::Relaxed);
        if heat & 3 > 0 {
            self.heat.store(heat - 1, Ordering::Relaxed);
        }
    }

    pub(crate) fn pin(&self) {
        self.pins.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes back one [`pin`](Self::pin), if there is one.
    pub(crate) fn unpin(&self) {
        let less = |pins: u32| pins.checked_sub(1);
        let _ = self.pins.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    pub(crate) fn is_pinned(&self) -> bool {
        self.pins.load(Ordering::Relaxed) > 0
    }
}
