//! gzip by ISA-L, the fastest inflater known to us: what the limit stands on.
#![allow(unsafe_code)]

use anyhow::{Result, bail};
use isal_sys::igzip_lib as isal;
use std::marker::PhantomData;

/// One gzip stream, of one member or several, being undone.
pub(crate) struct Inflate {
    state: Box<isal::inflate_state>,
    /// The state holds raw pointers only during a call, but the type must not be shared meanwhile.
    not_sync: PhantomData<*mut u8>,
}

/// How far a call of [`Inflate::step`] came.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    /// Input bytes used up.
    pub(crate) consumed: usize,
    /// Output bytes written.
    pub(crate) produced: usize,
    /// The member is complete, its CRC-32 and length checked.
    pub(crate) finished: bool,
}

impl Inflate {
    pub(crate) fn new() -> Self {
        // SAFETY: the structure holds integers, arrays of these and nullable raw pointers, for which zero bytes are valid.
        let mut state: Box<isal::inflate_state> = Box::new(unsafe { std::mem::zeroed() });
        // SAFETY: the pointer is to a live, writable `inflate_state`.
        unsafe { isal::isal_inflate_init(&raw mut *state) };
        state.crc_flag = isal::ISAL_GZIP;
        Self { state, not_sync: PhantomData }
    }

    /// Inflates from `input` into `output` until one of them is exhausted or the member ends.
    ///
    /// After the end of a member the next call with input starts a new one.
    ///
    /// # Errors
    /// When the bytes are no gzip stream, or its checksum does not hold.
    pub(crate) fn step(&mut self, input: &[u8], output: &mut [u8]) -> Result<Step> {
        if self.state.block_state == isal::isal_block_state_ISAL_BLOCK_FINISH {
            if input.is_empty() {
                return Ok(Step { consumed: 0, produced: 0, finished: true });
            }
            // SAFETY: the state is live and was initialised in `new`.
            unsafe { isal::isal_inflate_reset(&raw mut *self.state) };
            self.state.crc_flag = isal::ISAL_GZIP;
        }
        let (avail_in, avail_out) = (u32::try_from(input.len())?, u32::try_from(output.len())?);
        self.state.next_in = input.as_ptr().cast_mut();
        self.state.avail_in = avail_in;
        self.state.next_out = output.as_mut_ptr();
        self.state.avail_out = avail_out;
        // SAFETY: `next_in`/`avail_in` and `next_out`/`avail_out` describe the two live slices, of which the library
        // only reads the first; earlier output that it refers back to is kept inside the state.
        let code = unsafe { isal::isal_inflate(&raw mut *self.state) };
        let step = Step {
            consumed: (avail_in - self.state.avail_in) as usize,
            produced: (avail_out - self.state.avail_out) as usize,
            finished: self.state.block_state == isal::isal_block_state_ISAL_BLOCK_FINISH,
        };
        self.state.next_in = std::ptr::null_mut();
        self.state.next_out = std::ptr::null_mut();
        if code != 0 {
            bail!("not a sound gzip stream (ISA-L error {code})");
        }
        Ok(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::process::{Command, Stdio};

    fn gzip(plain: &[u8]) -> Vec<u8> {
        let mut child =
            Command::new("gzip").arg("-c").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("package gzip");
        let mut stdin = child.stdin.take().unwrap();
        let plain = plain.to_vec();
        let writer = std::thread::spawn(move || stdin.write_all(&plain).unwrap());
        let out = child.wait_with_output().unwrap().stdout;
        writer.join().unwrap();
        out
    }

    fn gunzip(mut input: &[u8], output_size: usize) -> Result<Vec<u8>> {
        let (mut inflate, mut all, mut buffer) = (Inflate::new(), Vec::new(), vec![0; output_size]);
        loop {
            let step = inflate.step(&input[..input.len().min(1000)], &mut buffer)?;
            all.extend_from_slice(&buffer[..step.produced]);
            input = &input[step.consumed..];
            if step.finished && input.is_empty() {
                assert!(inflate.step(input, &mut buffer)?.finished, "nothing begins without input");
                return Ok(all);
            }
            if step.consumed == 0 && step.produced == 0 {
                bail!("the stream ends early");
            }
        }
    }

    #[test]
    fn members_of_any_size_through_buffers_of_any_size() {
        let plain: Vec<u8> = (0..300_000_u32).flat_map(|n| (n.wrapping_mul(n) / 7).to_le_bytes()).collect();
        let two = [gzip(&plain), gzip(b"second")].concat();
        for size in [100, 4096, 1 << 20, 4 << 20] {
            let back = gunzip(&two, size).unwrap();
            assert_eq!(back.len(), plain.len() + 6);
            assert!(back.starts_with(&plain) && back.ends_with(b"second"));
        }
    }

    #[test]
    fn broken_streams_are_refused() {
        let sound = gzip(&[7; 10_000]);
        let mut wrong = sound.clone();
        let crc = wrong.len() - 8;
        wrong[crc] ^= 1;
        assert!(gunzip(&wrong, 4096).is_err());
        assert!(gunzip(&sound[..sound.len() - 4], 4096).is_err());
        assert!(gunzip(b"no gzip at all, but long enough", 4096).is_err());
    }
}
