"""LongBench: its sets' prompts, lengths and metrics, and its rows from files. Nothing here needs PyTorch.

Prompts and lengths are LongBench's (github.com/THUDM/LongBench, MIT), word for word, or numbers would not compare; the
metrics are written anew and tested against its packages where they are installed.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GIVEN = json.loads((Path(__file__).resolve().parent / "longbench.json").read_text(encoding="utf-8"))

_ZH_MARKS = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃"
    "》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


def _f1(answer: Sequence[str], reference: Sequence[str]) -> float:
    same = sum((Counter(answer) & Counter(reference)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(answer), same / len(reference)
    return 2 * precision * recall / (precision + recall)


def _plain(text: str) -> list[str]:
    """Lower case, without ASCII punctuation and articles, as words."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def qa_f1(answer: str, reference: str, classes: object = None) -> float:
    return _f1(_plain(answer), _plain(reference))


@functools.cache
def _jieba() -> Any:
    try:
        import jieba  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError("arena: LongBench's Chinese sets are scored in words by jieba: pip install jieba") from None
    jieba.setLogLevel("ERROR")
    return jieba


def _zh_words(text: str) -> list[str]:
    return [str(word) for word in _jieba().cut(text, cut_all=False)]


def qa_f1_zh(answer: str, reference: str, classes: object = None) -> float:
    def words(text: str) -> list[str]:
        plain = ["".join(c for c in w.lower() if c not in _ZH_MARKS + string.punctuation) for w in _zh_words(text)]
        return [w for w in ("".join(word.split()) for word in plain) if w]

    return _f1(words(answer), words(reference))


def _common(a: Sequence[str], b: Sequence[str]) -> list[str]:
    """A longest common subsequence; of several that which goes back in b last, as the package rouge does."""
    table = [[0] * (len(b) + 1)]
    for x in a:
        above, row = table[-1], [0]
        for j, y in enumerate(b):
            row.append(above[j] + 1 if x == y else max(above[j + 1], row[j]))
        table.append(row)
    out, i, j = [], len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            out.append(a[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return out[::-1]


def rouge_l(answer: str, reference: str, classes: object = None) -> float:
    """F of Rouge-L over sentences, as the package rouge has it: sentences end at full stops, and the words of the
    subsequences that a reference's sentence has in common with the answer's are counted as sets."""

    def sentences(text: str) -> list[list[str]]:
        # White space between two full stops is a sentence of one empty word there, and so it is here.
        return [" ".join(s.split()).split(" ") for s in text.split(".") if s]

    found, wanted = sentences(answer), sentences(reference)
    if not found or not wanted:
        return 0.0
    union = {word for a in wanted for b in found for word in _common(a, b)}
    recall, precision = (len(union) / len({word for s in x for word in s}) for x in (wanted, found))
    return 2 * recall * precision / (recall + precision + 1e-8)


def rouge_l_zh(answer: str, reference: str, classes: object = None) -> float:
    return rouge_l(" ".join(_zh_words(answer)), " ".join(_zh_words(reference)))


def classification(answer: str, reference: str, classes: Sequence[str] | None = None) -> float:
    named = [one for one in classes or () if one in answer]
    # As LongBench has it: what is only a part of the right name does not count, but the list shrinks as it is walked.
    for one in named:
        if one in reference and one != reference:
            named.remove(one)
    return 1 / len(named) if reference in named else 0.0


def _numbers(answer: str, wanted: str) -> float:
    numbers = re.findall(r"\d+", answer)
    return sum(number == wanted for number in numbers) / len(numbers) if numbers else 0.0


def count(answer: str, reference: str, classes: object = None) -> float:
    return _numbers(answer, str(reference))


def _retrieval(pattern: str, answer: str, reference: str) -> float:
    found = re.search(pattern, reference)
    return _numbers(answer, found[1]) if found else 0.0


def retrieval(answer: str, reference: str, classes: object = None) -> float:
    return _retrieval(r"Paragraph (\d+)", answer, reference)


def retrieval_zh(answer: str, reference: str, classes: object = None) -> float:
    return _retrieval(r"段落(\d+)", answer, reference)


def code_similarity(answer: str, reference: str, classes: object = None) -> float:
    """Of the first line that is no comment and no fence: twice the matching letters over all, in whole percent."""
    lines = answer.lstrip("\n").split("\n")
    line = next((x for x in lines if not any(mark in x for mark in ("`", "#", "//"))), "")
    if not line or not reference:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


METRICS: dict[str, Callable[..., float]] = {
    "qa_f1": qa_f1,
    "qa_f1_zh": qa_f1_zh,
    "rouge_l": rouge_l,
    "rouge_l_zh": rouge_l_zh,
    "classification": classification,
    "count": count,
    "retrieval": retrieval,
    "retrieval_zh": retrieval_zh,
    "code_similarity": code_similarity,
}


@dataclass(frozen=True)
class Set:
    """One of LongBench's data sets."""

    name: str
    prompt: str
    max_tokens: int
    metric: str
    chat: bool  # whether the model's chat template goes around the prompt
    first_line: bool  # whether only the answer's first line counts
    stop_at_line: bool  # whether the end of a line ends the answer
    paper: bool  # whether PHSA's paper has it


SETS = {name: Set(name, **values) for name, values in _GIVEN.items()}


def score(name: str, answer: str, references: Sequence[str], classes: Sequence[str] | None) -> float:
    """The best over the references, 0 to 1."""
    one = SETS[name]
    if one.first_line:
        answer = answer.lstrip("\n").split("\n")[0]
    return max((METRICS[one.metric](answer, reference, classes) for reference in references), default=0.0)


def truncated(tokens: list[int], most: int) -> list[int]:
    """The prompt's two ends."""
    half = most // 2
    return tokens if len(tokens) <= most else tokens[:half] + tokens[-half:]


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    # Not splitlines(): a text may hold other line ends, such as U+2028.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"arena: {path}, line {number}: {error}") from None


def qmsum_rows(path: Path) -> list[dict[str, Any]]:
    """All queries of all meetings of a file of QMSum, transcripts joined as LongBench does."""
    return [
        {
            "context": "\n".join(f"{turn['speaker']}: {turn['content']}" for turn in meeting["meeting_transcripts"]),
            "input": query["query"],
            "answers": [query["answer"]],
        }
        for meeting in _json_lines(path)
        for query in meeting["general_query_list"] + meeting["specific_query_list"]
    ]


def vcsum_rows(summaries: Path, segments: Path) -> list[dict[str, Any]]:
    """Meetings of VCSum: the segments of one, joined, and its summary."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for row in _json_lines(segments):
        parts.setdefault(str(row["av_num"]), []).append(row)
    rows = []
    for row in _json_lines(summaries):
        meeting = parts.get(str(row["av_num"]), [])
        lines = [
            f"{speaker}：{''.join(words) if isinstance(words, list) else words}"
            for segment in meeting
            for speaker, words in zip(segment["speaker"], segment["context"], strict=True)
        ]
        if lines:
            rows.append({"context": "\n".join(lines), "input": "", "answers": [row["summary"]]})
    return rows


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """Rows (context, input, answers, all_classes) of a set: `name.jsonl` in LongBench's format, or, for qmsum and
    vcsum, the files that LongBench drew them from."""
    own = folder / f"{name}.jsonl"
    if own.exists():
        found = list(_json_lines(own))
        for number, row in enumerate(found, 1):
            missing = {"context", "input", "answers"} - set(row)
            if missing:
                raise ValueError(f"arena: {own}, row {number} lacks {', '.join(sorted(missing))}")
        return found
    if name == "qmsum" and (folder / "upstream_qmsum_test.jsonl").exists():
        return qmsum_rows(folder / "upstream_qmsum_test.jsonl")
    if name == "vcsum" and (folder / "upstream_vcsum_long_test.txt").exists():
        both = [
            (folder / f"upstream_vcsum_long_{part}.txt", folder / f"upstream_vcsum_short_{part}.txt")
            for part in ("test", "dev")
        ]
        return [row for pair in both if pair[0].exists() for row in vcsum_rows(*pair)]
    raise ValueError(f"arena: {folder} has no {name}.jsonl")


def present(folder: Path) -> list[str]:
    """The sets that a folder has."""
    found = []
    for name in SETS:
        upstream = folder / {"qmsum": "upstream_qmsum_test.jsonl", "vcsum": "upstream_vcsum_long_test.txt"}.get(
            name, "-"
        )
        if (folder / f"{name}.jsonl").exists() or upstream.is_file():
            found.append(name)
    return found
