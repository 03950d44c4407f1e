//! Pipes as tests use them.

use std::sync::Arc;
use std::time::Duration;

use kvpipe_core::pipe::{Deadline, Pipe};
use kvpipe_core::tensor::{Meta, Received};
use kvpipe_core::transport::Transport;
use kvpipe_core::work::Then;
use kvpipe_core::work::Work;
use kvpipe_ucx::Buffer;

use super::{TIMEOUT, TOKEN, bytes, local};

/// Both ends of a pipe.
pub fn pipe(transport: &Transport) -> (Pipe, Pipe) {
    let receiver =
        Pipe::listen(&local(), TOKEN, transport.clone(), Duration::ZERO).expect("listen");
    (sender_to(transport, &receiver), receiver)
}

/// A sending end.
pub fn sender_to(transport: &Transport, receiver: &Pipe) -> Pipe {
    let address = receiver.address().expect("address").to_string();
    let (sender, connected) = Pipe::connect(
        &address,
        TOKEN,
        transport.clone(),
        kvpipe_core::Integrity::Auto,
        Duration::ZERO,
        TIMEOUT,
    )
    .expect("connect");
    connected.wait_for(TIMEOUT).expect("connected");
    sender
}

/// Description of a tensor of `len` bytes.
pub fn meta(len: usize) -> Meta {
    Meta {
        family: 2,
        dtype: "uint8".to_owned(),
        shape: vec![len as u64],
    }
}

/// Sends without a deadline.
pub fn send(pipe: &Pipe, content: Vec<u8>) -> Work<()> {
    send_within(pipe, content, None)
}

/// Sends.
pub fn send_within(pipe: &Pipe, content: Vec<u8>, timeout: Option<Duration>) -> Work<()> {
    let meta = meta(content.len());
    pipe.send(
        meta,
        Buffer::from_vec(content),
        Deadline::after(timeout),
        Then::GoOn,
    )
    .expect("send")
}

/// Receives into fresh memory, without a deadline.
pub fn receive(pipe: &Pipe) -> Work<Arc<Received>> {
    pipe.receive(None, Deadline::default(), Then::GoOn)
        .expect("receive")
}

/// The bytes that were received.
pub fn content(received: &Work<Arc<Received>>) -> Vec<u8> {
    let received = received.wait_for(TIMEOUT).expect("received");
    bytes(received.buffer.as_ref().expect("fresh memory"))
}

/// Closes and waits for the end of that.
pub fn close(pipe: &Pipe) -> kvpipe_core::Result<()> {
    let closed = pipe.close(Deadline::default()).expect("close");
    closed.map_or(Ok(()), |closed| closed.wait_for(TIMEOUT))
}
