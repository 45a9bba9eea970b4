"""Asks a model about a text.

    python ask.py smollm2-135m lighthouse.txt "How high is the tower?"
    python ask.py MODEL TEXT QUESTION --attention phsa --top-k 16

MODEL is a .gguf file, a Hugging Face folder, or a name that `phsa models` lists.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import phsa


def main() -> None:
    parser = argparse.ArgumentParser(description="Asks a model about a text.")
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("question")
    parser.add_argument("--attention", default="auto", help="auto, dense, phsa, infllm2, infllm2-64, streaming, quest")
    parser.add_argument("--top-k", type=int, help="blocks that a query chooses")
    args = parser.parse_args()

    llm = phsa.LLM(args.model, attention=args.attention, top_k=args.top_k, progress=True)
    text = args.text.read_text(encoding="utf-8")
    messages = [{"role": "user", "content": f"{text}\n\n{args.question}"}]
    for piece in llm.stream(messages, temperature=0, max_tokens=200):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, MemoryError) as error:
        sys.exit(f"ask.py: {error}")
