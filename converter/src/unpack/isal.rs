//! Deflate by ISA-L: the fence around its C interface. Nothing else in this crate is unsafe.
//!
//! ISA-L is used without its gzip wrapper handling: headers and trailers are ours ([`super::gzip`]), so that what is
//! wrong can be said exactly. It still computes the CRC while the bytes are in the cache (`ISAL_GZIP_NO_HDR`).

use isal_sys::igzip_lib as sys;
use std::ptr;

/// Streaming decompressor of one deflate stream after another.
pub(super) struct Inflater {
    /// Boxed because it is 90 KB of tables and history. Invariant: its `next_in` and `next_out` are null between calls.
    state: Box<sys::inflate_state>,
}

/// What one call did.
pub(super) struct Inflated {
    pub(super) consumed: usize,
    pub(super) produced: usize,
    /// The deflate stream is complete and all its output has been given.
    pub(super) finished: bool,
}

// SAFETY: `inflate_state` owns no thread-bound resource. It is `!Send` only because of its two pointer fields, which
// are null whenever no call is running (the invariant of `state`).
unsafe impl Send for Inflater {}

impl Inflater {
    pub(super) fn new() -> Self {
        let mut state = Box::<sys::inflate_state>::new_uninit();
        // SAFETY: the pointer is that of a live allocation of one `inflate_state`, which zeroes fit exactly. On the heap,
        // so that 90 KB are never copied over the stack.
        unsafe { ptr::write_bytes(state.as_mut_ptr(), 0, 1) };
        // SAFETY: `inflate_state` is a C struct of integers, arrays of integers, raw pointers and a union of integers;
        // the zeroes just written are a valid value of each.
        let mut state = unsafe { state.assume_init() };
        // SAFETY: `state` is a valid, exclusively borrowed `inflate_state`; the function only writes its fields.
        unsafe { sys::isal_inflate_init(ptr::from_mut(&mut *state)) };
        state.crc_flag = sys::ISAL_GZIP_NO_HDR;
        Self { state }
    }

    /// Prepares for the next deflate stream.
    pub(super) fn reset(&mut self) {
        // SAFETY: `state` is valid (initialised in `new`) and exclusively borrowed; the function only writes its fields
        // and keeps `crc_flag`.
        unsafe { sys::isal_inflate_reset(ptr::from_mut(&mut *self.state)) };
    }

    /// CRC-32 of all output of this deflate stream so far.
    pub(super) fn crc(&self) -> u32 {
        self.state.crc
    }

    /// Decodes from `input` to `output`, as far as either goes. Both may be empty: the decoder buffers on both sides.
    ///
    /// # Errors
    /// What is wrong with the deflate stream.
    pub(super) fn inflate(&mut self, input: &[u8], output: &mut [u8]) -> Result<Inflated, &'static str> {
        let avail_in = u32::try_from(input.len()).unwrap_or(u32::MAX);
        let avail_out = u32::try_from(output.len()).unwrap_or(u32::MAX);
        let state = &mut *self.state;
        state.next_in = input.as_ptr().cast_mut();
        state.avail_in = avail_in;
        state.next_out = output.as_mut_ptr();
        state.avail_out = avail_out;
        // SAFETY: `state` was initialised by `isal_inflate_init` and is exclusively borrowed. `next_in` points to at
        // least `avail_in` readable bytes and `next_out` to at least `avail_out` writable ones (both lengths are at most
        // the slices'), both live for the whole call and do not overlap (`&` and `&mut`). The function reads but never
        // writes through `next_in`, although the C struct has no const there.
        let code = unsafe { sys::isal_inflate(ptr::from_mut(state)) };
        state.next_in = ptr::null_mut();
        state.next_out = ptr::null_mut();
        let consumed = avail_in.saturating_sub(state.avail_in);
        let produced = avail_out.saturating_sub(state.avail_out);
        match code {
            sys::ISAL_INVALID_BLOCK => return Err("invalid deflate block"),
            sys::ISAL_INVALID_SYMBOL => return Err("invalid deflate symbol"),
            sys::ISAL_INVALID_LOOKBACK => return Err("deflate distance reaches before the start"),
            code if code < 0 => return Err("invalid deflate stream"),
            _ => {}
        }
        Ok(Inflated {
            consumed: consumed as usize,
            produced: produced as usize,
            finished: state.block_state == sys::isal_block_state_ISAL_BLOCK_FINISH,
        })
    }

    /// After the end of a deflate stream: the whole bytes behind it that the decoder consumed but did not use (it reads
    /// ahead in 64 bits), in order; at most 8.
    pub(super) fn unused(&self) -> ([u8; 8], usize) {
        let bits = u32::try_from(self.state.read_in_length).unwrap_or(0).min(64);
        let bytes = (self.state.read_in >> (bits % 8)).to_le_bytes();
        (bytes, (bits / 8) as usize)
    }
}
