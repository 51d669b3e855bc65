"""vLLM's processes end with the one that opened the engine, and tell it their errors. Here they are small programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from helpers.processes import all_end, read_line, runs

#: A process of vLLM: it logs errors, and then starts another one.
CHILD = r"""
    import logging, os, time
    from vllm_backend.children import attach

    attach()
    log = logging.getLogger("vllm.v1.engine")
    for _ in range(2):
        try:
            raise ValueError("no room\nfor the cache")
        except ValueError:
            log.exception("failed")
    log.error("a whole request")
    if pid := os.fork():
        print(pid, flush=True)
    time.sleep(600)
"""
OWNER = """
    import os, subprocess, sys, time
    from vllm_backend.children import Errors, attached

    def forked():
        if pid := os.fork():
            return pid
        time.sleep(600)

    try:
        with attached():
            inside = forked()
            child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
            worker = child.stdout.readline().strip()
            raise RuntimeError("see above")
    except RuntimeError as error:
        print(inside, child.pid, worker, forked(), flush=True)
        print(str(error) + Errors().said(), flush=True)
    time.sleep(600)
"""


@pytest.mark.process
def test_processes_that_vllm_starts_tell_their_errors_and_end_with_their_owner_while_others_stay() -> None:
    program = [sys.executable, "-c", textwrap.dedent(OWNER), textwrap.dedent(CHILD)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as owner:
        *family, other = map(int, read_line(owner).split())
        assert all(map(runs, family)) and len(family) == 3
        assert read_line(owner) == "see above; vLLM's last errors: ValueError: no room\\nfor the cache\n"
        owner.terminate()
        assert all_end(family)
        assert runs(other)
        os.kill(other, signal.SIGKILL)
