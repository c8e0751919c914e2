"""A publisher and its fleet, without vLLM."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

import pytest

from asyncrl.learner.publication import members as members_module
from asyncrl.learner.publication.members import Members
from tests.weights.fakes import TIMEOUT_S, Fleet, Learner


@pytest.fixture
def learner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Learner]:
    # Else the first delivery imports it, within its deadlines: seconds, on a busy machine.
    importlib.import_module("asyncrl.learner.publication.gloo_sender")
    # It points file descriptor 1 elsewhere for a moment, which several threads must not do.
    monkeypatch.setattr("vllm.distributed.utils.suppress_stdout", contextlib.nullcontext)
    monkeypatch.setattr(members_module, "BACKOFF_S", 0.2)
    members = Members()
    with Fleet(members.endpoint) as fleet:
        made = Learner(fleet, members, getattr(request, "param", TIMEOUT_S))
        yield made
        made.publisher.close()
        members.close()
