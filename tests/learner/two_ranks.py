"""A process per rank: train one batch with each of some configurations, write what came of it.

Arguments: RANK STORE MODEL OUT CONFIGS

CONFIGS is a file with a JSON list. Writes OUT.NUMBER.RANK.npz and .json for each.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.types import Version
from tests.helpers.ranks import rank_of_two
from tests.learner.trained import capture, partition_batch


def main() -> None:
    with rank_of_two() as (rank, (model, out, configs)):
        for k, settings in enumerate(json.loads(Path(configs).read_text())):
            config = Config.model_validate_json(json.dumps(settings))
            captured = capture(config, Path(model), partition_batch(), rank, 2, Version(0, 2))
            np.savez(f"{out}.{k}.{rank}.npz", **captured.arrays)
            Path(f"{out}.{k}.{rank}.json").write_text(json.dumps(captured.metrics))
