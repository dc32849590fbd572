//! See `converter::fuzzing::layer` for the invariants.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| converter::fuzzing::layer::layer(data));
