"""`asyncrl samples`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from asyncrl.cli.options import RunArgument, RunsDir, one_of

_NUMBER = "e.g. '>0.5', 2, '3..5' or '>=1,!=4'."


def samples(
    run: RunArgument = "latest",
    directory: RunsDir = "runs",
    reward: Annotated[
        str | None, typer.Option("--reward", metavar="COND", help=f"Reward: {_NUMBER}")
    ] = None,
    staleness: Annotated[
        str | None,
        typer.Option("--staleness", metavar="COND", help="Versions behind when it was used."),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option("--batch", "--step", metavar="COND", help="The batch that used it, from 1."),
    ] = None,
    length: Annotated[
        str | None, typer.Option("--length", metavar="COND", help="Response tokens.")
    ] = None,
    outcome: Annotated[
        str | None,
        typer.Option("--outcome", metavar="NAME,...", help="What became of it, e.g. trained,held."),
    ] = None,
    finish: Annotated[
        str | None,
        typer.Option("--finish", metavar="WHY", help="Why it ended: stop, length or abort."),
    ] = None,
    actor: Annotated[
        str | None, typer.Option("--actor", metavar="NAME", help="Who made it, e.g. actor-0.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="Within the prompt; any case.")
    ] = None,
    response: Annotated[
        str | None, typer.Option("--response", metavar="TEXT", help="Within the response.")
    ] = None,
    group: Annotated[
        str | None,
        typer.Option("--group", metavar="ID", help="One group, its samples side by side."),
    ] = None,
    show: Annotated[
        str | None,
        typer.Option("--show", metavar="ID", help="One sample in full, its tokens coloured."),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            "--by", metavar="WHAT", help="With --show: what colours are, logprob or version."
        ),
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="With --show: also a line for each token.")
    ] = False,
    sort: Annotated[
        str | None,
        typer.Option(
            "--sort", metavar="KEY",
            help="order, reward, staleness, batch or length; -KEY: the highest first. Default: "
            "-order, the newest first; in a file as recorded.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", "-n", min=1, metavar="N", help="Default: 20; in a file all."),
    ] = None,
    export: Annotated[
        str | None,
        typer.Option("--export", metavar="FILE", help="Write them: .jsonl or .parquet."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", metavar="FOLDER", help="If the run's own is not here."),
    ] = None,
) -> None:  # fmt: skip
    """Look at recorded samples: a table, one in full, a group side by side, or a file of them."""
    from asyncrl.config.paths import expand
    from asyncrl.errors import UserError
    from asyncrl.monitor.samples.show import BYS, By
    from asyncrl.monitor.samples.view import View
    from asyncrl.monitor.samples.wanted import FINISHES, Condition, Wanted, group_id, outcomes
    from asyncrl.monitor.status_reader import find

    given = {"--by": by, "--tokens": tokens or None, "--sort": sort, "--limit": limit,
             "--group": group, "--export": export}  # fmt: skip
    idle, why = {"--by", "--tokens"}, "it goes with --show"
    if show is not None:
        idle, why = given.keys() - idle, "--show shows one sample"
    elif group is not None and export is None:
        idle, why = idle | {"--sort", "--limit"}, "--group shows all of a group"
    for option in given:
        if option in idle and given[option] is not None:
            raise UserError(f"{option} has no effect here, {why}: leave it out")

    for option, text, names in (("--finish", finish, FINISHES), ("--by", by, BYS)):
        if text is not None:
            one_of(option, text, names)

    def number(option: str, text: str | None) -> Condition | None:
        return None if text is None else Condition.parse(option, text)

    wanted = Wanted(
        reward=number("--reward", reward), staleness=number("--staleness", staleness),
        batch=number("--batch", batch), length=number("--length", length),
        outcomes=() if outcome is None else outcomes(outcome), finish=finish, actor=actor,
        prompt=prompt, response=response,
        group=None if group is None else group_id("--group", group),
    )  # fmt: skip
    place = None if tokenizer is None else expand(tokenizer, "--tokenizer")
    view = View(find(run, Path(directory)), wanted, place)
    if show is not None:
        view.one(show, cast(By, by or BYS[0]), tokens=tokens)
    elif export is not None:
        view.export(export, sort or "order", limit)
    elif group is not None:
        view.group(group)
    else:
        view.table(sort or "-order", limit)
