from __future__ import annotations

import pytest

from control_plane.core.generation_params import GenerationParams
from hetero_infer.client import InferenceClient
from planes.address import parse_address
from planes.errors import ValidationError


@pytest.mark.parametrize(
    "params",
    [{"top_k": 3}, {"min_p": 0.5}, {"logit_bias": {1: 2.0}}, {"num_logprobs": 0}],
    ids=lambda params: next(iter(params)),
)
def test_a_parameter_the_public_service_does_not_take_is_refused_and_not_forgotten(params) -> None:
    (field,) = params
    with InferenceClient(parse_address("localhost:1")) as client:
        stream = client.generate_stream("hi", GenerationParams(**params))
        with pytest.raises(ValidationError, match=f"{field} is not part of") as caught:
            next(stream)
    assert caught.value.field == field
