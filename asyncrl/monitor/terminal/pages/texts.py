"""Pages of text: log, samples, help. What others wrote is cleaned of control characters."""

from __future__ import annotations

from rich.text import Text

from asyncrl.monitor.log_file import LEVELS
from asyncrl.monitor.terminal.view import View
from asyncrl.monitor.words import clean

STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}
SHOWN = {"": "all", "trained": "trained ones", "other": "those not trained"}

NONE = {
    "": "nothing is recorded yet (with record.trajectories=false, nothing is)",
    "trained": "none of the samples recorded last was trained",
    "other": "all samples recorded last were trained: none was dropped, filtered, failed or held",
}


def log(view: View) -> Text:
    """The logs of all roles, merged, the newest last."""
    least = LEVELS.index(view.wanted.level)
    lines = [entry for entry in view.log if _rank(entry["level"]) >= least]
    if not lines:
        return Text("no lines" + (f" of level {view.wanted.level} or graver" if least else ""),
                    "dim")  # fmt: skip
    made = Text()
    for entry in lines:
        style = STYLES.get(entry["level"], "")
        made.append(f"{entry['at']:8} ", "dim").append(f"{entry['role']:<10} ")
        if style:
            made.append(f"{entry['level']} ", style)
        made.append(f"{entry['logger']}: ", "dim")
        made.append(clean(entry["text"], "\n") + "\n", style)
    made.rstrip()
    return made


def _rank(level: str) -> int:
    return LEVELS.index(level if level in LEVELS else "INFO")


def samples(view: View) -> Text:
    """Prompts and responses whose fate was settled last, the newest first."""
    made = Text.assemble((f"the last samples: {SHOWN[view.wanted.only]}", "bold underline"), "\n")
    if not view.samples:
        return made.append(NONE[view.wanted.only], "dim")
    for sample in view.samples:
        made.append(f"{clean(sample['head'])}\n", "bold")
        made.append("prompt    ", "dim").append(clean(sample["prompt"], "\n") + "\n")
        made.append("response  ", "dim").append(clean(sample["response"], "\n") + "\n\n", "cyan")
    made.rstrip()
    return made


HELP = """\
1-8, left, right             pages        ?           this, and back
up, down, PgUp, PgDn         scroll       q, Ctrl-C   quit; the run goes on
Home, End                    likewise     l, o        choose, on pages 7 and 8

1 Overview    reward, loss, pace, figures; advice: what holds the run back
2 Staleness   versions between what made a sample and what trains it
3 Pace        tokens per second of both sides; where the time of all goes
4 Buffer      what became of each sample, what is held, who is waited for
5 Weights     importance weights: effective sample size, cuts, by staleness
6 Processes   who lives, on which version, with which waits
7 Log         of all roles, by time;  l: all, warnings, errors
8 Samples     prompts and responses;  o: all, trained, not trained

It reads the run's files once a second and nothing else: it asks no process,
writes nothing, and may be killed at any time. Red in the second line: there
is no news, or something is wrong. What the headlines mean: docs/monitoring.md,
"Words"; metrics: docs/metrics.md."""


def help_(view: View) -> Text:
    """The keys, and what the pages show."""
    return Text(HELP)
