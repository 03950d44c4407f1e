//! Regions of handoffs keep their id for life: what happens to other regions never moves a layer into another one.

use kvpipe_ucx::Buffer;

use crate::common::{TIMEOUT, eventually, on_every_path};
use crate::workers::{BLOCK, COUNT, LAYERS, Worker, pair, step};

/// A load that has selected, because a block of its last layer is here; and then closes the first region of the
/// producer.
fn selected_then_closed(producer: &Worker, consumer: &Worker) {
    consumer.load(producer.request(&[1, 2]));
    let last = LAYERS - 1;
    producer.save(&step(0, &[4]).expect("a step"), last..LAYERS);
    eventually("a block of the last layer", || {
        (consumer.block(last, 1) == producer.block(last, 4)).then_some(())
    });
    let closed = producer.agent.close_region(&producer.regions[0], None);
    closed.expect("close").wait_for(TIMEOUT).expect("closed");
}

/// The load fails, and names the region that was closed. Each layer of the consumer has its old bytes, or the producer's
/// of the same name.
fn assert_not_redirected(consumer: &Worker, before: &[Vec<u8>], producer: &Worker) {
    let (missing, reason) = consumer.failed();
    assert_eq!(missing, [0, 1]);
    assert!(
        reason.contains("layer.0") && reason.contains("closed"),
        "{reason}"
    );
    for (layer, before) in before.iter().enumerate() {
        let now = consumer.block(layer, 1);
        let is_right = now == *before || now == producer.block(layer, 4);
        assert!(is_right, "layer {layer} has the bytes of another one");
    }
}

#[test]
fn a_region_closed_between_select_and_blocks_ready_never_redirects_a_layer() {
    on_every_path(|transport| {
        let (producer, consumer) = pair(transport);
        let before: Vec<_> = (0..LAYERS).map(|layer| consumer.block(layer, 1)).collect();
        selected_then_closed(&producer, &consumer);
        producer.save(&step(0, &[4]).expect("a step"), 1..2);
        assert_not_redirected(&consumer, &before, &producer);
    });
}

#[test]
fn a_region_closed_and_another_registered_between_select_and_blocks_ready_never_redirects_a_layer()
{
    for name in ["layer.0", "layer.9"] {
        on_every_path(|transport| {
            let (producer, consumer) = pair(transport);
            let before: Vec<_> = (0..LAYERS).map(|layer| consumer.block(layer, 1)).collect();
            selected_then_closed(&producer, &consumer);
            let (memory, size) = (Buffer::from_vec(vec![7; COUNT * BLOCK]), BLOCK as u64);
            let another = producer.agent.register(name, memory, size, size);
            let another = another.expect("register").wait_for(TIMEOUT);
            let regions = [another.expect("registered"), producer.regions[1].clone()];
            let ready = step(0, &[4, 5]).expect("a step");
            producer.agent.mark_ready(&ready, &regions).expect("open");
            assert_not_redirected(&consumer, &before, &producer);
        });
    }
}
