//! See `converter::fuzzing::merge` for the invariants.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| converter::fuzzing::merge::merge(data));
