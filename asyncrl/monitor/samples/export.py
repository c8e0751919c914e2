"""Samples as JSON lines or Parquet, for other programs; docs/monitoring.md describes the fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import MissingExtraError, UserError
from asyncrl.monitor.outputs import replacing
from asyncrl.monitor.samples.search import Sample
from asyncrl.monitor.samples.texts import Texts

SUFFIXES = (".jsonl", ".parquet")
ROWS, TOKENS = 4096, 1 << 20
"""A row group of Parquet ends with so many samples or tokens; until then it is in memory."""

FIELDS: dict[str, str] = {
    "source": "string", "epoch": "int64", "index": "int64", "sample": "int64",
    "outcome": "string", "reward": "float64", "actor": "string", "lease": "int64",
    "incarnation": "int64", "version": "int64", "batch": "int64", "rank": "int64",
    "position": "int64", "head_staleness": "int64", "time": "float64",
    "finish_reason": "string", "temperature": "float64", "kv_mixed": "bool",
    "prompt_tokens": "int64", "response_tokens": "int64", "policy_tokens": "int64",
    "version_min": "int64s", "version_max": "int64s",
    "version_dispatch": "int64s", "version_finish": "int64s",
    "prompt": "string", "response": "string",
    "prompt_ids": "int32s", "response_ids": "int32s", "behaviour_logprobs": "floats",
    "versions": "int32s", "incarnations": "int32s", "loss_mask": "uint8s",
}  # fmt: skip
"""Name and type of each field; `s` at the end of a type makes it a list."""

Row = dict[str, Any]


def check_target(out: Path) -> None:
    """Refuse a file that could not be written, before anything is searched.

    Raises:
        UserError: it is neither JSON lines nor Parquet.
        MissingExtraError: it is Parquet, and pyarrow is not installed.
    """
    if out.suffix not in SUFFIXES:
        raise UserError(f"--export {out}: its name must end in {' or '.join(SUFFIXES)}")
    if out.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as e:
            raise MissingExtraError(
                f"--export {out}: pyarrow is not installed; pip install 'asyncrl[parquet]', or "
                "write .jsonl"
            ) from e


def export(samples: Iterable[Sample], out: Path, texts: Texts) -> int:
    """Write samples one by one; the file appears when it is whole. Returns how many.

    Raises:
        UserError: there is no sample, or the file cannot be written.
    """
    writer = _jsonl if out.suffix == ".jsonl" else _parquet
    written = 0
    try:
        with replacing(out) as part:
            with writer(part) as put:
                for s in samples:
                    put(row(s, texts))
                    written += 1
            if not written:
                raise UserError(f"--export {out}: no sample matches, so that nothing is written")
    except OSError as e:
        raise UserError(f"--export {out}: cannot be written: {e.strerror or e}") from e
    return written


def row(s: Sample, texts: Texts) -> Row:
    """A sample by field; arrays as they are, versions as [incarnation, version]."""
    e, h, t = s.entry, s.trajectory.header, s.trajectory
    return {
        "source": e.id.source, "epoch": e.id.epoch, "index": e.id.index, "sample": e.id.sample,
        "outcome": e.outcome, "reward": e.reward, "actor": e.actor, "lease": e.lease,
        "incarnation": e.incarnation, "version": e.version, "batch": e.batch, "rank": e.rank,
        "position": e.position, "head_staleness": e.head_staleness, "time": e.time,
        "finish_reason": str(h.finish_reason), "temperature": h.temperature,
        "kv_mixed": h.kv_mixed, "prompt_tokens": h.prompt_tokens,
        "response_tokens": h.response_tokens, "policy_tokens": h.policy_tokens,
        "version_min": list(e.version_min), "version_max": list(e.version_max),
        "version_dispatch": list(h.version_dispatch), "version_finish": list(h.version_finish),
        "prompt": texts.prompt(t) if texts.known else None,
        "response": texts.response(t) if texts.known else None,
        "prompt_ids": t.prompt_ids, "response_ids": t.response_ids,
        "behaviour_logprobs": t.behaviour_logprobs, "versions": t.versions,
        "incarnations": t.incarnations, "loss_mask": t.loss_mask,
    }  # fmt: skip


@contextmanager
def _jsonl(path: Path) -> Iterator[Callable[[Row], None]]:
    encode = msgspec.json.Encoder(enc_hook=lambda array: array.tolist()).encode
    with open(path, "wb") as file:

        def put(fields: Row) -> None:
            file.write(encode(fields) + b"\n")

        yield put


@contextmanager
def _parquet(path: Path) -> Iterator[Callable[[Row], None]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    plain = {"string": pa.string(), "bool": pa.bool_(), "float64": pa.float64(),
             "int64": pa.int64(), "int64s": pa.list_(pa.int64()), "int32s": pa.list_(pa.int32()),
             "floats": pa.list_(pa.float32()), "uint8s": pa.list_(pa.uint8())}  # fmt: skip
    schema = pa.schema([(name, plain[kind]) for name, kind in FIELDS.items()])
    rows: list[Row] = []
    tokens = 0
    with pq.ParquetWriter(path, schema) as writer:

        def flush() -> None:
            columns = {name: [r[name] for r in rows] for name in FIELDS}
            writer.write_table(pa.table(columns, schema=schema))
            rows.clear()

        def put(fields: Row) -> None:
            nonlocal tokens
            rows.append(fields)
            tokens += fields["prompt_tokens"] + fields["response_tokens"]
            if len(rows) >= ROWS or tokens >= TOKENS:
                flush()
                tokens = 0

        yield put
        if rows:
            flush()
