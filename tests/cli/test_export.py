"""`asyncrl export` as a user runs it."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from asyncrl import checkpoints
from asyncrl.__main__ import main
from asyncrl.checkpoints import Meta
from asyncrl.cli.export import _model_folder
from tests.cli.test_cli import HEAVY, assert_runs
from tests.helpers.tiny_model import save_tiny_model


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder that has ended, with a final model in float32 and a tokenizer."""
    folder = tmp_path / "runs" / "tiny-1"
    final = save_tiny_model(folder / "checkpoints" / "final", "qwen3", tied=True)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(final)
    (folder / "config.yaml").write_text("")
    (folder / "summary.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        ("tiny-1", "bfloat16"),
        ("latest", None),
        ("runs/tiny-1", "float32"),
        ("runs/tiny-1/checkpoints/final", "bfloat16"),
    ],
)
def test_the_copy_is_the_model(
    run: Path, tmp_path: Path, source: str, dtype: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    args = ["export", source, "out/model", *(["--dtype", dtype] if dtype else [])]
    assert main(args) == 0
    written = dtype or "float32"
    out, err = capfd.readouterr()
    assert out.strip().endswith(f"checkpoints/final in {written}")
    assert err == ""
    want = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "final").state_dict()
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "out/model", dtype="auto")
    assert got.dtype == getattr(torch, written)
    assert got.lm_head.weight is got.model.embed_tokens.weight
    for name, value in got.state_dict().items():
        assert torch.equal(value, want[name].to(value.dtype)), name
    assert AutoTokenizer.from_pretrained(tmp_path / "out/model").encode("b") == [1]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model"]


def test_a_checkpoint_is_named_behind_its_run(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for step, score in ((10, 0.9), (20, 0.1)):
        folder = checkpoints.partial(run, step, 0)
        folder.mkdir()
        meta = Meta(step=step, version=step, incarnation=0, world=1, run_id="r", score=score)
        checkpoints.seal(folder, meta)
    found = {
        source: _model_folder(source, "runs").name
        for source in ("tiny-1", "tiny-1@best", "tiny-1@20", "latest@latest",
                       "runs/tiny-1/checkpoints/best")
    }  # fmt: skip
    assert list(found.values()) == ["final", "step-000010", "step-000020", "step-000020", "best"]
    _without_model(run)
    assert _model_folder("tiny-1", "runs").name == "step-000020"
    assert main(["export", "tiny-1@7", "out"]) == 2
    assert "has no checkpoint 7, it has those of steps 10, 20: name" in capfd.readouterr().err


def test_an_empty_folder_may_be_there(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert main(["export", "tiny-1", "out"]) == 0
    assert (tmp_path / "out" / "config.json").exists()


def _unfinished(run: Path) -> None:
    (run / "summary.json").unlink()
    (run / "checkpoints" / "final").rename(run / "checkpoints" / "final.partial")


def _without_model(run: Path) -> None:
    (run / "checkpoints" / "final").rename(run / "elsewhere")


def _not_saved(run: Path) -> None:
    _without_model(run)
    (run / "summary.json").write_text('{"ended": "finished", "reason": "", "steps": 3}')
    (run / "config.yaml").write_text("learner:\n  save_final: false  # override\n")


def _not_trained(run: Path) -> None:
    _without_model(run)
    (run / "summary.json").write_text('{"ended": "failed", "reason": "buffer-0: no", "steps": 0}')


def _died(run: Path) -> None:
    _without_model(run)
    (run / "summary.json").write_text('{"ended": "killed", "reason": "", "steps": 2}')
    (run / "config.yaml").write_text("learner:\n  save_final: true\n")


def _half(run: Path) -> None:
    (run / "checkpoints" / "final" / "model.safetensors").write_bytes(b"half")


def _taken(run: Path) -> None:
    Path("out").mkdir()
    Path("out/notes.txt").write_text("mine")


def _taken_by_a_file(run: Path) -> None:
    Path("out").write_text("mine")


@pytest.mark.parametrize(
    ("change", "source", "expected"),
    [
        (_unfinished, "tiny-1", "run runs/tiny-1 has not finished"),
        (_without_model, "tiny-1", "run runs/tiny-1 has no final model"),
        (
            _not_saved, "tiny-1",
            "run runs/tiny-1 keeps no final model, it has learner.save_final=false: launch again "
            "with learner.save_final=true",
        ),
        (
            _not_trained, "tiny-1",
            "run runs/tiny-1 has no final model, no step was trained (buffer-0: no)",
        ),
        (
            _died, "tiny-1",
            "run runs/tiny-1 has no final model, it ended before that was written (killed)",
        ),
        (_half, "tiny-1", "cannot load a causal language model from runs/tiny-1/checkpoints/final"),
        (_taken, "tiny-1", "out exists and is not an empty folder"),
        (_taken_by_a_file, "tiny-1", "out exists and is not an empty folder"),
        (lambda run: None, "tiny-2", "no run tiny-2: neither a run's folder nor a name in runs"),
        (lambda run: None, "r" * 300, f"no run {'r' * 300}: File name too long"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_one_line_and_code_2(
    run: Path, change, source: str, expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    change(run)
    before = sorted(p for p in Path().rglob("*"))
    assert main(["export", source, "out"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"error: {expected}")
    assert len(err.splitlines()) == 1
    assert sorted(p for p in Path().rglob("*")) == before


TOO_LONG = "o" * 500


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        ("notes.txt/model", "notes.txt/model cannot be written (File exists): name a folder"),
        ("notes.txt/a/model", "notes.txt/a/model cannot be written (Not a directory): name a"),
        ("/proc/model", "/proc/model cannot be written (No such file or directory): name a folder"),
        (TOO_LONG, f"{TOO_LONG} cannot be written (File name too long): name a folder"),
    ],
)
def test_a_folder_that_cannot_be_written_is_named_with_the_reason(
    run: Path, tmp_path: Path, out: str, expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    assert main(["export", "tiny-1", out]) == 2
    err = capfd.readouterr().err
    assert err.startswith(f"error: {expected}")
    assert len(err.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_what_lies_beside_is_left_alone(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that a killed run left, exported to the name that it was meant to have."""
    source = Path("m.partial")
    (run / "checkpoints" / "final").rename(source)
    (source / "notes.txt").write_text("mine")
    before = {p.name: p.read_bytes() for p in source.iterdir()}
    assert main(["export", str(source), "m"]) == 0
    assert {p.name: p.read_bytes() for p in source.iterdir()} == before
    assert {"config.json", "tokenizer_config.json"} <= {p.name for p in Path("m").iterdir()}
    assert not [p for p in Path().iterdir() if p.name.startswith(".export-")]
    capfd.readouterr()
    assert main(["export", str(source), str(source / "copy")]) == 2
    assert "lies within" in capfd.readouterr().err


def test_a_link_to_an_empty_folder_may_be_written_through(run: Path) -> None:
    Path("big-disk").mkdir()
    Path("out").symlink_to("big-disk")
    assert main(["export", "tiny-1", "out"]) == 0
    assert (Path("big-disk") / "config.json").exists()


def test_a_full_disk_wants_room(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out.partial/model.safetensors")

    monkeypatch.setattr("asyncrl.learner.policy.export.write_hf", fail)
    assert main(["export", "tiny-1", "out"]) == 2
    expected = "error: out cannot be written (No space left on device): make room\n"
    assert capfd.readouterr().err == expected


def test_a_write_that_fails_half_way_is_told(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, old[1]))
    try:
        assert main(["export", "tiny-1", "out"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    err = capfd.readouterr().err
    assert err.startswith("error: out cannot be written (")
    assert "File too large" in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.glob("out*"))


def test_an_unknown_type_is_refused(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "tiny-1", "out", "--dtype", "int4"]) == 2
    assert "int4" in capfd.readouterr().err


def test_errors_and_help_come_without_loading_torch(run: Path) -> None:
    _without_model(run)
    code = (
        "import sys, asyncrl.__main__ as m\n"
        "assert m.main(['export', '--help']) == 0\n"
        "assert m.main(['export', 'tiny-1', 'out']) == 2\n"
        f"heavy = [n for n in {HEAVY!r} if n in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    assert_runs(code, Path.cwd())
