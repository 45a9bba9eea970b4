"""The engine on a GPU against the engine on the CPU, on one model: log-probabilities, answers, chosen blocks.

    python bench/cuda/engine_agreement.py --phsa PROGRAM --model MODEL [--out agreement.jsonl]

Both are servers of the same program with bf16 weights and a bf16 cache, and read the same tokens of a text with dense
attention, InfLLM v2 and PHSA. For each length and attention: the mean and the largest difference of the
log-probabilities of all tokens; how many tokens of a greedy answer are the same before the first that is not, and how
much less likely than its own best the CPU finds that one; how many of the lists of blocks that the last queries choose,
in all layers and heads, differ, and in how many of their blocks. bf16 rounds at other places on both sides, so that
small numbers are right and zeros are not expected; where two blocks are nearly alike, another one is chosen. The run
fails where the mean difference is above --tolerance with dense attention.
"""

import argparse
import contextlib
import json
import pathlib
import signal
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from server_bench import TEXT, Peer, free_port

ATTENTIONS = ("dense", "infllm2", "phsa")


@contextlib.contextmanager
def server(args, *flags):
    port = free_port()
    command = [args.phsa, "serve", "-m", args.model, "--port", port, "-c", max(args.lengths) + args.answer + 128]
    peer = Peer("phsa", [*command, "--weights", "bf16", "--kv-type", "bf16", "--log-file", "none", *flags], port)
    try:
        yield peer
    finally:
        peer.stop()


def complete(peer, tokens, how, **more):
    request = {"prompt": tokens, "temperature": 0, "return_token_ids": True, "phsa": how, **more}
    return peer.post("/v1/completions", request)["choices"][0]


def scores(peer, tokens, how):
    return complete(peer, tokens, how, max_tokens=0, echo=True, logprobs=0)["logprobs"]["token_logprobs"][1:]


def behind(peer, tokens, token, how):
    """How much less likely than the likeliest one a token after `tokens` is."""
    told = complete(peer, [*tokens, token], how, max_tokens=0, echo=True, logprobs=1)["logprobs"]
    return max(told["top_logprobs"][-1].values()) - told["token_logprobs"][-1]


def choices(peer, tokens, how, last):
    """The blocks that each of the last queries chose, by query, layer and head."""
    told = peer.post("/inspect", {"prompt": tokens, "max_tokens": 0, "last": last, "phsa": how})
    return {
        (query["position"], layer["layer"], head): frozenset(one["blocks"])
        for query in told["queries"]
        for layer in query["layers"]
        if not layer["reads_all"]
        for head, one in enumerate(layer["heads"])
    }


def compare(cpu, gpu, tokens, how, args):
    ours, theirs = scores(gpu, tokens, how), scores(cpu, tokens, how)
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    answers = [complete(peer, tokens, how, max_tokens=args.answer)["token_ids"] for peer in (gpu, cpu)]
    same = next((i for i, (a, b) in enumerate(zip(*answers, strict=False)) if a != b), min(map(len, answers)))
    row = {
        "model": pathlib.Path(args.model).name,
        "attention": how["attention"],
        "tokens": len(tokens),
        "mean_difference": sum(differences) / len(differences),
        "largest_difference": max(differences),
        "answer_tokens": len(answers[1]),
        "same_answer_tokens": same,
    }
    if same < len(answers[0]):
        row["behind"] = behind(cpu, tokens + answers[1][:same], answers[0][same], how)
    if how["attention"] != "dense":
        chosen = [choices(peer, tokens, how, args.queries) for peer in (gpu, cpu)]
        assert chosen[0].keys() == chosen[1].keys()
        lost = [len(chosen[1][key] - blocks) for key, blocks in chosen[0].items()]
        row["lists"] = len(lost)
        row["differing_lists"] = sum(count > 0 for count in lost)
        row["blocks"] = sum(len(blocks) for blocks in chosen[1].values())
        row["differing_blocks"] = sum(lost)
    return row


def table(rows):
    print("\n| model | attention | tokens | mean difference | largest | answer | lists of blocks | blocks |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        answer = f"{row['same_answer_tokens']} of {row['answer_tokens']} the same"
        if "behind" in row:
            answer += f", the next {row['behind']:.3f} behind"
        chosen = ["–", "–"]
        if "lists" in row:
            chosen = [f"{row[f'differing_{name}']} of {row[name]} differ" for name in ("lists", "blocks")]
        print(
            f"| {row['model']} | {row['attention']} | {row['tokens']} | {row['mean_difference']:.4f} "
            f"| {row['largest_difference']:.3f} | {answer} | {chosen[0]} | {chosen[1]} |"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phsa", default="phsa", help="the program")
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", type=lambda text: [int(part) for part in text.split(",")], default=[1000, 3500])
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--queries", type=int, default=32, help="queries whose choices are compared")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tolerance", type=float, default=0.1)
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines are added here")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server is left behind
    rows = []
    with server(args, "--device", "cpu") as cpu, server(args, "--device", args.device) as gpu:
        text = cpu.post("/tokenize", {"content": TEXT.read_text(encoding="utf-8")})["tokens"]
        for length in args.lengths:
            for attention in ATTENTIONS:
                how = {"attention": attention}
                if attention != "dense":
                    how |= {"top_k": args.top_k, "init": 16, "local": 128}
                rows.append(compare(cpu, gpu, text[:length], how, args))
                print(json.dumps(rows[-1]), flush=True)
                if args.out:
                    with args.out.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    table(rows)
    if any(row["mean_difference"] > args.tolerance for row in rows if row["attention"] == "dense"):
        sys.exit(f"the GPU does not give what the CPU gives: a mean difference is above {args.tolerance}")


if __name__ == "__main__":
    main()
