//! Memory of a process on this machine, which calls of our own read: many pieces, or much of a large one, in one call to
//! the kernel, where UCX makes one for each 512 KiB of each (CMA either way). A call returns when the bytes are here, so
//! that nothing is in flight.

use std::rc::Rc;

use kvpipe_ucx::{Buffer, ProcessVmReader};

use super::engine::TransferEngine;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::{Reader, Writer};
use crate::net::identity::random;
use crate::session::ReactorContext;
use crate::transport::DataPath;

/// Random bytes in this process's memory, by which a process of this host knows that it reads the right one.
pub(super) fn secret() -> Option<Buffer> {
    let secret = random::<16>().ok()?;
    Some(Buffer::from_vec(secret.to_vec()))
}

/// Whether UCX reads the peer's memory over CMA, as calls of our own would.
fn is_cma(cx: &ReactorContext, session: SessionKey) -> bool {
    matches!(cx.data_path(session), Some(DataPath::RemoteRead(transport)) if transport == "cma")
}

impl TransferEngine {
    /// What to tell a peer on this machine, so that it can read our memory itself: continues `frame`.
    pub(crate) fn process_address(
        &self,
        cx: &ReactorContext,
        session: SessionKey,
        frame: Writer,
    ) -> Option<Writer> {
        let secret = self.secret.as_ref().filter(|_| is_cma(cx, session))?;
        let frame = frame.u32(std::process::id()).u64(secret.address() as u64);
        Some(frame.raw(&secret.bytes(0, 16)?.to_vec()))
    }

    /// A peer on this machine says where its memory can be read.
    pub(crate) fn receive_process_address(
        &mut self,
        cx: &ReactorContext,
        session: SessionKey,
        mut frame: Reader<'_>,
    ) -> Result<()> {
        let (pid, address, secret) = (frame.u32()?, frame.u64()?, frame.fixed::<16>()?);
        frame.end()?;
        let Some(peer) = self.peers.get_mut(&session) else {
            return Ok(());
        };
        if std::mem::replace(&mut peer.has_process_address, true) {
            return Err(Error::protocol("a second PROCESS_VM"));
        }
        if is_cma(cx, session) {
            peer.process = ProcessVmReader::find(pid, address, &secret).map(Rc::new);
        }
        Ok(())
    }
}
