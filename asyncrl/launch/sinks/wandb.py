"""Weights & Biases as a sink: offline writes below the run's folder, online sends too."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.errors import MissingExtraError
from asyncrl.launch.folder import RunFolder
from asyncrl.sinks import tag

_NOT_IN_ID = re.compile(r"[^A-Za-z0-9_.-]")
AXES = ("step", "version", "wall_s")
"""Of every record; `step` is the one that charts begin with."""


class WandbSink:
    """Logs every record with its three axes; names as in `sinks.tag`."""

    def __init__(
        self, config: Config, folder: RunFolder, run_id: str = "", *, resumed: bool = False
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingExtraError(
                f"log.wandb={config.log.wandb}: wandb is not installed; "
                "pip install 'asyncrl[wandb]'"
            ) from None
        os.environ.setdefault("WANDB_SILENT", "true")
        self._wandb = wandb
        self._run = wandb.init(
            project=config.log.wandb_project, name=folder.name, dir=folder.path,
            mode="online" if config.log.wandb == "online" else "offline",
            config=config.model_dump(),
            # One run there too, however often it is resumed; offline files are joined by the id.
            id=_NOT_IN_ID.sub("-", run_id) or None,
            resume="allow" if resumed and config.log.wandb == "online" else None,
            allow_val_change=True if resumed else None,
        )  # fmt: skip
        for axis in AXES:
            self._run.define_metric(axis, hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Mapping[str, Any]) -> None:
        """Log the record's metrics and histograms."""
        values: dict[str, Any] = {tag(record, k): v for k, v in record["metrics"].items()}
        for name, h in record["hist"].items():
            key = tag(record, name)
            values[key] = self._wandb.Histogram(np_histogram=(h["counts"], h["edges"]))
        if values:
            self._run.log(values | {axis: record[axis] for axis in AXES})

    def close(self) -> None:
        """Finish the wandb run and end its service process."""
        self._run.finish()
        self._wandb.teardown()
