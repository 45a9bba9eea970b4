"""A language model on the CPU or a GPU, with dense or sparse attention: ``phsa.LLM``. docs/python.md explains it."""

from __future__ import annotations

import json
import numbers
import operator
import os
import sys
import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _library
from .settings import AttentionSettings, read_settings, settings_text

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from . import _engine

Prompt: TypeAlias = str | ArrayLike
"""A text, or the ids of its tokens."""
Messages: TypeAlias = str | Sequence[Mapping[str, str]]
"""A conversation: mappings with ``role`` and ``content``. A string is one message of the user."""

_INT32 = 2**31 - 1
_UINT64 = 2**64 - 1


class GenerateOptions(TypedDict, total=False):
    """What ``generate``, ``chat`` and ``stream`` take besides the prompt."""

    max_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    max_batch: int


@dataclass(frozen=True, eq=False)
class Generation:
    """What a model wrote."""

    text: str
    tokens: NDArray[np.int32]
    """Ids of the answer, without the one that ended it."""
    reason: str
    """Why it ends: ``end_of_text``, ``stop_string``, ``max_tokens`` or ``context_full``."""
    prompt_tokens: int
    reused_tokens: int
    """Tokens of the prompt that were known from another text with the same beginning, and not read again."""
    prefill_seconds: float
    decode_seconds: float
    read_share: float
    """Tokens that the attention read, as a share of what dense attention would have read."""


@dataclass(frozen=True, eq=False)
class LogLikelihood:
    """How likely a continuation is, in natural logarithms."""

    total: float
    greedy: bool
    """Whether each of its tokens is the most likely one."""
    tokens: NDArray[np.float32]
    """Of each token."""


@dataclass(frozen=True, eq=False)
class Inspection:
    """Which blocks some queries read. ``print`` shows it as the program does."""

    positions: NDArray[np.int32]
    """[queries]: where they are in the text."""
    blocks: NDArray[np.int32]
    """[queries, layers, choosing heads, slots]: the chosen blocks, ascending; -1 beyond the last."""
    scores: NDArray[np.float32]
    """Of these blocks, 0 beyond the last."""
    recall: NDArray[np.float32]
    """[queries, layers, query heads]: the share of dense attention's weight that lies on what was read."""
    data: dict[str, Any]
    """All of it, as ``phsa inspect --json`` gives it (docs/inspect.md)."""
    _found: _engine.Inspection = field(repr=False)

    def html(self) -> str:
        """One page that shows the choice over the text and needs nothing else."""
        return self._found.html()

    def __str__(self) -> str:
        return self._found.text()


class LLM:
    """A model, loaded: a ``.gguf`` file, a Hugging Face folder, or a name that ``phsa models`` lists as fetched.

    ``attention`` is the policy, and with ``top_k``, ``lam``, ``punctuation``, ``init``, ``local``, ``block``,
    ``dense_below`` and ``group_reduce`` what docs/settings.md describes; ``settings`` brings all of that in one, from a
    file or a mapping, by layer where wanted. An argument counts first, then ``settings``, then what the model or its
    adapter carries, then the paper's preset for the context, in which the attention is dense. A setting that nothing
    uses is an error.

    ``adapter`` is the folder of a LoRA adapter in PEFT's form (docs/adapters.md); the settings that it carries count as
    the model's own.

    ``device`` is where it runs: ``cpu``, ``cuda`` or ``cuda:1`` (the CPU, with a warning, where there is no GPU), or
    ``auto``, a GPU that can run it so and else the CPU (docs/devices.md). None: the environment's ``PHSA_DEVICE``, else
    ``auto``.

    ``context`` is the longest text in tokens (0: the model's, or as much of it as fits into memory) and
    ``cache_tokens`` what is kept of all texts together (0: one longest text). ``weights`` and ``kv_type`` say how
    precisely (docs/engine.md), ``chunk`` how many tokens of a prompt are read in one step (0: what suits the device),
    ``chat_template`` which template to use where the model's own is not known. ``progress`` shows long work on standard
    error.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        adapter: str | os.PathLike[str] | None = None,
        attention: str = "auto",
        top_k: int | None = None,
        lam: float | None = None,
        punctuation: str | None = None,
        init: int | None = None,
        local: int | None = None,
        block: int | None = None,
        dense_below: int | None = None,
        group_reduce: str | None = None,
        settings: AttentionSettings | None = None,
        device: str | None = None,
        context: int = 0,
        cache_tokens: int = 0,
        threads: int = 0,
        weights: str = "auto",
        kv_type: str = "auto",
        chunk: int = 0,
        chat_template: str | None = None,
        progress: bool = False,
    ) -> None:
        engine = _library.load_engine()
        self._warned = False
        self._progress = _Progress() if progress else None
        choice = _attention_choice(
            attention, top_k, lam, punctuation, init, local, block, dense_below, group_reduce, settings
        )
        try:
            self._engine = engine.Engine(
                _text("model", os.fspath(model)),
                choice,
                adapter="" if adapter is None else _text("adapter", os.fspath(adapter)),
                device=_text("device", os.environ.get("PHSA_DEVICE", "auto") if device is None else device),
                context=_whole("context", context),
                cache_tokens=_whole("cache_tokens", cache_tokens),
                threads=_whole("threads", threads),
                weights=_text("weights", weights),
                kv_type=_text("kv_type", kv_type),
                chunk=_whole("chunk", chunk),
                chat_template=_text("chat_template", chat_template or ""),
                progress=self._progress,
            )
        finally:
            self._clear_progress()
        if self._engine.device_note:
            warnings.warn(self._engine.device_note, stacklevel=2)

    @property
    def name(self) -> str:
        """The model's own name."""
        return self._engine.name

    @property
    def device(self) -> str:
        """Where it runs: ``cpu``, or what the GPU calls itself."""
        return self._engine.device

    @property
    def context(self) -> int:
        """Tokens of the longest text, prompt and answer together."""
        return self._engine.context

    @property
    def cache_tokens(self) -> int:
        """Tokens that the KV cache holds, of all texts together."""
        return self._engine.cache_tokens

    @property
    def model_context(self) -> int:
        """Tokens that the model was made for."""
        return self._engine.model_context

    @property
    def vocab_size(self) -> int:
        """The model's; its tokenizer may have fewer tokens."""
        return self._engine.vocab_size

    @property
    def eos_ids(self) -> list[int]:
        """The tokens that end an answer."""
        return self._engine.eos_ids

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text."""
        return None if self._engine.bos_id < 0 else self._engine.bos_id

    @property
    def add_bos(self) -> bool:
        """Whether the model expects ``bos_id`` before a text. Texts get it, ids are taken as they are."""
        return self._engine.add_bos and self._engine.bos_id >= 0

    @property
    def attention(self) -> dict[str, Any]:
        """The settings in use, with the names of docs/settings.md."""
        return json.loads(self._engine.attention)

    @property
    def tested_tokens(self) -> int | None:
        """The longest text that the model's or adapter's settings say it was tested with; longer ones warn, once."""
        return self._engine.tested_tokens

    @property
    def memory(self) -> dict[str, int]:
        """Bytes: weights, key_values and representatives of a full cache, workspace, total."""
        return self._engine.memory

    @property
    def chat_template(self) -> str | None:
        """The name of the template; None where the model has none that phsa knows."""
        return self._engine.chat_template

    def set_attention(
        self,
        attention: str = "auto",
        *,
        top_k: int | None = None,
        lam: float | None = None,
        punctuation: str | None = None,
        init: int | None = None,
        local: int | None = None,
        block: int | None = None,
        dense_below: int | None = None,
        group_reduce: str | None = None,
        settings: AttentionSettings | None = None,
    ) -> None:
        """Another attention for the same weights. What is not given is as if the model were newly loaded."""
        self._engine.set_attention(
            _attention_choice(
                attention, top_k, lam, punctuation, init, local, block, dense_below, group_reduce, settings
            )
        )

    def tokenize(self, text: str, *, special: bool = True) -> NDArray[np.int32]:
        """Ids of a text; nothing is added. With ``special=False`` control tokens in it stay text."""
        return self._engine.tokenize(_text("text", text), special)

    def detokenize(self, ids: ArrayLike, *, special: bool = True) -> str:
        """The text of these ids. ``special=False`` leaves control tokens out."""
        return self._engine.detokenize(_ids("ids", ids), special)

    @overload
    def apply_chat_template(
        self, messages: Messages, *, add_generation_prompt: bool = True, tokenize: Literal[False] = False
    ) -> str: ...
    @overload
    def apply_chat_template(
        self, messages: Messages, *, add_generation_prompt: bool = True, tokenize: Literal[True]
    ) -> NDArray[np.int32]: ...
    def apply_chat_template(
        self, messages: Messages, *, add_generation_prompt: bool = True, tokenize: bool = False
    ) -> str | NDArray[np.int32]:
        """The conversation as the model wants to read it. With ``tokenize`` its ids: no message can then pass off its
        text as a control token."""
        pairs = _chat(messages)
        if tokenize:
            return self._engine.encode_chat(pairs, add_generation_prompt)
        return self._engine.render_chat(pairs, add_generation_prompt)

    @overload
    def generate(
        self, prompt: str | NDArray[Any] | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> Generation: ...
    @overload
    def generate(
        self,
        prompt: Sequence[str] | Sequence[NDArray[Any]] | Sequence[Sequence[int]],
        **options: Unpack[GenerateOptions],
    ) -> list[Generation]: ...
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_tokens: int = 512,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        max_batch: int = 8,
    ) -> Generation | list[Generation]:
        """Goes on from a prompt as it is, without a chat template; from several, ``max_batch`` of them at a time.

        A prompt is a text, in which control tokens are recognised, or ids. What is not given of the sampling is what
        the model recommends; ``temperature=0`` always takes the most likely token. With ``seed`` each of the prompts
        gets the same answer every time.
        """
        choice = _generate_choice(
            max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop, ignore_eos
        )
        batch = _whole("max_batch", max_batch, 1)
        one = _is_one_prompt(prompt)
        prompts = [self._prompt_ids(each) for each in ([prompt] if one else prompt)]
        try:
            results = [_generation(result) for result in self._engine.generate(prompts, choice, batch)]
        finally:
            self._clear_progress()
        return results[0] if one else results

    def chat(self, messages: Messages, **options: Unpack[GenerateOptions]) -> Generation:
        """The assistant's answer. Takes what ``generate`` takes."""
        return self.generate(self.apply_chat_template(messages, tokenize=True), **options)

    def stream(
        self,
        prompt: Prompt | Messages,
        *,
        max_tokens: int = 512,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        max_batch: int = 8,
    ) -> Generator[str, None, Generation]:
        """An answer piece by piece, to a prompt (as ``generate``) or to a list of messages (as ``chat``). To leave the
        loop ends it. What the generator returns in the end (``yield from`` gives it) is the whole."""
        choice = _generate_choice(
            max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop, ignore_eos
        )
        ids = self._prompt_ids(self.apply_chat_template(prompt, tokenize=True) if _is_messages(prompt) else prompt)
        return _pieces(_library.load_engine().Stream(self._engine, ids, choice, _whole("max_batch", max_batch, 1)))

    def loglikelihood(self, pairs: Sequence[tuple[Prompt, Prompt]]) -> list[LogLikelihood]:
        """How likely each second part is after the first. Texts are tokenized apart; what pairs share from their
        beginnings is read once."""
        requests = [(self._prompt_ids(context), self._ids_of(continuation)) for context, continuation in pairs]
        try:
            scores = self._engine.loglikelihoods(requests)
        finally:
            self._clear_progress()
        return [LogLikelihood(score.total, score.greedy, score.tokens) for score in scores]

    def logits(self, ids: ArrayLike) -> NDArray[np.float32]:
        """[len(ids), vocab_size]: row i has the scores of the token that follows ids[: i + 1]."""
        return self._engine.logits(_ids("ids", ids))

    def inspect(self, prompt: Prompt, *, last: int = 1, max_tokens: int = 0) -> Inspection:
        """Which blocks the last ``last`` tokens of the prompt read, and those of ``max_tokens`` tokens of answer."""
        found = self._engine.inspect(
            self._prompt_ids(prompt), _whole("last", last, 1), _whole("max_tokens", max_tokens, 0)
        )
        return _inspection(found)

    def __repr__(self) -> str:
        return f"<phsa.LLM {self.name!r}, context {self.context}, attention {self.attention['attention']}>"

    def _ids_of(self, prompt: Prompt) -> NDArray[np.int32]:
        return self.tokenize(prompt) if isinstance(prompt, str) else _ids("the prompt", prompt)

    def _prompt_ids(self, prompt: Prompt) -> NDArray[np.int32]:
        ids = self._ids_of(prompt)
        if isinstance(prompt, str) and self.add_bos:
            ids = np.insert(ids, 0, self._engine.bos_id)
        self._warn_past_tested(ids.size)
        return ids

    def _warn_past_tested(self, tokens: int) -> None:
        """Once."""
        tested = self.tested_tokens
        if self._warned or tested is None or tokens <= tested:
            return
        self._warned = True
        warnings.warn(
            f"{self.name} was tested with texts of up to {tested} tokens, as its settings say; this one has {tokens}: "
            "answers may get worse beyond",
            stacklevel=3,
        )

    def _clear_progress(self) -> None:
        if self._progress is not None:
            self._progress.clear()


class _Progress:
    """A line on standard error that is written over."""

    def __init__(self) -> None:
        self._shown = False

    def __call__(self, what: str, share: float) -> None:
        self._shown = True
        print(f"\r{what} {share:4.0%}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            print("\r" + " " * 20, end="\r", file=sys.stderr, flush=True)
        self._shown = False


def _pieces(stream: _engine.Stream) -> Generator[str, None, Generation]:
    try:
        while (piece := stream.next()) is not None:
            yield piece
        return _generation(stream.result)
    finally:
        stream.close()


def _generation(result: _engine.Result) -> Generation:
    return Generation(
        text=result.text,
        tokens=result.tokens,
        reason=result.reason,
        prompt_tokens=result.prompt_tokens,
        reused_tokens=result.reused_tokens,
        prefill_seconds=result.prefill_seconds,
        decode_seconds=result.decode_seconds,
        read_share=result.read_share,
    )


def _inspection(found: _engine.Inspection) -> Inspection:
    data = json.loads(found.json())
    queries = data["queries"]
    layers = data["num_layers"]
    heads = [head for query in queries for layer in query["layers"] for head in layer["heads"]]
    most_heads = max((len(layer["heads"]) for query in queries for layer in query["layers"]), default=0)
    slots = max((len(head["blocks"]) for head in heads), default=0)
    blocks = np.full((len(queries), layers, most_heads, slots), -1, np.int32)
    scores = np.zeros(blocks.shape, np.float32)
    recall = np.zeros((len(queries), layers, data["num_q_heads"]), np.float32)
    for q, query in enumerate(queries):
        for i, layer in enumerate(query["layers"]):
            recall[q, i] = [share for head in layer["heads"] for share in head["recall_by_query_head"]]
            for h, head in enumerate(layer["heads"]):
                count = len(head["blocks"])
                blocks[q, i, h, :count] = head["blocks"]
                scores[q, i, h, :count] = head["scores"]
    positions = np.array([query["position"] for query in queries], np.int32)
    return Inspection(positions, blocks, scores, recall, data, found)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is of the type {type(value).__name__}; a str is needed")
    value.encode()  # what cannot be UTF-8 raises UnicodeEncodeError, which is a ValueError
    return value


def _whole(name: str, value: object, least: int = 0, most: int = _INT32) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is of the type {type(value).__name__}; an int is needed") from None
    if not least <= number <= most:
        raise ValueError(f"{name} is {number}; allowed: {least} to {most}")
    return number


def _maybe_whole(name: str, value: object, most: int = _INT32) -> int | None:
    return None if value is None else _whole(name, value, 0, most)


def _maybe_float(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is of the type {type(value).__name__}; a number is needed")
    return float(value)


def _ids(name: str, value: ArrayLike) -> NDArray[np.int32]:
    array = np.asarray(value)
    if array.ndim != 1:
        raise ValueError(f"{name}: the ids have the shape {array.shape}; one dimension is needed")
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: the ids have the type {array.dtype}; whole numbers are needed")
    if array.min() < 0 or array.max() > _INT32:
        raise ValueError(f"{name}: the ids are {array.min()} to {array.max()}; allowed: 0 to {_INT32}")
    return np.ascontiguousarray(array, np.int32)


def _is_one_prompt(prompt: object) -> bool:
    """A text or ids; otherwise a sequence of such."""
    if isinstance(prompt, str) or hasattr(prompt, "__array__"):
        return True
    if not isinstance(prompt, Sequence):
        raise TypeError(f"the prompt is of the type {type(prompt).__name__}; a text, ids, or a list of these is needed")
    return len(prompt) > 0 and isinstance(prompt[0], numbers.Integral)


def _is_messages(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _chat(messages: Messages) -> list[tuple[str, str]]:
    if isinstance(messages, str):
        return [("user", _text("the message", messages))]
    pairs = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ValueError(f"message {i} must be a mapping with role and content")
        role = _text(f"the role of message {i}", message["role"])
        pairs.append((role, _text(f"the content of message {i}", message["content"])))
    return pairs


def _settings_json(settings: AttentionSettings | None) -> str:
    """As AttentionChoice takes it; empty: none."""
    if settings is None:
        return ""
    if isinstance(settings, (str, os.PathLike)):
        return settings_text(settings) or " "  # an empty file is not the same as none
    return json.dumps(read_settings(settings))


def _attention_choice(
    attention: str,
    top_k: int | None,
    lam: float | None,
    punctuation: str | None,
    init: int | None,
    local: int | None,
    block: int | None,
    dense_below: int | None,
    group_reduce: str | None,
    settings: AttentionSettings | None,
) -> _engine.AttentionChoice:
    return _library.load_engine().AttentionChoice(
        policy=_text("attention", attention),
        top_k=_maybe_whole("top_k", top_k),
        lam=_maybe_float("lam", lam),
        init=_maybe_whole("init", init),
        local=_maybe_whole("local", local),
        block=_maybe_whole("block", block),
        dense_below=_maybe_whole("dense_below", dense_below),
        punctuation=_text("punctuation", punctuation or ""),
        group_reduce=_text("group_reduce", group_reduce or ""),
        settings=_settings_json(settings),
    )


def _generate_choice(
    max_tokens: int,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition_penalty: float | None,
    seed: int | None,
    stop: str | Sequence[str],
    ignore_eos: bool,
) -> _engine.GenerateChoice:
    return _library.load_engine().GenerateChoice(
        max_tokens=_whole("max_tokens", max_tokens, 1),
        temperature=_maybe_float("temperature", temperature),
        top_k=_maybe_whole("top_k", top_k),
        top_p=_maybe_float("top_p", top_p),
        min_p=_maybe_float("min_p", min_p),
        repetition_penalty=_maybe_float("repetition_penalty", repetition_penalty),
        seed=_maybe_whole("seed", seed, _UINT64),
        stop=[_text("stop", each) for each in ([stop] if isinstance(stop, str) else stop)],
        ignore_eos=bool(ignore_eos),
    )
