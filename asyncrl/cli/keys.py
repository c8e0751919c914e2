"""`asyncrl keys`."""

from __future__ import annotations

from typing import Annotated

import typer


def keys(
    folder: Annotated[str, typer.Argument(help="Folder for the keys; made if it is not there.")],
) -> None:
    """Make lasting keys for the data plane, so that a client outside the run can be let in."""
    from asyncrl.config.paths import expand
    from asyncrl.security import CLIENT_SECRET, SERVER_PUBLIC, write_keys

    path = expand(folder, "FOLDER")
    write_keys(path)
    print(f"keys in {path}: launch with security.curve=true security.keys={path}")
    print(f"a client outside the run needs {SERVER_PUBLIC} and {CLIENT_SECRET}, and nothing else")
    print("covered: the data plane (leases, trajectories, batches, metrics, weights control)")
    print("not covered: Ray, which hands the keys to the roles, and the tensors of NCCL and gloo")
