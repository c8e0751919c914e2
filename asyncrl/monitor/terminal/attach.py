"""Finding what `asyncrl monitor` is asked for: a folder, a run's name, latest, or a page's URL."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from asyncrl.errors import MissingExtraError, UserError
from asyncrl.monitor.status_reader import find
from asyncrl.monitor.terminal.feed import Feed, FolderFeed
from asyncrl.monitor.terminal.remote import UnreachableError, UrlFeed
from asyncrl.monitor.terminal.watcher import NotThereError
from asyncrl.monitor.words import clean


def watch(run: str, directory: Path, wait_s: float) -> None:
    """Show a run in the terminal.

    Args:
        run: a folder, a name in `directory`, latest, or the URL of `asyncrl monitor --web`.
        directory: of the runs.
        wait_s: for how long a run may be missing.

    Raises:
        UserError: there is no terminal, or the run did not come.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError(
            "asyncrl monitor needs a terminal: asyncrl status prints a run once, "
            "asyncrl monitor --web serves it as a page (over ssh: ssh -t)"
        )
    try:
        from asyncrl.monitor.terminal.app import show
    except ImportError as e:
        raise MissingExtraError(
            f"asyncrl monitor needs {e.name}, which is not installed: pip install "
            "'asyncrl[monitor]'"
        ) from e
    # Without the token of a URL: the screen may be seen by others, or kept.
    shown = run.partition("?")[0] if _is_url(run) else run
    show(attacher(run, directory), f"run {clean(shown)}", wait_s)


def _is_url(run: str) -> bool:
    return run.startswith(("http://", "https://"))


def attacher(run: str, directory: Path) -> Callable[[], Feed]:
    """What finds the run, each time it is called anew."""

    def attach() -> Feed:
        if not _is_url(run):
            try:
                return FolderFeed(find(run, directory))
            except UserError as e:
                raise NotThereError(str(e)) from e
        try:
            return UrlFeed(run)  # a token that is refused stays so: UserError
        except UnreachableError as e:
            raise NotThereError(str(e)) from e
        except (KeyError, TypeError, ValueError) as e:
            raise UserError(
                f"{run.partition('?')[0]} does not answer like asyncrl monitor --web: {e!r}"
            ) from e

    return attach
