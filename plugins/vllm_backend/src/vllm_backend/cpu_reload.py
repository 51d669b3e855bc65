"""Weights that vLLM on a CPU cannot load again, recognised in a server behind a URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from corelm.errors import CoreLMError

if TYPE_CHECKING:
    from corelm.support import Deadline, HttpClient

#: Where a server in its development mode says which configuration it runs.
SERVER_INFO = "/server_info"

#: The fields of a model's configuration that give its number of experts, as vLLM looks for them.
_NUMBERS_OF_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")


def answers_wrongly_afterwards(model: Any, client: HttpClient, routes: frozenset[str], deadline: Deadline) -> bool:
    """Return whether the server would answer wrongly after it has loaded weights again, as far as can be known.

    On a CPU, vLLM keeps the old head if it is tied to the embeddings, and a mixture of experts answers with neither the
    old weights nor the new ones (see `capabilities.read_model`).

    Args:
        model: the configuration of the model; None if it cannot be read on this machine.
        client: asks the server.
        routes: the paths that the server lists.
        deadline: the end of opening.
    """
    if model is None or SERVER_INFO not in routes:
        return False
    text = model.get_text_config()
    experts = any(getattr(text, name, 0) for name in _NUMBERS_OF_EXPERTS)
    # The server collects this page for some seconds, so only such models are asked about.
    if not experts and not getattr(text, "tie_word_embeddings", False):
        return False
    return _is_on_cpu(client, deadline)


def _is_on_cpu(client: HttpClient, deadline: Deadline) -> bool:
    try:
        page = client.get(f"{SERVER_INFO}?config_format=json", timeout=deadline.left())
        device = page["vllm_config"]["device_config"]["device"]
    except (CoreLMError, KeyError, TypeError):
        deadline.check()
        return False
    return bool(device == "cpu")
