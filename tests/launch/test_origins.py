"""A resumed run's config.yaml still says where each value comes from."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config import reader
from asyncrl.config.load import Resolved, load
from asyncrl.config.render import to_yaml
from asyncrl.config.sources import RESOLVED
from asyncrl.launch.resume.origins import origins
from asyncrl.launch.resume.plan import plan_resume
from tests.helpers.former import Former

HARD = ("task.system_prompt='a # b: \"c\" # d'", 'task.prompt_template="{prompt} # \\u2028"')


def write(path: Path, resolved: Resolved, told: dict[str, str]) -> None:
    path.write_text(f"{RESOLVED}\n{to_yaml(resolved.config, told)}", encoding="utf-8")


def line_of(path: Path, key: str) -> str:
    return path.read_text(encoding="utf-8").split("\n")[reader.read_file(path)[key].line - 1]


def test_origins_stay_and_changes_are_of_the_resume(tmp_path: Path) -> None:
    former = Former(tmp_path, 10)
    path = former.folder / "config.yaml"
    first = load("tiny", ["run.steps=30", *HARD], {"--actors": ("cluster.actors", 2)})
    write(path, first, first.sources)
    flags = {"--learners": ("cluster.learners", 2)}
    resumption = plan_resume(
        str(former.folder), ["correction/icepop"], ["run.steps=40", "cluster.actors=2"], flags
    )
    resumption.lineage.close()
    told = resumption.origins()
    write(path, resumption.config, told)
    assert line_of(path, "run.steps").endswith("# override (resumed at batch 10)")
    assert told["cluster.learners"] == "--learners (resumed at batch 10)"
    assert told["cluster.actors"] == "--actors", "it was 2 before, too"
    changed = {c.key for c in resumption.changes}
    from_file = {k for k in changed if told[k].startswith("correction/icepop.yaml:")}
    assert from_file
    assert {k for k, v in told.items() if v.endswith(" (resumed at batch 10)")} == changed
    assert {k: v for k, v in told.items() if k not in changed} == {
        k: v for k, v in first.sources.items() if k not in changed
    }
    again = former.resume("", "learner.optim.lr=1e-4")
    later = again.origins()
    assert later["learner.optim.lr"] == "override (resumed at batch 10)"
    assert {**later, "learner.optim.lr": ""} == {**told, "learner.optim.lr": ""}


def test_a_file_without_comments_is_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    resolved = load("tiny")
    path.write_text(to_yaml(resolved.config))
    assert origins(path, resolved.sources, [], 0) == resolved.sources
