"""phsa in EleutherAI's lm-evaluation-harness: the model ``phsa`` and tasks that need no network.

``python -m phsa.lm_eval`` is the harness's command with both. From Python, ``import phsa.lm_eval`` registers the model,
and ``TaskManager(include_path=phsa.lm_eval.TASKS)`` knows the tasks.
"""

from pathlib import Path

try:
    import lm_eval as _harness  # noqa: F401
except ImportError as error:
    raise ImportError(
        "phsa.lm_eval needs lm-evaluation-harness, which is not installed here: pip install 'lm_eval>=0.4.13', or "
        "pip install '.[lm-eval]' in a checkout of phsa, which also brings what LongBench's metrics need"
    ) from error

from .adapter import PhsaLM

TASKS = Path(__file__).resolve().parent / "tasks"

__all__ = ["TASKS", "PhsaLM"]
