"""Models that are named by a hub's names: do not wait for a hub that does not answer."""

from __future__ import annotations

import os
from typing import Any

#: Seconds for the one request that finds out whether the hub answers.
_TIMEOUT = 5.0


def hub_options(name: Any) -> dict[str, Any]:
    """Return arguments for the ``from_pretrained`` of transformers, so that it fails fast where there is no hub.

    Transformers sends each request that gets no answer six times, and several in a row: a minute or more for a name
    that is misspelt. The hub is asked once here, and if it does not answer, only files of this machine are read.

    Args:
        name: what ``from_pretrained`` is given: a path, which needs no hub, or a name.
    """
    if not isinstance(name, str) or os.path.exists(name):
        return {}
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return {}
    try:
        # Any answer will do. It goes the way that the library's own requests go, through proxies for example.
        get_session().head(constants.ENDPOINT, timeout=_TIMEOUT)
    except Exception:
        return {"local_files_only": True}
    return {}
