"""The layout: the links that make one package, the one import name, and what stays light."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKED = ("actors", "learner", "buffer", "configs")
LIGHT = (
    "asyncrl.errors", "asyncrl.types", "asyncrl.wire", "asyncrl.protocols", "asyncrl.metrics",
    "asyncrl.staleness", "asyncrl.config.load", "asyncrl.config.check", "asyncrl.config.render",
    "asyncrl.tasks", "asyncrl.models", "asyncrl.preflight", "asyncrl.cli", "asyncrl.launch",
    "asyncrl.user_function", "asyncrl.learner.maths.shaping",
    "asyncrl.actors.rewards", "asyncrl.actors.rewards.child", "asyncrl.actors.tokens",
    "asyncrl.buffer.ledger", "asyncrl.buffer.server", "asyncrl.buffer.client",
)  # fmt: skip


@pytest.mark.parametrize("name", LINKED)
def test_links_are_relative_and_lead_to_the_top_level_folder(name: str) -> None:
    link = ROOT / "asyncrl" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name
    assert (link / "__init__.py").is_file()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_links_are_committed_as_links() -> None:
    paths = [f"asyncrl/{name}" for name in LINKED]
    done = subprocess.run(
        ["git", "ls-files", "--stage", "--", *paths], cwd=ROOT, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    modes = {line.split("\t")[1]: line.split()[0] for line in done.stdout.splitlines()}
    assert modes == dict.fromkeys(paths, "120000")


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_nothing_imports_the_top_level_folders_by_their_bare_names() -> None:
    folders = ("asyncrl", "actors", "learner", "buffer", "tests", "bench")
    files = [p for folder in folders for p in (ROOT / folder).rglob("*.py")]
    assert len(files) > 30
    guilty = [str(p.relative_to(ROOT)) for p in files if _imports(p) & set(LINKED)]
    assert guilty == []


def test_light_modules_load_no_torch() -> None:
    code = (
        f"import sys, {', '.join(LIGHT)}\n"
        "heavy = [n for n in ('torch', 'transformers', 'vllm', 'ray') if n in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False,
        cwd="/", env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
