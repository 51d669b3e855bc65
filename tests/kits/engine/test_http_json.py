"""Bodies decode to what `json.loads` makes of them, and what is no JSON is not written."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corelm.errors import EngineError
from corelm_engine_kit.http_json import decoded, encoded
from helpers.http_clients import Connect
from helpers.http_server import raw

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(width=32) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def told(body: bytes) -> str:
    """Return what `json` makes of a body, or the kind of its refusal. A repr tells NaN, -0.0, 1 and 1.0 apart."""
    try:
        return repr(json.loads(body))
    except (ValueError, RecursionError) as error:
        return type(error).__name__


@given(VALUES, st.booleans())
def test_a_body_decodes_as_python_decodes_it(value: Any, plain: bool) -> None:
    # `value` may hold NaN and infinity, and lone surrogates if everything is written in ASCII.
    body = json.dumps(value, ensure_ascii=plain).encode("utf-8", "surrogatepass")
    assert repr(decoded(body)) == told(body)
    assert repr(decoded(bytearray(body))) == told(body)


def test_an_odd_body_is_read_or_refused_as_python_does() -> None:
    for body in (
        b"[NaN, Infinity, -Infinity, -1e400, 1e400, -0, -0.0, 1E2]",
        b'{"a": 1, "a": 2}',
        b'"\\ud800"',
        b"\xef\xbb\xbf[1]",
        "[1]".encode("utf-16"),
        b"-%d" % 10**400,
        b"",
        b" ",
        b"[1,]",
        b"nan",
        b'{"a": 1} x',
        b"\xff",
        b"[" * 2_000 + b"]" * 2_000,
        b"[" * 200_000,
        b"1" * 5_000,
    ):
        try:
            found = repr(decoded(body))
        except (ValueError, RecursionError) as error:
            found = type(error).__name__
        assert found == told(body), body[:12]


def test_an_integer_beyond_64_bits_may_become_a_float() -> None:
    assert math.isclose(decoded(b"%d" % 2**70), 2**70)


def test_numbers_that_are_none_arrive_as_the_server_wrote_them(connect: Connect, serve: Any) -> None:
    client = connect(serve(lambda request: raw(b'{"values": [-9999.0, null, NaN, -Infinity]}')))
    clamped, null, nan, infinite = client.get("/a")["values"]
    assert (clamped, null, infinite) == (-9999.0, None, -math.inf) and math.isnan(nan)


def test_a_body_that_is_cut_off_is_an_error(connect: Connect, serve: Any) -> None:
    with pytest.raises(EngineError, match="not JSON"):
        connect(serve(lambda request: raw(b'{"values": [-1.5, NaN')), max_retries=0).get("/a")


def test_what_is_no_json_is_not_written() -> None:
    for payload in ({"a": [1], "b": math.nan}, {"a": [math.inf, 1]}, math.nan, {"a": [object()]}):
        with pytest.raises((TypeError, ValueError)):
            pytest.fail(f"{payload} was written: {encoded(payload)!r}")
