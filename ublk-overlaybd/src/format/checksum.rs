//! "Raw" CRC-32C: Castagnoli's polynomial, reflected, with the initial register as given and no inversion at the end.
//!
//! A standard library inverts at both ends, so two inversions undo it.

/// The initial register for the checksums of compressed blocks.
pub const BLOCK_SEED: u32 = 100_007;

/// The checksum of `bytes`, from the register `init`: 0, or what an earlier call gave, or [`BLOCK_SEED`].
#[must_use]
pub fn raw_crc32c(init: u32, bytes: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if let Some(register) = super::crc32c::raw(init, bytes) {
        return register;
    }
    !crc32c::crc32c_append(!init, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        assert_eq!(raw_crc32c(0, b"123456789"), 0x58E3_FA20);
        assert_eq!(raw_crc32c(0, b""), 0);
        assert_eq!(raw_crc32c(BLOCK_SEED, b""), BLOCK_SEED);
    }

    #[test]
    fn it_can_be_taken_in_pieces() {
        let (a, b) = b"some bytes".split_at(3);
        assert_eq!(raw_crc32c(raw_crc32c(BLOCK_SEED, a), b), raw_crc32c(BLOCK_SEED, b"some bytes"));
    }
}
