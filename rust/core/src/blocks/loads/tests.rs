use kvpipe_ucx::Buffer;

use crate::blocks::{Agent, Event, Final, Finals, LoadRequest, Region};
use crate::link::Timing;
use crate::node::by_hand::{Round, without_threads};
use crate::transport::{MemoryRoad, Transport};

const BLOCK: usize = 1 << 10;
const ID: [u8; 16] = [7; 16];

struct Side {
    agent: Agent,
    region: Region,
    memory: Buffer,
}

impl Side {
    /// An agent without a thread, whose reads are gets.
    fn new(content: u8) -> Self {
        let (transport, timing) = (Transport::Memory(MemoryRoad::Get), Timing::default());
        let agent = || Agent::new("127.0.0.1:0", b"token", transport, "", Vec::new(), timing);
        let agent = without_threads(agent).expect("agent");
        let memory = Buffer::from_vec(vec![content; BLOCK]);
        let size = BLOCK as u64;
        let registered = agent.register("kv", memory.clone(), size, size);
        let registered = registered.expect("register");
        settle(&[&agent]);
        let region = registered.result().expect("registered").expect("a region");
        Self {
            agent,
            region,
            memory,
        }
    }

    fn content(&self) -> &[u8] {
        self.memory.bytes(0, BLOCK).expect("its bytes")
    }

    fn ended(&self) -> Option<Event> {
        let mut events = self.agent.drain().into_iter();
        events.find(|event| !matches!(event, Event::Log(_)))
    }
}

/// Runs nodes until they have nothing more to do.
fn settle(agents: &[&Agent]) {
    let is_at_rest = |agent: &&Agent| matches!(agent.round(), Round::AtRest { .. });
    while !(0..5).all(|_| agents.iter().filter(|it| is_at_rest(it)).count() == agents.len()) {}
}

#[test]
fn a_block_whose_get_has_failed_is_read_again_by_messages() {
    let (producer, consumer) = (Side::new(1), Side::new(0));
    let part = Final {
        handoff: ID,
        generation: 0,
        first: 0,
        block_ids: vec![0],
    };
    let finals = Finals::new(vec![part]).expect("finals");
    let regions = [producer.region.clone()];
    producer
        .agent
        .finalize(&finals, &regions)
        .expect("finalize");
    settle(&[&producer.agent]);
    assert!(producer.memory.write(17, &[9]));
    let request = LoadRequest {
        handoff: ID,
        producer: producer.agent.address().expect("address").to_string(),
        incarnation: producer.agent.incarnation(),
        generation: 0,
        first: 0,
        block_ids: vec![0],
        is_committed: true,
    };
    consumer.agent.load(request).expect("load");
    while consumer.content() != producer.content() {
        producer.agent.round();
        settle(&[&consumer.agent]);
    }
    // It has been read without the producer's help, and differs. The second time the producer has to send it.
    assert_eq!(consumer.ended(), None);
    assert!(producer.memory.write(17, &[1]));
    settle(&[&producer.agent, &consumer.agent]);
    let ended = consumer.ended();
    let Some(Event::Loaded { counts, .. }) = ended else {
        panic!("{ended:?}");
    };
    assert_eq!((counts.num_retried, counts.num_corrupt), (1, 1));
    assert_eq!(consumer.content(), [1; BLOCK]);
}
