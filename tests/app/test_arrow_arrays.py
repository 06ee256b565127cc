"""Arrays made from buffers equal those that pyarrow makes, and need no pandas."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from heddle.runs.arrow_arrays import number_array, numbers_of, word_array


@pytest.mark.parametrize("kind", [np.bool_, np.int8, np.int32, np.int64, np.float64])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000])
def test_numbers(kind: type, size: int):
    rng = np.random.default_rng(size)
    values = rng.integers(0, 2 if kind is np.bool_ else 100, 2 * size).astype(kind)[::2]
    valid = rng.random(size) < 0.5
    for given in (None, valid, np.ones(size, bool)):
        mask = None if given is None else ~given
        made = number_array(values, given)
        made.validate(full=True)
        assert made.equals(pa.array(values, mask=mask))
        back = values if given is None else np.where(given, values, 1)
        assert np.array_equal(numbers_of(made, 1), back)
        assert np.array_equal(numbers_of(made.slice(size // 3), 1), back[size // 3 :])


def test_words():
    for words in ([], ["a"], ["", "ü", "日本", "a" * 100], ["a", None, "b"], [None] * 9):
        made = word_array(words)
        made.validate(full=True)
        assert made.equals(pa.array(words, pa.string()))
    with pytest.raises(UnicodeEncodeError):
        word_array(["\ud800"])


def test_a_comparison_is_imported_without_pandas():
    code = "import sys, heddle; heddle.compare, heddle.load_run; assert 'pandas' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
