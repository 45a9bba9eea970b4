"""Long documents with questions about them, for distillation: JSON lines as `python -m phsa.train` takes them.

A record is a text to read (books, articles, source files), or a chat: a long document and several questions about
different places in it, with answers that are written somewhere, not quoted from where the question points. Questions
are those of the texts themselves where they have some (textbooks ask and answer; the pair is taken out of the text),
else about what a document says of itself: who wrote it, what an article found, which page or file holds something.
`bench/training_arms.py prepare` calls this; distillation learns how dense attention answers, so the answers' words
matter less than what must be found for them.
"""

import json
import lzma
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

# Fewer than any tokenizer here needs, so that what is asked at the end of a document is not cut off.
CHARACTERS_PER_TOKEN = 3.0
WORDS = 13  # as `phsa prepare --without` counts
_SUFFIXES = (".py", ".cc", ".h", ".cu", ".js", ".md")

Pair = tuple[str, str]


def _runs(text: str) -> Iterator[int]:
    words = re.findall(r"\w+", text.lower())
    for begin in range(len(words) - WORDS + 1):
        yield hash(tuple(words[begin : begin + WORDS]))


def _read(path: Path, known: set[int]) -> Iterator[tuple[str, str]]:
    """Name and text of each document, without those that hold text of the tests."""
    with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            text = record["text"]
            if known:
                runs = list(_runs(text))
                if sum(run in known for run in runs) > 0.01 * len(runs):
                    continue
            yield str(record.get("id", "")), text


def textbook(text: str) -> tuple[str, list[Pair]]:
    """A section without its questions that have an answer, and these."""
    lines, kept, pairs, index = text.split("\n"), [], [], 0
    while index < len(lines):
        question, answer = lines[index].strip(), lines[index + 1].strip() if index + 1 < len(lines) else ""
        asks = question.endswith("?") and 20 < len(question) < 240 and not question.startswith("Which of the following")
        answers = answer.endswith(".") and 40 < len(answer) < 500 and "?" not in answer
        orders = re.match(r"(Define|Explain|Describe|Discuss|List|Compare|Suppose|Consider|Use|Find|Show)\b", answer)
        if asks and answers and not orders:
            pairs.append((question, answer))
            index += 2
        else:
            kept.append(lines[index])
            index += 1
    return "\n".join(kept), pairs


def proposal(text: str) -> list[Pair]:
    found = re.match(r"PEP: (\d+) Title: (.+?) (?:Version: \S+ )?(?:Last-Modified: .+? )?Author: (.+?) (?:\S+: )", text)
    if not found:
        return []
    number, title, author = found.groups()
    author = re.sub(r"\s*<[^>]*>", "", author).rstrip(",")
    pairs = [(f"Who wrote PEP {number}, and what is it called?", f"PEP {number} is “{title}”, by {author}.")]
    if status := re.search(r" Status: (\w+) ", text[:1000]):
        pairs.append((f"What is the status of the PEP on “{title}”?", f"PEP {number} is {status.group(1).lower()}."))
    return pairs


def article(text: str) -> list[Pair]:
    title, _, rest = text.partition("\n")
    sentences = re.split(r"(?<=[.!?]) (?=[A-Z])", rest.partition("\n")[0])
    if not 20 < len(title) < 200 or len(sentences) < 4:
        return []
    # The last sentence of an abstract says what was found.
    return [(f"What does the article “{title}” conclude?", sentences[-1])]


def page(name: str, text: str) -> list[Pair]:
    where = name.removesuffix("/index.md").rpartition("/")[2].replace("_", " ")
    headings = re.findall(r"^##+ (.{8,60})$", text, re.MULTILINE)
    odd = [one for one in headings if one.lower() not in ("specifications", "browser compatibility", "see also")]
    return [(f"On which page is there a section “{one}”?", f"On the page {where}.") for one in odd[:2]]


def source(name: str, text: str) -> list[Pair]:
    pairs = []
    for match in re.finditer(r"^(?:def|class) (\w{5,})(\(.*?\))?.*?:$", text, re.MULTILINE | re.DOTALL):
        signature = " ".join(match.group(0).split())
        if len(signature) < 200:
            pairs.append((f"Where is `{match.group(1)}` defined?", f"In `{name}`: `{signature}`"))
    for match in re.finditer(r"^[\w:<>&* ]+? (\w{6,})\([^;{}]{0,160}\) (?:const )?\{$", text, re.MULTILINE):
        pairs.append((f"Which file defines `{match.group(1)}`?", f"`{name}` does."))
    return pairs


def _sources(folders: Sequence[Path]) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in _SUFFIXES and path.is_file() and path.stat().st_size < 200_000:
                yield str(path.relative_to(folder.parent)), path.read_text(encoding="utf-8", errors="replace")


def _kinds(files: dict[str, Path], code: Sequence[Path], known: set[int]) -> dict[str, list[tuple[str, list[Pair]]]]:
    """Texts and the questions about each, by kind."""
    kinds: dict[str, list[tuple[str, list[Pair]]]] = {}
    for name, ask in (
        ("openstax_ccby", lambda name, text: textbook(text)),
        ("elife", lambda name, text: (text, article(text))),
        ("peps", lambda name, text: (text, proposal(text))),
        ("mdn_en", lambda name, text: (f"# {name}\n{text}", page(name, text))),
    ):
        if name in files:
            kinds[name] = [ask(*one) for one in _read(files[name], known)]
    if found := [(f"=== {name}\n{text}", source(name, text)) for name, text in _sources(code)]:
        kinds["code"] = found
    return kinds


def _conversation(parts: list[tuple[str, list[Pair]]], generator: random.Random) -> dict[str, object] | None:
    """What is asked comes from all over the document, in any order."""
    pairs = [pair for _, of_part in parts for pair in of_part]
    pairs = generator.sample(pairs, min(len(pairs), 12))
    if not pairs:
        return None
    document = "\n\n".join(text for text, _ in parts)
    messages = []
    for number, (question, answer) in enumerate(pairs):
        asked = question if number else f"{document}\n\n{question}"
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def write_questions(
    out: Path, files: dict[str, Path], code: Sequence[Path], without: Sequence[Path], length: int, tokens: float
) -> str:
    """Two thirds chats, one third plain texts, together about `tokens`, none longer than `length`; returns a summary.
    A conversation is 0.1 to 0.8 of `length`, and texts are cut to it."""
    generator = random.Random(1)
    known = {run for path in without for run in _runs(path.read_text(encoding="utf-8"))}
    kinds = _kinds(files, code, known)
    if not kinds:
        raise SystemExit("there is nothing to ask about: none of openstax_ccby, elife, peps, mdn_en, and no code")
    books = [text for name in ("eltec_eng", "pg19_test") if name in files for _, text in _read(files[name], known)]
    places = dict.fromkeys(kinds, 0)
    budget, used = tokens * CHARACTERS_PER_TOKEN, {"chats": 0.0, "texts": 0.0}
    count, questions = {"chats": 0, "texts": 0}, 0
    names, empty = sorted(kinds), 0
    with out.with_suffix(".new").open("w", encoding="utf-8") as file:
        while sum(used.values()) < budget and empty < 100:
            if books and used["texts"] < used["chats"] / 2:
                text = generator.choice(books)
                most = int(length * CHARACTERS_PER_TOKEN)
                begin = generator.randrange(max(1, len(text) - most))
                record, kind = {"text": text[begin : begin + most]}, "texts"
                size = len(text[begin : begin + most])
            else:
                name, kind = generator.choice(names), "chats"
                most, size, parts = length * CHARACTERS_PER_TOKEN * generator.uniform(0.1, 0.8), 0, []
                while size < most and len(parts) < len(kinds[name]):
                    text, pairs = kinds[name][places[name] % len(kinds[name])]
                    places[name] += 1
                    if size + len(text) > length * CHARACTERS_PER_TOKEN * 0.8:
                        text = text[: int(length * CHARACTERS_PER_TOKEN * 0.8 - size)]
                        pairs = []  # what they ask for may have been cut
                    parts.append((text, pairs))
                    size += len(text)
                record = _conversation(parts, generator)
                if record is None:
                    empty += 1
                    continue
                empty, questions = 0, questions + len(record["messages"]) // 2
            used[kind] += size
            count[kind] += 1
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    out.with_suffix(".new").replace(out)
    return (
        f"{count['chats']} chats with {questions} questions, {count['texts']} texts, "
        f"{sum(used.values()) / 1e6:.1f} million characters"
    )
