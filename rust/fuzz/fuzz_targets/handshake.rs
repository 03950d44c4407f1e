#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvpipe_core::fuzzing::run("handshake", bytes));
