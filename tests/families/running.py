"""`run`: each case in a process of its own, so that a crash or a hang is one row of the table."""

import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing.connection import Connection

from .cases import Row, check_case
from .checks import Outcome
from .special import maker

#: Seconds of processor time that a case may take, and of wall-clock time, which a busy machine stretches.
BUSY, WAITING = 60, 600


def run(names: Sequence[str], processes: int, device: str = "cpu") -> Iterator[Row]:
    """Yield one row per case, in the order in which they end."""
    context = multiprocessing.get_context("forkserver")
    # The server imports torch and transformers once; each process that it forks has them already.
    context.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(processes) as pool:
        futures = [pool.submit(_in_process, name, device, scratch, context) for name in names]
        for future in as_completed(futures):
            yield future.result()


def _in_process(name: str, device: str, scratch: str, context: multiprocessing.context.ForkServerContext) -> Row:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_check, args=(name, device, scratch, sender), daemon=True)
    process.start()
    sender.close()
    try:
        row: Row = receiver.recv() if receiver.poll(WAITING) else _dead(name, f"no result after {WAITING} s")
    except EOFError:
        process.join()
        took_long = process.exitcode == -signal.SIGXCPU
        why = f"no result after {BUSY} s of processor time" if took_long else f"exit code {process.exitcode}"
        row = _dead(name, f"the process died: {why}")
    finally:
        process.kill()
        process.join()
        receiver.close()
    return row


def _check(name: str, device: str, scratch: str, sender: Connection) -> None:
    import warnings

    import torch
    from transformers.utils import logging

    resource.setrlimit(resource.RLIMIT_CPU, (BUSY, BUSY + 5))
    # Removed by the parent, even if this process is killed.
    tempfile.tempdir = scratch
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    # Convolutions would keep 10 bits of what they read, unlike products of matrices.
    torch.backends.cudnn.allow_tf32 = False
    sender.send(replace(check_case(name, maker(name), device), seconds=time.process_time()))


def _dead(name: str, why: str) -> Row:
    outcome = Outcome("crashed", why)
    return Row(name, outcome, outcome)
