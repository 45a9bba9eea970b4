"""Needle samples on a Hugging Face model, on a GPU or in the middle of a training run.

    phsa niah -m MODEL --forced --attention dense,infllm2,phsa -K 1,2,4 --samples 100 --export samples.jsonl
    python -m phsa.hf.niah samples.jsonl --model FOLDER --out answers.jsonl
    phsa niah --merge answers.jsonl

`phsa niah` writes the samples and, in the end, the tables; here is only what needs the model. A run that was stopped
goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .load import load_model
from .switch import set_attention

SAMPLES_FORMAT = "phsa niah samples 1"
ANSWERS_FORMAT = "phsa niah 1"


def read_samples(path: str | os.PathLike) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the samples of a file that `phsa niah --export` wrote."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    try:
        header, *samples = map(json.loads, lines)
        good = header["format"] == SAMPLES_FORMAT and all(
            {"tokens", "answer_tokens", "free_tokens", "records"} <= set(x) for x in samples
        )
    except (ValueError, KeyError, TypeError):
        good = False
    if not good:
        raise ValueError(f"{path}: not a file of `phsa niah --export`")
    return header, samples


@torch.no_grad()
def likeliest_answers(model: PreTrainedModel, samples: Sequence[Mapping[str, Any]], vocabulary: int) -> list[list[int]]:
    """The most likely token at each place of each sample's answer, given the prompt and the right tokens before it.
    The samples are read at once, as packed sequences."""
    rows = [[*sample["tokens"], *sample["answer_tokens"][:-1]] for sample in samples]
    lengths = [len(row) for row in rows]
    answers = [len(sample["answer_tokens"]) for sample in samples]
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ends = bounds[1:].tolist()
    wanted = torch.cat([torch.arange(end - answer, end) for end, answer in zip(ends, answers, strict=True)])
    logits: Tensor = model(
        input_ids=torch.tensor([[token for row in rows for token in row]], device=model.device),
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None].to(model.device),
        cu_seq_lens_q=bounds,
        logits_to_keep=wanted.to(model.device),
        use_cache=False,
    ).logits
    return [part.tolist() for part in logits[0, :, :vocabulary].argmax(-1).cpu().split(answers)]


def answers(
    model: PreTrainedModel,
    header: Mapping[str, Any],
    samples: Sequence[Mapping[str, Any]],
    known: set[str],
    batch_tokens: int = 1,
) -> Iterator[dict[str, Any]]:
    """The records of all samples but the known ones, as they are answered: all of one attention, then of the next.
    Samples are read together up to `batch_tokens`, one at least."""
    asked: dict[str, list[tuple[Mapping[str, Any], dict[str, Any]]]] = {}
    for sample in samples:
        for record in sample["records"]:
            if key(record) not in known:
                asked.setdefault(json.dumps(record["attention"], sort_keys=True), []).append((sample, record))
    for group in asked.values():
        set_attention(model, group[0][1]["attention"], header["punctuation"])
        while group:
            count, tokens = 0, 0
            while count < len(group) and (count == 0 or tokens + group[count][1]["length"] <= batch_tokens):
                tokens += group[count][1]["length"]
                count += 1
            batch, group = group[:count], group[count:]
            start = time.perf_counter()
            found = likeliest_answers(model, [sample for sample, _ in batch], header["vocabulary"])
            seconds = (time.perf_counter() - start) / count
            for (sample, record), tokens_found in zip(batch, found, strict=True):
                free = sample["free_tokens"]
                right = tokens_found[free:] == sample["answer_tokens"][free:]
                yield {
                    **record,
                    "score": float(right),
                    "found": [right],
                    # There need not be a tokenizer here.
                    "answer": "tokens " + " ".join(map(str, tokens_found)),
                    "seconds": seconds,
                }


def key(record: Mapping[str, Any]) -> str:
    """What tells records of one file apart."""
    return json.dumps([record[name] for name in ("task", "length", "sample", "attention")], sort_keys=True)


def _line(value: Mapping[str, Any]) -> str:
    """As `phsa niah` writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"


def _open_answers(path: Path, header: Mapping[str, Any]) -> set[str]:
    """Makes the file, or reads what a stopped run left in it; a last line without its end is dropped."""
    if not path.exists() or path.stat().st_size == 0:
        path.write_text(_line(header), encoding="utf-8")
        return set()
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    try:
        first, *records = map(json.loads, whole.splitlines())
        known = {key(record) for record in records}
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: not a file of needle answers; give another --out") from None
    if first != header:
        raise ValueError(f"{path}: holds answers of another model or other samples; give another --out")
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return known


def run(
    model: PreTrainedModel,
    name: str,
    samples_file: str | os.PathLike,
    out: str | os.PathLike,
    limit: int | None = None,
    batch_tokens: int = 1,
    quiet: bool = False,
    adapter: str = "none",
) -> list[dict[str, Any]]:
    """Answers the samples that `out` lacks and appends them to it. Returns the new records. `adapter`: what tells it
    from others."""
    header, samples = read_samples(samples_file)
    context = model.config.max_position_embeddings
    longest = max((record["length"] for sample in samples for record in sample["records"]), default=0)
    if longest > context:
        raise ValueError(f"{samples_file}: samples of {longest} tokens; the model's context is {context}")
    dtype = str(model.dtype).removeprefix("torch.")
    kept = {name: value for name, value in header.items() if name not in ("vocabulary", "punctuation")}
    kept |= {"format": ANSWERS_FORMAT, "model": name, "fingerprint": "", "weights": dtype, "kv_type": dtype}
    kept |= {"adapter": adapter}
    known = _open_answers(Path(out), kept)
    samples = samples[:limit]
    missing = sum(key(record) not in known for sample in samples for record in sample["records"])
    start = time.perf_counter()
    records = []
    with Path(out).open("a", encoding="utf-8") as file:
        for record in answers(model, header, samples, known, batch_tokens):
            file.write(_line(record))
            file.flush()
            records.append(record)
            done = len(records)
            if not quiet and (sys.stderr.isatty() or done % 100 == 0 or done == missing):
                left = (time.perf_counter() - start) / done * (missing - done)
                print(f"\rneedles: {done} of {missing} answers, {left:.0f} s left", end="", file=sys.stderr)
    if not quiet:
        print(file=sys.stderr)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m phsa.hf.niah", description="needle samples on a Hugging Face model"
    )
    parser.add_argument("samples", help="a file of `phsa niah --export`")
    parser.add_argument("--model", required=True, help="a folder or name that transformers loads, or a .gguf file")
    parser.add_argument(
        "--out", required=True, help="JSON lines for `phsa niah --merge`; a stopped run goes on from it"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--adapter", help="a folder with an adapter of `python -m phsa.train` or of PEFT")
    parser.add_argument("--batch-tokens", type=int, default=1, help="tokens of samples that are read at once")
    parser.add_argument("--samples", dest="limit", type=int, help="only the first of them")
    args = parser.parse_args()
    try:
        read_samples(args.samples)  # before the weights are loaded
        model = load_model(args.model, getattr(torch, args.dtype))
        adapter = "none"
        if args.adapter is not None:
            from ..train.lora import load_adapter

            load_adapter(Path(args.adapter), model)
            files = [Path(args.adapter, name) for name in ("adapter_config.json", "adapter_model.safetensors")]
            adapter = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
        model = model.to(args.device).eval()
        run(model, args.model, args.samples, args.out, args.limit, args.batch_tokens, adapter=adapter)
    except (OSError, ValueError) as error:
        sys.exit(f"phsa: {error}")


if __name__ == "__main__":
    main()
