"""New weights in the middle of answers: the server holds them between two tokens while its weights change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from corelm.errors import CoreLMError, EngineError
from corelm.spec import WeightUpdate
from corelm_engine_kit import HttpClient
from sglang_backend.weight_history import WeightHistory

#: How often the server is told to go on, if it does not say that it does.
_ATTEMPTS = 3


@contextmanager
def answers_held(client: HttpClient, history: WeightHistory, label: str, update: WeightUpdate) -> Iterator[None]:
    """Hold the answers in flight while the block changes the weights, if they are to go on with these.

    SGLang takes them off its batch after the token that it works on, and computes their keys and values again with the
    new weights. If the block fails, the weights may be partly new, so they get their label all the same.

    Args:
        label: the server's name for the weights of `update`.

    Raises:
        EngineError: the server did not stop, and nothing has changed; or it does not go on.
    """
    if update.when != "now":
        yield
        return
    client.post("/pause_generation", {"mode": "retract"}, expect_json=False)
    try:
        yield
    except BaseException:
        _name(client, history, label, update)
        raise
    finally:
        _go_on(client)


def _name(client: HttpClient, history: WeightHistory, label: str, update: WeightUpdate) -> None:
    try:
        # By default this would abort the requests of all clients.
        client.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})
    except CoreLMError:
        history.lose_track()
        return
    history.note(label, update)


def _go_on(client: HttpClient) -> None:
    for attempt in range(_ATTEMPTS):
        try:
            client.post("/continue_generation", {}, expect_json=False)
            return
        except CoreLMError as error:
            if attempt == _ATTEMPTS - 1:
                raise EngineError(
                    f"the server was paused for new weights and does not go on: {error}; post /continue_generation to "
                    "it, or restart it",
                    usable=False,
                ) from error
