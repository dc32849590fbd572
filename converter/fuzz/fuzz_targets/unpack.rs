//! See `converter::fuzzing::unpack` for the invariants.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| converter::fuzzing::unpack::unpack(data));
