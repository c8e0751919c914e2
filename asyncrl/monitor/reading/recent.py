"""The last samples of a recording, as text, for displays that show a few."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from asyncrl.errors import AsyncRLError, UserError
from asyncrl.models import BUILT_IN
from asyncrl.monitor.reading.settings import read_settings
from asyncrl.recording import INDEX, Entry, Recorded
from asyncrl.types import SampleId

TAIL_BYTES = {"": 64 << 10, "trained": 256 << 10, "other": 1 << 20}
"""Of the index, that are looked at: those of a kind may be rare."""
LONGEST = 4_000
"""Characters of a text that are kept."""

OF_A_GROUP = 2

Decode = Callable[[list[int]], str]


class Sample(NamedTuple):
    """One recorded sample."""

    entry: Entry
    prompt: str
    response: str


def recent_samples(folder: Path, n: int, only: str = "") -> list[Sample]:
    """The samples whose fate was settled last, the newest first; then those that were held at a
    run's end, as many as there is room for.

    Args:
        folder: of the run.
        n: how many at most; of a group there are two at most.
        only: trained, or other: those that were not.
    """
    decode = decoder(folder)
    found = []
    for entry in _last_entries(folder / "trajectories" / INDEX, n, only):
        try:
            trajectory = Recorded(entry, folder / "trajectories").trajectory()
        except (AsyncRLError, ValueError):
            continue  # its frames are not there
        prompt, response = (
            decode(ids.tolist())[:LONGEST]
            for ids in (trajectory.prompt_ids, trajectory.response_ids)
        )
        found.append(Sample(entry, prompt, response))
    return found


def _last_entries(index: Path, n: int, only: str) -> list[Entry]:
    try:
        with open(index, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES[only]))
            lines = file.read(TAIL_BYTES[only]).split(b"\n")[:-1]
    except OSError:
        return []
    found: list[Entry] = []
    held: list[Entry] = []  # a run's end writes them all at once: they would hide the others
    groups: Counter[tuple[object, ...]] = Counter()
    met: set[SampleId] = set()
    for line in reversed(lines):
        try:
            entry = msgspec.json.decode(line, type=Entry)
        except (msgspec.DecodeError, RecursionError):
            continue
        if entry.id in met:  # held when a launch ended, and trained since
            continue
        met.add(entry.id)
        kind = "trained" if entry.outcome == "trained" else "other"
        if only not in ("", kind):
            continue
        was_held = entry.outcome == "held"
        group = (was_held, *entry.id[:3])
        groups[group] += 1
        if groups[group] <= OF_A_GROUP:
            (held if was_held else found).append(entry)
        if len(found) == n:
            break
    return (found + held)[:n]


def decoder(folder: Path) -> Decode:
    """Tokens to text with the run's tokenizer if it is on this machine, else their numbers."""
    return tokenizer_of(folder) or numbers


def numbers(ids: list[int]) -> str:
    """Tokens as they are."""
    return " ".join(map(str, ids))


def tokenizer_of(folder: Path, given: Path | None = None) -> Decode | None:
    """Tokens to text with the run's tokenizer, or that of `given`; None if it is not here."""
    for place in _places(folder) if given is None else [given]:
        if (place / "tokenizer.json").is_file():
            with contextlib.suppress(Exception):  # tokenizers raises no narrower one
                return _of_file(place / "tokenizer.json")
    return None


def _places(folder: Path) -> list[Path]:
    places = [folder / "checkpoints" / "final"]
    with contextlib.suppress(UserError, OSError, KeyError, TypeError, RuntimeError):
        name = str(read_settings(folder)["model"]["name"])
        if name in BUILT_IN:
            return [*places, BUILT_IN[name].folder]
        places.append(Path(name).expanduser())
        if (cached := _in_hub_cache(name)) is not None:
            places.append(cached)
    return places


def _in_hub_cache(name: str) -> Path | None:
    """Where a model of the Hub has its tokenizer, if it was fetched."""
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with contextlib.suppress(HFValidationError):
        found = try_to_load_from_cache(name, "tokenizer.json")
        if isinstance(found, str):
            return Path(found).parent
    return None


@lru_cache(maxsize=4)
def _of_file(path: Path) -> Decode:
    # Not transformers' AutoTokenizer: that takes seconds to import.
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
