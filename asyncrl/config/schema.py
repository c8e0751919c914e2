"""What can be configured, with types, units and defaults. Importing this loads no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.config.learning import LearnerConfig
from asyncrl.config.section import Dtype, NonNegative, Positive, Seconds, Section
from asyncrl.config.tracing import TraceConfig

InFlightMode = Literal["keep", "keep_kv", "abort", "wait"]

CPU_KV_CACHE_GIB = 1.0
"""What an engine on CPU takes when `engine.kv_cache_gib` is null."""


class RunConfig(Section):
    """Where the run lives and when it ends."""

    name: str | None = None
    """Folder name below `dir`; default: the config's name and the time of the start."""
    dir: str = "runs"
    """Folder that holds the runs' folders."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the prompts' order, of sampling and of the learner."""
    steps: Positive = 100
    """Optimizer batches to train; the run ends after them."""


class StopConfig(Section):
    """What may end the run before `run.steps`, in order and with exit code 0; null is off."""

    wall_s: Seconds | None = None
    """Seconds since the launch; the batch in training ends first."""
    epochs: Positive | None = None
    """Passes over the prompts."""
    reward: float | None = None
    """Mean reward of the last `reward_batches` batches that is enough."""
    reward_batches: Positive = 10
    """Batches that the mean for `stop.reward` is taken over."""
    nonfinite_losses: Positive | None = 3
    """Batches in a row whose loss or gradient is not finite."""


class ModelConfig(Section):
    """The policy."""

    name: str = "smollm2-135m"
    """A built-in name (smollm2-135m, tiny), a local folder, or a Hub name."""
    trust_remote_code: bool = False
    """Run code that the model's folder ships."""


class TaskConfig(Section):
    """Prompts and their reward."""

    kind: Literal["arithmetic", "even_digits", "jsonl"] = "arithmetic"
    """arithmetic: sums made on the spot; even_digits: a dense toy reward; jsonl: a file."""
    path: str | None = None
    """jsonl: file with one JSON object a line (GSM8K's format by default)."""
    prompt_field: str = "question"
    """jsonl: the column that holds the prompt, text or a list of chat messages."""
    answer_field: str | None = "answer"
    """jsonl: the column that holds the ground truth; null if there is none."""
    prompt_template: str = "{prompt}"
    """Text around the prompt; `{prompt}` stands for it."""
    system_prompt: str | None = None
    """System turn; null leaves it to the chat template, "" asks for an empty one."""
    chat: bool = True
    """Render prompts with the tokenizer's chat template; false sends plain text."""
    max_operand: Positive = 99
    """arithmetic: operands are drawn from 1 to this."""
    reward: str = "auto"
    """auto (the task's own), last_number, even_digits, or the user's `module:function`."""
    reward_timeout_s: Seconds = 10.0
    """A reward that takes longer is killed and its sample counted as failed."""
    reward_workers: Positive = 1
    """Reward processes per actor: that many responses are scored at once."""


class RolloutConfig(Section):
    """Generation."""

    group_size: Positive = 8
    """Samples per prompt (n)."""
    max_prompt_tokens: Positive = 512
    """A longer prompt is counted as a data failure."""
    max_new_tokens: Positive = 256
    """Response length limit."""
    temperature: Annotated[float, Field(ge=0.01, le=4)] = 1.0
    """Sampling temperature; the learner applies the same. vLLM would raise a lower one to 0.01."""
    max_in_flight: Positive = 64
    """Samples in flight per actor."""
    lease_timeout_s: Seconds = 30.0
    """A lease without tokens, rewards or results for this long expires; others take its samples."""
    max_attempts: Positive = 3
    """Tries of a sample whose data or reward fails, the first included; 1 tries nothing again."""
    failed_member: Literal["shrink", "drop"] = "shrink"
    """After its last try: the group goes on without the sample, or is dropped."""
    quarantine_after: Positive = 1
    """A prompt whose group was given up so often, for data or reward, is left out from then on."""
    reward_failure: Literal["drop", "score"] = "drop"
    """A reward that fails (timeout, exception, no finite number). drop: the sample has failed, is
    tried again and then left out; score: it gets `reward_failure_score`."""
    reward_failure_score: float = 0.0
    """The reward of such a sample."""


class EngineConfig(Section):
    """vLLM."""

    dtype: Dtype = "bfloat16"
    """Type of the engine's weights; publications are sent in it."""
    max_model_len: Positive | None = None
    """Context length; default: max_prompt_tokens + max_new_tokens."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """Key-value cache; default: 1 GiB on CPU, vLLM's own choice on a GPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """GPU only: share of the device's memory for the engine."""
    tensor_parallel: Positive = 1
    """Devices per engine."""
    enforce_eager: bool = False
    """No compilation: slower tokens, a much faster start."""
    threads: Positive | None = None
    """CPU only: OpenMP threads per engine; default: cores / (actors + learners), at least 1."""


class BufferConfig(Section):
    """Staleness, order and flow (docs/architecture.md)."""

    max_staleness: NonNegative = 2
    """S, in versions: no trained token is staler. 0 is synchronous training."""
    window: Positive = 1
    """W: a group may overtake unfinished ones less than W positions ahead; 1 is strict order."""
    on_stale: Literal["drop", "raise"] = "drop"
    """What the check at the learner does with a sample over the bound (0 in a healthy run)."""
    prior_incarnation: Literal["keep", "drop"] = "keep"
    """When the learner goes back to a checkpoint: samples that no batch has yet stay, with their
    own log-probabilities, or are produced again. Batches that it had are the same in any case."""
    filter_zero_variance: bool = False
    """Leave out groups whose rewards are all equal: they carry no advantage."""
    max_filtered_in_a_row: Positive | None = None
    """Groups left out in a row that end the run; default: 16 batches of them, at least 64."""
    durability: Literal["none", "process", "disk"] = "none"
    """What the buffer acknowledged survives: nothing; the death of its process; that of the
    machine too (an fsync before every acknowledgement)."""
    memory_gib: Annotated[float, Field(gt=0)] = 4.0
    """Samples held in memory, those being produced counted at their longest. With durability none
    nothing is leased beyond it; else what is beyond it lies in the store alone."""
    store_gib: Annotated[float, Field(gt=0)] = 16.0
    """durability process or disk: samples held in the store; nothing is leased beyond it."""


class ReplayConfig(Section):
    """Samples trained again, on top of the fresh ones of a batch (docs/architecture.md)."""

    fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Replayed groups of a batch, as a share of its fresh groups; 0 turns replay off."""
    max_staleness: Positive = 4
    """In versions: no replayed token is staler; older groups are forgotten."""
    by: Literal["uniform", "advantage", "fresh"] = "uniform"
    """Which groups are drawn: all alike; by mean distance of a reward from its group's mean; or by
    freshness, half as likely for each version of age."""


class WeightsConfig(Section):
    """Publication of weights."""

    strategy: Literal["auto", "broadcast", "relay"] = "auto"
    """broadcast: to all engines at once; relay: to one receiver a machine, from whose memory each
    engine loads when it is ready. auto: relay for two actors or more on the CPU of one machine,
    else broadcast."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl on GPUs, gloo on CPU."""
    timeout_s: Seconds = 60.0
    """Deadline of one publication, to which 1 s per 100 MB of weights is added."""
    in_flight: InFlightMode = "keep"
    """Requests under way. keep: pause, go on with keys and values computed anew; keep_kv: with the
    old ones (marked kv_mixed); abort: resubmit the tokens so far; wait: let them end, at most
    `timeout_s`."""

    @property
    def drain_s(self) -> float:
        """Seconds for which a publication may wait for requests to end."""
        return self.timeout_s if self.in_flight == "wait" else 0.0


class ClusterConfig(Section):
    """Roles and where they run."""

    actors: Positive = 1
    """A: vLLM engines."""
    learners: Positive = 1
    """L: FSDP ranks."""
    address: str | None = None
    """Address of a running Ray cluster; null starts a local Ray."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is a GPU."""
    placement: Literal["packed", "spread", "explicit"] = "packed"
    """packed: one machine after the other; spread: evenly over them; explicit: `*_places`."""
    actor_places: tuple[str, ...] | None = None
    """explicit: NODE or NODE:GPU,GPU of each actor, or one NODE for all; NODE is `local`, a
    machine's address or host name, or a custom resource of the Ray cluster."""
    learner_places: tuple[str, ...] | None = None
    """explicit: the same for the learner ranks."""
    ready_timeout_s: Seconds = 600.0
    """Deadline for the learners, the first actor, a restarted buffer; other actors join later."""
    max_restarts: NonNegative = 5
    """Restarts of an actor without a sample in between; then the run goes on without it."""
    restart_backoff_s: Seconds = 1.0
    """Wait before the first restart; doubled each time, at most 60 s."""
    silent_after_s: Seconds = 10.0
    """An actor that says nothing for this long loses its leases to others."""


class SecurityConfig(Section):
    """Who may speak on the data plane (docs/security.md)."""

    curve: bool = False
    """Encrypt it, and let in only who has the run's keys (CURVE)."""
    keys: str | None = None
    """Folder made by `asyncrl keys`; null makes keys for this run, which lie on no disk."""
    allow_plaintext: bool = False
    """Without curve: bind addresses that other machines reach all the same."""


class EvalConfig(Section):
    """Greedy evaluation on prompts held out from training."""

    samples: NonNegative = 0
    """Held-out prompts; 0 turns evaluation off."""
    path: str | None = None
    """jsonl tasks: the file of held-out prompts."""
    at_start: bool = True
    """Evaluate version 0 before training."""
    at_end: bool = True
    """Evaluate the last version after training."""


class LogConfig(Section):
    """What is shown and kept."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    """auto: live on a terminal, a line per step elsewhere."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Send the records to Weights & Biases too."""
    wandb_project: str = "asyncrl"
    """Project there."""
    tensorboard: bool = False
    """Write TensorBoard's event files below the run's folder too."""
    prometheus: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port where Prometheus may scrape the newest records; 0 is a free one, told in status.json;
    null is off."""
    prometheus_host: str = "127.0.0.1"
    """Address of that port. Who can reach it can read all metrics; there is no password."""
    wait_warn_s: Seconds = 10.0
    """A wait longer than this is written to the log, with whom it waits for."""
    stall_warn_s: Seconds = 60.0
    """A run that trains and makes no progress for this long says why, again at twice that."""


class RecordConfig(Section):
    """What is kept of the samples, in the run's `trajectories/`."""

    trajectories: bool = True
    """Keep every sample that reached the learner or was left out, as it was on the wire."""
    max_gib: Annotated[float, Field(gt=0)] = 4.0
    """Recording ends at this size; what came later is counted."""


class CheckpointConfig(Section):
    """What a run can go on from (docs/operations.md)."""

    every: Positive | None = 20
    """Batches from one checkpoint to the next; null makes none, so that nothing can go on."""
    keep: Positive = 2
    """How many are kept; the latest and the best always are."""
    max_gib: Annotated[float, Field(gt=0)] | None = 64.0
    """What all may take together: the oldest go first, the latest and the best stay. Null is no
    limit."""
    score: str | None = "reward/mean"
    """The learner's metric, averaged over the batches since the last checkpoint, that decides which
    is the best: the highest. Null names none the best."""
    at_end: bool = True
    """Another one when the run ends or is stopped."""
    background: bool = True
    """Write beside training; false holds training up until it is written."""


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    stop: StopConfig = StopConfig()
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    buffer: BufferConfig = BufferConfig()
    replay: ReplayConfig = ReplayConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    cluster: ClusterConfig = ClusterConfig()
    security: SecurityConfig = SecurityConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    record: RecordConfig = RecordConfig()
    trace: TraceConfig = TraceConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def groups_per_batch(self) -> int:
        """G: groups that one optimizer batch consumes."""
        return self.learner.batch_size // self.rollout.group_size

    @property
    def replay_groups(self) -> int:
        """R: groups that one optimizer batch trains again, on top of its G fresh ones."""
        return round(self.replay.fraction * self.groups_per_batch)

    @property
    def last_version(self) -> int:
        """v of a finished run's last publication: one every n batches, and one at the end."""
        return -(-self.run.steps // self.learner.batches_per_publication)

    @property
    def max_model_len(self) -> int:
        """Context length of the engine, in tokens."""
        return self.engine.max_model_len or (
            self.rollout.max_prompt_tokens + self.rollout.max_new_tokens
        )
