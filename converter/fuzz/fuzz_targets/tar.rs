//! See `converter::fuzzing::tar` for the invariants.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| converter::fuzzing::tar::tar(data));
