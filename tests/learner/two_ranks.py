"""A process per rank: train one batch with each of some configurations, write what came of it.

python -m tests.learner.two_ranks RANK WORLD STORE MODEL OUT CONFIGS

CONFIGS is a file with a JSON list. Writes OUT.NUMBER.RANK.npz and .json for each.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from asyncrl.config.schema import Config
from asyncrl.types import Version
from tests.learner.trained import capture, partition_batch


def main() -> None:
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    store, model, out = sys.argv[3:6]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    try:
        for k, settings in enumerate(json.loads(Path(sys.argv[6]).read_text())):
            config = Config.model_validate_json(json.dumps(settings))
            captured = capture(config, Path(model), partition_batch(), rank, world, Version(0, 2))
            np.savez(f"{out}.{k}.{rank}.npz", **captured.arrays)
            Path(f"{out}.{k}.{rank}.json").write_text(json.dumps(captured.metrics))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
