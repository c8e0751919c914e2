"""Starting and ending the server of `asyncrl monitor --web`."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

from asyncrl.errors import MissingExtraError, UserError
from asyncrl.monitor.web.plotly_js import plotly_js
from asyncrl.monitor.web.shelf import Shelf
from asyncrl.weights import uses_loopback


def serve(
    folders: list[Path], directory: Path, *, host: str, port: int, tell: Callable[[str], None]
) -> None:
    """Serve runs until Ctrl-C, or until it is ended.

    Args:
        folders: of the runs that a page shows first.
        directory: whose other runs can be chosen.
        host: address to bind.
        port: 0 takes a free one.
        tell: is given the lines for the user; the first has the URL.

    Raises:
        UserError: the address cannot be bound.
    """
    plotly_js()  # missing: now rather than in a browser
    try:
        import uvicorn

        from asyncrl.monitor.web.app import make_app
        from asyncrl.monitor.web.patience import options
    except ImportError as e:
        raise MissingExtraError(
            f"--web needs {e.name}, which is not installed: pip install 'asyncrl[monitor]'"
        ) from e
    bound = _bind(host, port)
    shelf, token = Shelf(directory, folders), secrets.token_urlsafe(24)
    app = make_app(shelf, [shelf.name_of(folder) for folder in folders], token)
    config = uvicorn.Config(
        cast("uvicorn._types.ASGIApplication", app), lifespan="off", log_level="warning",
        access_log=False, server_header=False, timeout_graceful_shutdown=2, ws="none",
        **options(),
    )  # fmt: skip
    for line in told(host, bound.getsockname()[1], token):
        tell(line)
    try:
        uvicorn.Server(config).run(sockets=[bound])
    except KeyboardInterrupt:
        pass
    finally:
        bound.close()


def told(host: str, port: int, token: str) -> Iterator[str]:
    """What the user is told: the URL, and whom the server lets reach it."""
    shown = f"[{host}]" if ":" in host else host
    yield f"http://{shown}:{port}/?token={token}"
    if not (uses_loopback(host) or host == "::1"):
        yield (
            f"{host} is not loopback alone: whoever can reach it and learns this URL reads these "
            "runs, prompts and responses included; the connection is not encrypted"
        )
    yield "Ctrl-C ends it; the runs do not notice"


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as e:
        raise UserError(
            f"--host {host} --port {port} cannot be served: {e}: take another port (0: a free one)"
        ) from e
