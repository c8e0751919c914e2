"""The policy: a Hugging Face causal LM, sharded by FSDP2, in float32 with a faster compute type."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.errors import ModelError
from asyncrl.learner.attention import NAME

_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
_TOKENIZER_FILE = "tokenizer_config.json"


class Policy:
    """The model being trained. All methods are collective: every rank calls them alike.

    Args:
        path: folder of the Hugging Face model.
        world: ranks that share its shards; their process group must stand.
        device: where this rank computes.
        dtype: compute type of forward and backward; weights and gradients are float32.
        gradient_checkpointing: recompute each decoder layer in the backward pass.
        trust_remote_code: run code that the folder ships.

    Raises:
        ModelError: no model there, or one that cannot be packed.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        world: int,
        device: torch.device,
        dtype: torch.dtype,
        gradient_checkpointing: bool = False,
        trust_remote_code: bool = False,
    ):
        self.path = Path(path)
        self.trust_remote_code = trust_remote_code
        self.module: Any = _load(self.path, trust_remote_code)
        if gradient_checkpointing:
            _checkpoint_layers(self.module)
        _shard(self.module, world, device, dtype)

    def full_parameters(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Each parameter whole, with its Hugging Face name, in `dtype`; tied ones once.

        A collective per parameter: every rank must iterate to the end. A tensor may share memory
        with the parameter: copy what must outlive the next step.
        """
        for name, parameter in self.module.named_parameters():
            value = parameter.detach().to(dtype)
            yield name, value.full_tensor() if isinstance(value, DTensor) else value

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and full shape of each parameter, in the order of `full_parameters`."""
        return {name: tuple(p.shape) for name, p in self.module.named_parameters()}

    def save_hf(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write an ordinary Hugging Face folder, with the tokenizer; rank 0 writes.

        Under a temporary name beside it, renamed when whole: `folder` never is half a model.

        Raises:
            OSError: the disk failed, or `folder` exists and is not empty.
        """
        write = dist.get_rank() == 0
        state = {}
        for name, value in self.full_parameters(dtype):
            if write:
                state[name] = value.cpu()
        if write:
            folder = Path(folder)
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
            self._write(partial, state, dtype)
            partial.rename(folder)

    def _write(self, folder: Path, state: dict[str, Tensor], dtype: torch.dtype) -> None:
        config = AutoConfig.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)
        with torch.device("meta"):  # an unsharded skeleton knows how to save
            skeleton = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=self.trust_remote_code
            )
        skeleton.generation_config = self.module.generation_config
        skeleton.save_pretrained(folder, state_dict=state)
        if (self.path / _TOKENIZER_FILE).exists():
            tokenizer = AutoTokenizer.from_pretrained(
                self.path, trust_remote_code=self.trust_remote_code
            )
            tokenizer.save_pretrained(folder)

    def reshard(self) -> None:
        """Put the float32 shards back in the place of gathered copies, as a backward pass does."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _load(path: Path, trust_remote_code: bool) -> Any:
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        _check_config(config, path)
        model = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            attn_implementation=NAME,
            trust_remote_code=trust_remote_code,
        )
    except ModelError:
        raise
    except (OSError, ValueError) as e:
        raise ModelError(f"cannot load a causal language model from {path}: {e}") from e
    if not model._supports_attention_backend or getattr(model, "_is_stateful", False):
        raise ModelError(
            f"{type(model).__name__} ({path}) computes its attention in its own way, so sequences "
            "cannot be packed: use a model that supports transformers' attention interface"
        )
    # Dropout would make the engine's policy and the learner's differ: no module is in training
    # mode, whatever its rate.
    return model.eval()


def _check_config(config: Any, path: Path) -> None:
    odd = set(getattr(config, "layer_types", None) or ()) - _SUPPORTED_LAYERS
    if odd:
        raise ModelError(
            f"{path} has layers of type {', '.join(sorted(odd))}, which would mix packed "
            f"sequences: only {', '.join(sorted(_SUPPORTED_LAYERS))} are supported"
        )


def _checkpoint_layers(model: Any) -> None:
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"{type(model).__name__} does not support gradient checkpointing: "
            "set learner.gradient_checkpointing=false"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # the flag it looks at; its children stay in eval mode


def _shard(model: Any, world: int, device: torch.device, dtype: torch.dtype) -> None:
    mesh = init_device_mesh(device.type, (world,))
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        # One rank holds everything anyway: casting again in the backward pass saves nothing.
        "reshard_after_forward": world > 1,
    }
    for layer in _decoder_layers(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)


def _decoder_layers(model: Any) -> list[nn.Module]:
    names = set(model._no_split_modules or ())
    return [m for m in model.modules() if type(m).__name__ in names]
