"""Arrow arrays from and to NumPy arrays and words, by their buffers.

`pyarrow.array` and `to_numpy` import pandas where it is installed: longer than a small run.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa


def memory_of(values: Any) -> pa.Buffer:
    """Return the memory of a contiguous array."""
    return pa.py_buffer(values)


def number_array(values: np.ndarray[Any, Any], valid: np.ndarray[Any, Any] | None = None) -> Any:
    """Make an array of the same type; null where not `valid`."""
    kind, bits = pa.from_numpy_dtype(values.dtype), None
    if valid is not None and not valid.all():
        bits = memory_of(np.packbits(valid, bitorder="little"))
    data = np.packbits(values, bitorder="little") if kind == pa.bool_() else values
    buffers = [bits, memory_of(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(kind, len(values), buffers)


def numbers_of(column: Any, none: float) -> np.ndarray[Any, Any]:
    """Return the numbers of an array, `none` in place of nulls; of the same memory without any."""
    valid, data = column.buffers()
    end = column.offset + len(column)

    def bits_of(buffer: Any) -> np.ndarray[Any, Any]:
        bits = np.unpackbits(np.frombuffer(buffer, np.uint8), count=end, bitorder="little")
        return bits[column.offset :].view(bool)

    if column.type == pa.bool_():
        values = bits_of(data)
    else:
        values = np.frombuffer(data, np.dtype(str(column.type)), end)[column.offset :]
    if not column.null_count:
        return values
    return np.where(bits_of(valid), values, values.dtype.type(none))


def word_array(words: Sequence[str | None]) -> Any:
    """Make an array of strings.

    Raises:
        UnicodeEncodeError: a word has half a surrogate pair.
    """
    texts = [b"" if word is None else word.encode() for word in words]
    offsets = np.zeros(len(texts) + 1, np.int32)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    valid = np.array([word is not None for word in words], bool)
    bits = None if valid.all() else memory_of(np.packbits(valid, bitorder="little"))
    buffers = [bits, memory_of(offsets), pa.py_buffer(b"".join(texts))]
    return pa.Array.from_buffers(pa.string(), len(texts), buffers)
