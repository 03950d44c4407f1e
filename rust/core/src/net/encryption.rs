//! Encryption of a session, which both sides agree on in the handshake.

use std::fmt;

use crate::error::{Error, Result};
use crate::net::codec::{Reader, Writer};

/// Longest boot id.
const HOST_CAP: usize = 4096;

/// Selects the frames of a session that are sealed after its handshake. Those of the handshake always are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Encryption {
    /// All between hosts. None where both sides see loopback addresses and have the same boot id.
    #[default]
    Auto = 0,
    /// All.
    On = 1,
    /// None.
    Off = 2,
}

/// The setting of users.
const VARIABLE: &str = "KVPIPE_ENCRYPTION";

impl Encryption {
    /// The setting of this process.
    ///
    /// # Errors
    /// `Config`: it is none of the values.
    pub(crate) fn of_environment() -> Result<Self> {
        Self::of_setting(std::env::var(VARIABLE).ok().as_deref())
    }

    fn of_setting(setting: Option<&str>) -> Result<Self> {
        match setting {
            None | Some("" | "auto") => Ok(Self::Auto),
            Some("on") => Ok(Self::On),
            Some("off") => Ok(Self::Off),
            Some(other) => Err(Error::Config(format!(
                "{VARIABLE}={other}: expected auto (on between hosts), on or off"
            ))),
        }
    }

    fn parse(value: u8) -> Result<Self> {
        match value {
            0 => Ok(Self::Auto),
            1 => Ok(Self::On),
            2 => Ok(Self::Off),
            other => Err(Error::protocol(format_args!("encryption {other}"))),
        }
    }
}

impl fmt::Display for Encryption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto, which is on between hosts",
            Self::On => "on",
            Self::Off => "off",
        })
    }
}

/// The wish of a side, and what `Auto` depends on. The handshake authenticates it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EncryptionOffer {
    /// The setting of this side.
    pub encryption: Encryption,
    /// Both ends of the connection have loopback addresses, as this side sees them.
    pub is_loopback: bool,
    /// The boot id of its machine.
    pub host: String,
}

impl EncryptionOffer {
    pub(crate) fn write(&self, writer: Writer) -> Writer {
        let writer = writer.u8(self.encryption as u8).u8(self.is_loopback.into());
        writer.str(&self.host)
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(Self {
            encryption: Encryption::parse(reader.u8()?)?,
            is_loopback: reader.flag()?,
            host: reader.str(HOST_CAP)?,
        })
    }

    /// True if the session's frames are sealed, `None` if one side wants what the other refuses. Both sides find the same.
    pub(super) fn agree(&self, other: &Self) -> Option<bool> {
        let is_one_host = self.is_loopback
            && other.is_loopback
            && !self.host.is_empty()
            && self.host == other.host;
        let wish = |encryption| match encryption {
            Encryption::Auto if is_one_host => None,
            Encryption::Auto | Encryption::On => Some(true),
            Encryption::Off => Some(false),
        };
        match (wish(self.encryption), wish(other.encryption)) {
            (Some(ours), Some(theirs)) if ours != theirs => None,
            (ours, theirs) => Some(ours.or(theirs).unwrap_or(false)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Encryption::{Auto, Off, On};

    fn offer(encryption: Encryption, is_loopback: bool, host: &str) -> EncryptionOffer {
        let host = host.to_owned();
        EncryptionOffer {
            encryption,
            is_loopback,
            host,
        }
    }

    #[test]
    fn a_setting_is_auto_on_or_off_and_any_other_is_refused_by_name() {
        for (setting, expected) in [
            (None, Auto),
            (Some(""), Auto),
            (Some("auto"), Auto),
            (Some("on"), On),
            (Some("off"), Off),
        ] {
            assert_eq!(Encryption::of_setting(setting), Ok(expected));
        }
        let error = Encryption::of_setting(Some("yes")).unwrap_err().to_string();
        assert!(
            error.contains("KVPIPE_ENCRYPTION=yes: expected auto"),
            "{error}"
        );
    }

    #[test]
    fn auto_is_plain_only_if_both_see_loopback_and_the_boot_ids_are_equal() {
        let here = offer(Auto, true, "a");
        assert_eq!(here.agree(&here), Some(false));
        for other in [
            offer(Auto, true, "b"),
            offer(Auto, false, "a"),
            offer(Auto, true, ""),
        ] {
            assert_eq!(here.agree(&other), Some(true), "{other:?}");
            assert_eq!(other.agree(&here), Some(true), "{other:?}");
        }
        let unknown = offer(Auto, true, "");
        assert_eq!(unknown.agree(&unknown), Some(true));
    }

    #[test]
    fn auto_follows_the_other_side_on_one_host_and_is_on_between_hosts() {
        let cases = [
            (On, On, Some(true), Some(true)),
            (Off, Off, Some(false), Some(false)),
            (On, Off, None, None),
            (Auto, On, Some(true), Some(true)),
            (Auto, Off, Some(false), None),
        ];
        for (ours, theirs, on_one_host, between_hosts) in cases {
            let agreed =
                |ours, theirs, host| offer(ours, true, "a").agree(&offer(theirs, true, host));
            assert_eq!(agreed(ours, theirs, "a"), on_one_host);
            assert_eq!(agreed(theirs, ours, "a"), on_one_host);
            assert_eq!(agreed(ours, theirs, "b"), between_hosts);
            assert_eq!(agreed(theirs, ours, "b"), between_hosts);
        }
    }

    #[test]
    fn an_offer_is_read_as_written() {
        for encryption in [Auto, On, Off] {
            let sent = offer(encryption, true, "boot id");
            let bytes = sent.write(Writer::default()).finish();
            assert_eq!(EncryptionOffer::read(&mut Reader::new(&bytes)), Ok(sent));
        }
        assert!(EncryptionOffer::read(&mut Reader::new(&[3, 0, 0, 0, 0, 0])).is_err());
    }
}
