"""The checkpoints of a run: one folder each, whole or not there.

    write into .step-000010.i0.tmp ─► meta.json ─► fsync of every file ─► rename ─► step-000010
                                                                            └─► latest, best

What is half written has a name that nobody reads, and is removed when a learner starts again
(`clean`). The newest checkpoint is that of the highest incarnation, and in it of the highest step:
a run that went back to an older one may have left some of higher steps behind.
"""

from __future__ import annotations

from asyncrl.checkpoints.reading import (
    FOLDER,
    LEDGER,
    META,
    Checkpoint,
    Meta,
    ResumePoint,
    best,
    find,
    latest,
    list_checkpoints,
    read,
    verify,
)
from asyncrl.checkpoints.writing import clean, partial, prune, seal

__all__ = [
    "FOLDER",
    "LEDGER",
    "META",
    "Checkpoint",
    "Meta",
    "ResumePoint",
    "best",
    "clean",
    "find",
    "latest",
    "list_checkpoints",
    "partial",
    "prune",
    "read",
    "seal",
    "verify",
]
