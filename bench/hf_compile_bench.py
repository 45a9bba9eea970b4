"""phsa.hf eagerly and under torch.compile(fullgraph=True): generating with a static cache, and a training step with
padding, on a model of SmolLM2-135M's shape with random weights. Every compiled result is compared with the eager one.

    python bench/hf_compile_bench.py [--prompt 1024] [--new 64] [--rows 2] [--length 1024] [--layers 30]
        [--repeat 3] [--device cpu]

Prints a JSON line with the medians. Seconds of compiling are those of the first call, less a later one.
"""

import argparse
import json
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import phsa.hf

SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def seconds(work, repeat):
    """The first call's, and the median of later ones; with what the last returned."""
    times = []
    for _ in range(repeat + 1):
        begin = time.perf_counter()
        out = work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return times[0], statistics.median(times[1:]), out


def generating(model, args):
    ids = torch.randint(1, SHAPE["vocab_size"], (1, args.prompt), device=args.device)
    kwargs = {"do_sample": False, "attention_mask": torch.ones_like(ids)}
    eager = model.forward

    def measure(forward, cache):
        model.forward = forward

        def run(new):
            # As long a cache whatever is written, so that nothing is compiled again.
            def stop(tokens, scores):
                return torch.full((1,), tokens.shape[1] >= args.prompt + new, device=tokens.device)

            options = {"max_new_tokens": args.new, "cache_implementation": cache, "stopping_criteria": [stop]}
            return model.generate(ids, **options, **kwargs)

        first, whole, out = seconds(lambda: run(args.new), args.repeat)
        _, prompt, _ = seconds(lambda: run(1), args.repeat)
        return {"prompt_s": prompt, "tokens_per_s": (args.new - 1) / (whole - prompt), "first_s": first - whole}, out

    rows, outs = {}, []
    for name, forward, cache in (
        ("eager, default cache", eager, None),
        ("eager, static cache", eager, "static"),
        ("compiled, static cache", torch.compile(eager, fullgraph=True), "static"),
    ):
        rows[name], out = measure(forward, cache)
        outs.append(out)
    model.forward = eager
    assert all(torch.equal(out, outs[0]) for out in outs), "the answers differ"
    return rows


def training(model, args):
    ids = torch.randint(1, SHAPE["vocab_size"], (args.rows, args.length), device=args.device)
    mask = torch.ones_like(ids)
    mask[0, : args.length // 4] = 0  # on the left
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), "use_cache": False}
    rows, losses = {}, []
    for name, one in (("eager", model), ("compiled", torch.compile(model, fullgraph=True))):

        def step(one=one):
            model.zero_grad()
            loss = one(**batch).loss
            loss.backward()
            return loss.detach()

        first, later, loss = seconds(step, args.repeat)
        rows[name] = {"step_s": later, "first_s": first - later}
        losses.append(loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-3)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rows", type=int, default=2, help="of the training batch")
    parser.add_argument("--length", type=int, default=1024, help="of its rows")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "num_hidden_layers": args.layers})).to(args.device)
    phsa.hf.enable(model, top_k=16, init=16, local=128, punctuation=range(20, 60))
    out = {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": args.device}
    out["generate"] = generating(model.eval(), args)
    torch.compiler.reset()
    out["train"] = training(model.train(), args)
    rounded = json.loads(json.dumps(out), parse_float=lambda text: round(float(text), 3))
    print(json.dumps(rounded))


if __name__ == "__main__":
    main()
