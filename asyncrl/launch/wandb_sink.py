"""Weights & Biases as a sink: offline writes below the run's folder, online sends too."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.errors import MissingExtraError
from asyncrl.launch.folder import RunFolder


class WandbSink:
    """Logs every record against three axes: step, version and wall time."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingExtraError(
                f"log.wandb={config.log.wandb}: wandb is not installed; "
                "pip install 'asyncrl[wandb]'"
            ) from None
        os.environ.setdefault("WANDB_SILENT", "true")
        self._run = wandb.init(
            project=config.log.wandb_project, name=folder.name, dir=folder.path,
            mode="online" if config.log.wandb == "online" else "offline",
            config=config.model_dump(),
        )  # fmt: skip
        self._teardown = wandb.teardown
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Mapping[str, Any]) -> None:
        """Log the record's metrics; an actor's carry its rank in their name."""
        metrics = record["metrics"]
        if not metrics:
            return
        first = record["role"] == "learner" and record["rank"] == 0
        prefix = "" if first else f"{record['role']}-{record['rank']}/"
        axes = {k: record[k] for k in ("step", "version", "wall_s")}
        self._run.log({prefix + k: v for k, v in metrics.items()} | axes)

    def close(self) -> None:
        """Finish the wandb run and end its service process."""
        self._run.finish()
        self._teardown()
