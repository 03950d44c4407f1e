use super::*;
use proptest::prelude::*;

const DENSE: Layout = Layout {
    num_blocks: 100,
    block_bytes: 64,
    stride: 64,
    skipped: 0,
};
const SPARSE: Layout = Layout {
    num_blocks: 100,
    block_bytes: 64,
    stride: 128,
    skipped: 0,
};

fn runs(to: (&Layout, &[u32]), from: (&Layout, &[u32])) -> Vec<Run> {
    coalesce(to, from).unwrap().runs
}

#[test]
fn blocks_side_by_side_on_both_ends_become_one_run() {
    let joined = [Run {
        to: 192,
        from: 640,
        len: 192,
    }];
    assert_eq!(runs((&DENSE, &[3, 4, 5]), (&DENSE, &[10, 11, 12])), joined);
    assert_eq!(runs((&DENSE, &[5, 3, 4]), (&DENSE, &[12, 10, 11])), joined);
}

#[test]
fn blocks_with_gaps_stay_apart() {
    assert_eq!(runs((&SPARSE, &[0, 1]), (&DENSE, &[0, 1])).len(), 2);
    assert_eq!(sequence(&SPARSE, &[0, 1]).unwrap().runs.len(), 2);
}

#[test]
fn a_sequence_keeps_the_order_of_its_ids_and_may_repeat_them() {
    let run = |to, from, len| Run { to, from, len };
    let pieces = sequence(&DENSE, &[7, 8, 7]).unwrap();
    assert_eq!(pieces.runs, [run(0, 448, 128), run(128, 448, 64)]);
    assert_eq!(pieces.num_bytes, 192);
}

#[test]
fn bad_ids_are_named() {
    let text = |result: Result<Pieces>| result.unwrap_err().to_string();
    assert!(text(coalesce((&DENSE, &[100]), (&DENSE, &[0]))).contains("block id 100"));
    assert!(text(coalesce((&DENSE, &[0]), (&DENSE, &[4_000_000]))).contains("4000000"));
    assert!(
        text(coalesce((&DENSE, &[7, 8, 7]), (&DENSE, &[0, 1, 2]))).contains("7 is named twice")
    );
    assert!(text(coalesce((&DENSE, &[7]), (&DENSE, &[]))).contains("1 destination ids for 0"));
    let small = Layout::new(64, 32, 32).unwrap();
    assert!(text(coalesce((&DENSE, &[7]), (&small, &[0]))).contains("64 bytes cannot hold"));
    assert!(sequence(&DENSE, &[100]).is_err());
}

#[test]
fn the_same_source_may_be_read_into_two_blocks() {
    assert_eq!(runs((&DENSE, &[1, 2]), (&DENSE, &[5, 5])).len(), 2);
}

#[test]
fn a_layout_counts_the_last_block_without_its_gap() {
    assert_eq!(Layout::new(128 * 3 + 64, 64, 128).unwrap().num_blocks, 4);
    assert!(Layout::new(63, 64, 64).is_err());
    assert!(Layout::new(64, 64, 32).is_err());
}

fn described(base: u64, num_blocks: u64, block_bytes: u64, stride: u64) -> Result<RemoteRegion> {
    let layout = Layout {
        num_blocks,
        block_bytes,
        stride,
        skipped: 0,
    };
    let region = RemoteRegion {
        id: 3,
        name: "kv".to_owned(),
        slice: None,
        layout,
        device: "cpu".to_owned(),
        is_writable: true,
        base,
        rkey: vec![1],
    };
    let message = region.write(Writer::default()).finish();
    RemoteRegion::read(&mut Reader::new(&message))
}

#[test]
fn a_region_that_cannot_exist_is_refused() {
    assert!(described(4096, 8, 64, 64).is_ok());
    assert!(described(u64::MAX - 64, 8, 64, 64).is_err());
    assert!(described(0, 8, 64, u64::MAX / 4).is_err());
    assert!(described(0, u64::from(u32::MAX) + 1, 1, 1).is_err());
    assert!(described(0, 8, 65, 64).is_err());
    assert!(described(0, 8, 0, 64).is_err());
}

proptest! {
    #[test]
    fn any_bytes_give_a_region_or_an_error(message: Vec<u8>) {
        let _ = RemoteRegion::read(&mut Reader::new(&message));
    }

    #[test]
    fn runs_move_exactly_the_named_blocks(pairs in proptest::collection::btree_map(0u32..100, 0u32..100, 0..50)) {
        let (to, from): (Vec<u32>, Vec<u32>) = pairs.into_iter().unzip();
        let shuffled = |ids: &[u32]| -> Vec<u32> {
            let (odd, even): (Vec<_>, Vec<_>) = ids.iter().zip(0..).partition(|(_, index)| index % 2 == 1);
            odd.into_iter().chain(even).map(|(id, _)| *id).collect()
        };
        let pieces = coalesce((&DENSE, &shuffled(&to)), (&DENSE, &shuffled(&from))).unwrap();
        prop_assert_eq!((&pieces.to_ids, &pieces.from_ids), (&to, &from));
        let moved: Vec<(u64, u64)> = pieces.runs
            .iter()
            .flat_map(|run| (0..run.len).step_by(64).map(|at| (run.to + at, run.from + at)))
            .collect();
        let named: Vec<(u64, u64)> =
            to.iter().zip(&from).map(|(&t, &f)| (u64::from(t) * 64, u64::from(f) * 64)).collect();
        prop_assert_eq!(moved, named);
    }
}
