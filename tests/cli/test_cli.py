# ruff: noqa: E501  (tables of messages read best one case a line)
"""The command line: what it prints, its exit codes, and that it is quick and quiet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import asyncrl.launch
from asyncrl.__main__ import main
from asyncrl.config.sources import shipped
from asyncrl.errors import DeadlineError
from asyncrl.launch.placement import machine

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "ray", "vllm")


def command(*args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the real command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "asyncrl", *args], cwd=cwd, capture_output=True, text=True,
        timeout=120, check=False, env=os.environ | {"PYTHONPATH": str(ROOT), **env},
    )  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model of 128 positions (the checks read no weights)."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 128}')
    (folder / "model.safetensors").write_bytes(b"x")
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


SMALL = ("rollout.max_prompt_tokens=64", "rollout.max_new_tokens=16")


def dry_run(model: Path, *args: str) -> int:
    return main(["launch", "--dry-run", "--config", "tiny", f"model.name={model}", *SMALL, *args])


BAD = [
    (["launch", "learner.bath_size=8"], "error: learner.bath_size (override): unknown key; did you mean learner.batch_size?"),
    (["launch", "run.steps=many"], "error: run.steps=many (override): expected a whole number, got text"),
    (["launch", "--dry-run", "model.name=./nowhere"], "error: model.name=./nowhere: no such folder"),
    (["launch", "-c", "missing.yaml"], "error: --config missing.yaml: no such file in "),
    (["launch", "--actors", "0"], "error: cluster.actors=0 (--actors): must be greater than 0"),
    (["launch", "--dry-run", 'run.name="a\\tb"'], "error: run.name='a\\tb' holds a character that is not printable"),
    (["launch", "--dry-run", "run.dir="], "error: run.dir"),
    (["launch", "--dry-run", f"run.dir={'a' * 300}"], "File name too long"),
    (["launch", "-c", "~nobody-of-that-name/x.yaml"], "write the folder out"),
    (["launch", "-c", "gsm8k-1node"], "error: task.path is not set"),
    (["launch", "-c", "tiny", "-c", "correction/icepopp"], "error: --config correction/icepopp: no shipped configuration of that name, nor a file (did you mean correction/icepop?)"),
    (["config", "show", "-c", "tiny", "-c", "correction/topr", "learner.correction.level=token"], "would count mu twice"),
    (["launch", "-c", "math-2node", "task.path=x"], "error: cluster.device=cuda: there is no NVIDIA GPU on this machine; set cluster.device=cpu or cluster.address"),
    (["launch", "--dry-run", "engine.threads=99999"], "error: engine.threads=99999 is more than 4 times this machine's "),
    (["launch", "--dry-run", "learner.threads=99999"], "error: learner.threads=99999 is more than 4 times this machine's "),
    (["launch", "--dry-run", "engine.kv_cache_gib=99999"], "error: engine.kv_cache_gib=99999 x cluster.actors=1 = 1e+05 GiB is more than this machine's memory ("),
    (["launch", "--dry-run", "--actors", "4096", "learner.batch_size=64"], "error: engine.kv_cache_gib=0.5 x cluster.actors=4096 = 2048 GiB is more than this machine's memory ("),
    (["launch", "--frobnicate"], "No such option: --frobnicate"),
    (["lanch"], "No such command 'lanch'"),
    (["model", "fetch", "smolm2-135m"], "did you mean smollm2-135m?"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "expected"), BAD)
def test_bad_input_ends_with_one_message_and_code_2(
    args: list[str], expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    out, err = capfd.readouterr()
    assert expected in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize(("args", "expected"), [BAD[0], BAD[3], BAD[5]])
def test_bad_input_through_the_real_command(args: list[str], expected: str, tmp_path: Path) -> None:
    done = command(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) <= 4
    assert "Traceback" not in done.stderr


def test_traceback_on_request(tmp_path: Path) -> None:
    done = command("launch", "run.steps=x", cwd=tmp_path, ASYNCRL_TRACEBACK="1")
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "asyncrl.errors.ConfigError" in done.stderr


def assert_runs(code: str, folder: Path) -> str:
    """Run Python code in a fresh interpreter: it must end well. Returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120,
        check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "args", [["--help"], ["launch", "--help"], ["config", "list"], ["version"]]
)
def test_light_commands_load_nothing_heavy(args: list[str], tmp_path: Path) -> None:
    code = (
        "import sys, asyncrl.__main__ as m\n"
        f"assert m.main({args!r}) == 0\n"
        f"heavy = [n for n in {HEAVY!r} if n in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    assert_runs(code, tmp_path)


def test_importing_the_commands_loads_only_what_help_needs(tmp_path: Path) -> None:
    """`asyncrl --help` within 0.3 s: what takes long to import waits for the command."""
    heavy = (*HEAVY, "numpy", "tokenizers", "huggingface_hub", "zmq", "httpx", "psutil", "wandb")
    code = (
        "import sys, asyncrl.cli\n"
        f"heavy = [n for n in {heavy!r} if n in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    assert_runs(code, tmp_path)


def test_dry_run_loads_nothing_heavy_and_starts_nothing(model: Path, tmp_path: Path) -> None:
    code = (
        "import sys, asyncrl.__main__ as m\n"
        f"assert m.main(['launch', '--dry-run', '-c', 'tiny', 'model.name={model}']) == 0\n"
        f"assert not [n for n in {HEAVY!r} if n in sys.modules]\n"
    )
    assert_runs(code, tmp_path)
    assert not (tmp_path / "runs").exists()


def test_dry_run_shows_the_plan(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(model, "--actors", "2", "--run-name", "first", "buffer.max_staleness=1") == 0
    out = capfd.readouterr().out
    for expected in (
        "config     tiny",
        "(llama), uses 80 of 128 tokens of context",
        "even_digits: 224 prompts an epoch, 32 held out, reward even_digits",
        "30 batches of 32 samples = 4 groups of 8",
        "S = 1, W = 1: up to 8 groups (64 samples) ahead of training",
        "up to 64 samples (2 actors x 32)",
        str(tmp_path / "runs" / "first"),
        "actor-1    cpu     1",
        "learner-0  cpu     1",
    ):
        assert expected in out


def test_dry_run_says_what_ends_the_run(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert dry_run(model) == 0
    out = capfd.readouterr().out
    assert (
        "ends       after 30 batches\n           or early: 3 batches in a row without a finite loss\n"
        in out
    )
    ends = ("stop.wall_s=600", "stop.epochs=2", "stop.reward=.75", "stop.nonfinite_losses=null",
            "buffer.filter_zero_variance=true")  # fmt: skip
    assert dry_run(model, *ends) == 0
    out = capfd.readouterr().out
    assert (
        "after 30 batches, or after 600 s, or after 2 epochs (56.0 batches each), or when the mean "
        "reward of 10 batches reaches 0.75\n           or early: 64 groups in a row left out"
    ) in out


def test_dry_run_says_what_stays_on_the_disk(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "r" / "checkpoints"
    weights = {"a": np.zeros((1 << 10, 1 << 10), np.float16), "b": np.zeros(1 << 20, np.float16)}
    save_file(weights, model / "model.safetensors")
    assert dry_run(model, "--run-name", "r") == 0
    assert (
        "checkpoint every 20 batches and at the end; kept: the last 2 and the best, up to 64 GiB in all\n"
        f"           in {folder}, each about 24 MiB of weights and moments, and what the buffer holds\n"
        "replay     none (replay.fraction=0)\n"
        "recording  every sample, up to 4 GiB (asyncrl samples, asyncrl replay)\n"
    ) in capfd.readouterr().out
    little = ("checkpoint.every=1", "checkpoint.keep=1", "checkpoint.max_gib=null", "replay.fraction=0.5",
              "checkpoint.score=null", "checkpoint.at_end=false", "record.trajectories=false")  # fmt: skip
    (model / "model.safetensors").write_bytes(b"x")
    assert dry_run(model, "--run-name", "r", *little) == 0
    assert (
        "checkpoint every batch; kept: the last one, no limit\n"
        f"           in {folder}, and what the buffer holds\n"
        "replay     up to 2 groups again with each batch, at most 4 versions stale; asyncrl replay refuses such a run\n"
        "recording  none (record.trajectories=false): nothing for asyncrl samples and asyncrl replay\n"
    ) in capfd.readouterr().out
    assert dry_run(model, "checkpoint.every=null") == 0
    assert (
        "checkpoint none (checkpoint.every=null): the run cannot be resumed, and"
        in capfd.readouterr().out
    )


def test_dry_run_shows_named_gpus(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    args = ["cluster.placement=explicit", "engine.tensor_parallel=2", "engine.kv_cache_gib=null",
            'cluster.actor_places=["local:1,2"]', "cluster.learner_places=[local:0]"]  # fmt: skip
    assert dry_run(model, *args) == 0
    rows = [line.split() for line in capfd.readouterr().out.splitlines()[-3:]]
    assert rows == [
        ["buffer-0", "cpu", "1"], ["actor-0", "gpu", "1,2", "-"], ["learner-0", "gpu", "0", "-"]
    ]  # fmt: skip
    assert dry_run(model, *args, "cluster.learner_places=[local:3]") == 2
    assert "cluster.learner_places: local has no GPU 3 (for learner-0)" in capfd.readouterr().err


def test_dry_run_cannot_know_the_nodes_of_a_cluster(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    address = ("cluster.address=10.0.0.1:6379", "cluster.device=cpu", "security.curve=true")
    assert dry_run(model, *address) == 0
    out = capfd.readouterr().out.splitlines()
    assert out[-1].strip() == "known at the start, when 10.0.0.1:6379 is asked: the nodes (packed)"
    assert out[-2].split() == ["learner-0", "?", "cpu", "?"]
    places = ("cluster.placement=explicit", "cluster.actor_places=[rack_a]",
              "cluster.learner_places=[10.0.0.7]", "learner.threads=3")  # fmt: skip
    assert dry_run(model, *address, *places) == 0
    out = capfd.readouterr().out.splitlines()
    assert out[-1].endswith("is asked: whether these machines and GPUs exist")
    assert [line.split() for line in out[-4:-1]] == [
        ["buffer-0", "10.0.0.7", "cpu", "1"], ["actor-0", "rack_a", "cpu", "?"],
        ["learner-0", "10.0.0.7", "cpu", "3"],
    ]  # fmt: skip


def test_dry_run_starts_one_reward_process_at_most(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's function is imported once, however many workers; a built-in one not at all."""
    (tmp_path / "mine.py").write_text(
        "import os\nopen(f'imported-{os.getpid()}', 'w').close()\n"
        "def reward(prompt, response, finish_reason):\n    return 0.0\n"
    )
    assert dry_run(model, "task.reward=mine:reward", "task.reward_workers=64") == 0
    assert len(list(tmp_path.glob("imported-*"))) == 1

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("started a process")

    monkeypatch.setattr("asyncrl.actors.rewards.RewardWorker", fail)
    assert dry_run(model) == 0


def test_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "_CGROUP_LIMIT", limit)
    whole = machine.memory_gib()
    limit.write_text("max\n")
    assert machine.memory_gib() == whole
    limit.write_text(f"{3 << 28}\n")
    assert machine.memory_gib() == 0.75


def test_dry_run_refuses_what_does_not_fit_the_model(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(model, "rollout.max_new_tokens=65") == 2
    assert (
        "error: rollout.max_prompt_tokens=64 + rollout.max_new_tokens=65 = 129 tokens is longer "
        f"than the context of {model} (128): lower rollout.max_new_tokens to 64"
    ) in capfd.readouterr().err
    assert dry_run(model, "engine.max_model_len=200") == 2
    assert "engine.max_model_len=200 is longer than the context" in capfd.readouterr().err
    (model / "tokenizer_config.json").write_text("{}")
    assert dry_run(model) == 2
    assert "its tokenizer has no chat template: set task.chat=false" in capfd.readouterr().err
    assert dry_run(model, "task.chat=false") == 0


def test_dry_run_refuses_a_limit_that_no_prompt_meets(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps({"question": "word " * n, "answer": "1"}) for n in (9, 5, 7)]
    (tmp_path / "long.jsonl").write_text("\n".join(rows))
    task = ("task.kind=jsonl", "task.path=long.jsonl", "eval.samples=0")
    assert dry_run(model, *task, "rollout.max_prompt_tokens=4") == 2
    assert (
        "error: rollout.max_prompt_tokens=4 is smaller than each of the first prompts "
        "(5 to 9 tokens), so a batch can never fill"
    ) in capfd.readouterr().err
    assert dry_run(model, *task, "rollout.max_prompt_tokens=5") == 0


def test_dry_run_refuses_a_broken_tokenizer(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (model / "tokenizer.json").write_text("{}")
    assert dry_run(model) == 2
    assert "tokenizer.json cannot be read" in capfd.readouterr().err


def test_dry_run_refuses_what_needs_a_package_that_is_not_installed(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert dry_run(model) == 0
    capfd.readouterr()
    assert dry_run(model, "log.wandb=offline", "learner.lora.rank=8") == 2
    assert capfd.readouterr().err.splitlines() == [
        "error: log.wandb=offline: wandb is not installed; pip install 'asyncrl[wandb]'",
        "error: learner.lora.rank=8: peft is not installed; pip install 'asyncrl[lora]'",
    ]


def test_dry_run_loads_the_shaping_function_elsewhere(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shape.py").write_text(
        "import os\nopen(f'imported-{os.getpid()}', 'w').close()\nprint('noise')\n"
        "def shorter(header, reward):\n    return reward - 0.001 * header.response_tokens\n"
        "def one(header):\n    return 1.0\n"
    )
    assert dry_run(model, "learner.shaping.function=shape:shorter") == 0
    assert "noise" not in capfd.readouterr().out
    (imported,) = tmp_path.glob("imported-*")
    assert imported.name != f"imported-{os.getpid()}"
    key = "learner.shaping.function"
    for spec, why in (
        ("shape:one", "cannot be called with (SampleHeader, reward): too many positional"),
        ("nowhere:f", "no module 'nowhere' (looked in "),
    ):
        assert dry_run(model, f"{key}={spec}") == 2
        *said, line = capfd.readouterr().err.splitlines()
        assert line.startswith(f"error: {key}={spec}: {why}")
        assert said in ([], ["noise"])  # the module's own words


def test_dry_run_refuses_a_model_folder_with_parts_missing(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (model / "model.safetensors").unlink()
    (model / "tokenizer.json").unlink()
    assert dry_run(model) == 2
    err = capfd.readouterr().err
    assert "is not a whole model, it lacks weights (model.safetensors), a tokenizer" in err


def test_dry_run_refuses_a_malformed_line_with_its_number(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"question": "a", "answer": "1"}) + "\n{oops\n")
    args = ["launch", "--dry-run", "-c", "gsm8k", f"model.name={model}", f"task.path={data}"]
    assert main(args) == 2
    assert f"error: {data}:2: malformed JSON at column 2" in capfd.readouterr().err


def test_dry_run_reports_several_problems_at_once(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    args = ["--run-name", "taken", "task.reward=no_such:f"]
    assert dry_run(model, *args) == 2
    err = capfd.readouterr().err.splitlines()
    assert len(err) == 2
    assert err[0].startswith("error: task.reward=no_such:f: no module 'no_such' (looked in ")
    assert err[1].endswith(
        "choose another name, remove it, or go on with it: asyncrl launch --resume taken"
    )


def test_dry_run_refuses_a_folder_that_cannot_be_made(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert dry_run(model, "run.dir=file/runs") == 2
    assert "is not a folder that can be written: set run.dir to one" in capfd.readouterr().err


def test_cuda_without_a_gpu_is_refused(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert dry_run(model, "cluster.device=cuda") == 2
    assert "error: cluster.device=cuda: there is no NVIDIA GPU" in capfd.readouterr().err


def test_a_correction_goes_on_top_of_a_run(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(model, "--config", "correction/icepop", "-c", "correction/cispo") == 0
    out = capfd.readouterr().out
    assert "config     tiny + correction/icepop + correction/cispo\n" in out
    assert "30 batches of 32 samples" in out
    seen: dict[str, Any] = {}
    monkeypatch.setattr(asyncrl.launch, "launch", lambda config, **rest: seen.update(rest) or 0)
    assert main(["launch", "-c", "tiny", "-c", "correction/icepop", f"model.name={model}"]) == 0
    assert seen["preset"] == "tiny"
    assert seen["sources"]["learner.correction.action"] == "correction/icepop.yaml:5"
    assert main(["config", "show", "-c", "correction/icepop", "--run-name", "r"]) == 0
    out = capfd.readouterr().out
    assert out.count("# correction/icepop.yaml:") == 4
    assert "quickstart" not in out


def test_launch_hands_over_what_was_resolved(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}

    def fake(config: Any, **rest: Any) -> int:
        seen.update(rest, config=config)
        return 7

    monkeypatch.setattr(asyncrl.launch, "launch", fake)
    assert main(["launch", "-c", "tiny", "--learners", "2", f"model.name={model}"]) == 7
    assert seen["config"].cluster.learners == 2
    assert seen["preset"] == "tiny"
    assert seen["model_path"] == str(model)
    assert seen["sources"]["cluster.learners"] == "--learners"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (DeadlineError("actor-0 waited 60 s for weights 0:3"), 1, "error: actor-0 waited 60 s"),
        (PermissionError(13, "Permission denied", "x"), 1, "error: [Errno 13] Permission denied"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_faults_end_with_their_exit_code(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    error: BaseException, code: int, text: str,
) -> None:  # fmt: skip
    def fail(*_: Any, **__: Any) -> int:
        raise error

    monkeypatch.setattr(asyncrl.launch, "launch", fail)
    assert main(["launch", "-c", "tiny", f"model.name={model}"]) == code
    err = capfd.readouterr().err
    assert text in err
    assert "Traceback" not in err


def test_config_show_and_list(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "-c", "quickstart", "--actors", "3", "run.seed=4"]) == 0
    out = capfd.readouterr().out
    assert "  actors: 3 " in out
    assert out.count("# --actors") == 1
    assert out.count("# override") == 1
    assert "# quickstart.yaml:" in out
    assert main(["config", "list"]) == 0
    out = capfd.readouterr().out
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert lines["quickstart"].startswith("SmolLM2-135M learns sums")
    assert list(lines) == list(shipped())
    assert list(lines)[-1].startswith("correction/")


def test_model_list_and_version(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "list"]) == 0
    assert "not here yet" in capfd.readouterr().out
    assert main(["version"]) == 0
    assert f"asyncrl {asyncrl.__version__}" in capfd.readouterr().out
