"""A run's folder: made once, never reused silently."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from asyncrl.config.paths import expand
from asyncrl.config.schema import Config
from asyncrl.disk import write_whole
from asyncrl.errors import ConfigError

_SPEAKS = re.compile(r"(Error|Exception|Fatal|Killed|out of memory|Segmentation)", re.IGNORECASE)


class RunFolder:
    """Paths of one run, and its small files."""

    def __init__(self, config: Config, preset: str, path: str | os.PathLike[str] = "") -> None:
        """Of a new run, or of the one that lies at `path`."""
        name = config.run.name or f"{preset}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.path = os.path.abspath(path or expand(config.run.dir, "run.dir") / name)
        self.name = os.path.basename(self.path)
        self.logs = os.path.join(self.path, "logs")
        self.metrics = os.path.join(self.path, "metrics.jsonl")
        self.events = os.path.join(self.path, "events.jsonl")
        self.summary = os.path.join(self.path, "summary.json")

    def create(self, config_text: str) -> None:
        """Make the folder and write config.yaml.

        Raises:
            ConfigError: it exists already, or cannot be made.
        """
        try:
            os.makedirs(self.path)
            os.makedirs(self.logs)
            with open(os.path.join(self.path, "config.yaml"), "w", encoding="utf-8") as f:
                f.write(config_text)
        except FileExistsError:
            raise ConfigError(
                f"run.name={self.name}: {self.path} exists already; choose another name, remove "
                f"it, or go on with it: asyncrl launch --resume {self.name}"
            ) from None
        except OSError as e:
            raise ConfigError(
                f"run.dir: cannot make {self.path} ({e.strerror}); set run.dir to a folder "
                "that can be written"
            ) from e

    def take_up(self, incarnation: int, config_text: str) -> None:
        """The run goes on as this incarnation: its end is undone, its settings may be others.

        The former summary.json and, where there is another one, config.yaml are kept beside.

        Args:
            config_text: of the new config.yaml; empty leaves the former one.

        Raises:
            ConfigError: the folder cannot be written.
        """
        path, before = os.path.join(self.path, "config.yaml"), f".before-{incarnation}"
        try:
            os.makedirs(self.logs, exist_ok=True)
            with suppress(FileNotFoundError):
                os.replace(self.summary, f"{self.summary.removesuffix('.json')}{before}.json")
            if config_text:
                shutil.copyfile(path, f"{path.removesuffix('.yaml')}{before}.yaml")
                write_whole(path, config_text)
            os.utime(path)  # by which the run that was launched last is found
        except OSError as e:
            raise ConfigError(
                f"{self.path} cannot be written ({e.strerror}): let this user write there, or "
                "make room"
            ) from e

    def log_of(self, role: str) -> str:
        """Path of a role's log, e.g. logs/actor-0.log."""
        return os.path.join(self.logs, f"{role}.log")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json whole or not at all.

        Raises:
            OSError: the disk did not take it.
        """
        write_whole(self.summary, json.dumps(summary, indent=2) + "\n")


def last_words(path: str) -> str:
    """The last line of a log that speaks of an error, in one line; "" if there is none."""
    try:
        with open(path, "rb") as f:
            f.seek(0, os.SEEK_END)
            f.seek(max(0, f.tell() - 16384))
            text = f.read().decode(errors="replace")
    except OSError:
        return ""
    told = [line.strip() for line in text.splitlines() if _SPEAKS.search(line)]
    return told[-1][:300] if told else ""
