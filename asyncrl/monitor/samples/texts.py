"""Tokens as text that a terminal can be trusted with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len, set_cell_size

from asyncrl.errors import UserError
from asyncrl.monitor import words
from asyncrl.monitor.reading.recent import Decode, numbers, tokenizer_of
from asyncrl.types import Trajectory

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What a decoder gives for bytes that are no whole character."""
LONGEST_CHARACTER = 4
"""Most bytes, and so most tokens, of one."""


class Texts:
    """Decodes samples with the run's tokenizer.

    Args:
        folder: of the run.
        tokenizer: folder that holds tokenizer.json, where it is not the run's model.

    Raises:
        UserError: `tokenizer` holds none.
    """

    def __init__(self, folder: Path, tokenizer: Path | None = None) -> None:
        found = tokenizer_of(folder, tokenizer)
        if found is None and tokenizer is not None:
            raise UserError(f"--tokenizer {tokenizer}: there is no tokenizer.json that can be read")
        self.known = found is not None
        """Whether there is a tokenizer; without one tokens are shown as numbers."""
        self.decode: Decode = found or numbers
        self._prompt = (b"", "")  # that of the last sample: those of a group lie side by side

    def prompt(self, t: Trajectory) -> str:
        """The sample's prompt."""
        key = t.prompt_ids.tobytes()
        if self._prompt[0] != key:
            self._prompt = (key, self.decode(t.prompt_ids.tolist()))
        return self._prompt[1]

    def response(self, t: Trajectory) -> str:
        """The sample's response."""
        return self.decode(t.response_ids.tolist())

    def need(self, option: str) -> None:
        """Refuse an option that searches text, where there is none.

        Raises:
            UserError: there is no tokenizer.
        """
        if not self.known:
            raise UserError(
                f"{option} searches text, and the run's tokenizer is not on this machine: "
                "give its folder with --tokenizer"
            )


def pieces(decode: Decode, ids: Sequence[int]) -> list[str]:
    """The text of each token; joined they are the text of all, if all is text.

    A character that takes several tokens goes to the last of them. Of each token what it adds to
    those just before it is taken, since decoders treat a text's first token differently.
    """
    out: list[str] = []
    start, done, before = 0, 0, ""
    for k in range(1, len(ids) + 1):
        text = decode(list(ids[start:k]))
        whole = k == len(ids) or k - done >= LONGEST_CHARACTER
        if not whole and (text.endswith(BROKEN) or len(text) <= len(before)):
            out.append("")
            continue
        out.append(text[len(before) :])
        start, done = done, k
        before = decode(list(ids[start:done]))
    return out


def clean(text: str) -> str:
    """Control characters written out, so that a response cannot play with the terminal.

    >>> clean("a" + chr(27) + "[2J")
    'a\\\\x1b[2J'
    """
    return words.clean(text, "\n\t")


def on_a_line(text: str, most: int) -> str:
    r"""The beginning of a text in at most `most` columns; line ends are arrows, since a model may
    write a backslash and an n, too. Control characters are written out.

    >>> on_a_line("one" + chr(10) + "two three", 9), on_a_line(r"a\nb", 9)
    ('one↵tw...', 'a\\nb')
    """
    line = words.clean(text[: most + 1].replace("\n", "↵"))
    if cell_len(line) <= most:
        return line
    return set_cell_size(line, max(0, most - 3)).rstrip() + "..." if most >= 3 else ""
