use proptest::prelude::*;

use super::*;
use crate::entries::content::PARTS_CAP;

fn encode(message: EntryMessage<'_>) -> (u8, Vec<u8>, Vec<u8>) {
    let kind = message.kind();
    let (header, payload) = message.into_bytes();
    (kind, header, payload)
}

fn decode((kind, header, payload): &(u8, Vec<u8>, Vec<u8>)) -> Result<EntryMessage<'_>> {
    EntryMessage::decode(*kind, Reader::new(header), payload)
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

fn parts() -> impl Strategy<Value = Vec<Carried<'static>>> {
    proptest::collection::vec(carried(), 0..=PARTS_CAP)
}

fn query() -> impl Strategy<Value = Query<Cow<'static, [u8]>>> {
    let tokens = proptest::collection::vec(any::<u64>(), 1..9).prop_map(|tokens| {
        let bytes: Vec<_> = tokens.iter().flat_map(|it| it.to_le_bytes()).collect();
        Query::LongestPrefix(bytes.into())
    });
    prop_oneof![
        bytes(KEY_CAP).prop_map(Query::Exact),
        Just(Query::Oldest),
        tokens
    ]
}

fn access() -> impl Strategy<Value = Access> {
    prop_oneof![Just(Access::Open), duration().prop_map(Access::Lease)]
}

fn of_clients() -> impl Strategy<Value = EntryMessage<'static>> {
    let keys = || proptest::collection::vec(bytes(KEY_CAP), 0..9);
    let lease = || any::<u32>().prop_map(|micros| Duration::from_micros(micros.into()));
    prop_oneof![
        keys().prop_map(|keys| EntryMessage::Exists { keys }),
        keys().prop_map(|keys| EntryMessage::Delete { keys }),
        (bytes(KEY_CAP), any::<u64>(), duration(), duration()).prop_map(
            |(key, num_bytes, ttl, timeout)| EntryMessage::Reserve {
                key,
                num_bytes,
                ttl,
                timeout
            }
        ),
        (any::<u64>(), carried())
            .prop_map(|(reservation, bytes)| EntryMessage::Write { reservation, bytes }),
        (any::<u64>(), any::<u64>(), bytes(999)).prop_map(|(reservation, checksum, record)| {
            EntryMessage::Commit {
                reservation,
                checksum,
                record,
            }
        }),
        (
            (bytes(KEY_CAP), duration(), duration()),
            (any::<bool>(), bytes(999), parts())
        )
            .prop_map(|((key, ttl, timeout), (is_hashed, record, parts))| {
                EntryMessage::Put {
                    key,
                    ttl,
                    timeout,
                    is_hashed,
                    record,
                    parts,
                }
            }),
        any::<u64>().prop_map(EntryMessage::Checksum),
        (query(), access(), duration()).prop_map(|(query, access, timeout)| {
            EntryMessage::Select {
                query,
                access,
                timeout,
            }
        }),
        any::<bool>().prop_map(|is_withdrawn| EntryMessage::Cancel { is_withdrawn }),
        Just(EntryMessage::Consume),
        (any::<u64>(), lease()).prop_map(|(target, lease)| EntryMessage::Renew { target, lease }),
        any::<u64>().prop_map(|target| EntryMessage::Acknowledge { target }),
        any::<u64>().prop_map(|target| EntryMessage::Corrupt { target }),
        (bytes(KEY_CAP), any::<u64>())
            .prop_map(|(prefix, after)| EntryMessage::List { prefix, after }),
        any::<u64>().prop_map(|target| EntryMessage::Release { target }),
        Just(EntryMessage::Stats),
    ]
}

fn of_servers() -> impl Strategy<Value = EntryMessage<'static>> {
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
        (error, ".{0,99}").prop_map(|(error, text)| EntryMessage::Refused(error(text))),
        proptest::collection::vec(any::<bool>(), 0..99).prop_map(EntryMessage::Present),
        (any::<Option<u64>>(), bytes(999), parts()).prop_map(|(checksum, record, parts)| {
            EntryMessage::Offer {
                checksum,
                record,
                parts,
            }
        }),
        any::<u64>().prop_map(EntryMessage::Deleted),
        (
            proptest::collection::vec(listed, 0..9),
            any::<Option<u32>>()
        )
            .prop_map(|(values, next)| {
                let next = next.map(u64::from).filter(|next| *next > 0);
                EntryMessage::Page(Page { values, next })
            }),
        any::<[u64; 24]>().prop_map(|values| {
            let mut info = StoreInfo::default();
            for (field, value) in info.fields().into_iter().zip(values) {
                *field = value;
            }
            EntryMessage::Statistics(info)
        }),
        Just(EntryMessage::Done),
        Just(EntryMessage::Reserved),
        Just(EntryMessage::Occupied),
        Just(EntryMessage::Nothing),
        Just(EntryMessage::Ended),
    ]
}

proptest! {
    #[test]
    fn every_message_decodes_to_itself(message in prop_oneof![of_clients(), of_servers()]) {
        let encoded = encode(message.clone());
        prop_assert_eq!(decode(&encoded), Ok(message));
    }

    #[test]
    fn any_bytes_decode_to_a_message_or_an_error(kind in EXISTS..=CANCEL, header: Vec<u8>, payload: Vec<u8>) {
        let _ = EntryMessage::decode(kind, Reader::new(&header), &payload);
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
    let mut encoded = encode(EntryMessage::Write {
        reservation: 1,
        bytes,
    });
    encoded.2[10] ^= 1;
    assert!(matches!(decode(&encoded), Err(Error::Corrupt(_))));
}

#[test]
fn bytes_that_nothing_reads_are_refused() {
    let read = |len, is_cuda, verification| {
        let payload = [&[OFFERED], &described(len, is_cuda, verification)[..]].concat();
        Carried::read(&mut Reader::new(&payload), 0).map(drop)
    };
    for (len, is_cuda, verification) in [(1 << 20, 1, 0), (1 << 20, 0, 3), (0, 0, 0)] {
        let refused = read(len, is_cuda, verification).unwrap_err();
        assert!(matches!(refused, Error::Protocol(_)), "{refused:?}");
    }
    for (len, verification) in [(1, 0), (1, 1), (1, 2)] {
        assert_eq!(read(len, 0, verification), Ok(()));
    }
}

#[test]
fn a_message_with_more_bytes_inside_than_one_may_have_is_refused() {
    let inside = |lens: [usize; 2]| {
        let parts = lens.map(|len| Carried::Inline(vec![1; len].into()));
        let offer = EntryMessage::Offer {
            checksum: None,
            record: Cow::from(&b""[..]),
            parts: parts.into(),
        };
        decode(&encode(offer)).map(drop)
    };
    assert_eq!(inside([INLINE_CAP - 1, 1]), Ok(()));
    assert!(inside([INLINE_CAP, 1]).is_err());
}

#[test]
fn a_query_that_is_none_is_refused() {
    let select = |query| {
        let select = EntryMessage::Select {
            query,
            access: Access::Open,
            timeout: None,
        };
        decode(&encode(select)).map(drop)
    };
    let bytes = |len| Cow::from(vec![1; len]);
    assert_eq!(select(Query::Exact(bytes(KEY_CAP))), Ok(()));
    for query in [
        Query::Exact(bytes(0)),
        Query::Exact(bytes(KEY_CAP + 1)),
        Query::LongestPrefix(bytes(0)),
        Query::LongestPrefix(bytes(TOKEN_BYTES + 1)),
    ] {
        assert!(select(query).is_err());
    }
}
