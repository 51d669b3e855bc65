"""`CassetteRecorder`: a wrapper that writes every call of an engine to a cassette."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from corelm._version import __version__
from corelm.backend.call_log import place
from corelm.errors import CapabilityError, EngineError, InvalidRequestError, is_interrupt
from corelm.spec import (
    Capabilities,
    CloseRequest,
    GenerateRequest,
    GenerateResult,
    ScoreRequest,
    ScoreResult,
    TokenChunk,
    WeightUpdate,
    hookimpl,
)
from corelm.validate import invalid, one_of, shown
from corelm_engine_kit.listening import replaced
from corelm_testing.cassette.file import (
    CassetteError,
    CassetteReader,
    CassetteWriter,
    NotRecordedError,
    is_cassette,
    read_header,
)
from corelm_testing.cassette.playing import Player
from corelm_testing.cassette.records import (
    TensorHashes,
    WeightsHistory,
    as_json,
    chunk_json,
    error_json,
    fingerprint,
    request_json,
    result_json,
)
from corelm_testing.cassette.tokenizer import save_tokenizer, tokenizer_facts

if TYPE_CHECKING:
    from corelm.backend.engine import OpenEngine

RecordMode = Literal["once", "new_episodes", "all"]
#: What becomes of a cassette that is there already. VCR has the same words, and `none`, which is a replay.
RECORD_MODES: tuple[RecordMode, ...] = ("once", "new_episodes", "all")

_Call = Generator[None, Any, Any]


def _recording(hook: str) -> Callable[..., _Call]:
    """Return a wrapper of a hook for the class `CassetteRecorder`."""

    @hookimpl(wrapper=True)
    def record(self: CassetteRecorder, request: Any) -> _Call:
        return (yield from self._recorded(hook, request))

    record.__name__ = hook
    return record


class CassetteRecorder:
    """Writes every call of one engine to a cassette: pass it to ``get_backend(…, wrappers=[recorder])``.

    Calls come back unchanged. Of scores with gradients, the numbers are written, because a replay has no model. Secrets
    are never written: no options of the engine are, and an `engine_kwargs` whose name says that it is a secret is
    replaced by a fingerprint. The recording is complete when the engine is closed.

    Args:
        path: the folder of the cassette. It is made if it is missing.
        record_mode: what to do if there is a cassette. "once" refuses, so that nothing is lost. "all" replaces it.
            "new_episodes" answers the rows that it holds, asks the engine for the calls that have others, and adds
            these.
        save_tokenizer: whether to save the tokenizer's files in the cassette, so that a replay on another machine can
            read and write texts. Otherwise a replay loads the tokenizer by its path or name.

    Attributes:
        path: the folder.
        completes: whether the recording is complete when the engine is closed. A test that failed may say that it is
            not.

    Raises:
        InvalidRequestError: an unknown `record_mode`, or a tokenizer that cannot save itself.
        CassetteError: there is a cassette, or the folder cannot be written. Raised when the engine is opened.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, record_mode: RecordMode = "once", save_tokenizer: bool = False
    ) -> None:
        if str(record_mode) == "none":
            raise invalid("record_mode", f"to record nothing, open get_backend('cassette', {os.fspath(path)!r})")
        one_of("record_mode", record_mode, RECORD_MODES)
        self.path = Path(path)
        self.completes = True
        self._mode, self._save_tokenizer = record_mode, save_tokenizer
        self._writer: CassetteWriter | None = None
        self._engine: OpenEngine | None = None
        self._known: Player | None = None
        self._tells_weights = False
        self._weights = WeightsHistory()
        self._mutex = threading.Lock()
        self._next = 0
        #: The requests that the cassette has answered and that are on their way to the caller.
        self._answered: set[int] = set()

    def __repr__(self) -> str:
        return f"CassetteRecorder({os.fspath(self.path)!r}, record_mode={self._mode!r})"

    def attached(self, engine: OpenEngine) -> None:
        """Begin the recording. Core calls this when the engine is open.

        Raises:
            CassetteError: see the class; or this recorder records another engine already.
        """
        if self._writer is not None:
            raise CassetteError(f"{self!r} records another engine; give each engine a recorder and a folder")
        old = is_cassette(self.path)
        if old and self._mode == "once":
            again = f"CassetteRecorder({os.fspath(self.path)!r}, record_mode="
            raise CassetteError(
                f"cassette {self.path}: there is one already. To replay it, open get_backend('cassette', "
                f"{os.fspath(self.path)!r}). To replace it, pass {again}'all'); to add to it, {again}'new_episodes')"
            )
        header = _header(engine)
        extends = old and self._mode == "new_episodes"
        if extends:
            _refuse_other_engine(self.path, read_header(self.path), header)
        writer = CassetteWriter(self.path, replace=not extends)
        try:
            if extends:
                self._known = Player(CassetteReader(self.path), explains=False)
                self._next = self._known.calls[-1].number + 1 if self._known.calls else 0
                self._known.weights = self._weights
            if self._save_tokenizer:
                save_tokenizer(engine.tokenizer, self.path)
            writer.header(header)
        except BaseException:
            writer.close(complete=False)
            raise
        self._writer, self._engine, self._tells_weights = writer, engine, header["tells_weights"]

    # The hooks -------------------------------------------------------------------------------------------------------

    tokenize = _recording("tokenize")
    #: With the order in which tokens arrived, if the caller read along.
    generate = _recording("generate")
    #: Of gradients, nothing.
    score_logprobs = _recording("score_logprobs")
    #: A fingerprint of the weights, not the weights.
    update_weights = _recording("update_weights")
    sleep = _recording("sleep")
    wake = _recording("wake")
    abort = _recording("abort")

    @hookimpl(wrapper=True)
    def close(self, request: CloseRequest) -> _Call:
        """Complete the recording."""
        try:
            return (yield)
        finally:
            if self._writer is not None:
                self._writer.close(complete=self.completes)

    @hookimpl(specname="close", trylast=True)
    def closed(self, request: CloseRequest) -> bool:
        """Have `close` called for an engine that does not implement it."""
        return True

    @hookimpl(specname="generate", tryfirst=True)
    def known_answers(self, request: GenerateRequest) -> GenerateResult | None:
        """Answer a call all of whose rows are recorded; None lets the engine answer."""
        answers: GenerateResult | None = self._from_cassette("generate", request)
        return answers

    @hookimpl(specname="score_logprobs", tryfirst=True)
    def known_scores(self, request: ScoreRequest) -> ScoreResult | None:
        """Score the rows of a call all of which are recorded; None lets the engine do it."""
        scores: ScoreResult | None = None if request.grad else self._from_cassette("score_logprobs", request)
        return scores

    def _from_cassette(self, hook: str, request: Any) -> Any:
        if self._known is None:
            return None
        self._answered.add(id(request))
        try:
            return self._known.answer(hook, request)
        except NotRecordedError:
            self._answered.discard(id(request))
            return None

    def _recorded(self, hook: str, request: Any) -> _Call:
        """Let the engine answer, and write the call when it has ended."""
        if self._writer is None:
            raise CassetteError(f"{self!r} was not told which engine it records; pass it to get_backend as a wrapper")
        heard: list[Any] = []
        hashes = TensorHashes()
        form = request_json(hook, request, fingerprint(request) if isinstance(request, WeightUpdate) else None)
        with self._mutex:
            number, self._next = self._next, self._next + 1
            state = self._weights.state(getattr(request, "adapter", None))
        record = {"call": number, "hook": hook, "request": form, "weights": state, "began": time.time()}
        with ExitStack() as listening:
            if getattr(request, "on_tokens", None) is not None:
                listening.enter_context(replaced(request, "on_tokens", _listener(request.on_tokens, heard)))
            if getattr(request, "stream", None) is not None:
                listening.enter_context(replaced(request, "stream", hashes.reading(request.stream)))
            listening.callback(self._answered.discard, id(request))
            try:
                result = yield
            except BaseException as error:
                if not (is_interrupt(error) or isinstance(error, GeneratorExit)):
                    self._ended(request, record, heard, hashes, error=error)
                raise
            self._ended(request, record, heard, hashes, result)
            return result

    def _ended(
        self,
        request: Any,
        record: dict[str, Any],
        heard: list[Any],
        hashes: TensorHashes,
        result: Any = None,
        error: BaseException | None = None,
    ) -> None:
        """Write a call that has ended, unless the cassette has answered it."""
        if id(request) in self._answered:
            return
        assert self._writer is not None and self._engine is not None
        hook, outcome = record["hook"], dict[str, Any]()
        if isinstance(request, WeightUpdate):
            if request.stream is not None:
                record["request"]["weights"] = hashes.joined
            if not isinstance(error, (CapabilityError, InvalidRequestError)):
                with self._mutex:
                    self._weights.update(record["request"], failed=error is not None)
        if error is None:
            try:
                outcome["result"] = result_json(hook, result)
            except (TypeError, ValueError) as fault:
                # Core refuses it, too, as a fault of the engine.
                error = EngineError(f"the result of {hook} has no form in a cassette: {fault}", usable=True)
        if error is not None:
            outcome["error"] = error_json(error, self._engine.name, hook)
        if heard:
            outcome["stream"] = heard
        if self._tells_weights and isinstance(request, (GenerateRequest, ScoreRequest)):
            outcome["weight_version"] = self._engine.weights.state.label
        self._writer.append({**record, "seconds": round(time.time() - record["began"], 6), **outcome})


def _header(engine: OpenEngine) -> dict[str, Any]:
    """Return the header of a cassette: which engine is recorded, and what it can do."""
    declared = {each.name: as_json(getattr(engine.capabilities, each.name)) for each in fields(Capabilities)}
    return {
        "core": __version__,
        "backend": engine.name,
        # Without what may be secret in a URL.
        "model": place(engine.model_name),
        "software": engine.software,
        # The tokenizer's EOS counts for an engine that declares none, and a replay need not have the tokenizer.
        "capabilities": {**declared, "eos_token_ids": sorted(engine.eos_token_ids), "gradients": False},
        "tells_weights": engine.implements("weights_state"),
        "tokenizer": tokenizer_facts(engine.tokenizer),
    }


def _refuse_other_engine(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse to add calls of one engine to the cassette of another. Versions of software may differ."""
    for name in ("backend", "model", "capabilities"):
        if old.get(name) != new[name]:
            was, now = shown(old.get(name)), shown(new[name])
            raise CassetteError(
                f"cassette {path}: it was recorded with another engine: {name} {was}, and this one has {now}; record "
                "it again with record_mode='all', or name another folder"
            )


def _listener(listener: Callable[[TokenChunk], None], heard: list[Any]) -> Callable[[TokenChunk], None]:
    def listen(chunk: TokenChunk) -> None:
        listener(chunk)
        # Core fails the call for a chunk that cannot be read.
        with suppress(Exception):
            heard.append(chunk_json(chunk))

    return listen
