"""`CassetteBackend`: the plugin that answers from a cassette, without the engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from corelm.errors import CapabilityError, InvalidRequestError
from corelm.rendering.encoding import Encoder
from corelm.spec import (
    AbortRequest,
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
from corelm_testing.cassette.content import ContentPlayer
from corelm_testing.cassette.errors import CassetteError, NotRecordedError
from corelm_testing.cassette.file import CassetteReader
from corelm_testing.cassette.header import Recorded
from corelm_testing.cassette.index import CassetteIndex, row_keys
from corelm_testing.cassette.playing import answer
from corelm_testing.cassette.records import request_json
from corelm_testing.cassette.tokenizer import ReplayTokenizer
from corelm_testing.cassette.weights import TensorHashes, fingerprint


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
        recorded = Recorded.of(reader.path, reader.header)
        self.capabilities = recorded.capabilities
        self.answers_as = {
            "name": recorded.backend,
            "model_name": recorded.model,
            "software": f"a cassette of {recorded.software}",
        }
        named = isinstance(tokenizer, (str, os.PathLike))
        if tokenizer is None or named:
            tokenizer = ReplayTokenizer(reader.path, recorded.tokenizer, os.fspath(tokenizer) if named else None)
        self.tokenizer = tokenizer
        self._encode = Encoder(tokenizer)
        self._index = CassetteIndex(reader)
        self._player = ContentPlayer(reader.path, self._index, seeds=seeds)

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
        # The order does not matter, and neither do the weights.
        (key,) = row_keys("tokenize", request_json("tokenize", request), "")
        call = self._index.tokenized.get(key)
        result: TokenizeResult = self._encode(request) if call is None else self._index.read(call).result
        return result

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        result: GenerateResult = answer(self._player, "generate", request)
        return result

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        result: ScoreResult = answer(self._player, "score_logprobs", request)
        return result

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        hashes = TensorHashes()
        for _ in hashes.reading(request.stream or iter(())):
            pass
        weights = fingerprint(request) if request.stream is None else hashes.joined
        form = request_json("update_weights", request, weights)
        try:
            updated: bool = answer(self._player, "update_weights", request, weights)
        except (CapabilityError, InvalidRequestError, NotRecordedError, CassetteError):
            raise
        except Exception:
            self._player.weights.update(form, failed=True)
            raise
        self._player.weights.update(form)
        return updated

    @hookimpl
    def sleep(self, request: SleepRequest) -> bool:
        return bool(answer(self._player, "sleep", request))

    @hookimpl
    def wake(self, request: WakeRequest) -> bool:
        return bool(answer(self._player, "wake", request))

    @hookimpl
    def abort(self, request: AbortRequest) -> bool:
        # Every answer is there at once, so there is nothing left to end.
        return True

    @hookimpl
    def close(self, request: CloseRequest) -> bool:
        return True
