//! What fuzz targets reach of a pipe: its rounds.

use super::{End, Pipe};
use crate::reactor::manual::Round;

impl Pipe {
    pub(crate) fn round(&self) -> Round {
        match &self.end {
            End::Sender(reactor) => reactor.round(),
            End::Receiver(reactor) => reactor.round(),
        }
    }
}
