"""Requests that keep an engine busy while weights are published, and what they must show."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import torch

from asyncrl.protocols import Generation, GenerationRequest
from asyncrl.types import Version
from tests.helpers.engines import EngineHost, hf_logprobs, tiny_model

PROMPT = (5, 6, 7, 8)


def forced(token: int) -> torch.nn.Module:
    """A Llama that emits `token` with probability 1, whatever it reads."""
    model = tiny_model("llama", tied=False)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "o_proj" in name or "down_proj" in name or "lm_head" in name:
                p.zero_()  # the hidden state is the embedding
            if "embed" in name or "norm" in name:
                p.fill_(1.0)
        model.lm_head.weight[token] = 1.0  # type: ignore[union-attr,index]
    return model


def next_version(host: EngineHost) -> Version:
    incarnation, version = host.engine.applied
    return Version(incarnation, version + 1)


class Load:
    """`n` requests always in flight, until `stop`."""

    def __init__(
        self, host: EngineHost, n: int, tokens: int, prompt: tuple[int, ...] = PROMPT
    ) -> None:
        self._host, self._tokens, self._prompt = host, tokens, prompt
        self._ids = itertools.count()
        self._stopping = threading.Event()
        self._progress = threading.Condition()
        self._seen = 0
        self.issued: list[str] = []
        self.done: list[Generation] = []
        self._loops = [host.submit(self._loop()) for _ in range(n)]

    async def _loop(self) -> None:
        while not self._stopping.is_set():
            request = GenerationRequest(f"load-{next(self._ids)}", self._prompt, self._tokens, 1.0)
            self.issued.append(request.request_id)
            self.done.append(await self._host.engine.generate(request, self._heard))

    def _heard(self, n: int) -> None:
        with self._progress:
            self._seen += n
            self._progress.notify_all()

    def wait_for_tokens(self, n: int) -> None:
        with self._progress:
            target = self._seen + n
            assert self._progress.wait_for(lambda: self._seen >= target, timeout=60)

    def stop(self) -> list[Generation]:
        self._stopping.set()
        for loop in self._loops:
            loop.result(120)
        return self.done


def check_logprobs(
    host: EngineHost,
    model: torch.nn.Module,
    version: Version,
    prompt: tuple[int, ...] = PROMPT,
) -> None:
    """The engine's numbers for a new request are the model's, under the version's stamp."""
    g = host.generate(f"check-{version}", prompt, 24)
    expected = hf_logprobs(model, list(prompt), g.response_ids.tolist())
    np.testing.assert_allclose(g.logprobs, expected.numpy(), atol=1e-4)
    assert set(zip(g.incarnations.tolist(), g.versions.tolist(), strict=True)) == {version}
    assert not g.kv_mixed
