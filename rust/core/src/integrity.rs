//! Verification at a destination that its bytes are those that the source exposed.

use std::str::FromStr;

use kvpipe_ucx::MemoryKind;

use crate::error::{Error, Result};

/// A setting of agents and pipes. The setting of the source decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Integrity {
    /// As `Checksum` in host memory, as `Validate` in a device's.
    #[default]
    Auto,
    /// The source computes checksums, and the destination compares. It refuses handoffs of a source that validates.
    Checksum,
    /// As `Checksum`, and the destination accepts a source that validates.
    PreferChecksum,
    /// The source computes no checksums. The destination asks, after its last read, whether the source still holds what
    /// it exposed.
    Validate,
    /// Nothing is compared, and the source is not asked. Handoffs refuse it.
    None,
}

impl Integrity {
    /// Of host memory, whose source computes checksums or nothing.
    pub(crate) fn of_checksums(is_checksummed: bool) -> Self {
        if is_checksummed {
            Self::Checksum
        } else {
            Self::None
        }
    }

    /// The mode for such memory, which is not `Auto`.
    #[must_use]
    pub fn resolved(self, memory: MemoryKind) -> Self {
        match (self, memory) {
            (Self::Auto, MemoryKind::Host) | (Self::PreferChecksum, _) => Self::Checksum,
            (Self::Auto, MemoryKind::Cuda { .. }) => Self::Validate,
            (other, _) => other,
        }
    }

    /// # Errors
    /// There are no checksums of tensors in such memory.
    pub(crate) fn check_tensor(self, memory: MemoryKind) -> Result<()> {
        if self == Self::Checksum && memory != MemoryKind::Host {
            let text = "integrity=checksum: a Pipe has no checksums of tensors on a GPU; set auto, validate or none";
            return Err(Error::Config(text.to_owned()));
        }
        Ok(())
    }
}

impl FromStr for Integrity {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "checksum" => Ok(Self::Checksum),
            "prefer-checksum" => Ok(Self::PreferChecksum),
            "validate" => Ok(Self::Validate),
            "none" => Ok(Self::None),
            other => Err(Error::Config(format!(
                "integrity={other:?}: expected auto, checksum, validate or none"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_is_checksums_in_host_memory_and_validation_in_that_of_a_device() {
        let device = MemoryKind::Cuda { device: 1 };
        assert_eq!(
            Integrity::Auto.resolved(MemoryKind::Host),
            Integrity::Checksum
        );
        assert_eq!(Integrity::Auto.resolved(device), Integrity::Validate);
        for text in ["checksum", "validate", "none"] {
            let chosen: Integrity = text.parse().unwrap();
            assert_eq!(chosen.resolved(MemoryKind::Host), chosen);
            assert_eq!(chosen.resolved(device), chosen);
        }
        let preferred: Integrity = "prefer-checksum".parse().unwrap();
        for kind in [MemoryKind::Host, device] {
            assert_eq!(preferred.resolved(kind), Integrity::Checksum);
        }
    }

    #[test]
    fn checksums_of_tensors_on_a_device_are_refused_where_they_were_asked_for_by_name() {
        let device = MemoryKind::Cuda { device: 1 };
        assert!(Integrity::Checksum.check_tensor(device).is_err());
        assert_eq!(Integrity::Checksum.check_tensor(MemoryKind::Host), Ok(()));
        for other in [Integrity::Auto, Integrity::Validate, Integrity::None] {
            assert_eq!(other.check_tensor(device), Ok(()));
        }
    }

    #[test]
    fn an_unknown_integrity_is_refused_with_those_that_exist() {
        let refused = "crc".parse::<Integrity>().unwrap_err().to_string();
        assert!(
            refused.contains("auto, checksum, validate or none"),
            "{refused}"
        );
    }
}
