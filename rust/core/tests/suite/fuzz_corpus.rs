//! Everything that fuzzing has found worth keeping, and the conversations that it starts from, once more: without
//! libFuzzer, on every data path and with the checks of a test build.

use std::path::Path;

use kvpipe_core::fuzzing::{TARGETS, run, seeds};

#[test]
fn every_seed_ends_as_promised() {
    for (target, seed) in seeds() {
        run(target, &seed);
    }
}

#[test]
fn what_fuzzing_has_kept_ends_as_promised() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus");
    for (target, run) in TARGETS {
        let files = std::fs::read_dir(corpus.join(target)).expect("a corpus");
        let mut count = 0;
        for file in files {
            run(&std::fs::read(file.expect("file").path()).expect("readable"));
            count += 1;
        }
        assert!(count > 0, "{target} has no corpus");
    }
}
