//! The seeds, and what fuzzing has kept, without libFuzzer: every promise holds in a test build too.

use std::path::Path;

use kvpipe_core::fuzzing::DECODERS;
use kvpipe_fuzz_harness::{TARGETS, conversations, drain_refusal, run, seeds};

#[test]
fn every_seed_keeps_the_promises() {
    for (target, seed) in seeds() {
        run(target, &seed);
    }
}

/// One that is refused as breaking the protocol is from an older wire format, and reaches little.
#[test]
fn no_conversation_is_refused() {
    for (number, (target, seed)) in conversations().into_iter().enumerate() {
        run(target, &seed);
        let refusal = drain_refusal();
        assert_eq!(refusal, None, "{target}, seed {number}");
    }
}

/// A seed that its decoder refuses is from an older wire format.
#[test]
fn every_decoder_accepts_its_seeds() {
    let seeds = seeds().into_iter();
    let of_decoders = seeds.filter(|(target, _)| *target == "decoders");
    let mut num_accepted = [0; DECODERS.len()];
    for (_, seed) in of_decoders {
        let index = usize::from(seed[0]);
        let (name, decode) = DECODERS[index];
        assert!(decode(&seed[1..]).is_some(), "{name} refuses its seed");
        num_accepted[index] += 1;
    }
    for ((name, _), num_accepted) in DECODERS.iter().zip(num_accepted) {
        assert!(num_accepted > 0, "{name} has no seed");
    }
}

#[test]
fn the_corpus_keeps_the_promises() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus");
    for (target, run) in TARGETS {
        let files = std::fs::read_dir(corpus.join(target)).expect("a corpus");
        let mut num_files = 0;
        for file in files {
            run(&std::fs::read(file.expect("file").path()).expect("readable"));
            num_files += 1;
        }
        assert!(num_files > 0, "{target} has no corpus");
    }
}
