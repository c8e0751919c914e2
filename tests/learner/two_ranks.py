"""Run by test_step.py as a process per rank: train one batch, write what came of it.

python -m tests.learner.two_ranks RANK WORLD STORE MODEL OUT CONFIG_JSON [SEED]
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
        config = Config.model_validate_json(sys.argv[6])
        captured = capture(config, Path(model), partition_batch(), rank, world, Version(0, 2))
    finally:
        dist.destroy_process_group()
    np.savez(f"{out}.{rank}.npz", **captured.arrays)
    Path(f"{out}.{rank}.json").write_text(json.dumps(captured.metrics))


if __name__ == "__main__":
    main()
