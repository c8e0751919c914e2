"""What an installed wheel holds: the package behind its links, and every configuration."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from asyncrl.config.sources import shipped

ROOT = Path(__file__).parents[2]
BUILD = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"


def test_the_wheel_holds_every_configuration(tmp_path: Path) -> None:
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("asyncrl", "actors", "learner", "buffer", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=leave)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = zipfile.ZipFile(tmp_path / "dist" / done.stdout.split()[-1]).namelist()
    assert {f"asyncrl/configs/{name}.yaml" for name in shipped()} <= set(names)
    assert "asyncrl/config/rules/correcting.py" in names
    assert "asyncrl/learner/step.py" in names
    for file in ("web/static/page.js", "web/static/page.css", "report/static/report.js"):
        assert f"asyncrl/monitor/{file}" in names
    assert not [name for name in names if not name.startswith("asyncrl")]
