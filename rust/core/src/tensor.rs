//! A tensor as pipes and lookup buffers carry it: its description and its bytes.

use kvpipe_ucx::Buffer;

use crate::error::{Error, Result};
use crate::net::codec::{Reader, Writer};

/// Longest text of a dtype, structured ones included.
const DTYPE_CAP: usize = 4096;
/// Most dimensions of a tensor.
const DIMENSIONS_CAP: usize = 64;

/// Description of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Meta {
    /// The library of the sender's tensor: 0 none (`None`), 1 torch, 2 numpy.
    pub family: u8,
    /// The element type, spelled as the family spells it.
    pub dtype: String,
    /// The shape.
    pub shape: Vec<u64>,
}

/// A tensor that was received.
#[derive(Debug)]
pub struct Received {
    /// Its description.
    pub meta: Meta,
    /// Its bytes; `None` if the caller provided the memory.
    pub buffer: Option<Buffer>,
}

impl Meta {
    pub(crate) fn write(&self, writer: Writer) -> Writer {
        writer
            .u8(self.family)
            .str(&self.dtype)
            .list(&self.shape, |w, n| w.u64(*n))
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(Self {
            family: reader.u8()?,
            dtype: reader.str(DTYPE_CAP)?,
            shape: reader.list(DIMENSIONS_CAP, Reader::u64)?,
        })
    }

    /// Bytes of its parts of variable length.
    pub(crate) fn num_bytes(&self) -> u64 {
        (self.dtype.len() + size_of_val(self.shape.as_slice())) as u64
    }

    /// Refuses a description that no receiver would accept.
    pub(crate) fn check(&self) -> Result<()> {
        if self.dtype.len() > DTYPE_CAP || self.shape.len() > DIMENSIONS_CAP {
            return Err(Error::Config(format!(
                "a tensor of {} dimensions, its dtype spelled in {} bytes: at most {DIMENSIONS_CAP} and {DTYPE_CAP} are possible",
                self.shape.len(),
                self.dtype.len()
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_description_is_read_as_written(family: u8, dtype in ".{0,64}", shape in proptest::collection::vec(any::<u64>(), 0..8)) {
            let meta = Meta { family, dtype, shape };
            let message = meta.write(Writer::default()).finish();
            prop_assert_eq!(Meta::read(&mut Reader::new(&message)).unwrap(), meta);
        }

        #[test]
        fn any_bytes_give_a_description_or_an_error(message: Vec<u8>) {
            let _ = Meta::read(&mut Reader::new(&message));
        }
    }

    #[test]
    fn a_description_that_no_receiver_takes_is_refused() {
        let of = |dimensions, spelled| Meta {
            family: 2,
            dtype: "x".repeat(spelled),
            shape: vec![1; dimensions],
        };
        assert!(of(DIMENSIONS_CAP, DTYPE_CAP).check().is_ok());
        assert!(of(DIMENSIONS_CAP + 1, 1).check().is_err());
        assert!(of(1, DTYPE_CAP + 1).check().is_err());
    }
}
