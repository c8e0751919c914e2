"""How busy the GPUs of a process are, from the driver (NVML)."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


def gpu_meter() -> Callable[[], dict[str, float]]:
    """Reads `gpu/*` of the devices that this process may see; nothing where that cannot be had."""
    handles: list[Any] = []
    nvml: Any = None
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [_handle(nvml, device) for device in _visible(nvml.nvmlDeviceGetCount())]
    except ImportError:
        log.info("no gpu/* metrics: nvidia-ml-py is not installed (pip install 'asyncrl[gpu]')")
    except Exception as e:  # of NVML: no driver, no such device
        log.info("no gpu/* metrics: %s: %s", type(e).__name__, e)
        handles = []

    def read() -> dict[str, float]:
        used, memory = [], 0.0
        for handle in handles:
            memory += float(nvml.nvmlDeviceGetMemoryInfo(handle).used)
            with contextlib.suppress(nvml.NVMLError):  # not where the device is split (MIG)
                used.append(nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        values = {"gpu/mem_bytes": memory} if handles else {}
        return values | ({"gpu/util_frac": sum(used) / len(used)} if used else {})

    return read


def _visible(count: int) -> list[str]:
    """Numbers or ids of the devices, as CUDA_VISIBLE_DEVICES has them; all when it is not set."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(k) for k in range(count)]
    return [part.strip() for part in named.split(",") if part.strip()]


def _handle(nvml: Any, device: str) -> Any:
    if device.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(device))
    return nvml.nvmlDeviceGetHandleByUUID(device)
