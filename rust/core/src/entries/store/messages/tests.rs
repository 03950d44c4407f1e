use proptest::prelude::*;

use super::*;

fn encode(message: StoreMessage<'_>) -> (u8, Vec<u8>, Vec<u8>) {
    let kind = message.kind();
    let (header, payload) = message.into_bytes();
    (kind, header, payload)
}

fn decode((kind, header, payload): &(u8, Vec<u8>, Vec<u8>)) -> Result<StoreMessage<'_>> {
    StoreMessage::decode(*kind, Reader::new(header), payload)
}

/// A buffer of a peer as `BufferDescription::write` describes it.
fn described(len: usize, is_cuda: u8, verification: u8) -> Vec<u8> {
    let writer = Writer::default().u64(len as u64).u64(4096);
    writer.u8(is_cuda).u8(verification).bytes(&[1]).finish()
}

fn offered() -> Carried<'static> {
    let buffer = BufferDescription::read(&mut Reader::new(&described(1 << 20, 0, 0)));
    Carried::Offered(buffer.unwrap())
}

fn bytes(cap: usize) -> impl Strategy<Value = Cow<'static, [u8]>> {
    proptest::collection::vec(any::<u8>(), 1..cap).prop_map(Cow::from)
}

fn duration() -> impl Strategy<Value = Option<Duration>> {
    any::<Option<u32>>().prop_map(|micros| micros.map(|it| Duration::from_micros(it.into())))
}

fn carried() -> impl Strategy<Value = Carried<'static>> {
    prop_oneof![bytes(99).prop_map(Carried::Inline), Just(offered())]
}

fn of_clients() -> impl Strategy<Value = StoreMessage<'static>> {
    let keys = || proptest::collection::vec(bytes(KEY_CAP), 0..9);
    let lease = || any::<u32>().prop_map(|micros| Duration::from_micros(micros.into()));
    prop_oneof![
        keys().prop_map(|keys| StoreMessage::Exists { keys }),
        keys().prop_map(|keys| StoreMessage::Delete { keys }),
        (bytes(KEY_CAP), any::<u64>(), duration(), duration()).prop_map(
            |(key, num_bytes, ttl, timeout)| StoreMessage::Reserve {
                key,
                num_bytes,
                ttl,
                timeout
            }
        ),
        (any::<u64>(), carried())
            .prop_map(|(reservation, bytes)| StoreMessage::Write { reservation, bytes }),
        (any::<u64>(), any::<u64>(), bytes(999)).prop_map(|(reservation, checksum, record)| {
            StoreMessage::Commit {
                reservation,
                checksum,
                record,
            }
        }),
        (bytes(KEY_CAP), duration(), bytes(999), carried()).prop_map(
            |(key, ttl, record, bytes)| StoreMessage::Put {
                key,
                ttl,
                record,
                bytes
            }
        ),
        any::<u64>().prop_map(StoreMessage::Checksum),
        (bytes(KEY_CAP), duration())
            .prop_map(|(key, timeout)| StoreMessage::Select { key, timeout }),
        (bytes(KEY_CAP), lease(), duration()).prop_map(|(key, lease, timeout)| {
            StoreMessage::Take {
                key,
                lease,
                timeout,
            }
        }),
        (any::<u64>(), lease()).prop_map(|(take, lease)| StoreMessage::Renew { take, lease }),
        any::<u64>().prop_map(|take| StoreMessage::Acknowledge { take }),
        any::<u64>().prop_map(|select| StoreMessage::Corrupt { select }),
        (bytes(KEY_CAP), any::<u64>())
            .prop_map(|(prefix, after)| StoreMessage::List { prefix, after }),
        any::<u64>().prop_map(|target| StoreMessage::Release { target }),
        Just(StoreMessage::Stats),
    ]
}

fn of_servers() -> impl Strategy<Value = StoreMessage<'static>> {
    let listed = (bytes(KEY_CAP), any::<u64>(), any::<bool>());
    let listed = listed.prop_map(|(key, num_bytes, is_leased)| Listed {
        key: (*key).into(),
        num_bytes,
        is_leased,
    });
    let error = prop_oneof![
        Just(Error::Config as fn(String) -> Error),
        Just(Error::Exhausted as fn(String) -> Error),
        Just(Error::Corrupt as fn(String) -> Error),
        Just(Error::Timeout as fn(String) -> Error),
        Just(Error::Unavailable as fn(String) -> Error),
    ];
    prop_oneof![
        (error, ".{0,99}").prop_map(|(error, text)| StoreMessage::Refused(error(text))),
        proptest::collection::vec(any::<bool>(), 0..99).prop_map(StoreMessage::Present),
        (any::<u64>(), bytes(999), carried()).prop_map(|(checksum, record, bytes)| {
            StoreMessage::Offer {
                checksum,
                record,
                bytes,
            }
        }),
        any::<u64>().prop_map(StoreMessage::Deleted),
        (
            proptest::collection::vec(listed, 0..9),
            any::<Option<u32>>()
        )
            .prop_map(|(values, next)| {
                let next = next.map(u64::from).filter(|next| *next > 0);
                StoreMessage::Page(Page { values, next })
            }),
        any::<[u64; 18]>().prop_map(|values| {
            let mut info = StoreInfo::default();
            for (field, value) in info.fields().into_iter().zip(values) {
                *field = value;
            }
            StoreMessage::Statistics(info)
        }),
        Just(StoreMessage::Done),
        Just(StoreMessage::Reserved),
        Just(StoreMessage::Occupied),
        Just(StoreMessage::Nothing),
        Just(StoreMessage::Ended),
    ]
}

proptest! {
    #[test]
    fn every_message_decodes_to_itself(message in prop_oneof![of_clients(), of_servers()]) {
        let encoded = encode(message.clone());
        prop_assert_eq!(decode(&encoded), Ok(message));
    }

    #[test]
    fn any_bytes_decode_to_a_message_or_an_error(kind in EXISTS..=ENDED, header: Vec<u8>, payload: Vec<u8>) {
        let _ = StoreMessage::decode(kind, Reader::new(&header), &payload);
    }

    #[test]
    fn a_message_that_is_cut_is_refused(message in prop_oneof![of_clients(), of_servers()], at: proptest::sample::Index) {
        let (kind, header, payload) = encode(message);
        if !payload.is_empty() {
            let cut = payload[..at.index(payload.len())].to_vec();
            prop_assert!(decode(&(kind, header, cut)).is_err());
        }
    }
}

#[test]
fn a_value_that_differs_from_its_checksum_is_corrupt() {
    let bytes = Carried::Inline(Cow::from(&[1, 2, 3][..]));
    let mut encoded = encode(StoreMessage::Write {
        reservation: 1,
        bytes,
    });
    encoded.2[10] ^= 1;
    assert!(matches!(decode(&encoded), Err(Error::Corrupt(_))));
}

#[test]
fn bytes_that_a_store_does_not_read_are_refused() {
    for (len, is_cuda, verification) in [(1 << 20, 1, 0), (1 << 20, 0, 3), (INLINE_CAP, 0, 0)] {
        let payload = [&[OFFERED], &described(len, is_cuda, verification)[..]].concat();
        let refused = Carried::read(&mut Reader::new(&payload)).unwrap_err();
        assert!(matches!(refused, Error::Protocol(_)), "{refused:?}");
    }
    let empty_key = encode(StoreMessage::Select {
        key: Cow::from(&b""[..]),
        timeout: None,
    });
    assert!(decode(&empty_key).is_err());
    let too_long = encode(StoreMessage::Select {
        key: vec![1; KEY_CAP + 1].into(),
        timeout: None,
    });
    assert!(decode(&too_long).is_err());
}
