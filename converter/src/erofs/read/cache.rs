//! A small cache of the image's pages, so that reading an inode is a copy and not a system call.
//!
//! Pages of 16 KiB, 256 of them unless told otherwise (4 MiB), placed by their number. A miss reads one page; a miss right behind the
//! last one is taken for a scan and reads 128 KiB at once. Images are laid out in tree order, so a walk scans.

use super::ReadError;
use crate::read_at::ReadAt;
use std::fmt;
use std::io;
use std::sync::{Mutex, PoisonError};

const PAGE: usize = 16 << 10;
/// Pages kept unless told otherwise.
pub(super) const SLOTS: usize = 256;
const SCAN_PAGES: usize = 8;
/// Reads of this many bytes go past the cache.
const LARGE: usize = 64 << 10;

pub(super) struct WindowCache<R> {
    source: R,
    size: u64,
    state: Mutex<State>,
}

struct State {
    slots: Vec<Option<(u64, Box<[u8]>)>>,
    /// The page after the last one that was read from the source.
    next: u64,
    scan: Vec<u8>,
}

impl<R> fmt::Debug for WindowCache<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WindowCache").field("size", &self.size).finish_non_exhaustive()
    }
}

pub(super) fn image_error(offset: u64, len: usize, source: io::Error) -> ReadError {
    ReadError::Io { medium: "the image".to_owned(), offset, len, source }
}

impl<R> WindowCache<R> {
    pub(super) const fn size(&self) -> u64 {
        self.size
    }

    pub(super) const fn source(&self) -> &R {
        &self.source
    }
}

impl<R: ReadAt> WindowCache<R> {
    pub(super) fn new(source: R, size: u64, slots: usize) -> Self {
        let slots = std::iter::repeat_with(|| None).take(slots.max(1)).collect();
        Self { source, size, state: Mutex::new(State { slots, next: u64::MAX, scan: Vec::new() }) }
    }

    /// Fills `buf` from `offset`; the range must lie inside the image.
    pub(super) fn read(&self, buf: &mut [u8], offset: u64) -> Result<(), ReadError> {
        if buf.is_empty() {
            return Ok(());
        }
        if offset.checked_add(buf.len() as u64).is_none_or(|end| end > self.size) {
            return Err(image_error(offset, buf.len(), io::ErrorKind::UnexpectedEof.into()));
        }
        let len = buf.len();
        if len >= LARGE {
            return self.source.read_exact_at(buf, offset).map_err(|e| image_error(offset, len, e));
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let page = at / PAGE as u64;
            let within = usize::try_from(at % PAGE as u64).unwrap_or(0);
            let slot = slot_of(page, state.slots.len());
            if !matches!(&state.slots[slot], Some((held, _)) if *held == page) {
                self.load(&mut state, page).map_err(|e| image_error(at, len - done, e))?;
            }
            let Some((_, bytes)) = &state.slots[slot] else { continue };
            let Some(available) = bytes.get(within..).filter(|rest| !rest.is_empty()) else {
                return Err(image_error(at, len - done, io::ErrorKind::UnexpectedEof.into()));
            };
            let take = available.len().min(len - done);
            buf[done..done + take].copy_from_slice(&available[..take]);
            done += take;
        }
        Ok(())
    }

    fn load(&self, state: &mut State, page: u64) -> io::Result<()> {
        let State { slots, next, scan } = state;
        let pages = if page == *next { SCAN_PAGES.min(slots.len()) } else { 1 };
        let start = page * PAGE as u64;
        let len = usize::try_from((self.size - start).min((pages * PAGE) as u64)).unwrap_or(PAGE);
        scan.resize(len, 0);
        self.source.read_exact_at(scan, start)?;
        for (bytes, number) in scan.chunks(PAGE).zip(page..) {
            let slot = slot_of(number, slots.len());
            let slot = &mut slots[slot];
            match slot {
                Some((held, old)) if old.len() == bytes.len() => {
                    old.copy_from_slice(bytes);
                    *held = number;
                }
                _ => *slot = Some((number, bytes.into())),
            }
            *next = number + 1;
        }
        Ok(())
    }
}

fn slot_of(page: u64, slots: usize) -> usize {
    usize::try_from(page % slots as u64).unwrap_or(0)
}
