"""A process that writes checkpoints until it is killed; prints each step once it is on the disk.

python -m tests.helpers.checkpoint_loop RUN STEP
"""

from __future__ import annotations

import sys
from itertools import count

from asyncrl.checkpoints import Meta, clean, partial, prune, seal


def main() -> None:
    run, begin = sys.argv[1], int(sys.argv[2])
    clean(run)
    for step in count(begin):
        folder = partial(run, step, 0)
        folder.mkdir(parents=True)
        for number in range(4):
            (folder / f"{number}.distcp").write_bytes(bytes([step % 256]) * 20_000)
        seal(folder, Meta(step=step, version=step, incarnation=0, world=1, run_id="r", score=0.0))
        print(step, flush=True)
        prune(run, keep=2)


if __name__ == "__main__":
    main()
