"""Ctrl-C while the model works ends the program soon, as Ctrl-C ends every program, and without a crash."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from helpers.processes import heed_interrupts, read_line

#: Seconds in which the program has to end. It takes one or two on a machine that does nothing else.
SOON = 15.0
#: First a function that is called after those of corelm, and that runs `exec`, as one of torch may.
SETUP = """
import atexit
atexit.register(exec, "pass")
import asyncio, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch
from tensordict import TensorDict
import corelm
from corelm import LLMPolicy
from helpers.tiny_models import tiny_model, tiny_tokenizer

CONTEXT = 1_000_000
model = tiny_model(max_position_embeddings=CONTEXT)
backend = corelm.get_backend("transformers", model, tokenizer=tiny_tokenizer())
options = dict(input_mode="text", sampling_params={"max_new_tokens": CONTEXT - 1000, "ignore_eos": True})
batched = LLMPolicy(backend, batching=True, **options)
plain = LLMPolicy(backend, **options)
one = lambda: TensorDict(text=["Hello", "The cat is on the"])

def work_begins(after):
    # The signal is sent when this is printed, which is so many seconds after the work has begun.
    threading.Thread(target=lambda: (time.sleep(after), print("now", flush=True)), daemon=True).start()
"""
PROGRAMS = {
    "with batching": "work_begins(1.5); batched(one())",
    "with batching, at the first step": "work_begins(0.0); batched(one())",
    "in a with block": "with batched:\n    work_begins(1.5); batched(one())",
    "in a with block, while another thread asks": (
        "with batched:\n"
        "    thread = threading.Thread(target=batched, args=(one(),)); thread.start()\n"
        "    work_begins(1.0); time.sleep(100)"
    ),
    "while a pool asks": (
        "pool = ThreadPoolExecutor(4)\nwork_begins(1.5); list(pool.map(batched, [one() for _ in '1234']))"
    ),
    "in a with block, while a pool asks": (
        "pool = ThreadPoolExecutor(4)\n"
        "with batched:\n"
        "    work_begins(1.5); list(pool.map(batched, [one() for _ in '1234']))"
    ),
    "in a with block of the backend, while a pool asks": (
        "with ThreadPoolExecutor(4) as pool, backend:\n"
        "    work_begins(1.5); list(pool.map(plain, [one() for _ in '1234']))"
    ),
    "while a thread runs exec": (
        "def run():\n"
        "    while not hasattr(sys, 'last_value'): time.sleep(0.05)\n"
        "    for _ in range(10): exec('pass'); time.sleep(0.05)\n"
        "threading.Thread(target=run).start()\n"
        "with batched:\n"
        "    work_begins(1.5); batched(one())"
    ),
    "and closing fails": (
        "class Fails:\n"
        "    @corelm.spec.hookimpl(wrapper=True)\n"
        "    def close(self, request):\n"
        "        yield\n"
        "        raise OSError('cannot be closed')\n"
        "failing = corelm.get_backend('transformers', model, tokenizer=tiny_tokenizer(), wrappers=[Fails()])\n"
        "with LLMPolicy(failing, **options) as policy:\n"
        "    work_begins(1.5); policy(one())"
    ),
    "with batching, beams": (
        "work_begins(1.5)\n"
        "batched.replace(sampling_params={'max_new_tokens': 100_000, 'ignore_eos': True, 'num_beams': 2,"
        " 'temperature': 0.0}, return_log_probs=False)(one())"
    ),
    "with batching, scoring": (
        "rows = torch.randint(3, 500, (2000, 1000))\nwork_begins(1.5); batched.backend.score_logprobs(rows)"
    ),
    "in a task": "work_begins(1.5); asyncio.run(batched.aforward(one()))",
    "in a task, without batching": "work_begins(1.5); asyncio.run(plain.aforward(one()))",
    "without batching": "work_begins(1.5); plain(one())",
    "without batching, with a timeout": "work_begins(1.5); plain(one(), timeout=1000.0)",
}


def ended(program: str, signals: int = 1) -> tuple[int, str, float]:
    """Run a program and interrupt it once it prints a line. Return its status, its errors and how long it took."""
    run = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", SETUP + program],
        env={"PYTHONPATH": ":".join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    try:
        assert read_line(run) == "now\n", run.communicate()
        started = time.monotonic()
        for _ in range(signals):
            run.send_signal(signal.SIGINT)
            time.sleep(0.05)
        _, errors = run.communicate(timeout=4 * SOON)
        return run.returncode, errors, time.monotonic() - started
    finally:
        run.kill()


@pytest.mark.parametrize("program", PROGRAMS)
def test_ctrl_c_ends_the_program(program: str) -> None:
    status, errors, seconds = ended(PROGRAMS[program])
    assert status == -signal.SIGINT, errors  # a shell calls this 130
    assert "KeyboardInterrupt" in errors and "Fatal" not in errors and "terminate called" not in errors, errors
    assert seconds < SOON, errors


def test_ctrl_c_twice_ends_the_program() -> None:
    status, errors, seconds = ended(PROGRAMS["with batching"], signals=2)
    assert status == -signal.SIGINT, errors
    assert "Fatal" not in errors and "terminate called" not in errors and seconds < SOON, errors


STUCK = """
def stuck(*_):
    # As a forward pass of a large model: it does not look at anything for a long time.
    a = torch.randn(3000, 3000)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        a @ a

model.model.embed_tokens.register_forward_hook(stuck)
work_begins(1.5); batched(one())
"""


def test_ctrl_c_ends_a_program_whose_model_does_not_return() -> None:
    status, errors, seconds = ended(STUCK)
    assert status == -signal.SIGINT, errors
    assert "Fatal" not in errors and "terminate called" not in errors and seconds < SOON, errors


def test_ctrl_c_waits_for_several_stuck_models_together() -> None:
    # Waits that came one after the other would take 5 seconds or more for each of the three.
    several = """
from corelm.backend import program_end
program_end.PATIENCE_AFTER_INTERRUPT = 5.0
for _ in "12":
    other = tiny_model(max_position_embeddings=CONTEXT)
    more = LLMPolicy(corelm.get_backend("transformers", other, tokenizer=tiny_tokenizer()), batching=True, **options)
    other.model.embed_tokens.register_forward_hook(stuck)
    threading.Thread(target=more, args=(one(),), daemon=True).start()
work_begins"""
    status, errors, seconds = ended(STUCK.replace("work_begins", several))
    assert status == -signal.SIGINT, errors
    assert "Fatal" not in errors and "terminate called" not in errors and seconds < SOON - 1, errors
