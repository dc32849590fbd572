//! See `ublk_overlaybd::fuzzing::gzip` for the invariants.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ublk_overlaybd::fuzzing::gzip(data));
