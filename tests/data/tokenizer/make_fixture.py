"""Makes base.json, kinds.json and expected.json beside this file: `python tests/data/tokenizer/make_fixture.py`.

base.json is a small byte-level BPE tokenizer. kinds.json says how the tokenizers of real models differ from it: each
entry is merged into base.json (as JSON merge patch) and keeps the base's vocabulary. expected.json has the ids that
the Python package tokenizers gives for some texts. The merges are trained across word borders on purpose: a text that
is cut at the wrong place then gets other ids.
"""

import json
import pathlib
import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers import __version__ as tokenizers_version

HERE = pathlib.Path(__file__).resolve().parent
BOOK = HERE.parents[2] / "bench/data/from_sand_hill_to_pine.txt"  # public domain

# What prose does not have, so that merges across it exist.
SCRAPS = ["  ", "\n", "\r\n", "\t", " ", "123", "45", "'s", "'RE", "é", "ü", "Ж", "е", "...", "!!", "?\n", "١٢", "㎏"]
SCRAPS += [
    "한국",
    "중",
    "中文",
    "字",
    "。",
    "，",
    "ひ",
    "カ",
    "  \n",
    "a",
    "b",
    " I",
    "x=",
    "();",
    "//",
    "_",
    "🙂",
    "\u0301",
]


def train() -> dict:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=12,
    )
    rng = random.Random(5)
    texts = [BOOK.read_text(encoding="utf-8")[:250_000]]
    texts += ["".join(rng.choice(SCRAPS) for _ in range(8)) for _ in range(4000)]
    pieces = []
    for text in texts:
        at = 0
        while at < len(text):
            size = rng.randint(3, 24)
            pieces.append(text[at : at + size])
            at += size
    tokenizer.train_from_iterator(pieces, trainer)
    return json.loads(tokenizer.to_str())


def byte_level(**changes: bool) -> dict:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False, **changes}


def split(pattern: str, behavior: str = "Isolated", invert: bool = False, kind: str = "Regex") -> dict:
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def sequence(*steps: dict) -> dict:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def digits(individual: bool) -> dict:
    return {"type": "Digits", "individual_digits": individual}


QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
WORD_START = r"[^\r\n\p{L}\p{N}]?"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = (
    f"{WORD_START}{UPPER}*{LOWER}+{CONTRACTION}|{WORD_START}{UPPER}+{LOWER}*{CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
NFC = {"type": "NFC"}


def kinds(first_id: int) -> dict:
    def added(content: str, **changes: bool) -> dict:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        return {"content": content, **flags, **changes}

    def numbered(*tokens: dict) -> list:
        return [{"id": first_id + i, **token} for i, token in enumerate(tokens)]

    plain = [
        added("<|im_start|>"),
        added("<|im_end|>"),
        added("<tool>", special=False),
        added("<|im", special=False),
        added("<|endoftext|>"),
    ]
    odd = [
        *plain,
        added("[L]", lstrip=True),
        added("[R]", rstrip=True),
        added("[W]", single_word=True),
        added("[Éœ]", normalized=True, special=False),
        added("[LR]", lstrip=True, rstrip=True, special=False, normalized=True),
        added("word", single_word=True, special=False, normalized=True),
        added("  ", special=False),
    ]
    plain, odd = numbered(*plain), numbered(*odd)
    out = {
        "gpt2": {"pre_tokenizer": byte_level(use_regex=True)},
        "gpt2-prefix-space": {
            "pre_tokenizer": byte_level(use_regex=True, add_prefix_space=True),
            "added_tokens": odd,
        },
        "one-word": {"pre_tokenizer": byte_level(), "normalizer": NFC},
        "smollm2": {"pre_tokenizer": sequence(digits(True), byte_level(use_regex=True))},
        "digits-prefix-space": {
            "pre_tokenizer": sequence(digits(False), byte_level(use_regex=True, add_prefix_space=True))
        },
        "qwen2": {"pre_tokenizer": sequence(split(QWEN2), byte_level()), "normalizer": NFC},
        "qwen2-odd": {
            "pre_tokenizer": sequence(sequence(split(QWEN2)), byte_level()),
            "normalizer": {"type": "Sequence", "normalizers": [NFC]},
            "added_tokens": odd,
        },
        "llama3": {"pre_tokenizer": sequence(split(LLAMA3), byte_level()), "model": {"ignore_merges": True}},
        "gpt4o": {"pre_tokenizer": sequence(split(GPT4O), byte_level())},
        "deepseek3": {
            "pre_tokenizer": sequence(split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK3), byte_level()),
            "added_tokens": odd,
        },
        "deepseek-llm": {
            "pre_tokenizer": sequence(
                split("[\r\n]"),
                split(r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳΑ-ҁᎠ-Ᏽᴀ-ᴫḀ-ἕ𐐀-𐑏𞤀-𞥃]+"),
                split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
                split(r"\s+$"),
                split("[一-龥ࠀ-一가-퟿]+"),
                digits(True),
                byte_level(),
            )
        },
        "bloom": {"pre_tokenizer": sequence(split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), byte_level())},
        "odd-patterns": {
            "pre_tokenizer": sequence(
                split(r"\d{,2}x|[\s\S]\u00e9|\x{4e00}?[a-c\s-]+$|^[\w.-]+|(?=b)|(?<=c)d++|\S{2,3}?|\v|\w"),
                split(r"x*"),
                split(r"(?<=\s)\p{Han}*|", "MergedWithPrevious"),
                byte_level(use_regex=True),
            )
        },
    }
    for behavior in ("Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"):
        steps = (split(r"[\p{P}\s]", behavior), split("a", behavior, kind="String"), split(r"\w+", behavior, True))
        out[f"split-{behavior}"] = {"pre_tokenizer": sequence(*steps, byte_level())}
    for patch in out.values():
        patch.setdefault("added_tokens", plain)
    return out


TEXTS = [
    "",
    "Hello, world!",
    "  two  spaces   and\ttabs \n\n and\r\nlines  ",
    "I'm sure they'LL say we'Ve it'ſ don’t",
    "In 2024 there were 1234567 of 12,345.67, ١٢٣ and ½",
    "e\u0301 A\u030a \u212b \u1100\u1161\u11a8 \uac00\u11a7 a\u0315\u0300\u05ae\u0062",
    "中文字符，你好。日本語のひらがなとカタカナ 한국어 العربية हिन्दी",
    "👩‍👩‍👧 🇩🇪 \U0001f6dc \U0001fae8",
    "<|im_start|>user\nhi<|im_end|> <|im_start <tool> <|im <|endoftext|>",
    "a [L] b [R] c [W] d[W] [LR] x  [LR]  y word sword word. [E\u0301œ] [Éœ]",
    "\u0085\u00a0\u1680\u180e\u2028\u200b\u202f\u3000\ufeff x",
    "for (int i = 0; i < n; ++i) { x[i] += y[i]; }  // abcabc aéx",
    "\U0001c89a\ua7cb\U00011de3\U00016ff4\U000105c0\U00011f50\U0002ebf0\U00031350",
    "\x00\x01\x7f\u0378\U000e0001\U0010ffff",
    "word word\nword  word the end   ",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
]


def patched(base: dict, patch: dict) -> dict:
    """JSON merge patch, for patches without nulls."""
    out = dict(base)
    for key, value in patch.items():
        out[key] = (
            patched(out[key], value)
            if isinstance(value, dict) and isinstance(out.get(key), dict) and key == "model"
            else value
        )
    return out


def main() -> None:
    base = train()
    all_kinds = kinds(len(base["model"]["vocab"]))
    expected = {"tokenizers": tokenizers_version, "texts": TEXTS, "kinds": {}}
    for name, patch in all_kinds.items():
        tokenizer = Tokenizer.from_str(json.dumps(patched(base, patch)))
        entry = {}
        for key, as_text in (("recognised", False), ("as_text", True)):
            tokenizer.encode_special_tokens = as_text
            entry[key] = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
        expected["kinds"][name] = entry
    for name, value in (("base", base), ("kinds", all_kinds), ("expected", expected)):
        text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
        (HERE / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
