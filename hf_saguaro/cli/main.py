# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""`hf-saguaro`: one program, one command per job.

Exit codes: 0 done, 2 for what the user gave wrong (one line on stderr), 1 for a failure of ours (with its traceback).
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

from .. import __version__, kernels
from ..errors import SaguaroError
from . import adapt, bench, demo, records
from .environment import environment
from .progress import quiet_unless_terminal


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        # argparse would print the whole usage first; what went wrong is one line.
        raise SaguaroError(f"{message}; see `{self.prog} --help`.")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hf-saguaro", description="Speculative speculative decoding for Transformers.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    demo.add_parser(commands)
    bench.add_parser(commands)
    adapt.add_parsers(commands)
    records.add_parsers(commands)
    env = commands.add_parser("env", help="versions, devices, kernels and execution mode, for bug reports")
    env.set_defaults(run=_print_environment)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    quiet_unless_terminal()
    try:
        args = build_parser().parse_args(argv)
        return args.run(args)
    except SaguaroError as error:
        print(f"hf-saguaro: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except SystemExit as exit:  # --help and --version
        return exit.code
    except KeyboardInterrupt:
        print("hf-saguaro: interrupted", file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1


def _print_environment(args: argparse.Namespace) -> int:
    values = {
        **environment(),
        "kernels": kernels.describe(),
        "few rows": kernels.describe_few_rows(),
        "execution": _execution(),
    }
    width = max(map(len, values))
    for name, value in values.items():
        print(f"{name.ljust(width)}  {'-' if value is None else value}")
    return 0


def _execution() -> str:
    """What `execution="auto"` may choose here."""
    import torch

    if torch.cuda.is_available():
        return "auto: sync or async, as measured (the draft on a stream or device of its own)"
    if torch.get_num_threads() > 1:
        return f"auto: sync or async, as measured (target and draft share {torch.get_num_threads()} threads)"
    return "auto: sync (a single thread leaves the draft nothing to run on)"


if __name__ == "__main__":
    sys.exit(main())
