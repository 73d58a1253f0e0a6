"""`model.experts`: feed-forwards of which each token is given to a few (mixture of experts)."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Instead of one feed-forward, every layer has `count` smaller ones, chosen token by token."""

    count: int = 0
    """Experts of each layer; 0: every layer has one feed-forward for all tokens (`model.ffn_dim`)."""
    per_token: int = 2
    """Experts that compute each token; their outputs are added with weights whose sum is 1."""
    ffn_dim: int = 128
    """Inner width of each expert (SwiGLU)."""
    balance_rate: float = 1e-3
    """By how much an expert's bias moves after each step in which it had more, or fewer, tokens than the mean; the bias
    chooses experts and weighs nothing. 0: it never moves."""

    def __post_init__(self) -> None:
        for name, least in (("count", 0), ("per_token", 1), ("ffn_dim", 1)):
            if (size := getattr(self, name)) < least:
                raise ValueError(f"model.experts.{name}={size}: must be at least {least}")
        if 0 < self.count < self.per_token:
            raise ValueError(
                f"model.experts.per_token={self.per_token}: must be at most model.experts.count={self.count}: "
                f"type model.experts.per_token={self.count}"
            )
        if not 0 <= self.balance_rate < float("inf"):
            raise ValueError(f"model.experts.balance_rate={self.balance_rate}: must be 0 or more")
