"""phsa in EleutherAI's lm-evaluation-harness: the model ``phsa`` and tasks that need no network.

``python -m phsa.lm_eval`` is the harness's command with both. From Python, ``import phsa.lm_eval`` registers the model,
and ``TaskManager(include_path=phsa.lm_eval.TASKS)`` knows the tasks.
"""

from pathlib import Path

from .adapter import PhsaLM

TASKS = Path(__file__).resolve().parent / "tasks"

__all__ = ["TASKS", "PhsaLM"]
