//! Blocks of a process on this machine: many of them, or much of a large one, in one call to the kernel, where UCX makes
//! one for each 512 KiB of each (CMA either way). A call returns when the bytes are here, so that nothing is ever under way.

use std::rc::Rc;

use kvpipe_ucx::{Buffer, Piece, ProcessVmReader};

use super::messages::PROCESS_VM;
use super::service::Blocks;
use super::transfer::Transfer;
use crate::error::{Error, Result};
use crate::net::codec::{Reader, Writer};
use crate::net::identity::random;
use crate::reactor::{ReactorContext, SessionKey};
use crate::transfer::data_path::DataPath;

/// Of one call, which sockets and other transfers wait for: less than a millisecond.
const PIECES: usize = 256;
const BYTES: u64 = 4 << 20;
/// The same where it is compared with checksums right after: what a core's own cache still has then.
pub(super) const CHECKSUMMED_BYTES: u64 = 1 << 20;

/// Random bytes in this process's memory, by which a neighbour knows that it reads the right one.
pub(super) struct Secret(Option<Buffer>);

impl Secret {
    pub(super) fn new() -> Self {
        Self(
            random::<16>()
                .ok()
                .map(|verifier| Buffer::from_vec(verifier.to_vec())),
        )
    }

    fn frame(&self) -> Option<Vec<u8>> {
        let buffer = self.0.as_ref()?;
        let writer = Writer::new(PROCESS_VM).u32(std::process::id());
        Some(
            writer
                .u64(buffer.address() as u64)
                .raw(buffer.bytes(0, 16)?)
                .finish(),
        )
    }
}

fn is_cma(cx: &ReactorContext, session: SessionKey) -> bool {
    matches!(cx.data_path(session), Some(DataPath::RemoteRead(transport)) if transport == "cma")
}

impl Blocks {
    /// Tells a peer on this machine how it can read our memory itself.
    pub(super) fn send_process_vm_frame(&self, cx: &mut ReactorContext, session: SessionKey) {
        if is_cma(cx, session)
            && let Some(frame) = self.secret.frame()
        {
            cx.send(session, &frame);
        }
    }

    /// A peer on this machine says where its memory can be read.
    pub(super) fn process_vm_frame(
        &mut self,
        cx: &ReactorContext,
        session: SessionKey,
        mut frame: Reader<'_>,
    ) -> Result<()> {
        let (pid, address, verifier) = (frame.u32()?, frame.u64()?, frame.fixed::<16>()?);
        frame.end()?;
        let Some(peer) = self.peers.get_mut(&session) else {
            return Ok(());
        };
        if std::mem::replace(&mut peer.has_process_vm_frame, true) {
            return Err(Error::protocol("a second PROCESS_VM"));
        }
        if is_cma(cx, session) {
            peer.process_vm = ProcessVmReader::find(pid, address, &verifier).map(Rc::new);
        }
        Ok(())
    }
}

impl Transfer {
    /// Reads the next pieces, if calls of our own read it.
    pub(super) fn call(&mut self) -> std::io::Result<()> {
        let (Some((base, _)), Some(process_vm)) = (&self.remote, self.process_vm.clone()) else {
            return Ok(());
        };
        let base = *base;
        let bytes = if self.verifier.is_some() {
            CHECKSUMMED_BYTES
        } else {
            BYTES
        };
        let (mut pieces, mut num_bytes) = (Vec::with_capacity(PIECES), 0);
        while pieces.len() < PIECES
            && num_bytes < bytes
            && let Some(run) = self.cursor.piece(&self.pieces.runs, bytes - num_bytes)
        {
            pieces.push(Piece {
                to: run.to as usize,
                from: base + run.from,
                len: run.len as usize,
            });
            num_bytes += run.len;
            self.cursor.advance(&self.pieces.runs, run.len);
        }
        process_vm.read(self.memory.buffer(), &pieces)?;
        self.num_read += num_bytes;
        Ok(())
    }
}
