"""The states of a rank's random number generators, as tensors."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """torch's, the device's, and those that a user's function may draw from: numpy's, Python's."""
    _, words, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
    keys = np.asarray(words, np.int64)
    version, numbers, normal = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor(gauss, dtype=torch.float64),
        "python": torch.tensor([version, *numbers], dtype=torch.int64),
        "python_gauss": torch.tensor(math.nan if normal is None else normal, dtype=torch.float64),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on where `rng_state` was taken."""
    torch.set_rng_state(state["torch"])
    *keys, position, has_gauss = state["numpy"].tolist()
    gauss = state["numpy_gauss"].item()
    np.random.set_state(  # noqa: NPY002
        ("MT19937", np.array(keys, np.uint32), position, has_gauss, gauss)
    )
    version, *numbers = state["python"].tolist()
    normal = state["python_gauss"].item()
    random.setstate((version, tuple(numbers), None if math.isnan(normal) else normal))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
