"""Which failures of an engine are for lack of memory."""

import os
import subprocess
import sys

import pytest

from asyncrl import out_of_memory
from asyncrl.actors.engine_memory import EngineMemory
from asyncrl.errors import EngineMemoryError

WORDS = [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB free",
    "ValueError: No available memory for the cache blocks. Try increasing it",
    "ValueError: To serve at least one request with 4096 tokens, 1.5 GiB KV cache is needed, which "
    "is larger than the available KV cache memory (0.5 GiB).",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 68719476736 bytes.",
    "OSError: [Errno 12] Cannot allocate memory",
    "MemoryError",
    "terminate called after throwing an instance of 'std::bad_alloc'",
]


@pytest.mark.parametrize("words", WORDS)
def test_what_is_said_for_lack_of_memory(words):
    assert out_of_memory.said(f"Traceback\n  {words}\n") == words
    error = EngineMemory().start_error("model", RuntimeError(words))
    assert isinstance(error, EngineMemoryError)
    small = "cache" in words.lower()
    assert ("raise engine.kv_cache_gib" if small else "lower rollout.max_in_flight") in str(error)


def test_what_is_not():
    assert out_of_memory.said("loads 3 GiB of memory\nKeyError: 'memory'") == ""
    error = EngineMemory().start_error("model", RuntimeError("no such architecture"))
    assert not isinstance(error, EngineMemoryError)


IN_LOG = """
import sys
from asyncrl.actors.engine_memory import EngineMemory
print("CUDA out of memory, of the process before", file=sys.stderr, flush=True)
memory = EngineMemory()
print("EngineCore failed to start", file=sys.stderr, flush=True)
assert memory.fault([1]) == "", memory.fault([1])
print("RuntimeError: CUDA out of memory", file=sys.stderr, flush=True)
print(memory.fault([1]))
print(memory.start_error("model", RuntimeError("Engine core initialization failed.")))
"""


def test_the_engine_s_words_are_looked_for_in_the_process_s_log(tmp_path):
    with open(tmp_path / "log", "w") as log:
        done = subprocess.run(
            [sys.executable, "-c", IN_LOG], stdout=subprocess.PIPE, stderr=log, text=True,
            check=False,
        )  # fmt: skip
    assert done.returncode == 0, (tmp_path / "log").read_text()
    assert done.stdout.startswith("the engine ran out of memory (RuntimeError: CUDA out of memory)")
    assert "finds no memory at its start (RuntimeError: CUDA out of memory)" in done.stdout


@pytest.mark.parametrize(
    ("before", "after", "code", "words"),
    [(2, 3, 1, "killed by the kernel"), (2, 2, -9, ""), (None, None, -9, "as far as can be told"),
     (None, None, 1, ""), (2, 2, None, "")],
)  # fmt: skip
def test_who_was_killed_and_by_whom(monkeypatch, before, after, code, words):
    monkeypatch.setattr(out_of_memory, "kills", lambda: before)
    memory = EngineMemory()
    monkeypatch.setattr(out_of_memory, "kills", lambda: after)
    fault = memory.fault([None, code])
    assert (words in fault) if words else fault == ""


def test_the_kernel_s_count(tmp_path):
    path = tmp_path / "vmstat"
    path.write_text("nr_free_pages 3\noom_kill 17\n")
    assert out_of_memory.kills(str(path)) == 17
    path.write_text("nr_free_pages 3\n")
    assert out_of_memory.kills(str(path)) is None
    assert out_of_memory.kills(os.devnull + "/no") is None
