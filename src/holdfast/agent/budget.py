"""The budget: a hard limit on money and tokens, checked against the ledger of spend."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ..arguments import require_whole
from ..errors import BudgetExceeded
from ..formatting import plural
from ..spend import Money, Spent, dollars, nanos
from ..wire import travels


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one model call used; `usd` is None if the price is unknown."""

    input_tokens: int = 0
    output_tokens: int = 0
    usd: Decimal | None = None

    @property
    def tokens(self) -> int:
        """Tokens in and out."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The price of a million tokens, in US dollars."""

    input_usd: Decimal | float | str = 0
    output_usd: Decimal | float | str = 0

    def of(self, input_tokens: int, output_tokens: int) -> Usage:
        """Return the usage of these tokens, priced."""
        cost = Decimal(str(self.input_usd)) * input_tokens
        cost += Decimal(str(self.output_usd)) * output_tokens
        usd = dollars(nanos(cost / 1_000_000) or 0)
        return Usage(input_tokens=input_tokens, output_tokens=output_tokens, usd=usd)


@travels
class Budget:
    """How much a session, or its whole tree, may spend; None means no limit.

    A call is made only if the spend so far plus the model's estimate for it is within the limit.
    """

    def __init__(
        self, *, usd: Money | None = None, tokens: int | None = None, tree: bool = False
    ) -> None:
        limit = nanos(usd)
        if tokens is not None:
            require_whole("tokens", tokens, 0)
        self.usd = None if limit is None else dollars(limit)
        self.tokens = tokens
        self.tree = tree

    def _to_wire(self) -> tuple[Any, ...]:
        """Return the limits."""
        return self.usd, self.tokens, self.tree

    @classmethod
    def _from_wire(
        cls, runtime: Any, usd: Decimal | None, tokens: int | None, tree: bool
    ) -> Budget:
        """Return a budget with these limits."""
        return cls(usd=usd, tokens=tokens, tree=tree)

    def __repr__(self) -> str:
        return f"Budget(usd={self.usd}, tokens={self.tokens}, tree={self.tree})"

    def check(self, spent: Spent, next_call: Usage) -> None:
        """Raise BudgetExceeded if the next call would exceed the limit."""
        if self.usd is not None and spent.unpriced:
            raise BudgetExceeded(
                f"{plural(spent.unpriced, 'model call')} without a known price, so a budget in "
                "dollars cannot be enforced; give the model a price, or limit tokens",
                unpriced=spent.unpriced,
            )
        asked = next_call.usd or Decimal(0)
        if self.usd is not None and (spent.usd + asked > self.usd or spent.usd >= self.usd):
            raise BudgetExceeded(
                f"spent ${spent.usd} of ${self.usd}, and the next call may cost ${asked}; raise "
                "the budget to continue",
                spent_usd=str(spent.usd),
                limit_usd=str(self.usd),
                next_usd=str(asked),
            )
        if self.tokens is not None and (
            spent.tokens + next_call.tokens > self.tokens or spent.tokens >= self.tokens
        ):
            raise BudgetExceeded(
                f"used {spent.tokens} of {self.tokens} tokens, and the next call may use "
                f"{next_call.tokens}; raise the budget to continue",
                spent_tokens=spent.tokens,
                limit_tokens=self.tokens,
                next_tokens=next_call.tokens,
            )

    def describe(self, spent: Spent) -> dict[str, Any]:
        """Return the content of the channel `budget`, a copy for display."""
        return {
            "spent_usd": float(spent.usd),
            "limit_usd": None if self.usd is None else float(self.usd),
            "spent_tokens": spent.tokens,
            "limit_tokens": self.tokens,
            "uncertain_usd": float(spent.uncertain_usd),
        }
