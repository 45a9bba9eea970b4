"""Random texts that look for the places where two tokenizers could disagree."""

import random
import unicodedata
from collections.abc import Iterator

# Assigned after Unicode 14, or known to differ between the tables that the two sides use.
NEW_RANGES = [
    (0x7FD, 0x7FE), (0x897, 0x8A0), (0x11A7, 0x11A8), (0x1ABF, 0x1ACF), (0x1C89, 0x1C8B), (0xA7CB, 0xA7DD),
    (0x105C0, 0x105F4), (0x10D40, 0x10D90), (0x11380, 0x113E3), (0x11930, 0x11945), (0x11BC0, 0x11BFA),
    (0x11DE0, 0x11DEA), (0x11F00, 0x11F5B), (0x13430, 0x13456), (0x16100, 0x1613A), (0x16D40, 0x16D7A),
    (0x16FF0, 0x16FF7), (0x1CC00, 0x1CEB4), (0x1E030, 0x1E090), (0x1E4D0, 0x1E4FA), (0x1E5D0, 0x1E600),
    (0x2EBF0, 0x2EE60), (0x31350, 0x323B0),
]  # fmt: skip
PLANES = [
    (0x20, 0x7F), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x10000, 0x20000), (0x20000, 0x34000),
    (0xE0000, 0x110000),
]  # fmt: skip
SPACES = list(" \t\n\r\x0b\x0c\x85\xa0\u1680\u180e\u2000\u2009\u200a\u200b\u2028\u2029\u202f\u205f\u3000\ufeff")
SPACES += ["\r\n", "  ", "   ", "\n\n", " \n"]
LETTERS = list("abcdeghlmrstuvxyzABCDESTRLVMéÉüßſİıŉǅẗÅΩＡ")
MARKS_OF_SPEECH = list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~¿¡«»…—、。「」")
FRAGMENTS = [
    "'s", "'S", "'ſ", "'t", "'RE", "'ve", "'LL", "'d", "'m", "’s", "<|im_start|>", "<|im_end|>", "<|im", "<tool>",
    "<|endoftext|>", "<|im_st", "[L]", "[R]", "[W]", "[Éœ]", "[E\u0301œ]", "[LR]", "word", "e\u0301", "A\u030a",
    "\u1100\u1161\u11a8", "\uac00\u11a7", "12345", "1,234.5", "foo_bar", "http://a.b/c?d=e", "中文字", "。，",
    "ひらがな", "カタカナ", "한국어", "مرحبا", "हिन्दी", "👩‍👩‍👧", "🇩🇪", "...", "!!!", "--", "\u212b", "\u2126",
]  # fmt: skip


def random_texts(count: int, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    code_points = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    pools = [
        [chr(c) for c in code_points if unicodedata.combining(chr(c))],
        [chr(c) for first, end in NEW_RANGES for c in range(first, end)],
        [chr(c) for c in (*range(0x1100, 0x1200), *range(0xAC00, 0xAC40))],
        [chr(c) for c in code_points if unicodedata.category(chr(c))[0] == "N"],
        SPACES,
        SPACES,
        LETTERS,
        LETTERS,
        LETTERS,
        FRAGMENTS,
        MARKS_OF_SPEECH,
        MARKS_OF_SPEECH,
        None,  # any code point
        None,
        None,
    ]
    for _ in range(count):
        size = rng.choice([1, 2, 3, 5, 8, 13, 30])
        some = rng.sample(pools, 2) if rng.random() < 0.5 else pools
        text = ""
        for _ in range(size):
            pool = rng.choice(some)
            text += chr(rng.randrange(*rng.choice(PLANES))) if pool is None else rng.choice(pool)
        yield text
