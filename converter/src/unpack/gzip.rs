//! gzip members (RFC 1952) around ISA-L's deflate.

use super::input::Input;
use super::isal::Inflater;
use super::{Compression, Decoded, UnpackError};
use std::io::Read;

const FORMAT: Compression = Compression::Gzip;

// Flags of a member header (RFC 1952, 2.3.1).
const FHCRC: u8 = 1 << 1;
const FEXTRA: u8 = 1 << 2;
const FNAME: u8 = 1 << 3;
const FCOMMENT: u8 = 1 << 4;
const RESERVED: u8 = 0b1110_0000;

pub(super) struct Gzip {
    inflater: Inflater,
    state: State,
    /// Plain bytes of this member, modulo 2^32 as ISIZE counts.
    member_len: u32,
}

enum State {
    /// At the start of a member, or, after the first one, perhaps at the end.
    Header {
        first: bool,
    },
    Body,
    Trailer,
}

impl Gzip {
    pub(super) fn new() -> Self {
        Self { inflater: Inflater::new(), state: State::Header { first: true }, member_len: 0 }
    }

    /// Decodes something into `buf`, which is not empty.
    pub(super) fn step<R: Read>(&mut self, input: &mut Input<R>, buf: &mut [u8]) -> Result<Decoded, UnpackError> {
        loop {
            match self.state {
                State::Header { first } => {
                    if !first && !another_member(input)? {
                        return Ok(Decoded::End);
                    }
                    Header { input, crc: !0 }.skip()?;
                    self.inflater.reset();
                    self.member_len = 0;
                    self.state = State::Body;
                }
                State::Body => {
                    let n = self.body(input, buf)?;
                    if n > 0 {
                        return Ok(Decoded::Bytes(n));
                    }
                }
                State::Trailer => {
                    self.trailer(input)?;
                    self.state = State::Header { first: false };
                }
            }
        }
    }

    fn body<R: Read>(&mut self, input: &mut Input<R>, buf: &mut [u8]) -> Result<usize, UnpackError> {
        let bytes = input.filled().map_err(UnpackError::Read)?;
        let at_end = bytes.is_empty();
        let result = self.inflater.inflate(bytes, buf);
        let step = result.map_err(|what| UnpackError::Corrupt {
            format: FORMAT,
            what: what.to_owned(),
            at: input.position(),
        })?;
        input.consume(step.consumed);
        self.member_len = self.member_len.wrapping_add(u32::try_from(step.produced).unwrap_or(0));
        if step.finished {
            self.state = State::Trailer;
        } else if step.produced == 0 {
            if at_end {
                return Err(UnpackError::Truncated { format: FORMAT, part: "compressed data", at: input.taken() });
            }
            if step.consumed == 0 {
                // Cannot happen by ISA-L's contract; better an error than an endless loop if it does.
                let what = "the decoder makes no progress".to_owned();
                return Err(UnpackError::Corrupt { format: FORMAT, what, at: input.position() });
            }
        }
        Ok(step.produced)
    }

    fn trailer<R: Read>(&mut self, input: &mut Input<R>) -> Result<(), UnpackError> {
        let (mut trailer, unused) = self.inflater.unused();
        for slot in &mut trailer[unused..] {
            *slot = next(input, "trailer")?;
        }
        let [a, b, c, d, e, f, g, h] = trailer;
        let check = |what, stored, computed| {
            if stored == computed {
                Ok(())
            } else {
                Err(UnpackError::Checksum { format: FORMAT, what, stored, computed })
            }
        };
        check("CRC-32", u32::from_le_bytes([a, b, c, d]), self.inflater.crc())?;
        check("length (ISIZE)", u32::from_le_bytes([e, f, g, h]), self.member_len)
    }
}

/// Whether another member follows; consumes zero padding at the end, refuses anything else.
fn another_member<R: Read>(input: &mut Input<R>) -> Result<bool, UnpackError> {
    let garbage = |at| Err(UnpackError::TrailingGarbage { format: FORMAT, at });
    let at = input.position();
    match input.peek(2).map_err(UnpackError::Read)? {
        [] => return Ok(false),
        [0x1f, 0x8b] => return Ok(true),
        [0x1f] => return Err(UnpackError::Truncated { format: FORMAT, part: "header", at: input.taken() }),
        [0, ..] => {}
        _ => return garbage(at),
    }
    loop {
        let bytes = input.filled().map_err(UnpackError::Read)?;
        if bytes.is_empty() {
            return Ok(false);
        }
        let zeros = bytes.iter().take_while(|&&b| b == 0).count();
        let all = zeros == bytes.len();
        input.consume(zeros);
        if !all {
            return garbage(input.position());
        }
    }
}

fn next<R: Read>(input: &mut Input<R>, part: &'static str) -> Result<u8, UnpackError> {
    let byte = input.byte().map_err(UnpackError::Read)?;
    byte.ok_or_else(|| UnpackError::Truncated { format: FORMAT, part, at: input.taken() })
}

/// A member header while it is read and thrown away; none of it is kept, so its length costs nothing.
struct Header<'a, R> {
    input: &'a mut Input<R>,
    crc: u32,
}

impl<R: Read> Header<'_, R> {
    fn skip(mut self) -> Result<(), UnpackError> {
        let mut fixed = [0u8; 10];
        for slot in &mut fixed {
            *slot = self.byte()?;
        }
        let [id1, id2, method, flags, ..] = fixed;
        if [id1, id2] != [0x1f, 0x8b] {
            return Err(self.corrupt("a member does not start with the gzip magic".to_owned()));
        }
        if method != 8 {
            return Err(self.corrupt(format!("compression method {method} is not deflate (8)")));
        }
        if flags & RESERVED != 0 {
            return Err(self.corrupt(format!("reserved header flags are set ({flags:#04x})")));
        }
        if flags & FEXTRA != 0 {
            let len = u16::from_le_bytes([self.byte()?, self.byte()?]);
            for _ in 0..len {
                self.byte()?;
            }
        }
        for text in [FNAME, FCOMMENT] {
            if flags & text != 0 {
                while self.byte()? != 0 {}
            }
        }
        if flags & FHCRC != 0 {
            let computed = !self.crc & 0xffff;
            let stored = u32::from(u16::from_le_bytes([self.byte()?, self.byte()?]));
            if stored != computed {
                return Err(UnpackError::Checksum { format: FORMAT, what: "header CRC-16", stored, computed });
            }
        }
        Ok(())
    }

    fn byte(&mut self) -> Result<u8, UnpackError> {
        let byte = next(self.input, "header")?;
        // Bit by bit: headers are a few bytes, and the fast CRC is on the other side of the fence.
        self.crc ^= u32::from(byte);
        for _ in 0..8 {
            self.crc = (self.crc >> 1) ^ (0xedb8_8320 & (self.crc & 1).wrapping_neg());
        }
        Ok(byte)
    }

    fn corrupt(&self, what: String) -> UnpackError {
        UnpackError::Corrupt { format: FORMAT, what, at: self.input.position() }
    }
}
