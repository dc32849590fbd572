//! See `converter::fuzzing::erofs` for the invariants.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| converter::fuzzing::erofs::erofs(data));
