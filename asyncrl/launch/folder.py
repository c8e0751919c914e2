"""A run's folder: made once, never reused silently."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from asyncrl.config.paths import expand
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

_SPEAKS = re.compile(r"(Error|Exception|Fatal|Killed|out of memory|Segmentation)", re.IGNORECASE)


class RunFolder:
    """Paths of one run, and its small files."""

    def __init__(self, config: Config, preset: str) -> None:
        name = config.run.name or f"{preset}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.name = name
        self.path = os.path.abspath(expand(config.run.dir, "run.dir") / name)
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
                f"run.name={self.name}: {self.path} exists already; "
                "choose another name or remove it"
            ) from None
        except OSError as e:
            raise ConfigError(
                f"run.dir: cannot make {self.path} ({e.strerror}); set run.dir to a folder "
                "that can be written"
            ) from e

    def log_of(self, role: str) -> str:
        """Path of a role's log, e.g. logs/actor-0.log."""
        return os.path.join(self.logs, f"{role}.log")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json whole or not at all."""
        temporary = self.summary + ".tmp"
        with open(temporary, "w", encoding="utf-8") as f:
            json.dump(summary, f, indent=2)
            f.write("\n")
        os.replace(temporary, self.summary)


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
