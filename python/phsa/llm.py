"""A language model on the CPU or a GPU, with dense or sparse attention: ``phsa.LLM``. docs/python.md explains it."""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
import numbers
import operator
import os
import sys
import warnings
import weakref
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _library
from .settings import SETTING_OF, AttentionOptions, AttentionSettings, read_settings, settings_text

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from . import _engine


class SupportsArray(Protocol):
    """What NumPy can make an array of: its own arrays, tensors."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any: ...


Prompt: TypeAlias = str | SupportsArray | Sequence[int]
"""A text, or the ids of its tokens."""
Prompts: TypeAlias = Sequence[str] | Sequence[SupportsArray] | Sequence[Sequence[int]]
Messages: TypeAlias = str | Sequence[Mapping[str, str]]
"""A conversation: mappings with ``role`` and ``content``. A string is one message of the user."""

_INT32 = 2**31 - 1
_UINT64 = 2**64 - 1
_MAX_ANSWERS = 65536


class GenerateOptions(TypedDict, total=False):
    """What ``generate``, ``chat``, ``stream`` and ``astream`` take besides the prompt; docs/python.md explains it."""

    max_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | Sequence[int] | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    adapter: str | os.PathLike[str] | None
    grammar: str | None
    json_schema: Mapping[str, Any] | str | None
    max_batch: int


@dataclass(frozen=True, eq=False)
class Generation:
    """What a model wrote."""

    text: str
    tokens: NDArray[np.int32]
    """Ids of the answer, without the one that ended it."""
    reason: str
    """Why it ends: ``end_of_text``, ``stop_string``, ``stop_token``, ``max_tokens`` or ``context_full``."""
    prompt_tokens: int
    reused_tokens: int
    """Tokens of the prompt that were known from another text with the same beginning, and not read again."""
    prefill_seconds: float
    decode_seconds: float
    read_share: float
    """Tokens that the attention read, as a share of what dense attention would have read."""
    logprobs: NDArray[np.float32] | None = None
    """[tokens]: natural logarithms of their probabilities, before any sampling option; None where not asked for."""
    top_ids: NDArray[np.int32] | None = None
    """[tokens, ``logprobs`` of the call]: the likeliest tokens at each place, the likeliest first."""
    top_logprobs: NDArray[np.float32] | None = None
    """Theirs."""


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

    def _repr_html_(self) -> str:
        """The same page, in a frame of a notebook's."""
        page = html.escape(self.html(), quote=True)
        style = "width: 100%; height: 44em; border: 0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{page}"></iframe>'

    def __str__(self) -> str:
        return self._found.text()


class LLM:
    """A model, loaded: a ``.gguf`` file, a Hugging Face folder, or a name that ``phsa models`` lists as fetched.

    ``attention`` is the policy, and with ``top_k``, ``lam``, ``punctuation``, ``init``, ``local``, ``block``,
    ``dense_below``, ``parts``, ``survivors``, ``preset`` and ``group_reduce`` what docs/settings.md describes;
    ``settings`` brings all of that in one, from a file or a mapping, by layer where wanted. An argument counts first,
    then ``settings``, then what the model or its adapter carries, then the paper's preset for the context, in which the
    attention is dense. A setting that nothing uses is an error.

    ``adapter`` is the folder of a LoRA adapter in PEFT's form (docs/adapters.md); the settings that it carries count as
    the model's own. ``adapters`` gives names to several, of which ``adapter``, ``set_adapter`` or a call chooses one.

    ``device`` is where it runs: ``cpu``, ``cuda`` or ``cuda:1`` (the CPU, with a warning, where there is no GPU), or
    ``auto``, a GPU that can run it so and else the CPU (docs/devices.md). None: the environment's ``PHSA_DEVICE``, else
    ``auto``.

    ``context`` is the longest text in tokens (0: the model's, or as much of it as fits into memory) and
    ``cache_tokens`` what is kept of all texts together (0: one longest text). ``weights`` and ``kv_type`` say how
    precisely (docs/engine.md), ``chunk`` how many tokens of a prompt are read in one step (0: what suits the device),
    ``chat_template`` which template to use where the model's own is not known. ``progress`` shows long work on standard
    error.

    An LLM can be used in ``with``; ``close()`` gives its memory back.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        adapter: str | os.PathLike[str] | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        attention: str = "auto",
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
        **options: Unpack[AttentionOptions],
    ) -> None:
        engine = _library.load_engine()
        self._loaded: _engine.Engine | None = None
        self._progress = _Progress() if progress else None
        self._adapters = {name: _folder(folder) for name, folder in (adapters or {}).items()}
        self._adapter = adapter
        self._streams: weakref.WeakSet[Generator[str, None, Generation] | AsyncStream] = weakref.WeakSet()
        self._worker: ThreadPoolExecutor | None = None
        self._warned = False
        choice = _attention_choice(attention, settings, options)
        try:
            self._loaded = engine.Engine(
                _text("model", os.fspath(model)),
                choice,
                adapter=self._adapter_folder(adapter),
                other_adapters=list(self._adapters.values()),
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
    def _engine(self) -> _engine.Engine:
        if self._loaded is None:
            raise RuntimeError("this LLM is closed; make another one")
        return self._loaded

    def close(self) -> None:
        """Ends its streams and gives the model's memory back; where a call of another thread is under way, when that
        has ended. Every later call raises RuntimeError, but for ``close()``."""
        for stream in list(self._streams):
            with contextlib.suppress(ValueError):  # another thread is in it, and has the model until it is through
                stream.close()
        if self._worker is not None:
            self._worker.shutdown(wait=False)
        self._loaded = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
    def adapter(self) -> str | os.PathLike[str] | None:
        """The adapter, by its name or folder, of calls that ask for no other."""
        return self._adapter

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
        settings: AttentionSettings | None = None,
        **options: Unpack[AttentionOptions],
    ) -> None:
        """Another attention for the same weights. What is not given is as if the model were newly loaded."""
        self._engine.set_attention(_attention_choice(attention, settings, options))

    def set_adapter(self, adapter: str | os.PathLike[str] | None) -> None:
        """Another adapter for the same weights: one of ``adapters`` by its name, a folder, or None for the model alone.
        What was read before is read again."""
        self._engine.set_adapter(self._adapter_folder(adapter))
        self._adapter = adapter

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
    def generate(self, prompt: Prompt, *, n: None = None, **options: Unpack[GenerateOptions]) -> Generation: ...
    @overload
    def generate(self, prompt: Prompt, *, n: int, **options: Unpack[GenerateOptions]) -> list[Generation]: ...
    @overload
    def generate(self, prompt: Prompts, *, n: None = None, **options: Unpack[GenerateOptions]) -> list[Generation]: ...
    @overload
    def generate(self, prompt: Prompts, *, n: int, **options: Unpack[GenerateOptions]) -> list[list[Generation]]: ...
    def generate(
        self, prompt: Prompt | Prompts, *, n: int | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation | list[Generation] | list[list[Generation]]:
        """Goes on from a prompt as it is, without a chat template; from several, ``max_batch`` (8) of them at a time.
        With ``n`` each of them has a list of so many answers.

        A prompt is a text, in which control tokens are recognised, or ids. The options are ``max_tokens`` (512); for
        sampling ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``, ``frequency_penalty``,
        ``presence_penalty``, ``logit_bias`` and ``seed``; ``stop``, ``stop_token_ids`` and ``ignore_eos``;
        ``logprobs``, ``adapter`` and ``max_batch``; ``grammar`` (GBNF) or ``json_schema`` (a dict or its text), which
        the answer then follows, unless ``max_tokens`` or a ``stop`` cuts it short. What is not given of the sampling
        is what the model recommends; ``temperature=0`` always takes the most likely token. With ``seed``, a number or
        one for each prompt, a prompt gets the same answer every time; its ``n`` answers have seeds that count up from
        it.
        """
        one = _is_one_prompt(prompt)
        each = [prompt] if one else prompt
        choice, seeds = self._choice(options, len(each))
        count = 1 if n is None else _whole("n", n, 1, _MAX_ANSWERS)
        batch = _whole("max_batch", options.get("max_batch", 8), 1)
        prompts = [self._prompt_ids(each) for each in each]
        try:
            results = self._engine.generate(prompts, seeds, choice, count, batch)
        finally:
            self._clear_progress()
        answers = [_generation(result, options.get("logprobs")) for result in results]
        if n is None:
            return answers[0] if one else answers
        lists = [answers[i : i + count] for i in range(0, len(answers), count)]
        return lists[0] if one else lists

    @overload
    def chat(self, messages: Messages, *, n: None = None, **options: Unpack[GenerateOptions]) -> Generation: ...
    @overload
    def chat(self, messages: Messages, *, n: int, **options: Unpack[GenerateOptions]) -> list[Generation]: ...
    def chat(
        self, messages: Messages, *, n: int | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation | list[Generation]:
        """The assistant's answer. Takes what ``generate`` takes."""
        return self.generate(self.apply_chat_template(messages, tokenize=True), n=n, **options)  # type: ignore[misc]

    def stream(self, prompt: Prompt | Messages, **options: Unpack[GenerateOptions]) -> Generator[str, None, Generation]:
        """An answer piece by piece, to a prompt (as ``generate``) or to a list of messages (as ``chat``). To leave the
        loop ends it. What the generator returns in the end (``yield from`` gives it) is the whole."""
        pieces = _pieces(self._open_stream(prompt, options), options.get("logprobs"))
        self._streams.add(pieces)
        return pieces

    def astream(self, prompt: Prompt | Messages, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """As ``stream``, for ``async for``: the event loop goes on while the model works, in a thread of its own.
        Several at a time are answered together."""
        self._choice(options, 1)  # wrong names and types are told here
        if self._worker is None:
            # One thread, as one call at a time uses the model: a step of any stream is a step of all.
            self._worker = ThreadPoolExecutor(1, "phsa.LLM")
        stream = AsyncStream(self, self._worker, prompt, options)
        self._streams.add(stream)
        return stream

    def loglikelihood(self, pairs: Sequence[tuple[Prompt, Prompt]]) -> list[LogLikelihood]:
        """How likely each second part is after the first. Texts are tokenized apart; what pairs share from their
        beginnings is read once."""
        requests = []
        for i, pair in enumerate(pairs):
            if isinstance(pairs, str) or not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise TypeError(
                    f"loglikelihood: pair {i} is {_shown(pair)}; pairs are needed: [(context, continuation), …]"
                )
            requests.append((self._prompt_ids(pair[0]), self._ids_of(pair[1])))
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
        if self._loaded is None:
            return "<phsa.LLM, closed>"
        return f"<phsa.LLM {self.name!r}, context {self.context}, attention {self.attention['attention']}>"

    def _ids_of(self, prompt: Prompt) -> NDArray[np.int32]:
        return self.tokenize(prompt) if isinstance(prompt, str) else _ids("the prompt", prompt)

    def _prompt_ids(self, prompt: Prompt) -> NDArray[np.int32]:
        ids = self._ids_of(prompt)
        if isinstance(prompt, str) and self.add_bos:
            ids = np.insert(ids, 0, self._engine.bos_id)
        self._warn_past_tested(ids.size)
        return ids

    def _adapter_folder(self, adapter: str | os.PathLike[str] | None) -> str:
        if adapter is None:
            return ""
        return self._adapters.get(adapter) or _folder(adapter) if isinstance(adapter, str) else _folder(adapter)

    def _choice(self, options: GenerateOptions, prompts: int) -> tuple[_engine.GenerateChoice, list[int]]:
        """And a seed for each of the prompts, where they have their own."""
        _ = self._engine  # raises where it is closed
        seed = options.get("seed")
        seeds: list[int] = []
        if isinstance(seed, (Sequence, np.ndarray)) and not isinstance(seed, str):
            seeds = [_whole(f"seed {i}", each, 0, _UINT64) for i, each in enumerate(seed)]
            if len(seeds) != prompts:
                raise ValueError(
                    f"seed has {len(seeds)} numbers for {prompts} prompts; give one for each, or one for all"
                )
            seed = None
        folder = self._adapter_folder(options["adapter"]) if "adapter" in options else None
        return _generate_choice(**{**options, "seed": seed, "adapter": folder}), seeds  # type: ignore[arg-type]

    def _open_stream(self, prompt: Prompt | Messages, options: GenerateOptions) -> _engine.Stream:
        choice, seeds = self._choice(options, 1)
        if seeds:
            raise TypeError("seed is a list; a stream has one answer, and one number for it")
        ids = self._prompt_ids(self.apply_chat_template(prompt, tokenize=True) if _is_messages(prompt) else prompt)
        batch = _whole("max_batch", options.get("max_batch", 8), 1)
        return _library.load_engine().Stream(self._engine, ids, choice, batch)

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


class AsyncStream(AsyncIterator[str]):
    """An answer piece by piece, for ``async for``."""

    def __init__(
        self, llm: LLM, worker: ThreadPoolExecutor, prompt: Prompt | Messages, options: GenerateOptions
    ) -> None:
        self._open = lambda: llm._open_stream(prompt, options)
        self._worker = worker
        self._logprobs = options.get("logprobs")
        self._stream: _engine.Stream | None = None
        self._closed = False
        self.result: Generation | None = None
        """The whole, after the last piece."""

    def _next(self) -> str | None:
        stream = self._stream
        if stream is None and not self._closed:
            stream = self._stream = self._open()
        if stream is None or self._closed:  # by another thread
            self.close()
            return None
        return stream.next()

    async def __anext__(self) -> str:
        if self._closed:
            raise StopAsyncIteration
        try:
            piece = await asyncio.get_running_loop().run_in_executor(self._worker, self._next)
        except BaseException:
            self.close()  # also where the task is cancelled: nobody waits for the rest
            raise
        if piece is not None:
            return piece
        stream = self._stream
        if not self._closed and stream is not None and stream.result is not None:
            self.result = _generation(stream.result, self._logprobs)
        self.close()
        raise StopAsyncIteration

    def close(self) -> None:
        """Ends it where it is, before the model's next step. Any thread may call it."""
        self._closed = True
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    async def aclose(self) -> None:
        self.close()


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


def _pieces(stream: _engine.Stream, logprobs: int | None) -> Generator[str, None, Generation]:
    try:
        while (piece := stream.next()) is not None:
            yield piece
        assert stream.result is not None
        return _generation(stream.result, logprobs)
    finally:
        stream.close()


def _generation(result: _engine.Result, logprobs: int | None) -> Generation:
    scored: dict[str, Any] = {}
    if logprobs is not None:
        count = len(result.tokens)
        likeliest = (count, len(result.top_ids) // max(1, count))
        scored = {
            "logprobs": result.logprobs,
            "top_ids": result.top_ids.reshape(likeliest),
            "top_logprobs": result.top_logprobs.reshape(likeliest),
        }
    return Generation(
        text=result.text,
        tokens=result.tokens,
        reason=result.reason,
        prompt_tokens=result.prompt_tokens,
        reused_tokens=result.reused_tokens,
        prefill_seconds=result.prefill_seconds,
        decode_seconds=result.decode_seconds,
        read_share=result.read_share,
        **scored,
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


def _schema_text(schema: object) -> str:
    return json.dumps(dict(schema)) if isinstance(schema, Mapping) else _text("json_schema", schema)


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


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is of the type {type(value).__name__}; a number is needed")
    return float(value)


def _maybe_float(name: str, value: object) -> float | None:
    return None if value is None else _real(name, value)


def _folder(path: str | os.PathLike[str]) -> str:
    return _text("adapter", os.fspath(path))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


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


def _plain(value: object) -> object:
    """NumPy's numbers and arrays, for JSON."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"settings: {_shown(value)} is of the type {type(value).__name__}; JSON has no such thing")


def _settings_json(settings: AttentionSettings | None) -> str:
    """As AttentionChoice takes it; empty: none."""
    if settings is None:
        return ""
    if isinstance(settings, (str, os.PathLike)):
        return settings_text(settings) or " "  # an empty file is not the same as none
    return json.dumps(read_settings(settings), default=_plain)


def _attention_choice(
    attention: str, settings: AttentionSettings | None, options: Mapping[str, object]
) -> _engine.AttentionChoice:
    given: dict[str, int | float | str] = {}
    for name, value in options.items():
        if name not in AttentionOptions.__annotations__:
            raise TypeError(f"LLM() got an unexpected keyword argument {name!r}")
        if value is None or name == "preset":
            continue
        setting = SETTING_OF[name]
        if setting.kind == "int":
            given[setting.name] = _whole(name, value)
        elif setting.kind == "number":
            given[setting.name] = _real(name, value)
        else:
            given[setting.name] = _text(name, value)
    return _library.load_engine().AttentionChoice(
        policy=_text("attention", attention),
        preset=_text("preset", options.get("preset") or ""),
        given=given,
        settings=_settings_json(settings),
    )


def _generate_choice(
    *,
    max_tokens: int = 512,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    frequency_penalty: float = 0,
    presence_penalty: float = 0,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    logprobs: int | None = None,
    adapter: str | None = None,
    grammar: str | None = None,
    json_schema: Mapping[str, Any] | str | None = None,
    max_batch: int = 8,
) -> _engine.GenerateChoice:
    return _library.load_engine().GenerateChoice(
        max_tokens=_whole("max_tokens", max_tokens, 1),
        temperature=_maybe_float("temperature", temperature),
        top_k=_maybe_whole("top_k", top_k),
        top_p=_maybe_float("top_p", top_p),
        min_p=_maybe_float("min_p", min_p),
        repetition_penalty=_maybe_float("repetition_penalty", repetition_penalty),
        frequency_penalty=_maybe_float("frequency_penalty", frequency_penalty) or 0.0,
        presence_penalty=_maybe_float("presence_penalty", presence_penalty) or 0.0,
        logit_bias=[
            (_whole("a token of logit_bias", token), _maybe_float(f"logit_bias of token {token}", bias) or 0.0)
            for token, bias in (logit_bias or {}).items()
        ],
        seed=_maybe_whole("seed", seed, _UINT64),
        stop=[_text("stop", each) for each in ([stop] if isinstance(stop, str) else stop)],
        stop_tokens=_ids("stop_token_ids", stop_token_ids).tolist(),
        ignore_eos=bool(ignore_eos),
        logprobs=_maybe_whole("logprobs", logprobs),
        adapter=adapter,
        grammar=None if grammar is None else _text("grammar", grammar),
        json_schema=None if json_schema is None else _schema_text(json_schema),
    )
