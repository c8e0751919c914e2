"""How vLLM is set up, as far as that shows without vLLM."""

import math

import pytest
from pydantic import ValidationError

from asyncrl.actors.vllm_setup import MIN_TEMPERATURE
from asyncrl.config.schema import RolloutConfig


def test_the_configuration_refuses_temperatures_that_vllm_would_change() -> None:
    assert RolloutConfig(temperature=MIN_TEMPERATURE).temperature == MIN_TEMPERATURE
    with pytest.raises(ValidationError, match="temperature"):
        RolloutConfig(temperature=math.nextafter(MIN_TEMPERATURE, 0))
