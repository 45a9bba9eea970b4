"""lm-evaluation-harness's command, which also knows the model ``phsa`` and phsa's tasks.

The harness has a fixed list of models and looks nowhere else; whoever wants another must register it before the
command starts.
"""

from __future__ import annotations

import argparse

from . import TASKS  # names what is missing where the harness is not installed

# isort: split
from lm_eval._cli import HarnessCLI
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.utils import setup_logging


def _complete(args: argparse.Namespace) -> None:
    """phsa's tasks beside the user's, and its model where no other is named, by the command or its configuration."""
    config = EvaluatorConfig.load_yaml_config(args.config) if getattr(args, "config", None) else {}
    if hasattr(args, "include_path"):
        theirs = config.get("include_path") if args.include_path is None else args.include_path
        more = theirs if isinstance(theirs, list) else [theirs] if theirs else []
        args.include_path = [str(TASKS), *map(str, more)]
    if getattr(args, "model", "phsa") is None and "model" not in config:
        args.model = "phsa"


def main() -> None:
    setup_logging()
    command = HarnessCLI()
    args = command.parse_args()
    _complete(args)
    command.execute(args)


if __name__ == "__main__":
    main()
