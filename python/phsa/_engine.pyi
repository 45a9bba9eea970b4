from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray

def wait_for_all_inside() -> None: ...
def packaged_model(name: str) -> str | None: ...

class AttentionChoice:
    def __init__(
        self,
        *,
        policy: str,
        preset: str,
        given: Mapping[str, int | float | str],
        settings: str,
    ) -> None: ...

class GenerateChoice:
    def __init__(
        self,
        *,
        max_tokens: int,
        temperature: float | None,
        top_k: int | None,
        top_p: float | None,
        min_p: float | None,
        repetition_penalty: float | None,
        frequency_penalty: float,
        presence_penalty: float,
        logit_bias: Sequence[tuple[int, float]],
        seed: int | None,
        stop: Sequence[str],
        stop_tokens: Sequence[int],
        ignore_eos: bool,
        logprobs: int | None,
        adapter: str | None,
        grammar: str | None,
        json_schema: str | None,
    ) -> None: ...

class Result:
    @property
    def text(self) -> str: ...
    @property
    def tokens(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...
    @property
    def logprobs(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None,))]: ...
    @property
    def top_ids(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...
    @property
    def top_logprobs(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None,))]: ...
    @property
    def reason(self) -> str: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def reused_tokens(self) -> int: ...
    @property
    def prefill_seconds(self) -> float: ...
    @property
    def decode_seconds(self) -> float: ...
    @property
    def read_share(self) -> float: ...

class Score:
    @property
    def total(self) -> float: ...
    @property
    def greedy(self) -> bool: ...
    @property
    def tokens(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None,))]: ...

class Inspection:
    def json(self) -> str: ...
    def html(self) -> str: ...
    def text(self) -> str: ...

class Engine:
    def __init__(
        self,
        model: str,
        attention: AttentionChoice,
        *,
        adapter: str,
        other_adapters: Sequence[str],
        device: str,
        context: int,
        cache_tokens: int,
        threads: int,
        weights: str,
        kv_type: str,
        chunk: int,
        chat_template: str,
        progress: object | None,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def device_note(self) -> str: ...
    @property
    def context(self) -> int: ...
    @property
    def cache_tokens(self) -> int: ...
    @property
    def model_context(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_ids(self) -> list[int]: ...
    @property
    def bos_id(self) -> int: ...
    @property
    def add_bos(self) -> bool: ...
    @property
    def attention(self) -> str: ...
    @property
    def tested_tokens(self) -> int | None: ...
    @property
    def memory(self) -> dict[str, int]: ...
    @property
    def chat_template(self) -> str | None: ...
    def set_attention(self, attention: AttentionChoice) -> None: ...
    def set_adapter(self, folder: str) -> None: ...
    def tokenize(self, text: str, special: bool) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...
    def detokenize(
        self,
        ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        special: bool,
    ) -> str: ...
    def render_chat(self, messages: Sequence[tuple[str, str]], add_generation_prompt: bool) -> str: ...
    def encode_chat(
        self, messages: Sequence[tuple[str, str]], add_generation_prompt: bool
    ) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...
    def generate(
        self,
        prompts: Sequence[
            Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        ],
        seeds: Sequence[int],
        choice: GenerateChoice,
        n: int,
        max_batch: int,
    ) -> list[Result]: ...
    def loglikelihoods(
        self,
        pairs: Sequence[
            tuple[
                Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
                Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
            ]
        ],
    ) -> list[Score]: ...
    def logits(
        self, ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)]
    ) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None))]: ...
    def inspect(
        self,
        ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        last: int,
        max_tokens: int,
    ) -> Inspection: ...

class Stream:
    def __init__(
        self,
        engine: Engine,
        prompt: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        choice: GenerateChoice,
        max_batch: int,
    ) -> None: ...
    def next(self) -> str | None: ...
    def close(self) -> None: ...
    @property
    def result(self) -> Result | None: ...
