//! See `converter::fuzzing::manifest` for the invariants.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| converter::fuzzing::manifest::manifest(data));
