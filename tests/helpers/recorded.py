"""A run's folder with a recording of known samples, written by the buffer's own writer."""

import random

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from asyncrl import wire
from asyncrl.buffer.trajectories import TrajectoryWriter
from asyncrl.recording import Retired
from asyncrl.types import (
    NO_VERSION,
    FinishReason,
    SampleHeader,
    SampleId,
    Trajectory,
    Version,
)

OUTCOMES = ("trained", "dropped_stale", "filtered", "failed", "held", "requeued")
SIGNS = "abc .\n\té€🙂"


def save_byte_tokenizer(folder):
    """A tokenizer whose tokens are the 256 bytes; its reading of text."""
    folder.mkdir(parents=True, exist_ok=True)
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(signs)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return lambda text: tokenizer.encode(text).ids


class RecordedRun:
    """A run's folder to which samples are recorded, and what they were."""

    def __init__(self, folder):
        self.folder = folder
        self.ids = save_byte_tokenizer(folder / "model")
        (folder / "config.yaml").write_text(f"model: {{name: {folder / 'model'}}}\n")

    def sample(self, index, k, *, prompt="Say it.", response="It.", logprobs=None, versions=None,
               mask=None, reward=0.5, actor="actor-0", finish=FinishReason.STOP):  # fmt: skip
        """A trajectory; versions are pairs, None for a token that no policy produced."""
        asked, said = self.ids(prompt), self.ids(response)
        t = len(said)
        stamps = versions or [Version(0, 0)] * t
        of_policy = sorted((v for v in stamps if v), key=lambda v: (v.version, v.incarnation))
        header = SampleHeader(
            id=SampleId("p:q", 0, index, k), lease=index + 1, actor=actor,
            prompt_tokens=len(asked), response_tokens=t, policy_tokens=len(of_policy),
            version_min=of_policy[0], version_max=of_policy[-1], version_dispatch=of_policy[0],
            version_finish=of_policy[-1], reward=reward, finish_reason=finish, temperature=0.7,
        )  # fmt: skip
        return Trajectory(
            header=header, prompt_ids=np.array(asked, np.int32),
            response_ids=np.array(said, np.int32),
            behaviour_logprobs=np.array([-1.0] * t if logprobs is None else logprobs, np.float32),
            versions=np.array([v.version if v else NO_VERSION for v in stamps], np.int32),
            incarnations=np.array([v.incarnation if v else NO_VERSION for v in stamps], np.int32),
            loss_mask=np.array([bool(v) for v in stamps] if mask is None else mask, np.uint8),
        )  # fmt: skip

    def some(self, count, seed=0):
        """Samples of which each differs from the next in all that can be asked for."""
        rng = random.Random(seed)
        for n in range(count):
            t = rng.randint(1, 12)
            low = rng.randrange(4)
            stamps = [Version(rng.randrange(2), low + rng.randrange(2)) for _ in range(t)]
            said = "".join(rng.choices(SIGNS, k=t))
            size = len(self.ids(said))
            logprobs = [rng.choice([-rng.random() * 6, 0.0, float("nan")]) for _ in range(size)]
            outcome = rng.choice(OUTCOMES)
            used = outcome in ("trained", "dropped_stale")
            yield Retired(
                wire.pack_trajectory(self.sample(
                    n // 4, n % 4, prompt=f"Group {n // 4}", response=said, logprobs=logprobs,
                    versions=(stamps * size)[:size], reward=rng.choice([0, 0.25, 1 / 3, 1, -2]),
                    actor=f"actor-{rng.randrange(3)}", finish=rng.choice(list(FinishReason)),
                )),
                outcome, 1, low + rng.randrange(3) if used else None, 1 + n // 16 if used else None,
                0 if used else None, n // 4 if used else None,
            )  # fmt: skip

    def record(self, *retired, resume=False):
        """Write them as the buffer does."""
        writer = TrajectoryWriter(self.folder / "trajectories", max_bytes=1 << 30, resume=resume)
        writer.put(retired)
        writer.close()

    def trained(self, *trajectories, version=2, batch=3, incarnation=0, resume=False):
        """Record them as trained."""
        self.record(
            *(Retired(wire.pack_trajectory(t), "trained", incarnation, version, batch, 0, 0)
              for t in trajectories),
            resume=resume,
        )  # fmt: skip
