"""The command line; each command imports what it needs when it runs, so that --help is quick."""

from __future__ import annotations

import typer

from asyncrl.cli import config, export, keys, launch, model, scale, status, version

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
app.add_typer(config.app, name="config")
app.add_typer(model.app, name="model")
app.command("export")(export.export)
app.command("keys")(keys.keys)
app.command("version")(version.version)
