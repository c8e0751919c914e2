"""Samples laid out without padding, a common prompt once. Numpy only.

    samples of a rank ──► segments (one prompt, its responses) ──► packs of at most L tokens

    pack:    [ prefix | prompt a | response a1 | response a2 | prompt b | response b1 | ... ]
    position:  0 ..     C ..       P ..          P ..          C ..       P ..

The prefix is what all prompts of the pack begin with (a system turn, few-shot examples; C tokens,
possibly none). Each response attends to the prefix, its prompt and causally to itself, so that a
pack gives exactly what its sequences give one by one. Axis letters: S tokens of a pack, R distinct
predicting positions, N tokens that carry loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asyncrl.errors import ConfigError
from asyncrl.types import Trajectory

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

MIN_PREFIX = 8
"""A shorter common prefix saves less than its extra attention call costs."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A prompt and the responses that follow it in a pack.

    >>> Segment(start=20, prefix_tokens=16, prompt_tokens=4, response_tokens=(2, 3)).tokens
    9
    """

    start: int
    """Index of its first token in the pack."""
    prefix_tokens: int
    """C: its prompt begins with the first C tokens of the pack, which lie outside the segment."""
    prompt_tokens: int
    """P - C: the prompt's further tokens, at least 1."""
    response_tokens: tuple[int, ...]
    """T of each response, in order; empty for the prefix itself and for a dummy."""

    @property
    def tokens(self) -> int:
        """Tokens that lie in the segment: its own part of the prompt and all responses."""
        return self.prompt_tokens + sum(self.response_tokens)


@dataclass(frozen=True, slots=True)
class Pack:
    """One forward pass. Logits are needed only at `rows`; token n is predicted by row `row[n]`.

    For the first token of a response the predicting position is the prompt's last one, so the
    responses of a segment have that row in common.
    """

    input_ids: Ints
    """[S] token ids."""
    position_ids: Ints
    """[S] position of each token in its own sequence."""
    segments: tuple[Segment, ...]
    rows: Ints
    """[R] pack positions whose hidden state predicts a token."""
    row_temperature: Floats
    """[R] sampling temperature to divide that row's logits by."""
    row: Ints
    """[N] which of the R rows predicts the token."""
    target: Ints
    """[N] token id."""
    behaviour_logprobs: Floats
    """[N] log mu, in nats."""
    sample: Ints
    """[N] which sample the token belongs to (index into the sequence given to `make_packs`)."""
    offset: Ints
    """[N] index of the token in its response."""


Layout = list[tuple[int, ...]]
"""The segments of one pack: each the samples that have its prompt in common."""


def make_packs(
    samples: Sequence[Trajectory], which: Iterable[int], max_tokens: int, share_prompt: bool
) -> list[Pack]:
    """Pack the samples of `which` (indexes into `samples`), deterministically.

    Raises:
        ConfigError: a single sample is longer than `max_tokens`.
    """
    layouts = plan_packs(samples, which, max_tokens, share_prompt)
    return [_build(samples, layout, share_prompt) for layout in layouts]


def plan_packs(
    samples: Sequence[Trajectory], which: Iterable[int], max_tokens: int, share_prompt: bool
) -> list[Layout]:
    """Which samples go into which pack: first-fit decreasing over segments.

    Samples have a segment in common when their prompts are token for token the same; a segment
    over `max_tokens` is split, repeating the prompt.
    """
    by_prompt: dict[object, list[int]] = {}
    for i in which:
        if samples[i].header.tokens > max_tokens:
            raise _too_long(samples[i], max_tokens)
        key: object = samples[i].prompt_ids.tobytes() if share_prompt else i
        by_prompt.setdefault(key, []).append(i)
    sized: list[tuple[int, tuple[int, ...]]] = []
    for members in by_prompt.values():
        sized += _split(samples, members, max_tokens)
    sized.sort(key=lambda item: -item[0])  # stable: ties keep the order of the batch
    packs: list[Layout] = []
    room: list[int] = []
    for tokens, segment in sized:
        k = next((k for k, free in enumerate(room) if free >= tokens), len(packs))
        if k == len(packs):
            packs.append([])
            room.append(max_tokens)
        packs[k].append(segment)
        room[k] -= tokens
    return packs


def _split(
    samples: Sequence[Trajectory], members: list[int], max_tokens: int
) -> list[tuple[int, tuple[int, ...]]]:
    """Cut one prompt's samples into segments of at most `max_tokens`, each with its size."""
    prompt = samples[members[0]].header.prompt_tokens
    out: list[tuple[int, tuple[int, ...]]] = []
    current: list[int] = []
    size = prompt
    for i in members:
        response = samples[i].header.response_tokens
        if current and size + response > max_tokens:
            out.append((size, tuple(current)))
            current, size = [], prompt
        current.append(i)
        size += response
    out.append((size, tuple(current)))
    return out


def _too_long(sample: Trajectory, max_tokens: int) -> ConfigError:
    h = sample.header
    return ConfigError(
        f"learner.max_tokens_per_microbatch={max_tokens} is smaller than sample {tuple(h.id)} "
        f"(prompt {h.prompt_tokens} + response {h.response_tokens} = {h.tokens} tokens): "
        f"raise it to {h.tokens} or lower rollout.max_new_tokens."
    )


def _build(samples: Sequence[Trajectory], layout: Layout, share_prompt: bool) -> Pack:
    prompts = [samples[members[0]].prompt_ids for members in layout]
    prefix = _common_prefix(prompts) if share_prompt else 0
    ids, positions = [prompts[0][:prefix]], [np.arange(prefix)]
    segments = [Segment(0, 0, prefix, ())] if prefix else []
    tokens: list[Ints] = []  # [N, 4] predicting position, target, sample, offset
    size = prefix
    for prompt_ids, members in zip(prompts, layout, strict=True):
        prompt, start = len(prompt_ids), size
        ids.append(prompt_ids[prefix:])
        positions.append(np.arange(prefix, prompt))
        size += prompt - prefix
        last = size - 1
        for i in members:
            s = samples[i]
            length = len(s.response_ids)
            ids.append(s.response_ids)
            positions.append(np.arange(prompt, prompt + length))
            offset = np.flatnonzero(s.loss_mask)
            predictor = np.where(offset == 0, last, size + offset - 1)
            sample = np.full_like(offset, i)
            tokens.append(np.stack([predictor, s.response_ids[offset], sample, offset], axis=1))
            size += length
        lengths = tuple(len(samples[i].response_ids) for i in members)
        segments.append(Segment(start, prefix, prompt - prefix, lengths))
    predictor, target, sample, offset = np.concatenate(tokens).astype(np.int64).T
    behaviour = [
        samples[i].behaviour_logprobs[samples[i].loss_mask != 0] for m in layout for i in m
    ]
    temperature = np.array([s.header.temperature for s in samples])[sample]
    # A row is a position and a temperature: samples of one prompt may differ in the latter.
    keys, row = np.unique(np.stack([predictor, temperature], 1), axis=0, return_inverse=True)
    return Pack(
        input_ids=np.concatenate(ids).astype(np.int64),
        position_ids=np.concatenate(positions).astype(np.int64),
        segments=tuple(segments),
        rows=keys[:, 0].astype(np.int64),
        row_temperature=keys[:, 1].astype(np.float32),
        row=row.reshape(-1).astype(np.int64),
        target=target,
        behaviour_logprobs=np.concatenate(behaviour).astype(np.float32),
        sample=sample,
        offset=offset,
    )


def _common_prefix(prompts: Sequence[npt.NDArray[np.int32]]) -> int:
    """Tokens that all prompts begin with, leaving at least one to each; 0 if not worth it."""
    if len(prompts) < 2:
        return 0
    shortest = min(len(p) for p in prompts)
    differs = np.any([p[:shortest] != prompts[0][:shortest] for p in prompts], axis=0)
    common = int(np.argmax(differs)) if differs.any() else shortest
    common = min(common, shortest - 1)
    return common if common >= MIN_PREFIX else 0


def dummy_pack() -> Pack:
    """One token and no loss: what a rank runs while others still have packs (FSDP collectives)."""
    none, nothing = np.zeros(0, np.int64), np.zeros(0, np.float32)
    return Pack(
        input_ids=np.zeros(1, np.int64),
        position_ids=np.zeros(1, np.int64),
        segments=(Segment(0, 0, 1, ()),),
        rows=np.zeros(1, np.int64),
        row_temperature=np.ones(1, np.float32),
        row=none,
        target=none,
        behaviour_logprobs=nothing,
        sample=none,
        offset=none,
    )
