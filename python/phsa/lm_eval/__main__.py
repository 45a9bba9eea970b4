"""lm-evaluation-harness's command, which also knows the model ``phsa`` and phsa's tasks.

The harness has a fixed list of models and looks nowhere else; whoever wants another must register it before the
command starts.
"""

from lm_eval._cli import HarnessCLI
from lm_eval.utils import setup_logging

from . import TASKS


def main() -> None:
    setup_logging()
    command = HarnessCLI()
    args = command.parse_args()
    # A configuration file may set these two, and the command's arguments would win over it.
    if not getattr(args, "config", None):
        if getattr(args, "include_path", TASKS) is None:
            args.include_path = str(TASKS)
        if getattr(args, "model", "phsa") is None:
            args.model = "phsa"
    command.execute(args)


if __name__ == "__main__":
    main()
