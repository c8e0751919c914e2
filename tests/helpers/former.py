"""The folder of a run that may go on, without anything that it trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.checkpoints import Checkpoint, Meta, list_checkpoints, partial, seal
from asyncrl.config.load import load
from asyncrl.config.render import to_yaml
from asyncrl.config.sources import RESOLVED
from asyncrl.launch.resume.lineage import Lineage
from asyncrl.launch.resume.plan import Resumption, plan_resume

RUN_ID = "r-0123abcd"


class Former:
    """The folder of a run that was killed, with checkpoints of some steps."""

    def __init__(self, base: Path, *steps: int, **settings: Any) -> None:
        self.base, self.folder = base, base / "r"
        self.folder.mkdir()
        resolved = load("tiny", ["run.steps=30", *(f"{k}={v}" for k, v in settings.items())])
        (self.folder / "config.yaml").write_text(f"{RESOLVED}\n{to_yaml(resolved.config)}")
        lineage = Lineage.begin(self.folder, RUN_ID)
        lineage.close()
        self.write("events.jsonl", {"run_id": RUN_ID, "incarnation": 0, "wall_s": 70.5})
        self.write("metrics.jsonl", {"run_id": RUN_ID, "incarnation": 0, "wall_s": 71.25})
        for step in steps:
            self.checkpoint(step, 0)

    def write(self, name: str, line: dict[str, Any]) -> None:
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def checkpoint(self, step: int, incarnation: int, score: float | None = None) -> None:
        folder = partial(self.folder, step, incarnation)
        folder.mkdir(parents=True)
        seal(folder, Meta(step, step, incarnation, 1, RUN_ID, score=score))

    @property
    def checkpoints(self) -> list[Checkpoint]:
        return list_checkpoints(self.folder)

    def resume(self, text: str = "", *overrides: str, **options: Any) -> Resumption:
        resumption = plan_resume(text or str(self.folder), [], overrides, {}, **options)
        resumption.lineage.close()
        return resumption
