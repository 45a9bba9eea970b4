"""The model ``phsa`` of lm-evaluation-harness."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

import phsa

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

_log = logging.getLogger(__name__)

_TRUNCATIONS = ("left", "middle", "error")
# What goes to the engine in one call. Many, because it orders them, reads common beginnings once and keeps its batch
# full; not all, because what a call has answered goes into the harness's cache and is not lost if the run is stopped.
_SCORED_TOGETHER = 512
_ANSWERED_TOGETHER = 64
_MAX_BATCH = 8
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def _prefix_order(tokens: Sequence[Sequence[int]]) -> list[int]:
    """The indices in an order in which those with a common beginning follow one another."""
    keys = [np.asarray(ids, dtype=">i4").tobytes() for ids in tokens]
    return sorted(range(len(keys)), key=keys.__getitem__)


def _parts(order: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _engine_device(device: str | None) -> str | None:
    """The harness's ``--device`` as one of the engine's."""
    if device in ("cuda", "cuda:0"):
        # What the harness passes where the user says nothing, also without a GPU: a wish, not a condition.
        return "auto"
    if device is None or device == "cpu" or device.startswith("cuda:"):
        return device
    _log.warning("phsa's engine runs on the CPU or with CUDA; --device %s changes nothing", device)
    return None


@register_model("phsa")
class PhsaLM(TemplateLM):
    """A model on phsa's engine. ``path`` is what ``phsa.LLM`` takes, and so are all keywords not named here."""

    def __init__(
        self,
        path: str | None = None,
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_batch: int | None = None,
        device: str | None = None,
        max_gen_toks: int = 256,
        truncation: str = "left",
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__()
        if path is None:
            raise ValueError("phsa: model_args needs path=…: a .gguf file, a Hugging Face folder or a model's name")
        if truncation not in _TRUNCATIONS:
            raise ValueError(f"phsa: truncation={truncation} is not one of {', '.join(_TRUNCATIONS)}")
        # Before the model is loaded: whoever waits for it should not be told this afterwards.
        for name, value in (
            ("max_batch", max_batch),
            ("max_batch_size", max_batch_size),
            ("max_gen_toks", max_gen_toks),
        ):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"phsa: {name}={value}; allowed: whole numbers from 1")
        self.llm = phsa.LLM(path, device=_engine_device(device), **keywords)
        _log.info("phsa runs on %s", self.llm.device)
        self.truncation = truncation
        self.add_bos_token = self.llm.add_bos if add_bos_token is None else add_bos_token
        self.think_end_token = think_end_token
        self._prefix_token_id = prefix_token_id
        self._max_gen_toks = max_gen_toks
        # The harness passes 1 where the user says nothing, which cannot be told from a wish for 1. `max_batch` can.
        asked = int(batch_size) if str(batch_size).isdecimal() else 0
        self.max_batch = max_batch or (asked if asked > 1 else max_batch_size or _MAX_BATCH)

    @property
    def eot_token_id(self) -> int:
        return self.llm.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        return self.eot_token_id if self.llm.bos_id is None else self.llm.bos_id

    @property
    def max_length(self) -> int:
        return self.llm.context

    @property
    def max_gen_toks(self) -> int:
        return self._max_gen_toks

    @property
    def batch_size(self) -> int:
        return self.max_batch

    @property
    def tokenizer_name(self) -> str:
        """Part of the name under which the harness keeps prompts: they change with the model and its template."""
        return f"{self.llm.name}-{self.llm.chat_template}".replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if isinstance(chat_template, str):
            _log.warning("the model has one chat template, %s: %s is ignored", self.llm.chat_template, chat_template)
        return self.llm.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        messages = [{"role": turn["role"], "content": turn["content"]} for turn in chat_history]
        if add_generation_prompt:
            return self.llm.apply_chat_template(messages)
        # The answer has been begun, and the model goes on with it: its turn stays open.
        return self.llm.apply_chat_template(messages[:-1]) + messages[-1]["content"]

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results."""
        return {
            "phsa_version": phsa.__version__,
            "phsa_model": self.llm.name,
            "phsa_device": self.llm.device,
            "phsa_attention": self.llm.attention,
            "phsa_context": self.llm.context,
        }

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        ids = self.llm.tokenize(string).tolist()
        bos = self.llm.bos_id
        add = self.add_bos_token if add_special_tokens is None else add_special_tokens
        return [bos, *ids] if add and bos is not None and ids[:1] != [bos] else ids

    def tok_decode(self, tokens: Iterable[int]) -> str:
        return self.llm.detokenize(tokens)

    def _fit(self, texts: list[list[int]], rooms: list[int], what: str) -> list[list[int]]:
        """The texts, each shortened to its room as ``truncation`` says, with one warning for all of them."""
        long = [i for i, (tokens, room) in enumerate(zip(texts, rooms, strict=True)) if len(tokens) > room]
        if not long:
            return texts
        longest = max(long, key=lambda i: len(texts[i]))
        message = (
            f"phsa: {len(long)} of {len(texts)} {what} are too long, the longest has {len(texts[longest])} tokens "
            f"where {rooms[longest]} have room. The context is {self.max_length} (model_args context=…), the "
            f"model's own {self.llm.model_context}; truncation={self.truncation} (of {', '.join(_TRUNCATIONS)})"
        )
        if self.truncation == "error":
            raise ValueError(message)
        _log.warning("%s cuts them", message)
        fitted = list(texts)
        for i in long:
            head = rooms[i] // 2 if self.truncation == "middle" else 0
            fitted[i] = texts[i][:head] + texts[i][len(texts[i]) - (rooms[i] - head) :]
        return fitted

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        for _name, _context, text in requests:
            if not 0 < len(text) <= self.max_length:
                raise ValueError(f"phsa: a text to score has {len(text)} tokens; it must have 1 to {self.max_length}")
        # The last token is predicted, not read, so that one more than the context fits.
        rooms = [self.max_length + 1 - len(text) for _, _, text in requests]
        contexts = self._fit([context for _, context, _ in requests], rooms, "contexts of texts to score")
        pairs = [(context, text) for context, (_, _, text) in zip(contexts, requests, strict=True)]
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        with tqdm(total=len(pairs), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            for part in _parts(_prefix_order([context + text for context, text in pairs]), _SCORED_TOGETHER):
                for index, score in zip(part, self.llm.loglikelihood([pairs[i] for i in part]), strict=True):
                    answers[index] = (score.total, score.greedy)
                    name = requests[index][0]
                    if name is not None:
                        self.cache_hook.add_partial("loglikelihood", name, answers[index])
                bar.update(len(part))
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, rolling):
                windows.append((None, context, continuation))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (total, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += total
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _sampling(self, options: dict[str, Any]) -> dict[str, Any]:
        """The harness's options of a generation, less what stops it, as those of ``phsa.LLM.generate``."""
        unknown = sorted(options.keys() - {*_SAMPLING, "do_sample"})
        if unknown:
            raise ValueError(
                f"phsa: unknown generation options {', '.join(unknown)}; it knows until, max_gen_toks, do_sample, "
                + ", ".join(_SAMPLING)
            )
        if not options["do_sample"]:
            # What shapes a draw says nothing about the most likely token; tasks carry it all the same.
            return {"temperature": 0.0, "repetition_penalty": options.get("repetition_penalty")}
        return {name: options[name] for name in _SAMPLING if name in options}

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        groups: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[json.dumps(request.args[1], sort_keys=True)].append(index)
        # All of it before the first answer, so that what is wrong is said before hours of work.
        jobs: list[tuple[list[int], list[list[int]], list[str], dict[str, Any]]] = []
        for members in groups.values():
            options = dict(normalize_gen_kwargs(requests[members[0]].args[1], self.max_gen_toks))
            until = handle_stop_sequences(options.pop("until"), eos=None)
            max_tokens = options.pop("max_gen_toks")
            room = self.max_length - max_tokens
            if room < 1:
                raise ValueError(
                    f"phsa: max_gen_toks={max_tokens} leaves no room for a prompt in {self.max_length} tokens"
                )
            prompts = [self.tok_encode(requests[i].args[0]) or [self.prefix_token_id] for i in members]
            prompts = self._fit(prompts, [room] * len(prompts), "prompts")
            options = {"max_tokens": max_tokens, "stop": [text for text in until if text], **self._sampling(options)}
            jobs.append((members, prompts, until, options))
        answers = [""] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            for members, prompts, until, options in jobs:
                for part in _parts(_prefix_order(prompts), _ANSWERED_TOGETHER):
                    generations = self.llm.generate([prompts[i] for i in part], max_batch=self.max_batch, **options)
                    for index, generation in zip((members[i] for i in part), generations, strict=True):
                        answers[index] = postprocess_generated_text(generation.text, until, self.think_end_token)
                        self.cache_hook.add_partial("generate_until", requests[index].args, answers[index])
                    bar.update(len(part))
        return answers
