"""The engine on a GPU against transformers on the same weights, in the same run, and PHSA against dense attention.

    python bench/cuda/engine_bench.py --phsa PROGRAM --out results.jsonl --random
    python bench/cuda/engine_bench.py --phsa PROGRAM --out results.jsonl --model FOLDER_OR_GGUF
    python bench/cuda/engine_bench.py --out results.jsonl --table

--random makes a model of Qwen3-0.6B's shape with random weights (and a tokenizer of 256 bytes: nothing here reads
text). A .gguf file is turned into a folder by `phsa export`, so that both programs have the same bf16 weights; a
context that is shorter than what is measured is lengthened in a copy of config.json, for time and nothing else.

Steps, each once for each model and length; what results.jsonl holds already is not measured again:
    check    the log-probabilities of 4,096 tokens against transformers', with dense attention and PHSA
    prefill  time to the first token: phsa with dense attention and PHSA, transformers with each SDPA backend
    decode   tokens per second of --batches sequences at once, and transformers'
    int8     decode with int8 weights, beside the rows of the step decode: --batches, and 1 and 4
    parts    where the time goes
    long     one text of --long tokens with PHSA: time to the first token, then decode

Memory is what the device has less while a command runs. Times are the best of --repeats. PHSA has K = 16, init 128,
local 512 unless --sparse says otherwise ("--phsa-config FILE"). Prints the table at the end. Needs torch and
transformers; with --device cpu it runs without a GPU.
"""

import argparse
import contextlib
import gc
import json
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from server_bench import TEXT, Peer, free_port

STEPS = ("check", "prefill", "decode", "int8", "parts", "long")
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
SPARSE = "-K 16 --init 128 --local 512"
CHECK_TOKENS = 4096
# Mean difference of log-probabilities between two programs that round to bf16 in different places: transformers' logits
# are bf16, 0.06 apart where they are about 10.
LARGEST_MEAN_DIFFERENCE = 0.1
REFUSED = 2  # the program's status where what was asked for cannot be, such as a cache that does not fit
WRITTEN = 32  # tokens of a decode measurement
SHAPES = {
    "qwen3-0.6b": dict(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, vocab_size=151936
    ),
    "tiny": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512),
}


def byte_tokenizer():
    """A tokenizer.json with one token for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {alphabet[byte]: byte for byte in range(256)}, "merges": []},
    }


def random_model(folder, shape, context, device):
    """A Hugging Face folder; one that is there already is used as it is."""
    if (folder / "tokenizer.json").exists():
        return folder
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        **SHAPES[shape],
        num_key_value_heads=SHAPES[shape]["num_attention_heads"] // 2,
        head_dim=128,
        rope_theta=1e6,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()), encoding="utf-8")
    return folder


def folder_of(path, work, program, context):
    """A Hugging Face folder of a model with room for `context` tokens."""
    if path.suffix == ".gguf":
        exported = work / path.stem
        work.mkdir(parents=True, exist_ok=True)
        if not (exported / "config.json").exists():
            subprocess.run([program, "export", "-m", path, "--out", exported, "--type", "bf16"], check=True)
        path = exported
    config = json.loads((path / "config.json").read_text())
    if config["max_position_embeddings"] >= context:
        return path
    longer = work / f"{path.name}-{context}"
    longer.mkdir(parents=True, exist_ok=True)
    for file in path.iterdir():
        link = longer / file.name
        if file.name != "config.json" and not link.exists():
            link.symlink_to(file.resolve())
    config["max_position_embeddings"] = context
    (longer / "config.json").write_text(json.dumps(config))
    return longer


class MemoryWatch:
    """The most that the device had in use, above what it had at the beginning."""

    def __init__(self):
        self.bytes = 0
        self.stop = threading.Event()

    def used(self):
        free, total = torch.cuda.mem_get_info()
        return total - free

    def __enter__(self):
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()
            self.before = self.used()
            self.thread = threading.Thread(target=self.watch)
            self.thread.start()
        return self

    def watch(self):
        while not self.stop.wait(0.02):
            self.bytes = max(self.bytes, self.used() - self.before)

    def __exit__(self, *_):
        if torch.cuda.is_available():
            self.stop.set()
            self.thread.join()


class Results:
    """JSON lines that say what was measured; the file survives a run that is stopped."""

    def __init__(self, path):
        self.path = path
        self.rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def find(self, **key):
        return [row for row in self.rows if all(row.get(name) == value for name, value in key.items())]

    def add(self, **row):
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


class Bench:
    def __init__(self, args, results, folder, name):
        self.args, self.results, self.folder, self.name = args, results, folder, name
        self.hf = None
        # Ids that are text: a vocabulary's control tokens, and what it is padded with, lie at its end.
        vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
        self.known = 256 if args.random else vocab * 9 // 10

    def missing(self, **key):
        return not self.results.find(model=self.name, **key)

    @staticmethod
    def only(row, *names):
        return {name: row[name] for name in names if name in row}

    def add(self, **row):
        self.results.add(model=self.name, device=self.device_name(), **row)

    def device_name(self):
        return torch.cuda.get_device_name() if self.args.device != "cpu" else "cpu"

    # ------------------------------------------------------------------------------------------------- the program

    def phsa(self, attention, *flags):
        """The line of `phsa bench` with the memory that it took as `memory`; where it was refused, `error` alone."""
        command = [self.args.phsa, "bench", "-m", self.folder, "--device", self.args.device, "--attention", attention]
        command += [
            *(self.args.sparse.split() if attention != "dense" else []),
            *self.args.bench_args.split(),
            *flags,
            "--json",
        ]
        command = [str(part) for part in command]
        with MemoryWatch() as memory:
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == REFUSED:
            return {"error": done.stderr.splitlines()[-1]}
        if done.returncode != 0:
            sys.exit(f"{done.stderr}failed with status {done.returncode}: {' '.join(command)}")
        row = json.loads(done.stdout)
        if (row["device"] == "cpu") != (self.args.device == "cpu"):
            sys.exit(f"{done.stderr}the program ran on {row['device']}, not on {self.args.device}")
        return {**row, "memory": memory.bytes}

    @contextlib.contextmanager
    def server(self, context):
        port = free_port()
        serve = [
            self.args.phsa,
            "serve",
            "-m",
            self.folder,
            "--device",
            self.args.device,
            "-c",
            context,
            "--port",
            port,
        ]
        peer = Peer("phsa", [*serve, "--cache-tokens", context, "--log-file", "none"], port)
        try:
            yield peer
        finally:
            peer.stop()

    # ------------------------------------------------------------------------------------------------ transformers

    def load(self):
        if self.hf is None:
            self.hf = transformers.AutoModelForCausalLM.from_pretrained(
                self.folder, dtype=torch.bfloat16, attn_implementation="sdpa"
            ).to(self.args.device)
            self.hf.eval()
        return self.hf

    def unload(self):
        self.hf = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def tokens(self, count):
        generator = random.Random(count)
        return [generator.randrange(self.known) for _ in range(count)]

    def ids(self, count):
        return torch.tensor([self.tokens(count)], device=self.args.device)

    def synchronize(self):
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def best(self, function):
        function()
        seconds = []
        for _ in range(self.args.repeats):
            self.synchronize()
            start = time.perf_counter()
            function()
            self.synchronize()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    # ------------------------------------------------------------------------------------------------------- steps

    @torch.inference_mode()
    def check(self):
        if not self.missing(what="check", attention="phsa"):
            return
        with self.server(self.args.check_tokens + 128) as peer:
            tokens = self.check_tokens(peer)
            logits = self.load()(torch.tensor([tokens], device=self.args.device)).logits[0]
            want = logits.float().log_softmax(-1)
            next_tokens = torch.tensor(tokens[1:], device=want.device)
            scored = want[:-1].gather(1, next_tokens[:, None])[:, 0].cpu()
            last = want[-1, : self.known]
            for attention in ("dense", "phsa"):
                request = {"prompt": tokens, "temperature": 0, "return_token_ids": True}
                request["phsa"] = {"attention": attention, "top_k": 16, "init": 128, "local": 512}
                echo = peer.post("/v1/completions", {**request, "max_tokens": 0, "echo": True, "logprobs": 0})
                ours = torch.tensor(echo["choices"][0]["logprobs"]["token_logprobs"][1:])
                difference = (ours - scored).abs()
                answer = peer.post("/v1/completions", {**request, "max_tokens": 1})["choices"][0]["token_ids"][0]
                row = dict(
                    tokens=len(tokens),
                    mean_difference=difference.mean().item(),
                    largest_difference=difference.max().item(),
                    likeliest_is_theirs=answer == last.argmax().item(),
                    behind_theirs=(last.max() - want[-1, answer]).item(),
                )
                if attention == "dense" and row["mean_difference"] > LARGEST_MEAN_DIFFERENCE:
                    sys.exit(f"dense attention does not give what transformers gives: {row}")
                self.add(what="check", attention=attention, **row)

    def check_tokens(self, peer):
        """Tokens of a text; random ones where the model knows no text."""
        if self.args.random:
            return self.tokens(self.args.check_tokens)
        text = TEXT.read_text(encoding="utf-8")
        return peer.post("/tokenize", {"content": text})["tokens"][: self.args.check_tokens]

    def prefill(self):
        for length in self.args.lengths:
            for attention in ("dense", "phsa"):
                key = dict(what="prefill", engine="phsa", attention=attention, length=length)
                if self.missing(**key):
                    self.unload()
                    row = self.phsa(attention, "-p", length, "-n", 0, "-r", self.args.repeats)
                    if "error" not in row:
                        row["seconds"] = length / row["tokens_per_s"]
                    self.add(**key, **self.only(row, "seconds", "memory", "read_share", "error"))
            for backend in self.args.sdpa:
                if self.missing(what="prefill", engine="transformers", attention=backend, length=length):
                    self.prefill_hf(backend, length)

    @torch.inference_mode()
    def prefill_hf(self, backend, length):
        model, ids = self.load(), self.ids(length)
        row = dict(what="prefill", engine="transformers", attention=backend, length=length)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        try:
            with sdpa_kernel(BACKENDS[backend]):
                row["seconds"] = self.best(lambda: model(ids, use_cache=True, logits_to_keep=1))
        except (RuntimeError, torch.OutOfMemoryError) as error:
            row["error"] = str(error).splitlines()[0]
        row["memory"] = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        self.add(**row)

    def decode(self):
        for length in self.args.lengths:
            for batch in self.args.batches:
                self.decode_phsa(length, batch)
                if self.missing(what="decode", engine="transformers", length=length, batch=batch):
                    self.decode_hf(length, batch)

    def int8(self):
        for length in self.args.lengths:
            for batch in sorted({1, 4, *self.args.batches}):
                self.decode_phsa(length, batch)  # what it is compared with, where it is not there yet
                self.decode_phsa(length, batch, "int8", "--weights", "int8")

    def decode_phsa(self, length, batch, what="decode", *flags):
        for attention in ("dense", "phsa"):
            key = dict(what=what, engine="phsa", attention=attention, length=length, batch=batch)
            if self.missing(**key):
                self.unload()
                work = ("-p", 0, "-n", WRITTEN, "-d", length, "-b", batch, "-r", self.args.repeats)
                row = self.phsa(attention, *work, *flags)
                self.add(**key, **self.only(row, "tokens_per_s", "memory", "read_share", "error"))

    @torch.inference_mode()
    def decode_hf(self, length, batch):
        """With transformers' own cache, which grows by copying."""
        row = dict(what="decode", engine="transformers", attention="sdpa", length=length, batch=batch)
        model, ids = self.load(), self.ids(length)
        try:
            cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
            cache.batch_repeat_interleave(batch)
            token = torch.full((batch, 1), 1, device=self.args.device)
            seconds = []
            for step in range(2 + WRITTEN):
                self.synchronize()
                start = time.perf_counter()
                token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
                self.synchronize()
                if step >= 2:
                    seconds.append(time.perf_counter() - start)
            row["tokens_per_s"] = batch / (sum(seconds) / len(seconds))
        except (RuntimeError, torch.OutOfMemoryError) as error:
            row["error"] = str(error).splitlines()[0]
        self.add(**row)

    def parts(self):
        self.unload()
        for length in self.args.lengths:
            for attention in ("dense", "phsa"):
                for test, flags in (("pp", ("-p", length, "-n", 0)), ("tg", ("-p", 0, "-n", WRITTEN, "-d", length))):
                    key = dict(what="parts", engine="phsa", attention=attention, length=length, test=test)
                    if self.missing(**key):
                        row = self.phsa(attention, *flags, "-r", 1, "--profile")
                        self.add(**key, **self.only(row, "share", "error"))

    def long(self):
        length = self.args.long
        if not length or not self.missing(what="long", length=length):
            return
        tokens = self.tokens(length)
        self.unload()
        with MemoryWatch() as memory, self.server(length + WRITTEN) as peer:
            answer = peer.post(
                "/v1/completions",
                {
                    "prompt": tokens,
                    "max_tokens": WRITTEN,
                    "temperature": 0,
                    "phsa": {"attention": "phsa", "top_k": 16, "init": 128, "local": 512},
                },
            )
        told, usage = answer["phsa"], answer["usage"]
        if usage["prompt_tokens"] != length or not usage["completion_tokens"]:
            sys.exit(f"long: not what was asked for: {usage}")
        self.add(
            what="long",
            length=length,
            seconds=told["time_to_first_token_s"],
            tokens_per_s=told["decode_tokens_per_s"],
            read_share=told["read_share"],
            memory=memory.bytes,
        )


def cell(row, key, form):
    """A number of a row, with the memory that it took."""
    if row is None or key not in row:
        return "–"
    memory = f" ({row['memory'] / 1e9:.1f})" if row.get("memory") else ""
    return form.format(row[key]) + memory


def ratio(slow, fast):
    return f"{slow / fast:.2f}×" if slow and fast else "–"


def print_table(results):
    def one(**key):
        return next(iter(results.find(**key)), None)

    def get(row, key):
        return row.get(key) if row else None

    def line(*cells):
        print("| " + " | ".join(map(str, cells)) + " |")

    def head(title, *names):
        print(f"\n{title}\n")
        line(*names)
        line(*["---"] * len(names))

    head(
        "Agreement with transformers: log-probabilities of the tokens of a text",
        *("model", "attention", "tokens", "mean difference", "largest", "same likeliest token"),
    )
    for row in results.find(what="check"):
        same = "yes" if row["likeliest_is_theirs"] else f"no, {row['behind_theirs']:.3f} behind"
        differences = (f"{row[key]:.4f}" for key in ("mean_difference", "largest_difference"))
        line(row["model"], row["attention"], row["tokens"], *differences, same)

    head(
        "Time to the first token, seconds (memory, GB)",
        *("model", "tokens", "PHSA", "dense", "cuDNN", "flash", "dense / PHSA", "faster SDPA / PHSA"),
    )
    for model, length in dict.fromkeys((row["model"], row["length"]) for row in results.find(what="prefill")):
        rows = [
            one(what="prefill", model=model, length=length, attention=attention)
            for attention in ("phsa", "dense", "cudnn", "flash")
        ]
        ours, dense, *theirs = (get(row, "seconds") for row in rows)
        faster = min(filter(None, theirs), default=None)
        line(model, length, *(cell(row, "seconds", "{:.3f}") for row in rows), ratio(dense, ours), ratio(faster, ours))

    head(
        "Decode, tokens per second of all sequences together (memory, GB)",
        *("model", "tokens", "batch", "PHSA", "dense", "PHSA / dense", "transformers"),
    )
    for model, length, batch in dict.fromkeys(
        (row["model"], row["length"], row["batch"]) for row in results.find(what="decode")
    ):
        key = dict(what="decode", model=model, length=length, batch=batch)
        rows = [one(attention=attention, **key) for attention in ("phsa", "dense", "sdpa")]
        sparse, dense, theirs = (cell(row, "tokens_per_s", "{:.1f}") for row in rows)
        gain = ratio(get(rows[0], "tokens_per_s"), get(rows[1], "tokens_per_s"))
        line(model, length, batch, sparse, dense, gain, theirs)

    head(
        "Decode with int8 weights, tokens per second of all sequences together (memory, GB)",
        *("model", "tokens", "batch", "attention", "bf16", "int8", "int8 / bf16"),
    )
    for row in results.find(what="int8"):
        key = {name: row[name] for name in ("model", "length", "batch", "attention")}
        wide = one(what="decode", engine="phsa", **key)
        cells = (cell(each, "tokens_per_s", "{:.1f}") for each in (wide, row))
        line(*key.values(), *cells, ratio(get(row, "tokens_per_s"), get(wide, "tokens_per_s")))

    parts = ("products", "selection", "attention", "other")
    head("Where the time goes, percent (pp: prefill, tg: decode)", "model", "tokens", "test", "policy", *parts)
    for row in results.find(what="parts"):
        if "share" in row:
            shares = (f"{100 * row['share'][part]:.0f}" for part in parts)
            line(row["model"], row["length"], row["test"], row["attention"], *shares)

    for row in results.find(what="long"):
        print(
            f"\n{row['model']}, {row['length']} tokens with PHSA: first token after {row['seconds']:.1f} s "
            f"({row['length'] / row['seconds']:.0f} tokens/s), then {row['tokens_per_s']:.1f} tokens/s; "
            f"{100 * row['read_share']:.2f} % read, {row['memory'] / 1e9:.1f} GB"
        )
    for row in results.rows:
        if "error" in row:
            batch = f", batch {row['batch']}" if "batch" in row else ""
            print(
                f"\n{row['model']}: {row['what']} of {row['length']} tokens{batch}, {row['engine']} "
                f"{row['attention']}: {row['error']}"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    whole = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--phsa", default="phsa", help="the program")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON lines; what is there is not done again")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("build/bench"), help="for models made here")
    parser.add_argument("--random", action="store_true", help="a model with random weights")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES, help="of --random")
    parser.add_argument("--model", type=pathlib.Path, help="a Hugging Face folder or a .gguf file")
    parser.add_argument("--steps", default=",".join(STEPS), help=",".join(STEPS))
    parser.add_argument("--lengths", type=whole, default=[32768, 131072])
    parser.add_argument("--batches", type=whole, default=[1, 16])
    parser.add_argument("--long", type=int, default=0, help="tokens of the step long; 0: none")
    parser.add_argument("--sdpa", default="cudnn,flash", help="transformers' backends")
    parser.add_argument("--check-tokens", type=int, default=CHECK_TOKENS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bench-args", default="", help="more flags for `phsa bench`, such as '--chunk 32768'")
    parser.add_argument("--sparse", default=SPARSE, help="PHSA's settings in the steps prefill, decode, int8 and parts")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--table", action="store_true", help="print the table and end")
    args = parser.parse_args()
    args.sdpa = [name for name in args.sdpa.split(",") if name]
    steps = [step for step in args.steps.split(",") if step]
    unknown = set(steps) - set(STEPS) | set(args.sdpa) - set(BACKENDS)
    if unknown:
        parser.error(f"not known: {', '.join(sorted(unknown))}")
    if not args.table and args.random == (args.model is not None):
        parser.error("give --random or --model")
    transformers.utils.logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server is left behind
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results = Results(args.out)
    if not args.table:
        context = max([*args.lengths, args.long, args.check_tokens]) + 1024
        if args.random:
            # As long as the longest run might need, so that one folder serves them all.
            folder = random_model(args.work / f"random-{args.shape}", args.shape, 1 << 21, args.device)
        else:
            folder = folder_of(args.model, args.work, args.phsa, context)
        name = f"{args.shape} (random)" if args.random else args.model.stem
        bench = Bench(args, results, folder, name)
        for step in STEPS:
            if step in steps:
                getattr(bench, step)()
    print_table(results)


if __name__ == "__main__":
    main()
