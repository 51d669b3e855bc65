"""How many requests a client sends at a time, and what it logs when others wait."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import textwrap

import pytest

from corelm_engine_kit.http import Places

#: Holds every place there is, and then waits for one more.
CROWD = """
    import asyncio, resource
    from corelm_engine_kit.http import Places, most_places

    resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    places = Places(None, "http://there")

    async def crowd():
        for _ in range(places.limit):
            await places.__aenter__()
        waits = [asyncio.create_task(places.__aenter__()) for _ in range(2)]
        await asyncio.wait(waits, timeout=0)
        [wait.cancel() for wait in waits]

    print(most_places())
    asyncio.run(crowd())
"""


@pytest.mark.process
@pytest.mark.parametrize(("files", "places"), [(64, 32)])
def test_a_process_with_few_files_sends_fewer_requests_and_warns_once(files: int, places: int) -> None:
    code = textwrap.dedent(CROWD.format(files=files))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(ended.stdout) == places
    assert ended.stderr.count("requests wait in this process") == 1
    assert f"http://there: requests wait in this process while {places} are" in ended.stderr
    assert "ulimit -n" in ended.stderr


def test_requests_that_wait_for_a_given_limit_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="corelm_engine_kit")
    entered = []

    async def one(places: Places, number: int) -> None:
        async with places:
            entered.append(number)
            await asyncio.sleep(0)

    async def crowd() -> None:
        roomy, tight = Places(3, "http://roomy"), Places(1, "http://tight")
        await asyncio.gather(*(one(places, number) for places in (roomy, tight) for number in range(3)))

    asyncio.run(crowd())
    assert sorted(entered) == [0, 0, 1, 1, 2, 2]
    (record,) = caplog.records
    assert record.levelno == logging.INFO and "max_in_flight=" in record.getMessage()
    assert record.getMessage().startswith("http://tight: requests wait in this process while 1 are")
