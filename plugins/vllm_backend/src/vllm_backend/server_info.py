"""`running_config`: the configuration that a server behind a URL runs with, as far as it tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from corelm.errors import CoreLMError

if TYPE_CHECKING:
    from corelm.spec import Deadline
    from corelm_engine_kit import HttpClient

#: Where a server in its development mode says which configuration it runs. It collects the page for some seconds, once.
SERVER_INFO = "/server_info"


def running_config(client: HttpClient, routes: frozenset[str], deadline: Deadline) -> Mapping[str, Any]:
    """Return the server's `VllmConfig` as nested mappings; an empty one if the server does not tell it.

    Raises:
        TimeoutError: the deadline has passed.
    """
    if SERVER_INFO not in routes:
        return {}
    try:
        page = client.get(f"{SERVER_INFO}?config_format=json", timeout=deadline.left())
    except CoreLMError:
        deadline.check()
        return {}
    # An older server tells it as one text.
    config = page.get("vllm_config") if isinstance(page, dict) else None
    return config if isinstance(config, dict) else {}


def setting(config: Mapping[str, Any], part: str, name: str) -> Any:
    """Return one setting of a part of the configuration; None if the server does not tell it."""
    found = config.get(part)
    return found.get(name) if isinstance(found, dict) else None
