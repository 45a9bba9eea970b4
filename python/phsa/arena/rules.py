"""All rules by name, and how a run names them."""

from __future__ import annotations

from typing import Any

from .base import Rule
from .rules_blocks import InfLlm2, InfLlm264, Moba, Nsa, Phsa, Quest
from .rules_fixed import H2O, Dense, Oracle, SepLLM, SnapKV, Streaming
from .rules_prefill import FlexPrefill, MInference, XAttention
from .rules_tokens import ClusterKv, DoubleSparsity, HashAttention, MagicPig, Twilight

RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        Dense,
        Streaming,
        Phsa,
        InfLlm2,
        InfLlm264,
        SepLLM,
        H2O,
        SnapKV,
        MInference,
        Nsa,
        Moba,
        Quest,
        DoubleSparsity,
        ClusterKv,
        MagicPig,
        HashAttention,
        XAttention,
        FlexPrefill,
        Twilight,
        Oracle,
    )
}


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def parse(spec: str) -> tuple[type[Rule], dict[str, Any]]:
    """``phsa:parts=8:lam=1`` as a rule and its options."""
    name, *options = spec.split(":")
    if name not in RULES:
        raise ValueError(f"arena: there is no rule {name!r}; allowed: {', '.join(RULES)}")
    values: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not value:
            raise ValueError(f"arena: {spec}: {option!r} is not name=value")
        values[key] = _value(value)
    rule = RULES[name]
    rule(1000, **values)  # says what is wrong before a model is loaded
    return rule, values


def label(spec: str) -> str:
    """The rule's name with what is not its default, in one order."""
    rule, values = parse(spec)
    given = [f"{key}={value}" for key, value in sorted(values.items()) if rule.options[key] != value]
    return ":".join((rule.name, *given))
