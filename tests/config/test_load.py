# ruff: noqa: E501  (tables of messages read best one case a line)
"""Reading configurations: files, overrides, interpolation, and what is said of bad ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyncrl.config import fields
from asyncrl.config.load import load, parse_override
from asyncrl.config.render import to_yaml
from asyncrl.config.schema import Config
from asyncrl.config.sources import RESOLVED, shipped
from asyncrl.errors import ConfigError

NEEDS_A_FILE = ("gsm8k", "gsm8k-1node", "math-2node")
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)


def write(folder: Path, text: str | bytes) -> str:
    path = folder / "my.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def refusal(config: str | None = None, *overrides: str, **flags: object) -> list[str]:
    given = {f"--{k.split('.')[-1]}": (k, v) for k, v in flags.items()}
    with pytest.raises(ConfigError) as e:
        load(config, overrides, given)
    return str(e.value).splitlines()


def test_defaults_alone() -> None:
    resolved = load()
    assert resolved.config == Config()
    assert resolved.name == "default"
    assert set(resolved.sources.values()) == {"default"}
    assert set(resolved.sources) == set(fields.leaves())


def test_order_is_defaults_file_overrides_flags(tmp_path: Path) -> None:
    path = write(tmp_path, "run:\n  steps: 5\n  seed: 7\ncluster:\n  actors: 2\n")
    r = load(path, ["run.seed=8", "learner.optim.lr=2e-6"], {"--learners": ("cluster.learners", 2)})
    assert (r.config.run.steps, r.config.run.seed, r.config.cluster.actors) == (5, 8, 2)
    assert (r.config.learner.optim.lr, r.config.cluster.learners) == (2e-6, 2)
    assert r.sources["run.steps"] == f"{path}:2"
    assert r.sources["run.seed"] == "override"
    assert r.sources["cluster.actors"] == f"{path}:5"
    assert r.sources["cluster.learners"] == "--learners"
    assert r.sources["run.dir"] == "default"
    assert r.name == "my"


def test_later_files_override_earlier_ones(tmp_path: Path) -> None:
    first = write(tmp_path, "run: {steps: 5, seed: 7}\nlearner: {optim: {grad_clip: 2}}\n")
    second = tmp_path / "second.yaml"
    second.write_text("run:\n  seed: 8\nlearner: {optim: {grad_clip: null}}\n")
    r = load([first, str(second)], ["rollout.max_in_flight=3"])
    assert (r.config.run.steps, r.config.run.seed) == (5, 8)
    assert r.config.learner.optim.grad_clip is None
    assert r.sources["run.steps"] == f"{first}:1"
    assert r.sources["run.seed"] == f"{second}:2"
    assert r.sources["rollout.max_in_flight"] == "override"
    assert r.name == "my"
    assert load([str(second), first]).config.run.seed == 7
    assert load([]).config == Config()


def test_problems_of_all_files_are_reported(tmp_path: Path) -> None:
    first = write(tmp_path, "run: {stepz: 5}\n")
    second = tmp_path / "second.yaml"
    second.write_text("zzz: 1\n")
    with pytest.raises(ConfigError) as e:
        load([first, str(second)])
    assert [line.partition("):")[0] for line in str(e.value).splitlines()] == [
        f"run.stepz ({first}:1", f"zzz ({second}:1",
    ]  # fmt: skip


def test_last_override_wins_and_flags_left_out_count_for_nothing() -> None:
    r = load(None, ["run.steps=1", "run.steps=2"], {"--actors": ("cluster.actors", None)})
    assert r.config.run.steps == 2
    assert r.sources["cluster.actors"] == "default"


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("learner: {optim: {lr: 2e-6}}", "learner.optim.lr", 2e-6),
        ("learner: {optim: {lr: 1}}", "learner.optim.lr", 1.0),
        ("log: {wandb: off}", "log.wandb", "off"),
        ("log: {console: off}", "log.console", "off"),
        ("run: {name: no}", "run.name", "no"),
        ("run: {name: 1_000}", "run.name", "1_000"),
        ("run: {seed: 010}", "run.seed", 10),
        ("run: {seed: 0x10}", "run.seed", 16),
        ("learner: {optim: {betas: [0.8, .9]}}", "learner.optim.betas", (0.8, 0.9)),
        ("learner: {optim: {grad_clip: ~}}", "learner.optim.grad_clip", None),
        ("learner.optim.lr: 1e-5", "learner.optim.lr", 1e-5),
        ("learner:", "learner.batch_size", 64),
        ("learner: {}", "learner.batch_size", 64),
        ("# nothing\n", "run.steps", 100),
        ("\ufeffrun: {steps: 3}", "run.steps", 3),
    ],
)
def test_yaml_values(tmp_path: Path, text: str, key: str, value: object) -> None:
    assert fields.flatten(load(write(tmp_path, text)).config)[key] == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: {steps: 3}\nlearner:\n  bath_size: 8\n", ":3): unknown key; did you mean learner.batch_size?"),
        ("lerner: {epochs: 2}", "unknown key; did you mean learner.epochs?"),
        ("learner: {lr: 2e-6}", "did you mean learner.optim.lr or learner.critic.lr?"),
        ("zzz: 1", "unknown key; the sections are run, stop, model, task"),
        ("run: {steps: ten}", "run.steps=ten (FILE:1): expected a whole number, got text"),
        ("run: {steps: 1e2}", "run.steps=100.0 (FILE:1): expected a whole number: write 100"),
        ("run: {steps: true}", "expected a whole number, got true/false"),
        ("run: {steps: 0}", "run.steps=0 (FILE:1): must be greater than 0"),
        ("run: {steps: 99999999999}", "must be less than 2147483648"),
        ("run: {name: 12}", "expected text, got a int: put it in quotes"),
        ("engine: {enforce_eager: yes}", "expected true or false: write true"),
        ("engine: {gpu_memory_utilization: 1.5}", "must be at most 1"),
        ("log: {console: lve}", "expected auto, live, plain or off (did you mean live?)"),
        ("log: {wandb: false}", "expected off, offline or online"),
        ("learner: {optim: {lr: .inf}}", "learner.optim.lr=inf (FILE:1): expected a finite number"),
        ("learner: {optim: {lr: .nan}}", "expected a finite number"),
        ("learner: {optim: {betas: [0.9]}}", "the list is too short"),
        ("learner: {lora: {targets: q_proj}}", "expected a list, got text: write [q_proj]"),
        ("learner: {optim: {betas: [0.9, 0.9, 0.9]}}", "expected a list of 2, got 3"),
        ("learner: {optim: {betas: [0.9, 1.0]}}", "must be less than 1"),
        ("learner: 5", "learner=5 (FILE:1): learner is a section, set its keys one by one"),
        ("run: {steps: {a: 1}}", "run.steps takes a value, not keys below it"),
        ("run: {steps: 1}\nrun: {seed: 1}", "FILE:2: run is set twice (first on line 1): keep one"),
        ("run:\n  steps: 1\n  steps: 2", "FILE:3: run.steps is set twice (first on line 2)"),
        ("run: [1, 2", "FILE:1: not valid YAML"),
        ("run:\n  steps: 1\n bad", "FILE:3: not valid YAML"),
        ("a: &x 1\nb: *x", "FILE:2: not valid YAML: aliases (*name) are not supported"),
        ("- 1", "FILE:1: expected sections such as `learner:`, got a list"),
        ("just text", "FILE:1: expected sections such as `learner:`, got the text 'just text'"),
        ("a: 1\n---\nb: 1", "FILE:2: not valid YAML"),
        ("run: {steps: !!python/name:os.system x}", "the tag tag:yaml.org,2002:python/name:os.system"),
        ("run: {steps: !!int x}", "'x' is not of type int"),
        (f"run: {{steps: {'9' * 500}}}", "a number of 500 characters is too long"),
        ("? [1]\n: 2", "FILE:1: a key must be text, got a list"),
        (b"run:\n  name: \xff", "FILE:2: byte 0xff is not UTF-8"),
        ("run: {name: a\x01b}", "FILE:1: not valid YAML: character U+0001"),
        ("[" * 3000, "not valid YAML"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path: Path, text: str | bytes, expected: str) -> None:
    path = write(tmp_path, text)
    lines = refusal(path)
    assert any(expected in line.replace(path, "FILE") for line in lines), lines
    assert len(lines) == 1


def test_all_problems_are_reported_at_most_ten() -> None:
    bad = [f"run.x{i}=1" for i in range(4)]
    lines = refusal(None, *bad, "learner.optim.lr=x", "run.steps=0")
    assert len(lines) == 6
    lines = refusal(None, *(f"run.x{i}=1" for i in range(14)))
    assert len(lines) == 11
    assert lines[-1] == "and 4 more"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("foo", "'foo': expected key=value, e.g. learner.optim.lr=2e-6"),
        ("learner.batch_size", "expected key=value"),
        ("=3", "expected key=value"),
        ("learner.optim=3", "learner.optim is a section, set its keys one by one"),
        ("run.stepz=3", "run.stepz (override): unknown key; did you mean run.steps?"),
        ("lerner.foo=1", "lerner.foo (override): unknown key; did you mean learner?"),
        ("lerner.optim.lr=1", "unknown key; did you mean learner.optim.lr?"),
        (
            "learner.lora.targets=q_proj,v_proj",
            "expected a list, got text: write 'learner.lora.targets=[q_proj,v_proj]', in quotes for the shell",
        ),
        (
            "cluster.actor_places=a",
            "expected a list, got text: write 'cluster.actor_places=[a]', in quotes",
        ),
        ("learner.optim.betas=.9, .95", "write 'learner.optim.betas=[.9,.95]', in quotes"),
        ("learner.lora.targets={a: 1}", "expected a list, got a section"),
        ("run.steps.x=3", "run.steps takes a value, not keys below it"),
        ("run.steps=[1,", "run.steps=[1, (override): not valid YAML"),
        ("run.steps=", "run.steps=null (override): expected a whole number, got null"),
        ("run.steps={a: 1}", "expected a whole number, got a section"),
        ("run.name=\udcff", "run.name (override): not valid UTF-8"),
        ("engine.threads=${engine.thread}", "${engine.thread} points to nothing; did you mean"),
        ("engine.threads=${nope:1}", "cannot be interpolated: Unsupported interpolation type nope"),
        ("run.name=${", "cannot be interpolated"),
        ("run.steps=${run.steps}", "cannot be interpolated: Recursive"),
        ("task.prompt_template=${prompt}", "\\${ stands for itself"),
    ],
)
def test_bad_overrides(override: str, expected: str) -> None:
    lines = refusal(None, override)
    assert len(lines) == 1
    assert expected in lines[0]


def test_flag_and_override_that_contradict() -> None:
    with pytest.raises(ConfigError, match=r"--actors 2 and cluster.actors=3 \(override\) contra"):
        load(None, ["cluster.actors=3"], {"--actors": ("cluster.actors", 2)})
    r = load(None, ["cluster.actors=2"], {"--actors": ("cluster.actors", 2)})
    assert r.config.cluster.actors == 2


def test_interpolation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_RUNS", "/data/runs")
    text = (
        "rollout: {group_size: 4, max_in_flight: '${learner.batch_size}'}\n"
        "learner: {batch_size: 32}\n"
        "run: {name: 'b${learner.batch_size}', dir: '${oc.env:MY_RUNS}'}\n"
        "task: {prompt_template: 'costs \\${x} {prompt}'}\n"
    )
    r = load(write(tmp_path, text), ["learner.batch_size=64"])
    assert r.config.rollout.max_in_flight == 64
    assert (r.config.run.name, r.config.run.dir) == ("b64", "/data/runs")
    assert r.config.task.prompt_template == "costs ${x} {prompt}"
    assert r.sources["rollout.max_in_flight"].endswith("my.yaml:1")


def test_finding_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "did you mean quickstart?" in refusal("quikstart")[0]
    assert f"nor a file; shipped: {', '.join(shipped())}" in refusal("zzzz")[0]
    assert "did you mean correction/icepop?" in refusal("icepop")[0]
    assert "did you mean correction/icepop?" in refusal("correction/icepopp")[0]
    assert "no shipped configuration of that name" in refusal("correction/icepopp")[0]
    assert "did you mean correction/sequence-mask?" in refusal("correction/sequence_mask.yaml")[0]
    assert "did you mean tiny?" in refusal("correction/tiny")[0]
    assert "shipped: quickstart" not in refusal("quikstart")[0]
    assert f"--config x/tiny.yaml: no such file in {tmp_path}" in refusal("x/tiny.yaml")[0]
    (tmp_path / "folder.yaml").mkdir()
    assert "is a folder, expected a YAML file" in refusal("folder.yaml")[0]


@pytest.mark.parametrize("name", [name for name in shipped() if "/" not in name])
def test_shipped_configurations_load(name: str) -> None:
    needs = ["task.path=train.jsonl"] if name in NEEDS_A_FILE else []
    resolved = load(name, needs)
    assert resolved.name == name
    assert resolved.sources["run.steps"].startswith(f"{name}.yaml:")
    assert shipped()[name].read_text().startswith("# ")


@pytest.mark.parametrize("name", NEEDS_A_FILE)
def test_a_configuration_that_needs_a_file_says_so(name: str) -> None:
    assert refusal(name) == [
        "task.path is not set: task.kind=jsonl needs the file of prompts, task.path=FILE"
    ]


def test_lists_of_places_read_back_equal(tmp_path: Path) -> None:
    overrides = ["cluster.placement=explicit", "cluster.actors=2", "engine.tensor_parallel=2",
                 'cluster.actor_places=["local:0,1", "10.0.0.7:2,3"]',
                 "cluster.learner_places=[local:4]"]  # fmt: skip
    config = load(None, overrides).config
    assert config.cluster.actor_places == ("local:0,1", "10.0.0.7:2,3")
    assert load(write(tmp_path, to_yaml(config))).config == config
    block = "cluster:\n  placement: explicit\n  actor_places:\n    - a:0\n  learner_places: [b]\n"
    assert load(write(tmp_path, block)).config.cluster.actor_places == ("a:0",)


def test_rendering_names_the_sources() -> None:
    r = load("quickstart", ["run.seed=3"], {"--actors": ("cluster.actors", 2)})
    lines = {line.split(":")[0].strip(): line for line in to_yaml(r.config, r.sources).splitlines()}
    assert lines["seed"].endswith("# override")
    assert lines["actors"].endswith("# --actors")
    assert "# quickstart.yaml:" in lines["batch_size"]
    assert lines["weight_decay"].endswith("# default")
    columns = {line.index("#") for line in lines.values() if "# " in line}
    assert len(columns) == 1


@settings(deadline=None)
@given(
    name=st.text("abcxyz0189-_.", min_size=1, max_size=12).filter(lambda s: s.strip(".")),
    template=TEXT,
    system=st.none() | TEXT,
    lr=st.floats(min_value=0, max_value=10, exclude_min=True),
    clip=st.none() | st.integers(1, 10**6),
)
def test_rendered_configuration_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, name: str, template: str, system: str | None,
    lr: float, clip: int | None,
) -> None:  # fmt: skip
    tree = fields.flatten(Config()) | {
        "run.name": name, "task.prompt_template": template + "{prompt}",
        "task.system_prompt": system, "learner.optim.lr": lr, "learner.optim.grad_clip": clip,
    }  # fmt: skip
    config = Config.model_validate(fields.as_tree(tree))
    path = write(tmp_path_factory.mktemp("c"), to_yaml(config, {"run.name": "override"}))
    assert load(path).config == config


@settings(deadline=None)
@given(TEXT)
def test_text_overrides_are_taken_as_they_stand(text: str) -> None:
    assume("${" not in text)
    assume(text not in ("null", "~"))
    assume(not (len(text) > 1 and text[0] == text[-1] and text[0] in "'\""))
    assert parse_override("task.system_prompt", text) == text


@settings(deadline=None)
@given(st.integers(-(10**30), 10**30) | st.floats(allow_nan=False))
def test_number_overrides(number: float) -> None:
    text = repr(number).replace("inf", ".inf")
    value = parse_override("learner.optim.lr", text)
    assert value == number
    assert type(value) is type(number)


@pytest.mark.parametrize(
    ("raw", "value"),
    [("null", None), ("", ""), ("'null'", "null"), ('"a\\n"', "a\n"), ("off", "off")],
)
def test_text_overrides_null_and_quotes(raw: str, value: str | None) -> None:
    assert parse_override("task.system_prompt", raw) == value


def test_a_run_s_own_config_is_accepted_again(tmp_path):
    """It holds what a shipped file set, and what has no effect with the run's own settings."""
    (tmp_path / "mine.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    overrides = ("task.kind=jsonl", f"task.path={tmp_path / 'mine.jsonl'}", "eval.samples=0")
    first = load("quickstart", overrides, {})
    assert first.config.task.max_operand == 20
    path = tmp_path / "config.yaml"
    path.write_text(f"{RESOLVED}\n{to_yaml(first.config, first.sources)}")
    again = load(str(path), (), {})
    assert again.config == first.config
    path.write_text(to_yaml(first.config))  # as somebody's own file
    with pytest.raises(ConfigError, match="task.max_operand=20 .* has no effect"):
        load(str(path), (), {})
