"""The specification: what a backend implements. Read this first.

A backend is a class with three attributes and the hooks below, found through the entry-point group
``corelm.backends``::

    class MyBackend:
        requires_api = ">=1,<2"                      # the versions of this page it was written for

        @classmethod
        def open(cls, model=None, **options): ...    # import and start the engine here, not before

        capabilities: Capabilities                   # what it can do; known once it is open
        tokenizer: Any                               # a transformers tokenizer, or what is said of it below

        @hookimpl
        def generate(self, request): ...

A tokenizer is called as ``tokenizer(texts, add_special_tokens=…)`` and returns a mapping with ``input_ids``; it has
``decode(ids, skip_special_tokens=…)``. `eos_token_id`, `pad_token_id` and `all_special_tokens` are read if it has them.
Chats need ``apply_chat_template``; ``split_special_tokens=True`` is passed where a user typed a special token, and
``return_offsets_mapping=True`` where a mask must follow a template's markers.

Core checks every request before a hook sees it (`corelm/backend/check_requests.py`) and every result before a user does
(`check_results.py`), so a plugin contains no checks of its own. A hook that cannot serve a request raises; what it
raises reaches the caller chained to an `EngineError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from tensordict import TensorDict

    from corelm.spec.records import (
        AbortRequest,
        CloseRequest,
        ContainerRequest,
        GenerateRequest,
        GenerateResult,
        HealthRequest,
        ScoreRequest,
        ScoreResult,
        TokenizeRequest,
        TokenizeResult,
        WeightUpdate,
    )

API_VERSION = "1.0"
PROJECT = "corelm"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class BackendSpec:
    """Every hook takes exactly one argument named `request`; the first result that is not None is the answer."""

    # Required. Core brings `tokenize` and `to_containers`; a plugin writes the other two.

    @hookspec(firstresult=True)
    def tokenize(self, request: TokenizeRequest) -> TokenizeResult:
        """Turn texts into ids, adding special tokens only if asked. Core's own calls ``backend.tokenizer``."""

    @hookspec(firstresult=True)
    def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one answer per row, each from its own seed, ended by and keeping a stop id, with its tokens' log-
        probs.
        """

    @hookspec(firstresult=True)
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        """Log-probability of each given token under the model; sample nothing."""

    @hookspec(firstresult=True)
    def to_containers(self, request: ContainerRequest) -> TensorDict:
        """Wrap rows as TensorClasses in a TensorDict. Core's own serves every engine."""

    # Optional.

    @hookspec(firstresult=True)
    def update_weights(self, request: WeightUpdate) -> bool:
        """Load new weights and forget everything computed with the old ones. True when every later result uses them."""

    @hookspec(firstresult=True)
    def health(self, request: HealthRequest) -> bool:
        """Whether the engine can serve; cheap, and never raises because it cannot."""

    @hookspec(firstresult=True)
    def abort(self, request: AbortRequest) -> bool:
        """End requests in flight, exactly those named. True even if they had already ended."""

    @hookspec(firstresult=True)
    def close(self, request: CloseRequest) -> bool:
        """Release processes, threads and memory. Called once; True when it is done."""
