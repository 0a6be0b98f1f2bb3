"""How an expert router chooses a row's experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Routing:
    """A row gets the `top_k` experts with the highest scores, and every shared expert.

    Shared experts have the ids after the others. A row's sum runs over its experts in the order
    of their scores, the highest first, then over the shared ones. Among equal scores the lowest id
    comes first.
    """

    experts: int  # without the shared ones
    top_k: int
    columns: int  # intermediate size of an expert's MLP
    shared: int = 0
    shared_gate: bool = False  # one more output of the expert router weighs the shared experts
    biased: bool = False  # the expert router's outputs and the experts' products have biases
    scores: Scores = "softmax"
    corrected: bool = False  # a bias is added to scores for the choice, not for the weights
    normalized: bool = False  # a row's weights sum to one
    scale: float = 1.0  # factor of the weights of chosen experts
    groups: int = 1  # neighbouring experts form groups; only the best `top_groups` are eligible
    top_groups: int = 1
    group_best: int = 1  # how many of a group's best scores are added up to rank it

    @property
    def every(self) -> int:
        """Number of experts, shared ones included."""
        return self.experts + self.shared

    @property
    def per_row(self) -> int:
        """Number of experts of a row."""
        return self.top_k + self.shared

    @property
    def outputs(self) -> int:
        """Number of outputs of the expert router."""
        return self.experts + self.shared_gate
