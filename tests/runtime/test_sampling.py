"""Which fields of a client's sampling are taken."""

import pytest

from heddle_runtime.sampling import SamplingError, checked_sampling


def test_a_field_that_is_null_is_not_set():
    given = {"temperature": 0.5, "prompt_logprobs": None, "output_kind": 2}
    assert checked_sampling(given) == {"temperature": 0.5}
    with pytest.raises(SamplingError, match="prompt_logprobs"):
        checked_sampling({"prompt_logprobs": 1})


@pytest.mark.parametrize("extra", [None, {}, {"seed_of_mine": 1}])
def test_arguments_of_an_extension_of_vllm_pass(extra):
    assert checked_sampling({"extra_args": extra}) == {"extra_args": extra}


@pytest.mark.parametrize("extra", [[], "kv_transfer_params", 1])
def test_such_arguments_are_an_object(extra):
    with pytest.raises(SamplingError, match="must be an object"):
        checked_sampling({"extra_args": extra})
