//! Fields that the messages of several services share: a timeout, a checksum of the payload, and a refusal.

use std::time::Duration;

use super::codec::{Reader, Writer};
use crate::checksum;
use crate::error::{Error, Result};

/// Longest text of a refusal.
const TEXT_CAP: usize = 4096;
/// The time-out of an operation without one.
const FOREVER: u64 = u64::MAX;

/// Appends a timeout in microseconds.
pub(crate) fn write_timeout(writer: Writer, timeout: Option<Duration>) -> Writer {
    let micros = timeout.map_or(FOREVER, |timeout| {
        u64::try_from(timeout.as_micros()).unwrap_or(FOREVER)
    });
    writer.u64(micros)
}

pub(crate) fn read_timeout(reader: &mut Reader<'_>) -> Result<Option<Duration>> {
    let micros = reader.u64()?;
    Ok((micros != FOREVER).then(|| Duration::from_micros(micros)))
}

/// Ends a header with the checksum of its payload.
pub(crate) fn seal(header: Writer, payload: &[u8]) -> Writer {
    header.u64(checksum::of(payload))
}

/// Reads the rest of a header that [`seal`] has ended.
///
/// # Errors
/// `Corrupt`: the payload has another checksum. `Protocol`: something else is in the header.
pub(crate) fn check_seal(mut header: Reader<'_>, payload: &[u8], what: &str) -> Result<()> {
    let checksum = header.u64()?;
    header.end()?;
    if checksum::of(payload) == checksum {
        return Ok(());
    }
    Err(Error::Corrupt(format!(
        "{what} came with another checksum than it was sent with; nothing was delivered"
    )))
}

/// Encodes why an operation is refused: a kind that its caller can act on, and a text.
pub(crate) fn write_refusal(error: &Error) -> Vec<u8> {
    let kind = match error {
        Error::Config(_) => 1,
        Error::Exhausted(_) => 2,
        Error::Corrupt(_) => 3,
        Error::Timeout(_) => 4,
        _ => 0,
    };
    Writer::new(kind)
        .text(&error.to_string(), TEXT_CAP)
        .finish()
}

pub(crate) fn read_refusal(mut reader: Reader<'_>) -> Result<Error> {
    let (kind, text) = (reader.u8()?, reader.str(TEXT_CAP)?);
    reader.end()?;
    Ok(match kind {
        1 => Error::Config(text),
        2 => Error::Exhausted(text),
        3 => Error::Corrupt(text),
        4 => Error::Timeout(text),
        _ => Error::Unavailable(text),
    })
}
