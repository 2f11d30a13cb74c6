"""The ``apexsim`` command. Commands import what they need when they run: ``--help`` stays fast."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import typer

from apexsim.cli import bench, collect, compare, policies, traces, train
from apexsim.errors import ApexSimError, UsageError

app = typer.Typer(
    name="apexsim",
    help="Replay real speculative-decoding traces exactly, and compare fixed and adaptive draft depths on them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(traces.app, name="traces")
app.command("import")(traces.import_)
app.command("policies")(policies.policies)
app.command("compare")(compare.compare)
app.command("train")(train.train)
app.command("collect")(collect.collect)
app.command("bench")(bench.bench)

ParserError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""Base of the parser's own errors; typer carries its own click and exports only some of its classes."""
SIBLINGS = ("envs", "policies", "real_runs")


def check_siblings() -> None:
    """Makes sure that the packages imported are ours: their plain names are easily shadowed by a folder.

    Raises:
        ApexSimError: One of them is missing or comes from elsewhere.
    """
    home = Path(__file__).resolve().parent.parent.parent
    for name in SIBLINGS:
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve().parent.parent if spec and spec.origin else None
        if found != home:
            raise ApexSimError(
                f"package {name!r} is imported from {found or 'nowhere'}, not from beside apexsim in {home}: "
                f"a folder called {name} shadows it; run the apexsim command from another folder, or not with python -m"
            )


def main() -> None:
    """Runs the command line: exit status 0, 2 for a usage error, 1 for anything else, one clear line on standard error."""
    try:
        check_siblings()
        status = app(standalone_mode=False)
    except UsageError as error:
        _fail(str(error), 2)
    except ApexSimError as error:
        _fail(str(error), 1)
    except ParserError as error:
        message = error.format_message()  # type: ignore[attr-defined]
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
            print(message)
            sys.exit(2)
        _fail(message, 2)
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        _fail(str(error), 1)
    except Exception as error:
        if os.environ.get("APEXSIM_DEBUG"):
            raise
        _fail(f"unexpected {type(error).__name__}: {error} (APEXSIM_DEBUG=1 shows where)", 1)
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str, status: int) -> None:
    print(f"apexsim: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)
