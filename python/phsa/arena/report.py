"""The page of results, from records alone: the same records give the same bytes."""

from __future__ import annotations

import html
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .rules import RULES, parse
from .statistics import difference, interval, mean_ranks

BEGIN, END = "<!-- arena: begin -->", "<!-- arena: end -->"

# As the program's reports have them: grey, orange and blue are dense, InfLLM v2 and PHSA.
_COLOURS = ("#6b7280", "#d97706", "#2563eb", "#0d9488", "#9333ea", "#be123c")
_DARK = ("#9ca3af", "#f59e0b", "#60a5fa", "#2dd4bf", "#c084fc", "#fb7185")
_FIXED = {"dense": 0, "infllm2": 1, "phsa": 2}


@dataclass
class Line:
    """What one rule at one budget found in one table."""

    rule: str
    budget: str | None
    prefill: str
    answer: str
    scores: dict[str, float] = field(default_factory=dict)  # by sample
    nll: dict[str, float] = field(default_factory=dict)
    reads: list[tuple[float, float]] = field(default_factory=list)  # shares of tokens and bytes

    @property
    def name(self) -> str:
        """With how the text was read where that is not what the rule's own name says."""
        own = (self.prefill, self.answer) in (("dense", self.rule), (self.rule, "dense"), ("dense", "dense"))
        return self.rule if own else f"{self.rule} (text: {self.prefill})"

    @property
    def score(self) -> float:
        return sum(self.scores.values()) / len(self.scores)

    def share(self, which: int) -> float | None:
        return sum(read[which] for read in self.reads) / len(self.reads) if self.reads else None


@dataclass
class Group:
    """One model, task, length, and way to read the question."""

    model: str
    task: str
    length: int
    question: str
    tail: int
    lines: list[Line] = field(default_factory=list)

    @property
    def perplexity(self) -> bool:
        return all(line.nll and all(-line.nll[s] == x for s, x in line.scores.items()) for line in self.lines)

    @property
    def title(self) -> str:
        return f"{self.task}, {_thousands(self.length)} tokens, {self.model}, question read by {_reader(self.question)}"

    def shown(self, score: float) -> str:
        return f"{math.exp(-score):.3f}" if self.perplexity else f"{100 * score:.1f}"

    def with_interval(self, line: Line) -> str:
        low, high = interval(list(line.scores.values()))
        if self.perplexity:
            low, high = high, low
        return f"{self.shown(line.score)} ({self.shown(low)}–{self.shown(high)})"


def _reader(question: str) -> str:
    return "dense attention" if question == "dense" else "the rule"


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens:,}"


def groups(records: Sequence[Mapping[str, Any]]) -> list[Group]:
    found: dict[tuple[Any, ...], Group] = {}
    lines: dict[tuple[Any, ...], Line] = {}
    for record in records:
        place = tuple(record[name] for name in ("model", "task", "length", "question", "tail"))
        group = found.setdefault(place, Group(*place))
        names = tuple(record[name] for name in ("rule", "budget", "prefill", "answer"))
        if (place, names) not in lines:
            lines[place, names] = Line(*names)
            group.lines.append(lines[place, names])
        line = lines[place, names]
        sample = f"{record['sample']} {record['digest']}"
        line.scores[sample] = record["score"]
        if "nll" in record:
            line.nll[sample] = record["nll"]
        phase = (
            record["read_prefill"] if record["answer"] == "dense" and record["prefill"] != "dense" else record["read"]
        )
        if phase is not None:
            line.reads.append((phase["token_share"], phase["byte_share"]))
    order = {name: i for i, name in enumerate(RULES)}
    for group in found.values():
        group.lines.sort(
            key=lambda x: (_budget_key(x.budget), order[parse(x.rule)[0].name], x.rule, x.prefill, x.answer)
        )
    return sorted(found.values(), key=lambda g: (g.model, g.task, g.length, g.question, g.tail))


def _budget_key(budget: str | None) -> tuple[int, float]:
    if budget is None:
        return 0, 0.0
    return (1, float(budget[2:])) if budget.startswith("K=") else (2, float(budget))


def _budget(budget: str | None) -> str:
    if budget is None:
        return "all"
    return budget if budget.startswith("K=") else f"{100 * float(budget):g} %"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def _phase(line: Line) -> str:
    rule = parse(line.rule)[0]
    if rule.name == "dense":
        return "–"
    if line.prefill == line.rule and line.answer == line.rule:
        return "both"
    return "prefill" if line.prefill == line.rule else "answer"


def _common(a: Line, b: Line) -> tuple[list[float], list[float]]:
    shared = [sample for sample in a.scores if sample in b.scores]
    return [a.scores[s] for s in shared], [b.scores[s] for s in shared]


def _against(group: Group, line: Line, name: str) -> str:
    """The difference to a rule at the same budget, in points (perplexity: percent)."""
    if line.rule == name:
        return ""
    others = [x for x in group.lines if x.rule == name and x.budget in (None, line.budget)]
    same = [
        x
        for x in others
        if (x.prefill, x.answer) == tuple(name if y == line.rule else y for y in (line.prefill, line.answer))
    ]
    other = next(iter(same or others), None)
    if other is None:
        return "–"
    ours, theirs = _common(line, other)
    if not ours:
        return "–"
    change = difference(ours, theirs)
    if group.perplexity:
        mean, high, low = (100 * (math.exp(-x) - 1) if abs(x) < 50 else math.inf for x in change)
    else:
        mean, low, high = (100 * x for x in change)
    text = f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"
    return f"**{text}**" if low > 0 or high < 0 else text


def _rows(group: Group, against: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    unit = "perplexity" if group.perplexity else "found, %" if _needle(group) else "score"
    head = ["rule", "phase", "budget", "samples", unit, *(["nll"] if _needle(group) else []), "tokens, %", "bytes, %"]
    shown = [name for name in against if any(line.rule == name for line in group.lines)]
    head += [f"− {name}" + (", %" if group.perplexity else "") for name in shown]
    rows = []
    for line in group.lines:
        nll = sum(line.nll.values()) / len(line.nll) if line.nll else 0.0
        rows.append(
            [
                line.name,
                _phase(line),
                _budget(line.budget),
                str(len(line.scores)),
                group.with_interval(line),
                *([f"{nll:.3f}"] if _needle(group) else []),
                _percent(line.share(0)),
                _percent(line.share(1)),
                *(_against(group, line, name) for name in shown),
            ]
        )
    return head, rows


def _needle(group: Group) -> bool:
    return not group.perplexity and all(line.nll for line in group.lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


Ranks = list[tuple[str, int, list[tuple[str, float, float, float]]]]


def overall(found: Sequence[Group], draws: int) -> Ranks:
    """For each model and budget: mean ranks over its tables by score, and by nll where all of them have it; of the
    rules that are in all tables, on the samples that all of them have. How the text was read is part of a rule's
    name."""
    out = []
    keys = sorted(
        {(g.model, line.budget) for g in found for line in g.lines if line.budget},
        key=lambda k: (k[0], _budget_key(k[1])),
    )
    for model, budget in keys:
        tables = []
        for group in found:
            if group.model == model:
                here = {line.name: line for line in group.lines if line.budget == budget}
                if here:
                    tables.append(here)
        names = set.intersection(*(set(t) for t in tables))
        if len(names) < 2:
            continue
        by_score, by_nll = [], []
        for table in tables:
            shared = [s for s in table[min(names)].scores if all(s in table[name].scores for name in names)]
            if shared:
                by_score.append({name: [table[name].scores[s] for s in shared] for name in names})
                if all(s in table[name].nll for name in names for s in shared):
                    by_nll.append({name: [-table[name].nll[s] for s in shared] for name in names})
        for what, data in (("score", by_score), ("nll", by_nll)):
            if not data or (what == "nll" and (len(data) < len(by_score) or data == by_score)):
                continue
            ranked = mean_ranks(data, draws)
            best = sorted(((name, *value) for name, value in ranked.items()), key=lambda x: (x[1], x[0]))
            out.append((f"by {what}, {model}, {_budget(budget)}", len(data), best))
    return out


def _used(headers: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The files, and what ran them."""
    lines = []
    for header in headers:
        lines.append(f"`{header['file']}`: {header['model']}, {header['dtype']}, weights {header['weights']}")
    devices = sorted({(r["device"], r["torch"], r["transformers"]) for r in records})
    lines += [f"{device}, torch {torch}, transformers {version}" for device, torch, version in devices]
    return lines


def command(group: Group) -> str:
    """What makes a table, but for the files' places."""
    rules = list(dict.fromkeys(line.rule for line in group.lines if line.rule != "dense"))
    budgets = sorted({line.budget for line in group.lines if line.budget}, key=_budget_key)
    ks = [b[2:] for b in budgets if b.startswith("K=")]
    shares = [b for b in budgets if not b.startswith("K=")]
    readers = list(dict.fromkeys(line.prefill for line in group.lines if line.answer == line.rule != line.prefill))
    both = any(_phase(line) == "both" for line in group.lines)
    alone = any(_phase(line) == "answer" and "prefill" in parse(line.rule)[0].phases for line in group.lines)
    samples = max(len(line.scores) for line in group.lines)
    words = ["python -m phsa.arena table --model", shlex.quote(group.model), "--rules", ",".join(rules) or "dense"]
    words += ["-K", ",".join(ks)] if ks else ["--budget", ",".join(shares) or "1"]
    if readers not in ([], ["dense"]):
        words += ["--prefill", ",".join(readers)]
    if both:
        words += ["--phases", "all" if alone else "both"]
    words += ["--question dense"] * (group.question == "dense") + [f"--tail {group.tail}"] * (group.tail != 64)
    if group.perplexity:
        words += [f"--perplexity {group.task}=FILE --length {group.length}"]
    elif _needle(group):
        words += ["--niah SAMPLES.jsonl"]
    else:
        words += [f"--longbench FOLDER --sets {group.task} --max-length {group.length}"]
    if any("calibration" in parse(rule)[0].needs for rule in rules):
        words += ["--calibration TEXT"]
    return " ".join([*words, f"--samples {samples} --out RECORDS.jsonl"])


def markdown(
    headers: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]], against: Sequence[str], draws: int
) -> str:
    found = groups(records)
    parts = [f"From {len(records):,} records. Intervals are 95 %; bold differences exclude 0."]
    parts.append("\n".join(f"- {line}" for line in _used(headers, records)))
    for title, tables, ranked in overall(found, draws):
        rows = [[name, f"{mean:.1f} ({low:.1f}–{high:.1f})"] for name, mean, low, high in ranked]
        parts.append(f"**Mean rank {title}, over {tables} {'table' if tables == 1 else 'tables'}**")
        parts.append(_table(["rule", "rank (95 %)"], rows))
    for group in found:
        parts += [f"**{group.title}**", _table(*_rows(group, against)), f"```\n{command(group)}\n```"]
    return "\n\n".join(parts)


def replace_between_marks(path: Path, text: str) -> None:
    whole = path.read_text(encoding="utf-8")
    begin, end = whole.find(BEGIN), whole.find(END)
    if begin < 0 or end < begin:
        raise ValueError(f"arena: {path} lacks the lines {BEGIN} and {END}, between which the tables go")
    path.write_text(whole[: begin + len(BEGIN)] + "\n" + text + "\n" + whole[end:], encoding="utf-8")


def rules_table(names: Sequence[str]) -> str:
    rows = []
    for name in names:
        rule = RULES[name]
        options = ", ".join(f"`{k}={v}`" if v is not None else f"`{k}`" for k, v in rule.options.items())
        rows.append(
            [f"`{name}`", rule.paper, " and ".join(rule.phases), rule.keeps or "everything", rule.reads, rule.differs]
        )
        rows[-1].append(options)
    head = ["rule", "paper", "phase", "keeps", "reads in order to choose", "not as in the paper, and why", "options"]
    return _table(head, rows)


# The page.

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP = 400, 210, 62, 16, 30


def _style_of(rules: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Colour and dash of each rule, the same in all plots of a page."""
    styles: dict[str, tuple[int, int]] = {}
    others = 0
    for rule in rules:
        base = parse(rule)[0].name
        if rule in _FIXED:
            styles[rule] = (_FIXED[rule], 0)
        elif base == "phsa":
            styles[rule] = (2, 1 + sum(1 for x in styles if parse(x)[0].name == "phsa"))
        else:
            styles[rule] = (3 + others % 3, others // 3)
            others += 1
    return styles


_DASHES = ("", "8 4", "2 3", "10 3 2 3", "14 4", "5 2 1 2 1 2")


def _marker(colour: int, x: float, y: float, hollow: bool) -> str:
    paint = f'class="stroke{colour}" stroke="{_COLOURS[colour]}" fill-opacity="0" stroke-width="1.6"'
    if not hollow:
        paint = f'class="fill{colour}" fill="{_COLOURS[colour]}"'
    shapes = {
        0: f'<circle {paint} cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
        1: f'<rect {paint} x="{x - 3.6:.1f}" y="{y - 3.6:.1f}" width="7.2" height="7.2"/>',
        2: f'<path {paint} d="M{x:.1f} {y - 5.6:.1f}l5.2 9.2h-10.4z"/>',
        3: f'<path {paint} d="M{x:.1f} {y - 5.2:.1f}l5.2 5.2l-5.2 5.2l-5.2 -5.2z"/>',
        4: f'<path {paint} d="M{x:.1f} {y + 5.6:.1f}l5.2 -9.2h-10.4z"/>',
        5: f'<rect {paint} x="{x - 5.6:.1f}" y="{y - 2:.1f}" width="11.2" height="4"/>',
    }
    return shapes[colour]


def _ticks(low: float, high: float) -> list[float]:
    span = high - low or 1.0
    step = 10 ** math.floor(math.log10(span / 4))
    step = next(step * f for f in (1, 2, 5, 10) if span / (step * f) <= 5)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(order=True)
class _Point:
    x: float  # per cent read
    y: float
    low: float
    high: float
    rule: str


@dataclass
class _Axes:
    """Where a share of what is read (logarithmic) and a score lie in the picture."""

    left: float
    right: float
    floor: float
    top: float

    @classmethod
    def of(cls, group: Group, points: Sequence[_Point], level: float | None) -> _Axes:
        xs = [p.x for p in points]
        values = [y for p in points for y in (p.y, p.low, p.high)] + ([level] if level is not None else [])
        floor, top = (min(values) * 0.995, max(values) * 1.005) if group.perplexity else (0.0, 100.0)
        if not group.perplexity and not _needle(group):
            top = max(1.0, max(values) * 1.1)
        return cls(math.log(min(xs) * 0.9), math.log(max(xs) * 1.1), floor, top)

    def x_at(self, x: float) -> float:
        inside = (math.log(x) - self.left) / max(1e-9, self.right - self.left)
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * inside

    def y_at(self, y: float) -> float:
        return _TOP + _HEIGHT * (1 - (y - self.floor) / max(1e-9, self.top - self.floor))

    def drawn(self, xs: Sequence[float]) -> Iterator[str]:
        for tick in _ticks(self.floor, self.top):
            y = self.y_at(tick)
            yield f'<line class="rule" stroke="#e3dfd7" x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>'
            yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" class="soft" fill="#67625a">{tick:g}</text>'
        last = -100.0
        for x in sorted({float(f"{x:.2g}") for x in xs}):
            if self.x_at(x) - last > 40:
                last = self.x_at(x)
                yield (
                    f'<text x="{last:.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle" class="soft" fill="#67625a">'
                    f"{x:g}</text>"
                )


def _dashes(dash: int) -> str:
    return f' stroke-dasharray="{_DASHES[dash % 6]}"' if dash else ""


def _legend(names: Sequence[tuple[str, str]], styles: Mapping[str, tuple[int, int]]) -> tuple[list[str], float]:
    """Of names and their rules, in as many lines as they need, and where the last line is."""
    legend, y, x = [], _TOP + _HEIGHT + 40, 4.0
    for name, rule in names:
        colour, dash = styles[rule]
        width = 34 + 7.6 * len(name) + 14
        if x > 4 and x + width > _WIDTH:
            x, y = 4.0, y + 18
        legend.append(
            f'<line class="stroke{colour}" stroke="{_COLOURS[colour]}" stroke-width="2"{_dashes(dash)} x1="{x:.1f}" '
            f'y1="{y - 4}" x2="{x + 28:.1f}" y2="{y - 4}"/>'
        )
        if rule != "dense":
            legend.append(_marker(colour, x + 14, y - 4, dash % 2 == 1))
        legend.append(f'<text x="{x + 34:.1f}" y="{y}">{html.escape(name)}</text>')
        x += width
    return legend, y


def _curve(points: Sequence[_Point], axes: _Axes, styles: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    colour, dash = styles[points[0].rule]
    if len(points) > 1:
        path = " ".join(f"{axes.x_at(p.x):.1f},{axes.y_at(p.y):.1f}" for p in points)
        yield (
            f'<polyline class="stroke{colour}" stroke="{_COLOURS[colour]}" stroke-width="1.6" fill="none"'
            f'{_dashes(dash)} points="{path}"/>'
        )
    for p in points:
        x = axes.x_at(p.x)
        yield (
            f'<line class="whisker" stroke="#1f1d1a" stroke-opacity="0.35" x1="{x:.1f}" y1="{axes.y_at(p.low):.1f}" '
            f'x2="{x:.1f}" y2="{axes.y_at(p.high):.1f}"/>'
        )
        yield _marker(colour, x, axes.y_at(p.y), dash % 2 == 1)


def _plot(group: Group, which: int, styles: Mapping[str, tuple[int, int]]) -> str:
    """Scores against the share of tokens (0) or bytes (1) read."""
    series: dict[str, list[_Point]] = {}
    level: float | None = None
    value = (lambda s: math.exp(-s)) if group.perplexity else (lambda s: 100 * s)
    for line in group.lines:
        if line.rule == "dense":
            level = value(line.score)
            continue
        share = line.share(which)
        if share:
            low, high = (value(x) for x in interval(list(line.scores.values())))
            series.setdefault(line.name, []).append(_Point(100 * share, value(line.score), low, high, line.rule))
    points = [point for line in series.values() for point in line]
    if not points:
        return ""
    axes = _Axes.of(group, points, level)
    what = "tokens" if which == 0 else "bytes"
    title = f"{'perplexity' if group.perplexity else 'score'} against {what} read, % of dense attention's"
    parts = [f'<text x="4" y="16" font-weight="600">{html.escape(title)}</text>', *axes.drawn([p.x for p in points])]
    if level is not None:
        y = axes.y_at(level)
        parts.append(
            f'<line class="stroke0" stroke="{_COLOURS[0]}" stroke-width="2" x1="{_LEFT}" y1="{y:.1f}" '
            f'x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>'
        )
    names = ([("dense", "dense")] if level is not None else []) + [(name, pts[0].rule) for name, pts in series.items()]
    legend, bottom = _legend(names, styles)
    for drawn in series.values():
        parts += _curve(sorted(drawn), axes, styles)
    body = "\n".join(parts + legend)
    label = html.escape(f"{group.title}: {title}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {_WIDTH} {bottom + 12:.0f}" role="img" '
        f'aria-label="{label}" font-family="sans-serif" font-size="13" fill="#1f1d1a">\n{body}\n</svg>'
    )


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield '<div class="scroll"><table><thead><tr>'
    yield "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr></thead><tbody>"
    for first, *rest in rows:
        cells = []
        for cell in rest:
            bold = cell.startswith("**")
            text = html.escape(cell.strip("*") if bold else cell)
            cells.append(f"<td><b>{text}</b></td>" if bold else f"<td>{text}</td>")
        yield f"<tr><th>{html.escape(first)}</th>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"


def page(
    headers: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]], against: Sequence[str], draws: int
) -> str:
    found = groups(records)
    rules = list(dict.fromkeys(line.rule for group in found for line in group.lines))
    order = {name: i for i, name in enumerate(RULES)}
    rules.sort(key=lambda rule: (order[parse(rule)[0].name], rule))
    styles = _style_of(rules)
    sections = ["<section><h1>The arena: rules for choosing, at equal tokens</h1><dl>"]
    sections += [f"<div><dt>from</dt><dd>{html.escape(line)}</dd></div>" for line in _used(headers, records)]
    sections.append(
        f'</dl><p class="note">{len(records):,} records. Intervals are 95 %, differences on the same samples; bold '
        "ones exclude 0. Tokens: what a query head attends to. Bytes: keys and values that a KV head's query heads "
        "attend to together, and what was read in order to choose, with 16 bits a number. Both as shares of dense "
        "attention's.</p></section>"
    )
    ranked = overall(found, draws)
    if ranked:
        sections.append("<section><h2>Overall</h2>")
        for title, tables, best in ranked:
            rows = [[name, f"{mean:.1f}", f"{low:.1f} to {high:.1f}"] for name, mean, low, high in best]
            sections.append(f"<h3>Mean rank {html.escape(title)}, over {tables} table{'s' * (tables != 1)}</h3>")
            sections += _html_table(["rule", "rank", "95 %"], rows)
        sections.append("</section>")
    for group in found:
        sections.append(f'<section><h2>{html.escape(group.title)}</h2><div class="charts">')
        sections += [f"<figure>{plot}</figure>" for plot in (_plot(group, i, styles) for i in (0, 1)) if plot]
        sections.append("</div>")
        sections += _html_table(*_rows(group, against))
        sections.append(f'<p class="note"><code>{html.escape(command(group))}</code></p></section>')
    dark = "\n".join(
        f"  .fill{i} {{ fill: {colour}; }} .stroke{i} {{ stroke: {colour}; }}" for i, colour in enumerate(_DARK)
    )
    template = (Path(__file__).resolve().parent / "page.html").read_text(encoding="utf-8")
    return template.replace("{{dark}}", dark).replace("{{body}}", "\n".join(sections))
