"""How many requests a client sends at a time, and what it logs when others wait."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import textwrap

import pytest

from corelm_engine_kit.http import ConnectionSlots

#: Holds every slot there is, and then waits for one more.
CROWD = """
    import asyncio, resource
    from corelm_engine_kit.http import ConnectionSlots, most_slots

    resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    slots = ConnectionSlots(None, "http://there")

    async def crowd():
        for _ in range(slots.limit):
            await slots.__aenter__()
        waits = [asyncio.create_task(slots.__aenter__()) for _ in range(2)]
        await asyncio.wait(waits, timeout=0)
        [wait.cancel() for wait in waits]

    print(most_slots())
    asyncio.run(crowd())
"""


@pytest.mark.process
@pytest.mark.parametrize(("files", "slots"), [(64, 32)])
def test_a_process_with_few_files_sends_fewer_requests_and_warns_once(files: int, slots: int) -> None:
    code = textwrap.dedent(CROWD.format(files=files))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(ended.stdout) == slots
    assert ended.stderr.count("requests wait in this process") == 1
    assert f"http://there: requests wait in this process while {slots} are" in ended.stderr
    assert "ulimit -n" in ended.stderr


def test_requests_that_wait_for_a_given_limit_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="corelm_engine_kit")
    entered = []

    async def one(slots: ConnectionSlots, number: int) -> None:
        async with slots:
            entered.append(number)
            await asyncio.sleep(0)

    async def crowd() -> None:
        roomy, tight = ConnectionSlots(3, "http://roomy"), ConnectionSlots(1, "http://tight")
        await asyncio.gather(*(one(slots, number) for slots in (roomy, tight) for number in range(3)))

    asyncio.run(crowd())
    assert sorted(entered) == [0, 0, 1, 1, 2, 2]
    (record,) = caplog.records
    assert record.levelno == logging.INFO and "max_in_flight=" in record.getMessage()
    assert record.getMessage().startswith("http://tight: requests wait in this process while 1 are")
