#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvpipe_fuzz_harness::run("lookup_client", bytes));
