//! Blocks between processes: registered regions, reads of a peer's blocks into our own, writes, notifications, and
//! [handoffs](handoff).

mod agent;
mod agent_core;
mod api;
pub mod handoff;
mod inbox;
pub(crate) mod messages;
mod metadata;
mod notices;
mod notify;
mod offers;
mod peer;
pub(crate) mod peers;
mod plan;
mod reads;
pub(crate) mod regions;
mod shared;

pub use agent::{Agent, AgentConfig};
pub use inbox::Notification;
pub use metadata::Metadata;
pub use notices::TAG_CAP;
pub use peer::{Peer, Regions, SessionTransport, Stats};
pub use plan::{Options, Plan, Region};

pub(crate) use agent::AgentCommand;
pub(crate) use agent_core::AgentCore;
pub(crate) use messages::reason;
