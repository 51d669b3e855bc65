"""`DistillationLoss`: the divergence of a teacher and of a student at each token, from k log-probs and the tail."""

from __future__ import annotations

import functools
from contextlib import suppress

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from corelm.containers.classes import LogProbs
from corelm.containers.keys import find_entry, key_parts, next_or_root
from corelm.containers.reading import provenance_of_rows, ragged
from corelm.errors import InvalidRequestError, MissingKeyError, ProvenanceMismatchError, refuse
from corelm.kl.divergence_terms import Divergence, Terms
from corelm.kl.divergences import TopLogProbs, top_k_divergence
from corelm.kl.estimators import Reduction, aggregate
from corelm.kl.layout import TokenLayout
from corelm.kl.pairs import Pair, PairKeys, read_pair
from corelm.policy.policy import LLMPolicy
from corelm.spec.provenance import Provenance
from corelm.tensors.modes import no_inference_mode

_FIELDS = ("top_ids", "top_log_probs", "tail_log_mass")


class DistillationLoss(TensorDictModuleBase):
    """Write the divergence of teacher and student at each token to `loss_key`, in nats, with gradients to the student.

    The teacher's `LogProbs` holds its k most probable ids at each token, as ``LLMPolicy(…, top_k=k)`` writes them. The
    student is scored at the same ids; all others are one outcome on both sides. See `corelm.kl.divergences`: the loss
    is a lower bound of the exact divergence. On tokens that the student sampled it is the on-policy distillation of
    Agarwal et al. (GKD), arXiv:2306.13649; with `reverse_kl`, the loss of Gu et al. (MiniLLM), arXiv:2306.08543, token
    by token and without the effect of a token on those after it.

    A position counts if the teacher scored it (and the student, if its `LogProbs` is read) and the mask selects it.
    Elsewhere the loss is 0.0. Dense log-probs give ``loss_key`` as float32 ``[*batch, width]``; rows of different
    lengths give a `PerToken`, read as ``td["distillation_loss"].full``. `mean` returns one number instead.

    Args:
        student: scores the tokens of the TensorDict at the teacher's ids, at every call, with gradients if its engine
            has them and they are enabled. Its `log_probs_mode`, temperature and adapter are used, and its `on_error`:
            "skip" leaves out rows that cannot be scored, if no position of them counts. None reads a `LogProbs` with
            the same ids from the TensorDict.
        kind: `forward_kl` is KL(teacher‖student), `reverse_kl` is KL(student‖teacher), `js` the generalised
            Jensen-Shannon divergence.
        beta: of `js`, above 0 and below 1: the weight of the teacher in the mixture.
        assistant_only: count the assistant's tokens in the response; if False, every token that was scored.
        mask_key: as in `KLComputation`.
        teacher_log_probs_key: the teacher's `LogProbs`.
        student_log_probs_key: the student's, if there is no `student`.
        tokens_key: the `Tokens` that `student` scores.
        masks_key: the policy's `Masks`.
        loss_key: where the loss is written.

    Raises:
        InvalidRequestError: an argument is invalid. On a call: the layouts or the ids of the two differ, probabilities
            do not sum to 1, or the loss of a position that counts is not finite (`rows` lists the rows at fault).
        MissingKeyError: on a call, a key or one of the fields of the most probable ids is missing.
        ProvenanceMismatchError: on a call, teacher and student are of different distributions, such as those of two
            temperatures.
        CapabilityError, EngineError, BackendTimeoutError, BackendClosedError: on a call, from the student's engine.
    """

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
        if student is not None and not isinstance(student, LLMPolicy):
            raise InvalidRequestError(f"student: expected an LLMPolicy, got {type(student).__name__}", field="student")
        self.terms = Terms.checked(kind, beta)
        # Not a submodule: the student's parameters are those of its model.
        self._student = (student,)
        self.teacher_key, self.tokens_key, self.loss_key = teacher_log_probs_key, tokens_key, loss_key
        self.student_key = student_log_probs_key if student is None else teacher_log_probs_key
        gen, ref = ((*key_parts(key), "full") for key in (self.student_key, teacher_log_probs_key))
        self.keys = PairKeys.selecting(gen, ref, masks_key, assistant_only, mask_key)
        self.in_keys = [
            (*key_parts(key), name) for key in dict.fromkeys((self.student_key, self.teacher_key)) for name in _FIELDS
        ]
        self.in_keys += [key for key in (self.keys.mask,) if key is not None]
        if student is not None:
            self.in_keys.append((*key_parts(tokens_key), "full"))
        self.out_keys = [loss_key]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        loss, pair = self._loss(tensordict)
        next_or_root(tensordict).set(self.loss_key, pair.layout.stored(loss))
        return tensordict

    def mean(self, tensordict: TensorDictBase, how: Reduction = "token-mean") -> Tensor:
        """Return the loss of all positions that count as one number, with gradients; nothing is written.

        Args:
            tensordict: as in a call.
            how: as in `aggregate`.
        """
        loss, pair = self._loss(tensordict)
        return aggregate(pair.layout.ragged(loss), pair.layout.ragged(pair.mask), how)

    @no_inference_mode()
    def _loss(self, td: TensorDictBase) -> tuple[Tensor, Pair]:
        """Return float[total], 0.0 where a position does not count, and which do."""
        pair = read_pair(td, self.keys, allow_mismatch=False)
        layout = pair.layout
        teacher = _read_top(td, self.teacher_key, layout)
        (policy,) = self._student
        student = _read_top(td, self.student_key, layout) if policy is None else self._score(policy, td, teacher, pair)
        # As rows, padded on the right, so that errors name the row and the position.
        where = layout.ragged(pair.mask).mask().to(student.tail.device)
        p, q = (_as_rows(side, layout, where) for side in (teacher, student))
        mask = layout.ragged(pair.mask.to(where.device)).scatter(where, False)
        found = top_k_divergence(p, q, self.terms.kind, beta=self.terms.beta, mask=mask)[where]
        counts = pair.mask.to(found.device)
        problems = layout.not_finite(found, counts, f"the {self.terms.kind}")
        if problems and bool((found.detach() == torch.inf).any()):
            hint = "; it is infinite where one side excludes what the other does not: use kind='js', which is finite"
            problems = {row: problem + hint for row, problem in problems.items()}
        refuse(problems, str(self.loss_key))
        return found, Pair(pair.gen, pair.ref, counts, layout)

    def _score(self, policy: LLMPolicy, td: TensorDictBase, teacher: TopLogProbs, pair: Pair) -> TopLogProbs:
        """Return the student's log-probs of the teacher's ids."""
        policy.backend.engine.require(
            "score_top_ids",
            "it cannot score the teacher's ids; give a student whose engine can, such as transformers, or write the "
            "student's LogProbs at these ids yourself and pass student=None",
        )
        container, here = find_entry(td, key_parts(self.teacher_key))
        assert teacher.ids is not None
        held = {"tokens": find_entry(td, self.tokens_key, first=here)[0]}
        # Rows of their own length need no masks; `ragged` asks for those of dense ones.
        with suppress(MissingKeyError):
            held["masks"] = find_entry(td, self.keys.masks, first=here)[0]
        sequences = ragged(TensorDict(held, batch_size=td.batch_size), ("tokens", "full"))
        lengths = pair.layout.lengths
        refuse(
            {
                row: f"{self.tokens_key} has {int(sequences.lengths[row])} tokens, the teacher's log-probs are for "
                f"{int(lengths[row])}"
                for row in (sequences.lengths != lengths).nonzero().flatten().tolist()
            },
            str(self.tokens_key),
        )
        # What does not count need not be scored, so no ids are asked for there.
        ids = torch.where(pair.mask[:, None].to(teacher.ids.device), teacher.ids, -1)
        result = policy.backend.score_logprobs(
            sequences,
            temperature=policy.score_provenance.temperature,
            score_from=_first_counted(pair),
            top_ids=pair.layout.ragged(ids),
            grad=torch.is_grad_enabled() and policy.backend.capabilities.gradients,
            adapter=policy.options.adapter,
            on_error=policy.options.on_error,
        )
        counted = pair.layout.row_sums(pair.mask.double()).flatten() > 0
        errors = {row: error for row, error in enumerate(result.errors or ()) if error and bool(counted[row])}
        refuse(errors, str(self.tokens_key))
        self._check_distributions(container, policy.backend.provenance(result), len(lengths))
        assert result.top_logprobs is not None and result.tail_log_mass is not None
        return TopLogProbs(result.top_logprobs.values, result.tail_log_mass.values, ids)

    def _check_distributions(self, teacher: LogProbs, student: Provenance | tuple[Provenance, ...], count: int) -> None:
        theirs = student if isinstance(student, tuple) else (student,) * count
        for row, (one, other) in enumerate(zip(provenance_of_rows(teacher, count), theirs, strict=True)):
            if one is not None and not one.matches(other):
                raise ProvenanceMismatchError(
                    f"row {row}: teacher and student are of different distributions, so their divergence has no "
                    f"meaning: {one} and {other}; give both policies the same log_probs_mode and temperature"
                )


def _read_top(td: TensorDictBase, key: NestedKey, layout: TokenLayout) -> TopLogProbs:
    """Return the most probable ids of a `LogProbs`, flat: ``[total, k]`` and ``[total]``."""
    container, _ = find_entry(td, key_parts(key))
    missing = [name for name in _FIELDS if name not in container.keys()]
    if missing:
        raise MissingKeyError(
            f"the LogProbs under {key!r} has no {missing[0]!r}; score it with LLMPolicy(backend, input_mode='tokens', "
            "generate=False, top_k=64, log_probs_key=…), or the student at the teacher's ids by passing student=",
            field=str((*key_parts(key), missing[0])),
        )
    ids, log_probs, tail = (_flat(container, name, key, layout) for name in _FIELDS)
    return TopLogProbs(log_probs, tail, ids)


def _flat(container: LogProbs, name: str, key: NestedKey, layout: TokenLayout) -> Tensor:
    if not layout.padded:
        rows = ragged(TensorDict({"own": container}, batch_size=container.batch_size), ("own", name))
        refuse(
            {
                row: f"{name} of {key} has {int(rows.lengths[row])} positions for {int(layout.lengths[row])} tokens"
                for row in (rows.lengths != layout.lengths).nonzero().flatten().tolist()
            },
            str(key),
        )
        return rows.values
    dense, columns = getattr(container, name), layout.columns
    wanted = (*layout.batch, columns.shape[-1])
    if not isinstance(dense, Tensor) or tuple(dense.shape[: len(wanted)]) != wanted:
        found = list(dense.shape) if isinstance(dense, Tensor) else "no dense tensor"
        raise InvalidRequestError(f"{name} of {key}: expected shape {[*wanted, '…']}; got {found}", field=str(key))
    return dense.reshape(*columns.shape, *dense.shape[len(wanted) :])[columns.to(dense.device)]


def _as_rows(side: TopLogProbs, layout: TokenLayout, where: Tensor) -> TopLogProbs:
    put = functools.partial(_scattered, layout=layout, where=where)
    return TopLogProbs(put(side.log_probs), put(side.tail), None if side.ids is None else put(side.ids))


def _scattered(values: Tensor, layout: TokenLayout, where: Tensor) -> Tensor:
    return layout.ragged(values.to(where.device)).scatter(where, 0)


def _first_counted(pair: Pair) -> Tensor:
    """Return int64[rows]: the first position of each row that counts, at least 1; the last one where none counts."""
    marks = pair.layout.ragged(pair.mask.cpu())
    last = (pair.layout.lengths - 1).clamp(min=1)
    places, index = marks.positions[marks.values], marks.row_index[marks.values]
    return last.scatter_reduce(0, index, places, "amin").clamp(min=1)
