"""What a call asks for beyond the log-probs of given ids: the ids that truncation left, and the most probable ids."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from corelm import validate
from corelm.backend.engine import OpenEngine
from corelm.backend.given_ids import given_support, given_top_ids
from corelm.backend.skipping import ServedRows
from corelm.errors import CapabilityError, Problems
from corelm.spec.records import GenerateResult
from corelm.spec.sampling import SamplingParams
from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets
from corelm.validate import invalid


@dataclass(frozen=True, slots=True)
class SupportOfAnswers:
    """Whether a caller of `generate` wants the ids that each token was drawn from, and who knows them.

    Attributes:
        wanted: the caller wants them.
        from_engine: only the engine knows them. Otherwise core does: in greedy decoding it is the sampled id, and
            without truncation the whole vocabulary.
        greedy: the temperature is 0.
    """

    wanted: bool
    from_engine: bool
    greedy: bool

    @classmethod
    def of(cls, return_support: Any, sampling: SamplingParams, engine: OpenEngine) -> SupportOfAnswers:
        """Check the argument `return_support`.

        Raises:
            CapabilityError: the engine does not say which ids were left, or beam search was asked for.
            InvalidRequestError: `engine_kwargs` are given, or only `min_new_tokens` takes ids away.
        """
        wanted, greedy = validate.flag("return_support", return_support), sampling.temperature == 0.0
        if wanted and sampling.num_beams > 1:
            raise CapabilityError(
                "beam search does not sample token by token, so no token was drawn from a set of ids; leave out "
                "return_support=True",
                capability="num_beams",
            )
        if wanted and not greedy and sampling.engine_kwargs:
            raise invalid(
                "return_support",
                "core does not know how engine_kwargs change the distribution, so the ids that are left would not say "
                "what a log-prob is of; leave out engine_kwargs or return_support=True",
            )
        if wanted and not greedy and sampling.truncates_support and not sampling.truncates:
            raise invalid(
                "return_support",
                "min_new_tokens leaves nearly the whole vocabulary, and that would be returned for every token; give "
                "top_k, top_p or min_p as well, or leave out return_support=True",
            )
        from_engine = wanted and not greedy and sampling.truncates
        if from_engine:
            engine.require(
                "return_support", "it does not say which ids truncation has left; leave out return_support=True"
            )
        return cls(wanted, from_engine, greedy)

    def added(self, batch: GenerateResult) -> GenerateResult:
        """Return the engine's result with what core knows."""
        if not self.wanted or self.from_engine:
            return batch
        ids = batch.ids
        kept = TokenSets.empty(ids.lengths).to(ids.values.device)
        if self.greedy:
            ones = torch.ones(ids.values.shape[0], dtype=torch.int64)
            kept = TokenSets(Ragged(ids.values.clone(), ones), ids.lengths)
        mass = torch.zeros(ids.values.shape, dtype=torch.float32, device=ids.values.device)
        return replace(batch, kept_ids=kept, kept_log_mass=ids.with_values(mass))


def top_of_answers(given: Any, mode: Literal["none", "raw", "processed"], engine: OpenEngine) -> int:
    """Check the argument `top_logprobs` of `generate`.

    Raises:
        CapabilityError: the engine returns the log-probs of no other ids.
        InvalidRequestError: no whole number, more than the engine gives, or log-probs were not asked for.
    """
    k = _most("top_logprobs", given, "top_logprobs", engine)
    if k and mode == "none":
        raise invalid("top_logprobs", "no log-probs were asked for; give logprobs='raw' or 'processed' as well")
    return k


@dataclass(frozen=True, slots=True, eq=False)
class IdsAtPositions:
    """The ids that a caller of `score_logprobs` names at each position, or how many of the most probable ones.

    Attributes:
        support: the ids over which to normalise, as long as the sequences; None for the whole vocabulary.
        top_k: how many of the most probable ids to return; 0 for none.
        top_ids: the ids to return instead, ``[total, k]``, as long as the sequences; None for none.
        problems: the rows whose ids are wrong, and why.
    """

    support: TokenSets | None = None
    top_k: int = 0
    top_ids: Ragged | None = None
    problems: Problems = field(default_factory=dict)

    @classmethod
    def of(
        cls, engine: OpenEngine, sequences: Ragged, starts: Tensor, support: Any, top_k: Any, top_ids: Any
    ) -> IdsAtPositions:
        """Check the arguments of these names.

        Raises:
            CapabilityError: the engine cannot do it.
            InvalidRequestError: two of them were given, or one is malformed.
        """
        k = _most("top_k", top_k, "score_top_k", engine)
        given = [name for name, one in (("support", support), ("top_ids", top_ids)) if one is not None]
        given += ["top_k"] if k else []
        if len(given) > 1:
            raise invalid(given[-1], f"give only one of {' and '.join(given)} in a call")
        vocab = engine.capabilities.vocab_size
        if support is not None:
            engine.require("score_support", "it normalises over the whole vocabulary; leave out support")
            sets, problems = given_support(support, sequences, starts, vocab)
            return cls(support=sets, problems=problems)
        if top_ids is not None:
            engine.require("score_top_ids", "it returns no log-probs of other ids than those given; leave out top_ids")
            ids, problems = given_top_ids(top_ids, sequences, starts, vocab)
            return cls(top_ids=ids, problems=problems)
        return cls(top_k=k)

    @property
    def k(self) -> int:
        """How many ids are returned at each position."""
        return self.top_k if self.top_ids is None else self.top_ids.values.shape[1]

    def of_rows(self, rows: ServedRows) -> dict[str, Any]:
        """Return the fields of a `ScoreRequest` for the served rows, in storage that the caller does not hold."""

        def some(given: Any) -> Any:
            if given is None:
                return None
            return given.clone() if len(rows) == rows.total else given.select(rows.index)

        return {"support": some(self.support), "top_k": self.top_k, "top_ids": some(self.top_ids)}


def _most(field: str, given: Any, capability: str, engine: OpenEngine) -> int:
    """Return how many ids to return at each position, at most as many as the engine can."""
    k = validate.count(field, given)
    if k:
        engine.require(capability, f"it returns no log-probs of the most probable ids; leave out {field}={k}")
        most = min(getattr(engine.capabilities, capability), engine.capabilities.vocab_size)
        if k > most:
            raise invalid(field, f"this engine returns at most {most} ids at each position, got {k}")
    return k
