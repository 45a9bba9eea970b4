"""The policies: what each is called and what it needs.

The library has this table too (src/attention/policies.h, ``phsa_policy_describe``); settings are made and judged here
also where there is no library, so python/tests/test_policies.py holds one to the other.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    name: str
    number: int  # phsa_policy
    dense: bool = False  # queries read everything; the other settings say nothing
    chooses: bool = True  # queries choose blocks, by top_k and group_reduce
    parts: bool = False  # parts and survivors say something
    weighs: bool = False  # lam and punctuation say something
    plain_means: bool = False  # representatives are plain means: lam is 1
    block_size: int = 0  # its only one; 0: 16, 32 or 64

    def block(self, otherwise: int = 16) -> int:
        return self.block_size or otherwise

    def budget_unit(self, block: int) -> int:
        """Init and local are multiples of so many tokens: a policy with a block size of its own rounds them up to its
        blocks, so that it can be given the budgets of the others."""
        return 16 if self.block_size else block


# All but those that only the reference computes.
TABLE = {
    policy.name: policy
    for policy in (
        Policy("dense", 0, dense=True, chooses=False),
        Policy("phsa", 1, parts=True, weighs=True),
        Policy("infllm2", 2, parts=True, plain_means=True),
        Policy("infllm2-64", 3, plain_means=True, block_size=64),
        Policy("streaming", 4, chooses=False),
        Policy("quest", 5),
    )
}

# What a model's own settings are for.
OWN = "phsa"
