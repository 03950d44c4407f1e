//! Block ids from Python. Arrays and ranges are read without an object for each id.

use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyRange, PyRangeMethods, PyTuple};

use crate::error::bad;

/// Reads the ids of a range, an array of integers, or any iterable of them.
pub(crate) fn ids(object: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    if let Ok(range) = object.cast::<PyRange>() {
        return from_range(range);
    }
    let has_items = object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>();
    let array = if has_items { None } else { from_array(object) };
    array.unwrap_or_else(|| from_items(object))
}

fn from_range(range: &Bound<'_, PyRange>) -> PyResult<Vec<u32>> {
    let (start, step, len) = (range.start()?, range.step()?, range.len()?);
    let id = |index: usize| checked(start as i128 + index as i128 * step as i128);
    // The last id is the furthest from 0: it is checked before anything is allocated.
    len.checked_sub(1).map_or(Ok(0), id)?;
    (0..len).map(id).collect()
}

/// None if it is not an array of integers.
fn from_array(object: &Bound<'_, PyAny>) -> Option<PyResult<Vec<u32>>> {
    typed::<i64>(object)
        .or_else(|| typed::<i32>(object))
        .or_else(|| typed::<u32>(object))
        .or_else(|| typed::<u64>(object))
        .or_else(|| typed::<i16>(object))
        .or_else(|| typed::<u16>(object))
        .or_else(|| typed::<i8>(object))
        .or_else(|| typed::<u8>(object))
}

fn typed<T: Element + Into<i128>>(object: &Bound<'_, PyAny>) -> Option<PyResult<Vec<u32>>> {
    let buffer = PyBuffer::<T>::get(object).ok()?;
    if buffer.dimensions() != 1 {
        let text = format!(
            "block ids: an array of {} dimensions, 1 is expected",
            buffer.dimensions()
        );
        return Some(Err(bad(text)));
    }
    let items = buffer.to_vec(object.py());
    Some(items.and_then(|items| items.into_iter().map(|id| checked(id.into())).collect()))
}

fn from_items(object: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let py = object.py();
    let explain = |error: PyErr| {
        let is_theirs =
            error.is_instance_of::<PyTypeError>(py) || error.is_instance_of::<PyOverflowError>(py);
        if is_theirs {
            bad(format!("block ids: {}", error.value(py)))
        } else {
            error
        }
    };
    let items = object.try_iter().map_err(explain)?;
    items
        .map(|item| checked(item?.extract::<i64>().map_err(explain)?.into()))
        .collect()
}

fn checked(id: i128) -> PyResult<u32> {
    u32::try_from(id).map_err(|_| {
        bad(format!(
            "block id {id} is out of range: ids start at 0 and have 32 bits"
        ))
    })
}
