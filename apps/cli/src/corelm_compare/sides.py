"""`SideSpec`, an engine to compare, and `OpenSide`, which asks it and counts the calls."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from corelm import Backend, get_backend
from corelm.errors import CapabilityError, CoreLMError
from corelm.spec import Adapter, Provenance, SamplingParams
from corelm.validate import invalid
from corelm_compare.oracles import rendered
from corelm_compare.records import Side
from corelm_engine_kit.redaction import MASK, Secrets, is_secret
from corelm_fleet.probes import dtype_of_engine, plain_modes


@dataclass(frozen=True, slots=True, kw_only=True)
class SideSpec:
    """An engine to open, as `get_backend` does.

    Attributes:
        backend: the backend's name.
        model: a path, a model object, or None for an engine behind a URL.
        options: all other arguments of `get_backend`, such as ``python``, ``base_url``, ``dtype``.
        name: what to call it in the comparison; None for the backend's name.
        adapter: the adapter of its calls: a name, False for none, None for the engine's default.
        adapter_path: the folder that the adapter is loaded from; None if the engine has it.
    """

    backend: str
    model: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    adapter: Adapter = None
    adapter_path: str | PathLike[str] | None = None

    def open(self) -> Backend:
        """Open the engine, and load the adapter if a folder is given."""
        if self.adapter_path is not None and not isinstance(self.adapter, str):
            raise invalid("adapter", f"expected the name for {self.adapter_path}, got {self.adapter!r}")
        backend = get_backend(self.backend, self.model, **self.options)
        if self.adapter_path is not None:
            try:
                backend.load_adapter(str(self.adapter), self.adapter_path)
            except BaseException:
                backend.close()
                raise
        return backend


class Answer(NamedTuple):
    """What a side sampled after a prompt: ids, and float32[len(ids)], their log-probs; NaN if it returned none."""

    ids: list[int]
    numbers: Tensor


class OpenSide:
    """Asks one engine.

    Args:
        spec: how it was opened; None if the caller opened it.
        timeout: seconds that a call may take.
        adapter: the adapter of its calls, if `spec` names none.

    Attributes:
        backend, name, adapter: as given.
        can: what it can do.
        mode: which log-probs of sampled tokens it is asked for.
        notes: what went wrong with single rows.
        calls, tokens, seconds: as in `corelm_compare.Side`.
    """

    def __init__(
        self, backend: Backend, name: str, spec: SideSpec | None, timeout: float | None, adapter: Adapter = None
    ) -> None:
        self.backend, self.name, self._spec, self._timeout = backend, name, spec, timeout
        self.adapter: Adapter = spec.adapter if spec is not None and spec.adapter is not None else adapter
        self.can = backend.capabilities
        self.notes: list[str] = []
        self.calls, self.tokens, self.seconds = 0, 0, 0.0
        self._dtype: str | None = None
        modes = self.can.generation_modes
        self.mode: Literal["raw", "processed"] = "raw" if modes & {"raw", "scaled"} else "processed"
        if not self.can.score and not modes:
            raise CapabilityError(
                f"sides: {name} can neither score nor return log-probs of what it samples, so there is nothing to "
                "compare; leave it out",
                capability="score",
            )

    @property
    def folder(self) -> Path | None:
        """The folder of the model that it was opened with; None if there is no such folder here."""
        model = self.backend.model_name if self._spec is None or self._spec.model is None else self._spec.model
        folder = Path(model) if isinstance(model, (str, PathLike)) else None
        return folder if folder is not None and (folder / "config.json").is_file() else None

    @property
    def samples(self) -> bool:
        """Whether it returns log-probs of what it samples."""
        return bool(self.can.generation_modes)

    def score(
        self,
        rows: Sequence[Sequence[int]],
        *,
        starts: Sequence[int] | None = None,
        adapter: Adapter = None,
    ) -> list[Tensor]:
        """Return the log-prob of every id of each row, float32; NaN where there is none."""
        starts = [1] * len(rows) if starts is None else list(starts)
        with self._counted(sum(map(len, rows))):
            result = self.backend.score_logprobs(
                [list(row) for row in rows],
                score_from=starts,
                adapter=self.adapter if adapter is None else adapter,
                timeout=self._timeout,
                on_error="skip",
            )
        self.notes += [f"{self.name}, row {row}: {error}" for row, error in enumerate(result.errors or ()) if error]
        values = torch.where(result.scored.values, result.logprobs.values, torch.nan).float().cpu()
        return list(values.split(result.logprobs.lengths.tolist()))

    def tables(self, rows: Sequence[Sequence[int]]) -> list[Tensor] | None:
        """Return the logits that predict each id but the first of each row, float32; None if it returns none."""
        if not self.can.logits or not self.can.score:
            return None
        with self._counted(sum(map(len, rows))):
            result = self.backend.score_logprobs([list(row) for row in rows], return_logits=True, timeout=self._timeout)
        assert result.logits is not None
        return [table[1:].float().cpu() for table in result.logits.split()]

    def sample(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seed: int) -> list[Answer]:
        """Sample one answer to each prompt.

        Raises:
            CapabilityError: the engine cannot sample like this, or not with log-probs.
        """
        most = sampling.max_new_tokens or 0
        with self._counted(sum(map(len, prompts)) + most * len(prompts)):
            made = self.backend.generate(
                [list(prompt) for prompt in prompts],
                replace(sampling, seed=seed if self.can.per_answer_seeds else None),
                logprobs=self.mode if self.samples else "none",
                adapter=self.adapter,
                timeout=self._timeout,
                on_error="skip",
            )
        numbers = [torch.full((len(row),), torch.nan) for row in made.ids.tolist()]
        if made.logprobs is not None:
            numbers = [row.float().cpu() for row in made.logprobs.split()]
        self.notes += [f"{self.name}, prompt {row}: {error}" for row, error in enumerate(made.errors or ()) if error]
        return [Answer(*row) for row in zip(made.ids.tolist(), numbers, strict=True)]

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Return the ids of a text, as the engine tokenizes it."""
        found = self.backend.tokenize(text, add_special_tokens=add_special_tokens, parse_special=parse_special)
        return list(map(int, found.ids.tolist()[0]))

    def render(self, chat: Sequence[Mapping[str, Any]]) -> tuple[str, list[int]]:
        """Return a conversation as the text and the ids of a prompt, with the engine's own chat template."""
        return rendered(chat, self.backend.tokenizer, self.backend.tokenize, self.backend.eos_token_ids)

    def spell(self, token: int) -> str:
        """Return the text of an id; its number if the tokenizer cannot say."""
        try:
            return self.backend.detokenize([[token]], skip_special_tokens=False)[0]
        except Exception:  # tokenizers of others raise anything for ids that they lack
            return f"<{token}>"

    def dtype(self) -> str | None:
        """Return the dtype of the engine's logits, or the one that it was opened with; None if neither is known."""
        if self._dtype is None and self.can.logits:
            with self._counted(2), plain_modes():
                self._dtype = dtype_of_engine(self.backend, (1 % self.can.vocab_size, 2 % self.can.vocab_size))
        if self._dtype is None and self._spec is not None and "dtype" in self._spec.options:
            self._dtype = str(self._spec.options["dtype"]).removeprefix("torch.")
        return self._dtype

    def record(self) -> Side:
        """Return the description for the `Comparison`."""
        can, modes = self.can, self.can.generation_modes
        flags = [name for name in ("score", "logits", "score_temperature", "adapters") if getattr(can, name)]
        backend = self.backend
        label = Provenance(backend.name, backend.model_name, backend.weight_version, adapter=self.adapter).to_dict()
        return Side(
            name=self.name,
            backend=backend.name,
            model=backend.model_name,
            options={} if self._spec is None else shown_options(self._spec.options),
            software=backend.engine.software,
            provenance={**label, **Provenance.label_of_scores(1.0)} if can.score else {},
            dtype=self.dtype(),
            abilities=(*flags, *sorted(modes)),
            calls=self.calls,
            tokens=self.tokens,
            seconds=self.seconds,
        )

    @contextmanager
    def _counted(self, tokens: int) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        except CoreLMError as error:
            # Two sides may be backends of one name, which is all that the message has.
            if error.args and not str(error).startswith(f"side {self.name}"):
                error.args = (f"side {self.name}: {error.args[0]}", *error.args[1:])
            raise
        finally:
            self.calls, self.tokens = self.calls + 1, self.tokens + tokens
            self.seconds += time.monotonic() - started


def shown_options(options: Mapping[str, Any]) -> dict[str, str]:
    """Return options as texts, without secrets: of a mapping, such as `env` or `headers`, the names alone."""
    secrets = {name: str(value) for name, value in options.items() if is_secret(name, value)}
    masks = Secrets(secrets.values())
    return {name: MASK if name in secrets else masks.masked(_text_of(value)) for name, value in options.items()}


def _text_of(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(map(str, value))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text_of, value))}]"
    return str(value)
