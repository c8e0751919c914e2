"""The NCCL path: vLLM's own engines. Without a GPU, that what we use of them exists."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest
import torch

from asyncrl.learner.publication.round import nccl_init_info
from asyncrl.types import Version
from asyncrl.weights import ParamSpec, TransferPlan
from tests.helpers.engines import hf_logprobs, metadata, tiny_model


def test_vllm_has_what_the_nccl_path_uses() -> None:
    from vllm.distributed.weight_transfer import (
        VLLMWeightSyncClient,
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerWeightTransferEngine,
        NCCLWeightTransferEngine,
        NCCLWeightTransferUpdateInfo,
    )

    from asyncrl.learner.publication.weight_fleet import FleetClient

    info = nccl_init_info("127.0.0.1", 3)
    assert (info.backend, info.world_size, info.is_sender) == ("nccl", 3, True)
    assert WeightTransferTrainerFactory._registry["nccl"]() is NCCLTrainerWeightTransferEngine
    assert WeightTransferEngineFactory._registry["nccl"]() is NCCLWeightTransferEngine
    client = FleetClient([])
    assert isinstance(client, VLLMWeightSyncClient)
    client.close()
    # Our actors read the size of a publication from the fields of vLLM's update info.
    plan = TransferPlan((ParamSpec("w", "bfloat16", (2, 3)),))
    update = dataclasses.asdict(NCCLWeightTransferUpdateInfo(**plan.to_info()))
    assert TransferPlan.from_info(update) == plan
    assert {"client", "source"} <= inspect.signature(
        NCCLTrainerWeightTransferEngine.trainer_init
    ).parameters.keys()


def test_gloo_and_nccl_sources_agree_with_their_metadata() -> None:
    from asyncrl.learner.layout import Layout
    from asyncrl.learner.publication.gloo_sender import SnapshotSource
    from asyncrl.learner.publication.snapshot import Snapshot

    model = tiny_model("llama", tied=False)
    snapshot = Snapshot(Layout.whole(metadata(model)))
    snapshot.fill(model.named_parameters())
    source = SnapshotSource(snapshot, torch.device("cpu"))
    for meta, (name, tensor), (_, p) in zip(
        source.metadata(), source, model.named_parameters(), strict=True
    ):
        assert (meta.name, meta.dtype, meta.shape) == (name, tensor.dtype, tuple(tensor.shape))
        torch.testing.assert_close(tensor, p.detach(), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("tied", [True, False])
def test_publication_over_nccl(tied: bool, tmp_path: Path) -> None:
    """The engine takes GPU 0, the learner speaks from GPU 1."""
    from tests.helpers.engines import EngineHost, engine_config, publisher, save_model

    model = tiny_model("llama", tied=tied, seed=1).to(torch.bfloat16)
    path = save_model(tiny_model("llama", tied=tied).to(torch.bfloat16), tmp_path)
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    config = engine_config(dtype="bfloat16", gpu_memory_utilization=0.3)
    with EngineHost(config, path, device="cuda", weight_backend="nccl") as host:
        pub = publisher([host], lambda: model, backend="nccl", device=device)
        pub.publish(Version(0, 1))
        pub.wait()
        assert pub.take_events() == []
        g = host.generate("after", (5, 6, 7), 16)
        assert set(g.versions.tolist()) == {1}
        expected = hf_logprobs(model.float(), [5, 6, 7], g.response_ids.tolist())
        assert (torch.tensor(g.logprobs) - expected).abs().mean() < 0.1
        pub.close()
