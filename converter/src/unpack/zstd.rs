//! zstd frames (RFC 8878) by the reference library.

use super::input::Input;
use super::{Compression, Decoded, UnpackError};
use std::io::{self, Read};
use zstd::zstd_safe::{self, DCtx, DParameter, InBuffer, OutBuffer};

const FORMAT: Compression = Compression::Zstd;

/// Log2 of the largest window that is granted: `zstd -d`'s own default (`ZSTD_WINDOWLOG_LIMIT_DEFAULT`).
const WINDOW_LOG_MAX: u32 = 27;
/// The same in MiB, for messages.
pub(super) const WINDOW_LOG_MAX_MIB: u32 = 1 << (WINDOW_LOG_MAX - 20);

// Error numbers, pinned by the library's ABI since 1.3.1 (zstd_errors.h).
const PREFIX_UNKNOWN: usize = 10;
const WINDOW_TOO_LARGE: usize = 16;

pub(super) struct Zstd {
    context: DCtx<'static>,
    /// A frame has begun and not ended.
    in_frame: bool,
    /// A frame was completed.
    any_frame: bool,
}

impl Zstd {
    pub(super) fn new() -> Result<Self, UnpackError> {
        let out_of_memory = || UnpackError::Read(io::ErrorKind::OutOfMemory.into());
        let mut context = DCtx::try_create().ok_or_else(out_of_memory)?;
        context.set_parameter(DParameter::WindowLogMax(WINDOW_LOG_MAX)).map_err(|_| out_of_memory())?;
        Ok(Self { context, in_frame: true, any_frame: false })
    }

    /// Decodes something into `buf`, which is not empty.
    pub(super) fn step<R: Read>(&mut self, input: &mut Input<R>, buf: &mut [u8]) -> Result<Decoded, UnpackError> {
        loop {
            let bytes = input.filled().map_err(UnpackError::Read)?;
            let at_end = bytes.is_empty();
            if at_end && !self.in_frame {
                return Ok(Decoded::End);
            }
            let between_frames = !self.in_frame;
            let mut source = InBuffer::around(bytes);
            let mut target = OutBuffer::around(&mut *buf);
            let result = self.context.decompress_stream(&mut target, &mut source);
            let (produced, consumed) = (target.pos(), source.pos());
            match result {
                // 0 is "the frame is complete and flushed" (zstd.h, ZSTD_decompressStream).
                Ok(hint) => {
                    self.in_frame = hint != 0;
                    self.any_frame |= hint == 0;
                }
                Err(code) => return Err(self.error(code, between_frames, input)),
            }
            input.consume(consumed);
            if produced > 0 {
                return Ok(Decoded::Bytes(produced));
            }
            if at_end && self.in_frame {
                return Err(UnpackError::Truncated { format: FORMAT, part: "frame", at: input.taken() });
            }
            if consumed == 0 && !at_end && self.in_frame {
                // Cannot happen by the library's contract; better an error than an endless loop if it does.
                let what = "the decoder makes no progress".to_owned();
                return Err(UnpackError::Corrupt { format: FORMAT, what, at: input.position() });
            }
        }
    }

    fn error<R: Read>(&self, code: usize, between_frames: bool, input: &Input<R>) -> UnpackError {
        // Errors are the negated number, as a size_t (zstd_errors.h).
        match code.wrapping_neg() {
            WINDOW_TOO_LARGE => UnpackError::Window,
            PREFIX_UNKNOWN if between_frames || self.any_frame => {
                UnpackError::TrailingGarbage { format: FORMAT, at: input.position() }
            }
            _ => {
                let what = zstd_safe::get_error_name(code).to_owned();
                UnpackError::Corrupt { format: FORMAT, what, at: input.position() }
            }
        }
    }
}
