"""The `learner` section: optimisation, loss, corrections, advantages. Loads no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.config.section import Decay, Dtype, NonNegative, Positive, Section


class OptimConfig(Section):
    """AdamW."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the first and the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay, on matrices only."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine would reach 0 with the batch after `run.steps`."""
    warmup_steps: NonNegative = 0
    """Linear warm-up, in optimizer batches."""
    grad_clip: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global gradient norm; null turns clipping off."""
    ess_ref: Annotated[float, Field(gt=0, le=1)] | None = None
    """VCPO: lr times sqrt(ESS share of the batch / this), at most lr; null is off."""


class LossConfig(Section):
    """The policy loss: r = pi_theta/pi_prox, rho = pi_theta/mu (docs/corrections.md)."""

    policy: Literal["ppo", "gspo", "cispo", "aipo", "topr", "dppo-tv", "dppo-kl", "reinforce"] = (
        "ppo"
    )
    """ppo, gspo and cispo clip r; aipo, topr and dppo weigh by rho themselves; reinforce has no
    ratio."""
    clip_low: Annotated[float, Field(gt=0)] | None = None
    """e: lower bound; default: .2, gspo 3e-4, cispo 1. dppo: divergence where A < 0."""
    clip_high: Annotated[float, Field(gt=0)] | None = None
    """e_hi: upper bound; default: .2, gspo 4e-4, cispo 4. dppo: divergence where A > 0."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """ppo: c, bounds the loss of negative advantages; 3 is usual, null is off."""
    cap: Annotated[float, Field(gt=0)] | None = None
    """aipo: C, upper bound of rho; default: 2."""
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"
    ] = "token-mean"
    """How token losses are averaged, over the whole batch."""
    norm_tokens: Positive | None = None
    """seq-mean-token-sum-norm: the constant length; default: rollout.max_new_tokens."""
    denominator: Literal["original", "kept"] = "original"
    """kept: tokens that a mask rejects leave the denominator too, so the others weigh more."""
    entropy: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the entropy bonus."""

    @property
    def clips(self) -> tuple[float, float]:
        """(e, e_hi) in effect; (0.0, 0.0) for a loss without."""
        low, high = DEFAULT_CLIPS.get(self.policy, (0.0, 0.0))
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )


DEFAULT_CLIPS = {
    "ppo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0),
    "dppo-tv": (0.2, 0.2), "dppo-kl": (0.2, 0.2),
}  # fmt: skip
"""(e, e_hi) where the configuration says null, by `learner.loss.policy`."""
DEFAULT_CAP = 2.0
"""C of aipo where `learner.loss.cap` is null."""


class CorrectionConfig(Section):
    """What is made of the behaviour weight w = pi_prox/mu (docs/corrections.md)."""

    prox: Literal["recompute", "interpolate", "behaviour"] = "recompute"
    """pi_prox: the policy before the update; interpolated by version between mu and theta, without
    a forward pass; or mu itself (w = 1: PPO that ignores staleness)."""
    level: Literal["off", "token", "sequence-product", "sequence-geometric"] = "token"
    """w of a token, of its sequence as a product (collapses with length), or as a geometric
    mean."""
    action: Literal["truncate", "mask", "none"] = "truncate"
    """truncate: min(w, high); mask: w within [low, high], else 0; none: w as it is."""
    low: Annotated[float, Field(ge=0)] | None = None
    """mask: a; default: .5, sequence-geometric .99."""
    high: Annotated[float, Field(gt=0)] | None = None
    """truncate: C, default 2; mask: b, default 5, sequence-geometric 1.01."""
    m2po: Annotated[float, Field(gt=0)] | None = None
    """tau: mask the tokens that deviate most until the batch's mean (log pi/mu)^2, pi the policy
    before the update, is at most this (.04 is usual); null is off."""
    opsm: Annotated[float, Field(ge=0)] | None = None
    """delta: mask a sequence with A < 0 whose mean log(mu/pi_theta) is over this (1e-4 is usual);
    null is off."""

    @property
    def bounds(self) -> tuple[float, float]:
        """(a, b) in effect: w is truncated at b, or masked outside [a, b]."""
        geometric = self.level == "sequence-geometric"
        mask = self.action == "mask"
        low = (0.99 if geometric else 0.5) if self.low is None else self.low
        high = (1.01 if geometric else 5.0) if mask else 2.0
        return low if mask else 0.0, high if self.high is None else self.high


class AdvantageConfig(Section):
    """From rewards to advantages."""

    estimator: Literal["grpo", "dr_grpo", "rloo", "reinforce++", "gae", "vtrace"] = "grpo"
    """Relative to the group: with its std, without it, leave-one-out; of tokens: returns whitened
    over the batch; with a critic: GAE or V-trace."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """reinforce++, gae, vtrace: discount per policy token."""
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    """gae, vtrace: lambda."""
    rho_bar: Annotated[float, Field(gt=0)] = 1.0
    """vtrace: bound of rho in the temporal difference."""
    c_bar: Annotated[float, Field(gt=0)] = 1.0
    """vtrace: bound of the trace coefficients."""
    rho_bar_pg: Annotated[float, Field(gt=0)] = 1.0
    """vtrace: bound of rho in the policy gradient."""
    whiten: bool = False
    """gae, vtrace: mean 0 and std 1 over the batch's tokens (reinforce++ always does)."""

    @property
    def relative(self) -> bool:
        """Whether samples of a group are compared: one advantage a sample."""
        return self.estimator in ("grpo", "dr_grpo", "rloo")

    @property
    def critic(self) -> bool:
        """Whether there is a value function."""
        return self.estimator in ("gae", "vtrace")


class CriticConfig(Section):
    """The value function of gae and vtrace."""

    trunk: Literal["shared", "own"] = "shared"
    """shared: a head on the policy's last hidden state; own: a second model of the same weights."""
    coefficient: Annotated[float, Field(gt=0)] = 0.5
    """Of the value loss, half the mean squared error."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """A value moves at most so far from the one before the update; null is off."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Learning rate of the value head, or of the own model; default: learner.optim.lr."""
    warmup_steps: NonNegative = 0
    """First batches that train the critic alone."""


class KLConfig(Section):
    """KL to the reference: the model that the run started from, frozen."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """0 is off; no reference is held then."""
    estimator: Literal["k1", "k2", "k3", "k3-unbiased"] = "k3"
    """d = log pi_theta/pi_ref: d; d^2/2; exp(-d) - 1 + d; that times rho."""
    apply: Literal["loss", "reward"] = "loss"
    """Added to the loss, or taken from each token's reward (reinforce++, gae, vtrace)."""
    clamp: Annotated[float, Field(gt=0)] | None = None
    """Largest absolute value of a token's estimate; null is off."""

    @property
    def in_loss(self) -> bool:
        """Whether it is a term of the loss."""
        return self.coefficient > 0 and self.apply == "loss"

    @property
    def in_reward(self) -> bool:
        """Whether it is taken from rewards."""
        return self.coefficient > 0 and self.apply == "reward"


class ShapingConfig(Section):
    """What is done to rewards before advantages; `reward/mean` stays the task's own."""

    overlong_tokens: Positive | None = None
    """The last so many tokens below rollout.max_new_tokens are penalised, linearly; null is
    off."""
    overlong_penalty: Annotated[float, Field(gt=0)] = 1.0
    """What a response of full length loses."""
    length_normalise: bool = False
    """Divide each reward by its response's length over the mean length of its group."""
    function: str | None = None
    """The user's `module:function` of (SampleHeader, reward), which returns the reward."""


class LoraConfig(Section):
    """Train low-rank adapters instead of the weights; where they can, they travel alone."""

    rank: Positive | None = None
    """Null trains all weights."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Adapters are scaled by alpha/rank; default: 2 rank."""
    targets: tuple[str, ...] | None = None
    """Names of the linear layers, such as q_proj; default: all but the head."""


class LearnerConfig(Section):
    """Training."""

    batch_size: Positive = 64
    """Samples per optimizer batch: a multiple of rollout.group_size."""
    batches_per_publication: Positive = 1
    """n: optimizer batches per weight publication."""
    epochs: Positive = 1
    """Passes over each batch."""
    minibatches: Positive = 1
    """Optimizer steps of a pass, each over so many whole groups; prox is the policy before the
    first."""
    max_tokens_per_microbatch: Positive = 8192
    """Tokens in one forward pass of one rank."""
    dtype: Dtype = "bfloat16"
    """Type of the forward and backward passes; weights and optimizer are kept in float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    cpu_offload: bool = False
    """GPU only: weights, gradients and moments stay in host memory between uses."""
    compile: bool = False
    """torch.compile the decoder layers: a slow first step, faster ones after it."""
    attention: Literal["auto", "sdpa", "flash"] = "auto"
    """auto: flash on a GPU that has it (bfloat16), else torch's attention segment by segment."""
    share_prompt: bool = True
    """Compute a group's common prompt once; exact, and much cheaper for long prompts."""
    threads: Positive | None = None
    """CPU only: threads per rank; default: cores / (actors + learners), at least 1."""
    save_final: bool = True
    """Write the trained model as a Hugging Face folder at the end."""
    optim: OptimConfig = OptimConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    correction: CorrectionConfig = CorrectionConfig()
    loss: LossConfig = LossConfig()
    kl: KLConfig = KLConfig()
    shaping: ShapingConfig = ShapingConfig()
    critic: CriticConfig = CriticConfig()
    lora: LoraConfig = LoraConfig()

    @property
    def updates(self) -> int:
        """Optimizer steps over one batch."""
        return self.epochs * self.minibatches

    @property
    def first_pass_for(self) -> tuple[str, ...]:
        """Settings, below `learner`, that need a pass over the batch before its first update.

        What they need to know of the policy before the update would else not be known.
        """
        asked = {
            "correction.prox": self.correction.prox == "recompute" and self.updates > 1,
            "correction.m2po": self.correction.m2po is not None,
            "optim.ess_ref": self.optim.ess_ref is not None,
            "loss.denominator": self.loss.denominator == "kept",
            "advantage.estimator": self.advantage.critic,
            "kl.apply": self.kl.in_reward,
        }
        return tuple(key for key, needed in asked.items() if needed)
