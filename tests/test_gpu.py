"""`gpu/*`: what the driver says of the devices that a process may see. (No GPU is needed here: the
driver's library is a stand-in; tests/weights/test_nccl.py is for machines that have one.)"""

import sys
from types import SimpleNamespace

import pytest

from asyncrl.gpu import gpu_meter
from tests.helpers.metric_names import undocumented


class NVMLError(Exception):
    pass


class Driver:
    """Two devices, of which the second cannot tell its use."""

    NVMLError = NVMLError
    GIB = 2**30

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return {"GPU-b": 1}[uuid]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=(handle + 1) * self.GIB)

    def nvmlDeviceGetUtilizationRates(self, handle):
        if handle == 1:
            raise NVMLError("not supported")
        return SimpleNamespace(gpu=40)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, {"gpu/mem_bytes": 3.0 * 2**30, "gpu/util_frac": 0.4}),
        ("0", {"gpu/mem_bytes": 1.0 * 2**30, "gpu/util_frac": 0.4}),
        ("GPU-b", {"gpu/mem_bytes": 2.0 * 2**30}),
        ("", {}),
    ],
)
def test_only_what_may_be_seen_is_told(visible, expected, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Driver())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    values = gpu_meter()()
    assert values == expected
    assert undocumented(values, "Actors and learner ranks on GPUs") == []


def test_without_a_driver_or_its_library_nothing_is_told(monkeypatch):
    class Broken(Driver):
        def nvmlInit(self):
            raise NVMLError("driver not loaded")

    monkeypatch.setitem(sys.modules, "pynvml", Broken())
    assert gpu_meter()() == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_meter()() == {}
