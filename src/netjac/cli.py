"""The command ``netjac``: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Jacobians of neural networks as layer factors.")


@app.callback()
def _commands() -> None:
    """Jacobians of neural networks as layer factors."""  # with a callback, `demo` stays a command of its own


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Directory for the fitted model and the picture.")] = Path("demo-output"),
) -> None:
    """Fit a Keras network to the diabetes data with SciPy, then answer two old questions; under a minute."""
    from netjac.demo import run

    run(output, typer.echo)


def main() -> None:
    """Entry point."""
    app()
