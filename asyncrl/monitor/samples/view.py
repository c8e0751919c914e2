"""What `asyncrl samples` prints and writes."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TextIO

from rich.console import Console, RenderableType

from asyncrl.errors import UserError
from asyncrl.monitor import outputs, words
from asyncrl.monitor.samples import export as files
from asyncrl.monitor.samples import show
from asyncrl.monitor.samples.search import KEYS, Key, Search
from asyncrl.monitor.samples.table import table
from asyncrl.monitor.samples.texts import Texts
from asyncrl.monitor.samples.wanted import Wanted, sample_id

ROWS = 20
"""Of a table, unless told."""


def order(text: str) -> tuple[Key, bool]:
    """What --sort names, and whether the highest comes first.

    Raises:
        UserError: it names nothing.
    """
    found = next((key for key in KEYS if key == text.removeprefix("-")), None)
    if found is None:
        raise UserError(
            f"--sort {text}: one of {', '.join(KEYS)} is asked for; with - before it the highest "
            "comes first"
        )
    return found, text.startswith("-")


class View:
    """Looks at the recording of a run.

    Args:
        folder: of the run.
        wanted: which samples.
        tokenizer: folder of the tokenizer, where the run's own is not on this machine.
        file: where lines go; standard output.

    Raises:
        UserError: what is asked for needs the tokenizer, and there is none.
    """

    def __init__(
        self, folder: Path, wanted: Wanted, tokenizer: Path | None = None,
        file: TextIO | None = None,
    ) -> None:  # fmt: skip
        self._folder, self._wanted = folder, wanted
        self._file = file or sys.stdout
        self._texts = Texts(folder, tokenizer)
        for option, text in (("--prompt", wanted.prompt), ("--response", wanted.response)):
            if text is not None:
                self._texts.need(option)

    def table(self, sort: str, limit: int | None) -> None:
        """A line for each of the first `limit` samples, then what was left out."""
        key, descending = order(sort)
        search = self._search(key, descending)
        samples = list(islice(search, ROWS if limit is None else _capped(limit)))
        if samples:
            self._say(table(samples, self._texts, shutil.get_terminal_size((120, 24)).columns))
            self._say([""])
        self._say([
            f"{len(samples)} of {len(search)} that match, of {search.counts.samples} samples",
            *search.counts.lines(),
        ])  # fmt: skip

    def one(self, text: str, by: show.By, *, tokens: bool = False) -> None:
        """A sample in full.

        Raises:
            UserError: it is not recorded, or cannot be read.
        """
        self._wanted = replace(self._wanted, sample=sample_id("--show", text))
        search = self._search()
        found = next(iter(search), None)
        if found is None:
            why = list(search.counts.lines()) if search.counts.unreadable else []
            raise UserError("; ".join([f"--show {text}: no such sample is recorded", *why]))
        self._print(show.show(found, self._texts, by))
        if tokens:
            self._say(["", *show.tokens(found, self._texts)])
        elif not self._file.isatty():
            self._say(["(colours need a terminal; --tokens lists them)"])

    def group(self, text: str) -> None:
        """The samples of a group side by side.

        Raises:
            UserError: none is recorded, or can be read.
        """
        search = self._search()
        samples = sorted(search, key=lambda s: s.entry.id.sample)
        if not samples:
            why = list(search.counts.lines())
            if re.search(r":\d+:\d+:\d+$", text):  # a sample's, unless its source is named so
                why.append("a group has three parts, SOURCE:EPOCH:INDEX, a sample's id has four")
            raise UserError("; ".join([f"--group {text}: none of its samples match", *why]))
        console = self._console()
        console.print(show.beside(samples, self._texts, console.width))
        self._say(search.counts.lines())

    def export(self, target: str, sort: str, limit: int | None) -> None:
        """Write samples to a file.

        Raises:
            UserError: see `files.check_target` and `files.export`.
        """
        key, descending = order(sort)
        out = outputs.target(target, "--export", [self._folder])
        files.check_target(out)
        search = self._search(key, descending)
        written = files.export(islice(search, _capped(limit)), out, self._texts)
        text = "" if self._texts.known else "; without text, the tokenizer is not on this machine"
        self._say([
            f"{out}: {written} of {search.counts.samples} samples{text}", *search.counts.lines()
        ])  # fmt: skip

    def _search(self, key: Key = "order", descending: bool = False) -> Search:
        return Search(self._folder, self._wanted, self._texts, key, descending=descending)

    def _console(self) -> Console:
        return Console(file=self._file, highlight=False, markup=False, emoji=False)

    def _print(self, parts: Iterable[RenderableType]) -> None:
        console = self._console()
        for part in parts:
            console.print(part, soft_wrap=True)

    def _say(self, lines: Iterable[str]) -> None:
        for line in lines:
            print(words.clean(line, "\t"), file=self._file)


def _capped(limit: int | None) -> int | None:
    return None if limit is None else min(limit, sys.maxsize)  # islice takes no more
