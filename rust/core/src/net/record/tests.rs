use super::*;
use proptest::prelude::*;

/// Two sides that have each other's keys.
fn pair() -> (Records, Records) {
    let (first, second) = (|| Key::new([1; KEY_LEN]), || Key::new([2; KEY_LEN]));
    let near = Records::new(first(), second());
    (near, Records::new(second(), first()))
}

fn seal(records: &mut Records, frame: &[u8]) -> Vec<u8> {
    let mut record = Vec::new();
    records.sealer.seal(frame, &mut record).unwrap();
    record
}

fn refuses(records: &mut Records, mut record: Vec<u8>) {
    let opened = records.opener.open(&mut record);
    assert!(matches!(opened, Err(Error::Protocol(_))), "{opened:?}");
}

#[test]
fn a_record_shows_the_type_of_its_frame_alone() {
    let (mut near, mut far) = pair();
    let mut record = seal(&mut near, b"!a frame of text");
    assert_eq!(record.len(), 16 + TAG_LEN);
    assert_eq!(record[0], b'!');
    let shows = |part: &[u8]| record.windows(part.len()).any(|window| window == part);
    assert!(!shows(b"frame") && !shows(b"text"));
    assert_eq!(far.opener.open(&mut record), Ok(&b"!a frame of text"[..]));
}

#[test]
fn a_record_in_which_any_bit_differs_does_not_open() {
    let record = seal(&mut pair().0, b"!frame");
    for bit in 0..8 * record.len() {
        let mut changed = record.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        refuses(&mut pair().1, changed);
    }
}

#[test]
fn a_record_that_is_cut_or_longer_does_not_open() {
    let record = seal(&mut pair().0, b"!frame");
    for len in 0..record.len() {
        refuses(&mut pair().1, record[..len].to_vec());
    }
    refuses(&mut pair().1, [&record[..], &[0]].concat());
}

#[test]
fn a_record_that_comes_again_or_out_of_turn_does_not_open() {
    let (mut near, mut far) = pair();
    let records = [seal(&mut near, b"!first"), seal(&mut near, b"!second")];
    refuses(&mut pair().1, records[1].clone());
    assert!(far.opener.open(&mut records[0].clone()).is_ok());
    refuses(&mut far, records[0].clone());
}

#[test]
fn nothing_opens_after_a_record_that_did_not() {
    let (mut near, _) = pair();
    let records = [seal(&mut near, b"!first"), seal(&mut near, b"!second")];
    for honest in &records {
        let (_, mut far) = pair();
        let mut changed = records[0].clone();
        changed[1] ^= 1;
        refuses(&mut far, changed);
        assert!(far.opener.open(&mut honest.clone()).is_err());
    }
}

#[test]
fn a_record_that_is_sent_back_does_not_open() {
    let (mut near, _) = pair();
    let record = seal(&mut near, b"!frame");
    refuses(&mut near, record);
}

#[test]
fn equal_frames_have_unlike_records() {
    let (mut near, _) = pair();
    let records: std::collections::HashSet<_> =
        (0..100).map(|_| seal(&mut near, b"!frame")).collect();
    assert_eq!(records.len(), 100);
}

#[test]
fn the_key_changes_after_so_many_bytes_on_both_sides_and_nothing_is_lost() {
    let (mut near, mut far) = pair();
    for direction in [&mut near.sealer.0, &mut far.opener.0] {
        direction.rekey_bytes = 100;
    }
    let mut secrets = vec![near.sealer.0.secret.clone()];
    for _ in 0..20 {
        let mut record = seal(&mut near, b"!a frame of 30 bytes in all...");
        assert!(far.opener.open(&mut record).is_ok());
        assert_eq!(near.sealer.0.secret, far.opener.0.secret);
        if *near.sealer.0.secret != **secrets.last().unwrap() {
            secrets.push(near.sealer.0.secret.clone());
        }
    }
    // Three records of 46 bytes for each key.
    assert_eq!(secrets.len(), 1 + 20 / 3);
    let all: std::collections::HashSet<_> = secrets.iter().map(|it| **it).collect();
    assert_eq!(all.len(), secrets.len());
}

const KNOWN_HEX: &str =
    "21ba775161afcabbcac1dfe3c6c2b4df20f2ac7b99cf21365c0b04e24527df0fa7365f99a4040b136174d3ddc6";

/// Computed by another implementation, in Python with `hmac` and AES-GCM of `cryptography`, from wire-format.md.
#[test]
fn a_record_with_the_second_key_has_the_known_bytes() {
    let mut sealer = Sealer(Direction::new(Key::new([1; KEY_LEN])));
    sealer.0.rekey_bytes = 1;
    let mut records = Vec::new();
    for frame in [&b"!first"[..], b"!second"] {
        sealer.seal(frame, &mut records).unwrap();
    }
    assert_eq!(crate::net::handshake::tests::hex(&records), KNOWN_HEX);
}

#[test]
fn no_nonce_is_used_twice() {
    let (mut near, _) = pair();
    near.sealer.0.num_records = u64::MAX;
    let refused = near.sealer.seal(b"!frame", &mut Vec::new());
    assert!(matches!(refused, Err(Error::Exhausted(_))), "{refused:?}");
}

#[test]
fn keys_are_not_shown() {
    let (near, _) = pair();
    assert_eq!(format!("{near:?}"), "Records");
}

proptest! {
    #[test]
    fn frames_come_out_as_they_went_in(frames: Vec<(u8, Vec<u8>)>) {
        let (mut near, mut far) = pair();
        let mut sent = Vec::new();
        for (kind, fields) in &frames {
            let (frame, start) = ([&[*kind][..], fields].concat(), sent.len());
            near.sealer.seal(&frame, &mut sent).unwrap();
            prop_assert_eq!(far.opener.open(&mut sent[start..]), Ok(&frame[..]));
        }
    }

    #[test]
    fn any_bytes_do_not_open(mut record: Vec<u8>) {
        prop_assert!(pair().1.opener.open(&mut record).is_err());
    }
}
