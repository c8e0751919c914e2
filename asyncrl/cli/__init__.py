"""The command line; each command imports what it needs when it runs, so that --help is quick."""

from __future__ import annotations

import typer

from asyncrl.cli import (
    compare,
    config,
    export,
    keys,
    launch,
    logs,
    model,
    monitor,
    replay,
    report,
    samples,
    scale,
    status,
    trace,
    version,
)

app = typer.Typer(
    name="asyncrl",
    help="Asynchronous actor-learner RL post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("launch")(launch.launch)
app.command("status")(status.status)
app.command("scale")(scale.scale)
app.command("replay")(replay.replay)
app.command("monitor")(monitor.monitor)
app.command("report")(report.report)
app.command("compare")(compare.compare)
app.command("logs")(logs.logs)
app.command("trace")(trace.trace)
app.command("samples")(samples.samples)
app.add_typer(config.app, name="config")
app.add_typer(model.app, name="model")
app.command("export")(export.export)
app.command("keys")(keys.keys)
app.command("version")(version.version)
