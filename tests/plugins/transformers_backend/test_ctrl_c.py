"""Ctrl-C while the model works ends the program, as Ctrl-C ends every program, and without a crash.

The programs would work for hours, so that each of them that ends was ended by the interrupt.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from helpers.processes import heed_interrupts, read_line

pytestmark = pytest.mark.process
#: Seconds after which a program is taken to go on. It ends within one or two on a machine that does nothing else.
LIMIT = 60.0
SETUP = """
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

left = 0

def look(*_):
    global left
    left -= 1
    if left == 0:
        # The signal is sent when this is printed.
        print("now", flush=True)

model.get_input_embeddings().register_forward_hook(look)

def interrupt_at(forward_pass):
    global left
    left = forward_pass
"""
PROGRAMS = {
    "with batching": "interrupt_at(100); batched(one())",
    "with batching, at the first step": "interrupt_at(1); batched(one())",
    "in a with block": "with batched:\n    interrupt_at(100); batched(one())",
    "in a with block, while another thread asks": (
        "with batched:\n"
        "    interrupt_at(100); threading.Thread(target=batched, args=(one(),)).start()\n"
        "    time.sleep(1000)"
    ),
    "while a pool asks": (
        "pool = ThreadPoolExecutor(4)\ninterrupt_at(100); list(pool.map(batched, [one() for _ in '1234']))"
    ),
    "in a with block, while a pool asks": (
        "pool = ThreadPoolExecutor(4)\n"
        "with batched:\n"
        "    interrupt_at(100); list(pool.map(batched, [one() for _ in '1234']))"
    ),
    "in a with block of the backend, while a pool asks": (
        "with ThreadPoolExecutor(4) as pool, backend:\n"
        "    interrupt_at(100); list(pool.map(plain, [one() for _ in '1234']))"
    ),
    "while daemon threads ask": (
        "short = plain.replace(sampling_params={'max_new_tokens': 8, 'ignore_eos': True})\n"
        "def run():\n"
        "    while True: short(one())\n"
        "interrupt_at(100)\n"
        "for _ in '1234': threading.Thread(target=run, daemon=True).start()\n"
        "time.sleep(1000)"
    ),
    "while a thread runs exec": (
        "def run():\n"
        "    while not hasattr(sys, 'last_value'): time.sleep(0.05)\n"
        "    for _ in range(10): exec('pass'); time.sleep(0.05)\n"
        "threading.Thread(target=run).start()\n"
        "with batched:\n"
        "    interrupt_at(100); batched(one())"
    ),
    "and closing fails": (
        "class Fails:\n"
        "    @corelm.spec.hookimpl(wrapper=True)\n"
        "    def close(self, request):\n"
        "        yield\n"
        "        raise OSError('cannot be closed')\n"
        "failing = corelm.get_backend('transformers', model, tokenizer=tiny_tokenizer(), wrappers=[Fails()])\n"
        "with LLMPolicy(failing, **options) as policy:\n"
        "    interrupt_at(100); policy(one())"
    ),
    "with batching, beams": (
        "interrupt_at(100)\n"
        "batched.replace(sampling_params={'max_new_tokens': 100_000, 'ignore_eos': True, 'num_beams': 2,"
        " 'temperature': 0.0}, return_log_probs=False)(one())"
    ),
    "with batching, scoring": (
        "rows = torch.randint(3, 500, (2000, 1000))\ninterrupt_at(30); batched.backend.score_logprobs(rows)"
    ),
    "in a task": "interrupt_at(100); asyncio.run(batched.aforward(one()))",
    "in a task, without batching": "interrupt_at(100); asyncio.run(plain.aforward(one()))",
    "without batching": "interrupt_at(100); plain(one())",
    "without batching, with a timeout": "interrupt_at(100); plain(one(), timeout=1000.0)",
}
#: The rest runs at night: each takes as long as importing torch does.
FIRST = {
    "in a task, without batching",
    "without batching",
}


def ended(program: str, signals: int = 1) -> str:
    """Run a program, interrupt it once it prints a line, check how it ends, and return its errors."""
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
        for _ in range(signals):
            run.send_signal(signal.SIGINT)
            time.sleep(0.05)
        _, errors = run.communicate(timeout=LIMIT)
    finally:
        run.kill()
    # By the signal, or with 1 if an exit function of a library ran `exec`, as torch's do: Python then forgets it.
    assert run.returncode in (-signal.SIGINT, 1), errors
    assert "Fatal" not in errors and "terminate called" not in errors, errors
    return errors


@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=[] if name in FIRST else [pytest.mark.nightly]) for name in PROGRAMS]
)
def test_ctrl_c_ends_the_program(program: str) -> None:
    assert "KeyboardInterrupt" in ended(PROGRAMS[program])


@pytest.mark.nightly
def test_ctrl_c_twice_ends_the_program() -> None:
    ended(PROGRAMS["with batching"], signals=2)


STUCK = """
def stuck(*_):
    # As a forward pass of a large model: it does not look at anything for a long time.
    a = torch.randn(3000, 3000)
    while True:
        a @ a

model.model.norm.register_forward_hook(stuck)
interrupt_at(1); batched(one())
"""


def test_ctrl_c_ends_a_program_whose_model_does_not_return() -> None:
    ended(STUCK)
