//! What client and server of a lookup buffer say to each other besides the bytes of large tensors; see
//! docs/reference/wire-lookup.md.

use std::time::Duration;

use super::LookupQuery;
use crate::error::{Error, Result};
use crate::net::codec::{Reader, Writer};

// Besides those of `crate::fetch`. Each names an operation of the client.
/// Client: insert this. Ends with INSERTED or REFUSED.
pub(super) const INSERT: u8 = 16;
/// Server: it can be selected; its memory is not needed any more.
pub(super) const INSERTED: u8 = 17;
/// Server: an insert or a select has failed.
pub(super) const REFUSED: u8 = 18;
/// Client: give me one. Ends with OFFER, NOTHING or REFUSED.
pub(super) const SELECT: u8 = 19;
/// Server: this one, which is leased to you.
pub(super) const OFFER: u8 = 20;
/// Server: there was nothing in time.
pub(super) const NOTHING: u8 = 21;
/// Client: all of it is here; is it mine?
pub(super) const CONSUME: u8 = 22;
/// Server: it is, and will not be offered again unless you give it back.
pub(super) const CONSUMED: u8 = 23;
/// Client: somebody has it, or nobody wants it.
pub(super) const SETTLE: u8 = 24;
/// Client: forget an operation that has not met its other side.
pub(super) const WITHDRAW: u8 = 25;

/// Most tokens that count: of an entry, of the inserts together that a server lets wait, of a query.
pub(super) const TOKENS_CAP: usize = 1 << 22;
/// Longest text of a refusal.
const TEXT_CAP: usize = 4096;
/// In place of a timeout: none.
const FOREVER: u64 = u64::MAX;

pub(super) fn write_tokens(writer: Writer, tokens: &[i64]) -> Writer {
    writer.list(tokens, |w, token| w.u64(token.cast_unsigned()))
}

/// There is at least one.
pub(super) fn read_tokens(reader: &mut Reader<'_>) -> Result<Vec<i64>> {
    let tokens = reader.list(TOKENS_CAP, |r| r.u64().map(u64::cast_signed))?;
    if tokens.is_empty() {
        return Err(Error::protocol("no tokens"));
    }
    Ok(tokens)
}

pub(super) fn write_timeout(writer: Writer, timeout: Option<Duration>) -> Writer {
    let micros = timeout.map_or(FOREVER, |timeout| {
        u64::try_from(timeout.as_micros()).unwrap_or(FOREVER)
    });
    writer.u64(micros)
}

pub(super) fn read_timeout(reader: &mut Reader<'_>) -> Result<Option<Duration>> {
    let micros = reader.u64()?;
    Ok((micros != FOREVER).then(|| Duration::from_micros(micros)))
}

pub(crate) fn write_select(query: &LookupQuery, timeout: Option<Duration>) -> Vec<u8> {
    let writer = write_timeout(Writer::default(), timeout);
    match query {
        LookupQuery::Any => writer.u8(0),
        LookupQuery::Tokens(tokens) => write_tokens(writer.u8(1), tokens),
    }
    .finish()
}

pub(crate) fn read_select(payload: &[u8]) -> Result<(LookupQuery, Option<Duration>)> {
    let mut reader = Reader::new(payload);
    let timeout = read_timeout(&mut reader)?;
    let query = match reader.u8()? {
        0 => LookupQuery::Any,
        1 => {
            let mut tokens = read_tokens(&mut reader)?;
            // It may wait for long, and up to half of it is room to grow.
            tokens.shrink_to_fit();
            LookupQuery::Tokens(tokens)
        }
        other => return Err(Error::protocol(format_args!("query {other}"))),
    };
    reader.end()?;
    Ok((query, timeout))
}

/// Of the errors with which a server answers, those that a caller can tell apart.
pub(crate) fn write_refusal(error: &Error) -> Vec<u8> {
    let kind = match error {
        Error::Config(_) => 1,
        Error::Exhausted(_) => 2,
        Error::Corrupt(_) => 3,
        _ => 0,
    };
    Writer::new(kind)
        .text(&error.to_string(), TEXT_CAP)
        .finish()
}

pub(crate) fn read_refusal(payload: &[u8]) -> Result<Error> {
    let mut reader = Reader::new(payload);
    let (kind, text) = (reader.u8()?, reader.str(TEXT_CAP)?);
    reader.end()?;
    Ok(match kind {
        1 => Error::Config(text),
        2 => Error::Exhausted(text),
        3 => Error::Corrupt(text),
        _ => Error::Unavailable(text),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_refusal_is_read_as_written() {
        let text = || "a text".to_owned();
        for error in [
            Error::Config(text()),
            Error::Exhausted(text()),
            Error::Corrupt(text()),
            Error::Unavailable(text()),
        ] {
            assert_eq!(read_refusal(&write_refusal(&error)).unwrap(), error);
        }
    }

    #[test]
    fn a_query_without_tokens_is_refused() {
        let written = write_select(&LookupQuery::Tokens(Vec::new()), None);
        assert!(read_select(&written).is_err());
    }

    proptest! {
        #[test]
        fn a_select_is_read_as_written(tokens: Vec<i64>, micros: Option<u32>) {
            let query = if tokens.is_empty() { LookupQuery::Any } else { LookupQuery::Tokens(tokens) };
            let timeout = micros.map(|micros| Duration::from_micros(micros.into()));
            prop_assert_eq!(read_select(&write_select(&query, timeout)).unwrap(), (query, timeout));
        }

        #[test]
        fn any_bytes_give_a_message_or_an_error(payload: Vec<u8>) {
            let _ = read_select(&payload);
            let _ = read_refusal(&payload);
        }
    }
}
