"""`run`: each case in a process of its own, so that a crash or a hang is one row of the table."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing.connection import Connection

from .cases import Row, check_case
from .checks import Outcome
from .special import maker

#: Seconds that a case may take.
LIMIT = 120.0


def run(names: Sequence[str], processes: int) -> Iterator[Row]:
    """Yield one row per case, in the order in which they end."""
    context = multiprocessing.get_context("forkserver")
    # The server imports torch and transformers once; each process that it forks has them already.
    context.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(processes) as pool:
        futures = [pool.submit(_in_process, name, scratch, context) for name in names]
        for future in as_completed(futures):
            yield future.result()


def _in_process(name: str, scratch: str, context: multiprocessing.context.ForkServerContext) -> Row:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_check, args=(name, scratch, sender), daemon=True)
    started = time.monotonic()
    process.start()
    sender.close()
    try:
        row: Row = receiver.recv() if receiver.poll(LIMIT) else _dead(name, f"no result after {LIMIT:.0f} s")
    except EOFError:
        process.join()
        row = _dead(name, f"the process died with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()
        receiver.close()
    return replace(row, seconds=time.monotonic() - started)


def _check(name: str, scratch: str, sender: Connection) -> None:
    import warnings

    import torch
    from transformers.utils import logging

    # Removed by the parent, even if this process is killed.
    tempfile.tempdir = scratch
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    sender.send(check_case(name, maker(name)))


def _dead(name: str, why: str) -> Row:
    outcome = Outcome("crashed", why)
    return Row(name, outcome, outcome)
