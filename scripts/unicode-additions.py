#!/usr/bin/env python3
"""Prints the table kAdditions of src/tokenizer/unicode_sets.cc.

These are the characters that the regular expressions of the Python package tokenizers know and Unicode 14, which PCRE2
of Debian 12 and Python 3.11 have, does not. The package itself is asked for each character's category.
"""

import unicodedata

from tokenizers import Regex, pre_tokenizers

CATEGORIES = [
    *("Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No"),
    *("Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp"),
]


def main() -> None:
    if unicodedata.unidata_version != "14.0.0":
        raise SystemExit(f"this Python has Unicode {unicodedata.unidata_version}; 14.0.0 is wanted (Python 3.11)")
    unassigned = [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) == "Cn"]
    category = {}
    for name in CATEGORIES:
        remove = pre_tokenizers.Split(Regex(rf"\p{{{name}}}"), "removed")
        for begin in range(0, len(unassigned), 4096):
            part = unassigned[begin : begin + 4096]
            left = {c for piece, _ in remove.pre_tokenize_str("".join(part)) for c in piece}
            category.update({ord(c): name for c in part if c not in left})
    rows = []
    for code in sorted(category):
        if rows and rows[-1][1] == code - 1 and rows[-1][2] == category[code]:
            rows[-1][1] = code
        else:
            rows.append([code, code, category[code]])
    for first, last, name in rows:
        print(f'{{{first:#x}, {last:#x}, "{name}"}},')


if __name__ == "__main__":
    main()
