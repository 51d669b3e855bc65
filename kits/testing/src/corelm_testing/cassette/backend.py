"""`CassetteBackend`: the plugin that answers from a cassette, without the engine."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from corelm.errors import CapabilityError, CoreLMError, InvalidRequestError
from corelm.rendering.encoding import Encoder
from corelm.spec import (
    AbortRequest,
    Capabilities,
    CloseRequest,
    GenerateRequest,
    GenerateResult,
    ScoreRequest,
    ScoreResult,
    SleepRequest,
    TokenizeRequest,
    TokenizeResult,
    WakeRequest,
    WeightUpdate,
    hookimpl,
)
from corelm.validate import flag, invalid
from corelm_testing.cassette.file import CassetteError, CassetteReader, NotRecordedError
from corelm_testing.cassette.playing import Player
from corelm_testing.cassette.records import TensorHashes, fingerprint, request_json
from corelm_testing.cassette.tokenizer import ReplayTokenizer


class CassetteBackend:
    """Answers what a `CassetteRecorder` has recorded. It declares what the recorded engine could do, except gradients.

    Each row is found by its ids, sampling parameters, seed, and the weights that answer. The order of the calls and
    their batches do not matter.

    ``get_backend("cassette", path)`` opens it. Its numbers carry the names of the recorded backend and model.

    Attributes:
        capabilities: those of the recorded engine.
        tokenizer: the one that was passed, or the recorded one, which is loaded when a text needs it.
        answers_as: the names of the recorded engine.
    """

    requires_api = ">=1,<2"

    def __init__(self, reader: CassetteReader, tokenizer: Any, *, seeds: bool) -> None:
        header = reader.header
        try:
            # A capability that this version of core does not know is passed over.
            known = {each.name for each in fields(Capabilities)}
            declared = {name: value for name, value in header["capabilities"].items() if name in known}
            spans = {name: None if span is None else (span[0], span[1]) for name, span in declared["sampling"].items()}
            self.capabilities = Capabilities(**{**declared, "sampling": spans})
            names = {name: str(header[name]) for name in ("backend", "model", "software")}
            facts = dict(header["tokenizer"])
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, CoreLMError) as error:
            raise CassetteError(
                f"cassette {reader.path}: its header cannot be read ({type(error).__name__}: {error}); record again"
            ) from error
        self.answers_as = {
            "name": names["backend"],
            "model_name": names["model"],
            "software": f"a cassette of {names['software']}",
        }
        named = isinstance(tokenizer, (str, os.PathLike))
        if tokenizer is None or named:
            tokenizer = ReplayTokenizer(reader.path, facts, os.fspath(tokenizer) if named else None)
        self.tokenizer = tokenizer
        self._encode = Encoder(tokenizer)
        self._player = Player(reader, seeds=seeds)

    @classmethod
    def open(
        cls,
        model: str | os.PathLike[str] | None = None,
        *,
        match_seeds: bool = True,
        tokenizer: Any = None,
    ) -> CassetteBackend:
        """Open a cassette.

        Args:
            model: the folder of the cassette.
            match_seeds: False passes over seeds. The answers to a row are then played in the order of the recording.
            tokenizer: replaces the recorded tokenizer: a path, a name or an object.

        Raises:
            InvalidRequestError: no path.
            CassetteError: there is no cassette, it is damaged, or its format is not known.
        """
        if not isinstance(model, (str, os.PathLike)):
            raise invalid("model", "name the folder of a cassette: get_backend('cassette', 'PATH')")
        return cls(CassetteReader(Path(model)), tokenizer, seeds=flag("match_seeds", match_seeds))

    @hookimpl
    def tokenize(self, request: TokenizeRequest) -> TokenizeResult:
        return self._player.tokenized(request) or self._encode(request)

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        result: GenerateResult = self._player.answer("generate", request)
        return result

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        result: ScoreResult = self._player.answer("score_logprobs", request)
        return result

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        hashes = TensorHashes()
        for _ in hashes.reading(request.stream or iter(())):
            pass
        weights = fingerprint(request) if request.stream is None else hashes.joined
        form = request_json("update_weights", request, weights)
        try:
            updated: bool = self._player.answer("update_weights", request, weights)
        except (CapabilityError, InvalidRequestError, NotRecordedError, CassetteError):
            raise
        except Exception:
            self._player.weights.update(form, failed=True)
            raise
        self._player.weights.update(form)
        return updated

    @hookimpl
    def sleep(self, request: SleepRequest) -> bool:
        return bool(self._player.answer("sleep", request))

    @hookimpl
    def wake(self, request: WakeRequest) -> bool:
        return bool(self._player.answer("wake", request))

    @hookimpl
    def abort(self, request: AbortRequest) -> bool:
        # Every answer is there at once, so there is nothing left to end.
        return True

    @hookimpl
    def close(self, request: CloseRequest) -> bool:
        return True
