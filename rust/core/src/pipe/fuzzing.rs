//! What fuzz targets reach of a pipe: its rounds.

use super::{End, Pipe};
use crate::node::by_hand::Round;

impl Pipe {
    pub(crate) fn round(&self) -> Round {
        match &self.end {
            End::Sender(node) => node.round(),
            End::Receiver(node) => node.round(),
        }
    }
}
