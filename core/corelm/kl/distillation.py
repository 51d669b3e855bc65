"""`DistillationLoss`: the divergence of a teacher and of a student at each token, from k log-probs and the tail."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from corelm.containers.classes import TOP, must_have_lengths
from corelm.containers.reading import (
    TokenRows,
    container_of,
    find_entry,
    key_parts,
    next_or_root,
    provenance_of_rows,
    ragged,
)
from corelm.errors import MissingKeyError, ProvenanceMismatchError, refuse
from corelm.kl.divergences import Divergence, Terms, TopLogProbs, top_k_divergence
from corelm.kl.estimators import Reduction, aggregate
from corelm.kl.pairs import Pair, PairKeys, read_pair
from corelm.policy.policy import LLMPolicy, checked_policy
from corelm.tensors.modes import no_inference_mode
from corelm.validate import checks_names


class DistillationLoss(TensorDictModuleBase):
    """Write the divergence of teacher and student at each token to `loss_key`, in nats, with gradients to the student.

    The teacher's `LogProbs` holds its k most probable ids at each token, as ``LLMPolicy(…, top_k=k)`` writes them. The
    student is scored at the same ids; the loss is that of `top_k_divergence`. On tokens that the student sampled it is
    the on-policy distillation of Agarwal et al. (GKD), arXiv:2306.13649; with `reverse_kl`, the loss of Gu et al.
    (MiniLLM), arXiv:2306.08543, without the effect of a token on those after it.

    A position counts if the teacher scored it (and the student, if its `LogProbs` is read) and the mask selects it.
    Elsewhere the loss is 0.0. Dense log-probs give ``loss_key`` as float32 ``[*batch, width]``; rows of different
    lengths give a `PerToken`, read as ``td["distillation_loss"].full``. `mean` returns one number instead.

    Args:
        student: scores the tokens at the teacher's ids, at every call, with gradients if its engine has them and they
            are enabled. Its `log_probs_mode`, temperature, adapter and `on_error` are used: "skip" leaves out rows that
            cannot be scored, if no position of them counts. None reads a `LogProbs` with the same ids.
        kind: as in `top_k_divergence`, and so is `beta`.
        assistant_only: as in `KLComputation`, and so are `mask_key` and `masks_key`.
        teacher_log_probs_key: the teacher's `LogProbs`.
        student_log_probs_key: the student's, if there is no `student`.
        tokens_key: the `Tokens` that `student` scores.
        loss_key: where the loss is written.

    Raises:
        InvalidRequestError: an argument is invalid. On a call: the layouts or the ids of the two differ, probabilities
            do not sum to 1, or the loss of a position that counts is not finite (`rows` lists the rows at fault).
        MissingKeyError: on a call, a key or one of the fields of the most probable ids is missing.
        ProvenanceMismatchError: on a call, teacher and student are of different distributions, such as those of two
            temperatures.
        CapabilityError, EngineError, BackendTimeoutError, BackendClosedError: on a call, from the student's engine.
    """

    @checks_names()
    def __init__(
        self,
        student: LLMPolicy | None = None,
        kind: Divergence = "forward_kl",
        *,
        beta: float = 0.5,
        assistant_only: bool = True,
        mask_key: NestedKey | None = None,
        teacher_log_probs_key: NestedKey = "teacher_log_probs",
        student_log_probs_key: NestedKey = "student_log_probs",
        tokens_key: NestedKey = "tokens",
        masks_key: NestedKey = "masks",
        loss_key: NestedKey = "distillation_loss",
    ) -> None:
        super().__init__()
        if student is not None:
            checked_policy(student, "student")
        self.terms = Terms(kind, beta)
        # Not a submodule: the student's parameters are those of its model.
        self._student = (student,)
        self.teacher_key, self.tokens_key, self.loss_key = container_of(teacher_log_probs_key), tokens_key, loss_key
        self.student_key = container_of(student_log_probs_key) if student is None else self.teacher_key
        self.keys = PairKeys(self.student_key, self.teacher_key, masks_key, assistant_only, mask_key)
        scorings = dict.fromkeys((self.student_key, self.teacher_key))
        self.in_keys = [(*key_parts(key), name) for key in scorings for name in TOP] + self.keys.selecting
        if student is not None:
            self.in_keys.append((*key_parts(tokens_key), "full"))
        self.out_keys = [loss_key]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        loss, _, rows = self._loss(tensordict)
        next_or_root(tensordict).set(self.loss_key, rows.stored(loss))
        return tensordict

    def mean(self, tensordict: TensorDictBase, how: Reduction = "token-mean") -> Tensor:
        """Return the loss of all positions that count as one number, with gradients; nothing is written.

        `how` is as in `aggregate`.
        """
        loss, counts, rows = self._loss(tensordict)
        return aggregate(rows.ragged(loss), rows.ragged(counts), how)

    @no_inference_mode()
    def _loss(self, td: TensorDictBase) -> tuple[Tensor, Tensor, TokenRows]:
        """Return float[total], 0.0 where a position does not count; bool[total], which do; and the tokens."""
        pair = read_pair(td, self.keys)
        rows = pair.rows
        teacher = _read_top(rows, self.teacher_key)
        (policy,) = self._student
        student = _read_top(rows, self.student_key) if policy is None else self._score(policy, td, teacher, pair)
        counts = pair.mask.to(student.tail.device)

        def padded(values: Tensor) -> Tensor:
            return rows.ragged(values.to(counts.device)).to_padded(0)

        # As rows, padded on the right, so that errors name the row and the position.
        p, q = (TopLogProbs(*map(padded, vars(side).values())) for side in (teacher, student))
        divergence = top_k_divergence(p, q, self.terms.kind, beta=self.terms.beta, mask=padded(counts))
        found = divergence[padded(torch.ones_like(counts))]
        problems = rows.not_finite(found, counts, f"the {self.terms.kind}")
        if problems and bool((found.detach() == torch.inf).any()):
            hint = "; it is infinite where one side excludes what the other does not: use kind='js', which is finite"
            problems = {row: problem + hint for row, problem in problems.items()}
        refuse(problems, str(self.loss_key))
        return found, counts, rows

    def _score(self, policy: LLMPolicy, td: TensorDictBase, teacher: TopLogProbs, pair: Pair) -> TopLogProbs:
        policy.backend.engine.require(
            "score_top_ids",
            "it cannot score the teacher's ids; give a student whose engine can, such as transformers, or write the "
            "student's LogProbs at these ids yourself and pass student=None",
        )
        assert teacher.ids is not None
        rows = pair.rows
        held, here = find_entry(td, key_parts(self.teacher_key))
        tokens, _ = find_entry(td, self.tokens_key, first=here)
        rows.td.set(self.tokens_key, tokens)
        sequences = ragged(rows.td, (*key_parts(self.tokens_key), "full"), masks=rows.masks)
        must_have_lengths(rows.lengths, sequences.lengths, str(self.tokens_key))
        # What does not count need not be scored, so no ids are asked for there.
        ids = torch.where(pair.mask[:, None].to(teacher.ids.device), teacher.ids, -1)
        result = policy.backend.score_logprobs(
            sequences,
            temperature=policy.score_provenance.temperature,
            score_from=torch.minimum(rows.first(pair.mask), rows.lengths - 1).clamp(min=1),
            top_ids=rows.ragged(ids),
            grad=torch.is_grad_enabled() and policy.backend.capabilities.gradients,
            adapter=policy.options.adapter,
            on_error=policy.options.on_error,
        )
        counted = rows.row_sums(pair.mask.double()).flatten() > 0
        errors = {row: error for row, error in enumerate(result.errors or ()) if error and bool(counted[row])}
        refuse(errors, str(self.tokens_key))
        count = len(sequences)
        made = policy.backend.provenance(result)
        labels = made if isinstance(made, tuple) else (made,) * count
        for row, (one, other) in enumerate(zip(provenance_of_rows(held, count), labels, strict=True)):
            if one is not None and not one.matches(other):
                raise ProvenanceMismatchError(
                    f"row {row}: teacher and student are of different distributions, so their divergence has no "
                    f"meaning: {one} and {other}; give both policies the same log_probs_mode and temperature"
                )
        assert result.top_logprobs is not None and result.tail_log_mass is not None
        return TopLogProbs(result.top_logprobs.values, result.tail_log_mass.values, ids)


def _read_top(rows: TokenRows, key: NestedKey) -> TopLogProbs:
    """Return the most probable ids of a `LogProbs`, flat: ``[total, k]`` and ``[total]``."""
    if missing := [name for name in TOP if name not in rows.td.get(key).keys()]:
        raise MissingKeyError(
            f"the LogProbs under {key!r} has no {missing[0]!r}; score it with LLMPolicy(backend, input_mode='tokens', "
            "generate=False, top_k=64, log_probs_key=…), or the student at the teacher's ids by passing student=",
            field=str((*key_parts(key), missing[0])),
        )
    ids, log_probs, tail = (rows.read((*key_parts(key), name)).values for name in TOP)
    return TopLogProbs(log_probs, tail, ids)
