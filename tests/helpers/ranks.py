"""`on_two_ranks`: runs a function in two processes of one gloo group, which are always ended."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import distributed, multiprocessing

#: Seconds after which ranks count as hanging. A collective fails earlier than that.
_PATIENCE = 240


def on_two_ranks(job: Callable[[int], Any], folder: Path) -> list[Any]:
    """Return what ``job(rank)`` returns on rank 0 and on rank 1. `job` is a function of a module of `helpers`.

    Args:
        folder: where the ranks meet and leave their results.

    Raises:
        Exception: a rank has failed, or both have not ended in time.
    """
    context = multiprocessing.spawn(_rank, (job, str(folder)), nprocs=2, join=False)
    end = monotonic() + _PATIENCE
    try:
        while not context.join(max(0.0, end - monotonic())):
            if monotonic() > end:
                raise TimeoutError("the ranks wait for each other")
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def _rank(rank: int, job: Callable[[int], Any], folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    torch.save(job(rank), Path(folder, f"{rank}.pt"))
    distributed.barrier()
    distributed.destroy_process_group()
