"""What a rule looks at, and the words that rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from asyncrl.config import fields
from asyncrl.config.schema import Config
from asyncrl.config.sources import RESOLVED_MARK

_DEFAULTS = fields.flatten(Config())


@dataclass(frozen=True, slots=True)
class Context:
    """A configuration and where its values came from."""

    config: Config
    sources: Mapping[str, str]
    flat: Mapping[str, object]
    device: str
    shipped: frozenset[str]
    """The shipped configurations as sources name them, e.g. "correction/icepop.yaml"."""

    @property
    def relative(self) -> bool:
        """True if advantages are relative to the group."""
        return self.config.learner.advantage.relative

    @property
    def critic(self) -> bool:
        """True if there is a value function."""
        return self.config.learner.advantage.critic

    @property
    def one_update(self) -> bool:
        """True if a batch is one optimizer step, so that theta is the policy before the update."""
        return self.config.learner.updates == 1

    def given(self, key: str) -> bool:
        """True if somebody set the field, to something else than null.

        In a file the default value does not count. What a shipped file sets does not count either,
        nor what a run's config.yaml holds, where every field stands.
        """
        source, value = self.sources.get(key, "default"), self.flat[key]
        file, is_file, _ = source.partition(":")
        if source == "default" or value is None:
            return False
        if file.endswith(RESOLVED_MARK):
            return False
        # Whoever starts from a shipped file may turn off what its other lines are for.
        return not is_file or (value != _DEFAULTS[key] and file not in self.shipped)

    def file(self, key: str) -> str:
        """The file that set the field; "" if none did, or only one that holds every field."""
        file, is_file, _ = self.sources.get(key, "default").partition(":")
        return file if is_file and not file.endswith(RESOLVED_MARK) else ""

    def named(self, key: str) -> str:
        """`key=value (where)`."""
        value = self.flat[key]
        text = str(value).lower() if isinstance(value, bool) else value
        source = self.sources.get(key, "default")
        return f"{key}={text}" + ("" if source == "default" else f" ({source})")

    def fix(self, key: str, value: str, preset: str) -> str:
        """How to set a field to what a preset sets it to."""
        if f"{preset}.yaml" not in map(self.file, self.sources):
            return f"set {key}={value}, or add --config {preset}"
        file, is_file, _ = self.sources[key].partition(":")
        if is_file:
            return f"put --config {preset} last, or remove {file}'s {key}"
        return f"remove the {file}, since --config {preset} sets it"

    def inactive(self, *keys: str, why: str, fix: str) -> Iterator[str]:
        """A refusal for each key that is set although it has no effect."""
        for key in keys:
            if self.given(key):
                yield f"{self.named(key)} has no effect {why}: remove it or {fix}"


Rule = Callable[[Context], Iterator[str]]
"""Yields a refusal for each problem that it finds."""
