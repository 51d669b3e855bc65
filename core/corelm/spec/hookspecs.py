"""The specification: what a backend implements. Read this first.

A backend is a class with three attributes and the hooks below, found through the entry-point group
``corelm.backends``. The group ``corelm.engines`` may name the module of its engine, under the same name: core tells
from it, without importing anything, whether the engine is installed::

    class MyBackend:
        requires_api = ">=1,<2"                      # the versions of this specification it was written for

        @classmethod
        def open(cls, model=None, *, slots=8): ...   # its options, spelled out; the engine is imported here

        capabilities: Capabilities                   # what the engine can do; set once it is open
        tokenizer: Any                               # a transformers tokenizer, or an object as described below
        # Optional:
        info: Mapping[str, str]                      # short facts about the open engine, see `Backend.info`

        @classmethod
        def engine_warning(cls) -> str: ...          # what is slow with the installed engine, for `corelm doctor`

        @hookimpl
        def generate(self, request): ...

A tokenizer is a callable ``tokenizer(texts, add_special_tokens=…)`` that returns a mapping with
``input_ids``, and has a method ``decode(ids, skip_special_tokens=…)``. Core reads `eos_token_id`,
`pad_token_id`, `all_special_tokens` and `added_tokens_decoder` if it has them, and ``apply_chat_template``
for chats. Core passes ``split_special_tokens=True`` for a text in which a user typed a special token, and
``return_offsets_mapping=True`` if an assistant mask needs character offsets.

Core checks every request before it calls a hook (`corelm/backend/arguments.py`) and every result before it
returns it (`corelm/backend/check_results.py`), so a plugin needs no checks. A hook that cannot serve a
request raises an exception:

========================  ==========================================================================================
the hook raises           the caller gets
========================  ==========================================================================================
`CapabilityError`         The same error. Raise it to refuse a combination of parameters that the engine cannot serve,
                          or one that it would serve differently; `capability` names one of the parameters.
`InvalidRequestError`     The same error. Raise it for a value that the engine does not accept; `field` names the
                          parameter, `problems` the rows at fault.
`TimeoutError`            A `BackendTimeoutError` with the exception as its cause. Raise it when ``request.timeout``
                          seconds have passed.
`EngineError`             The same error. ``usable=False`` says that the engine will serve no other request: nothing
                          is retried, and requests that shared the call fail with it.
another `CoreLMError`     The same error.
any other `Exception`     An `EngineError` with the exception as its cause.
========================  ==========================================================================================

Do not raise for a row that fails alone: return its finish reason `error` (in scores: nothing scored) and say
why in `errors`. The other rows of the call are then served.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Hashable

    from tensordict import TensorDict

    from corelm.spec import records

API_VERSION = "1.1"
PROJECT = "corelm"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class BackendSpec:
    """Every hook takes one argument named `request`. The first result that is not None is used."""

    # Core implements `tokenize` and `to_containers`. A plugin implements `generate`, and `score_logprobs` if it scores.

    @hookspec(firstresult=True)
    def tokenize(self, request: records.TokenizeRequest) -> records.TokenizeResult:
        """Turn texts into ids, with special tokens only if requested. Core's default calls ``backend.tokenizer``."""

    @hookspec(firstresult=True)
    def generate(self, request: records.GenerateRequest) -> records.GenerateResult:
        """Sample one answer per row, each from its own seed, and return the log-probs of its tokens.

        The first stop id ends an answer and stays in it.
        """

    @hookspec(firstresult=True)
    def score_logprobs(self, request: records.ScoreRequest) -> records.ScoreResult:
        """Return the log-probability of each given token under the model; sample nothing."""

    @hookspec(firstresult=True)
    def to_containers(self, request: records.ContainerRequest) -> TensorDict:
        """Wrap rows as TensorClasses in a TensorDict. Core's default works for every engine."""

    # Optional.

    @hookspec(firstresult=True)
    def update_weights(self, request: records.WeightUpdate) -> bool:
        """Load new weights and drop everything computed with the old ones.

        An update without weights says that the owner has changed them: there is only something to drop. One
        with an ``adapter`` loads or unloads that adapter, and leaves the base weights alone.

        Return True if every later result uses the new weights. Raise `InvalidRequestError` or
        `CapabilityError` only if nothing was changed: core then keeps the label of the old weights. After any
        other exception it takes the weights for partly new, and gives them a label that no others have.
        """

    @hookspec(firstresult=True)
    def weights_state(self, request: records.WeightsStateRequest) -> Hashable:
        """Return a value by which states of the weights are told apart: where it is equal, the weights are.

        For an engine whose model other code can change in place. Core asks before and after every call, so it
        must be cheap. New in 1.1.
        """

    @hookspec(firstresult=True)
    def sleep(self, request: records.SleepRequest) -> bool:
        """Free the accelerator's memory, at one of the levels that ``capabilities.sleep_levels`` declares.

        Return True. The engine's processes go on, and `health` and `tokenize` still work. Raise
        `InvalidRequestError` or `CapabilityError` only if nothing was changed. New in 1.1.
        """

    @hookspec(firstresult=True)
    def wake(self, request: records.WakeRequest) -> bool:
        """Take the memory of the named parts again. Weights that level 1 kept are the same as before.

        Return True. Core calls `update_weights` while the weights are awake and the KV cache is not, if the
        user does: the hook must not need the cache then. New in 1.1.
        """

    @hookspec(firstresult=True)
    def health(self, request: records.HealthRequest) -> bool:
        """Return whether the engine can serve. Must be cheap; return False instead of raising."""

    @hookspec(firstresult=True)
    def abort(self, request: records.AbortRequest) -> bool:
        """End the named requests and no others. Return True even if they have already ended."""

    @hookspec(firstresult=True)
    def close(self, request: records.CloseRequest) -> bool:
        """Release processes, threads and memory. Called once; return True when everything is released."""
