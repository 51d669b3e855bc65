"""The files of a cassette: readable after a crash, refused when damaged, and without secrets."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import corelm
from corelm import Backend
from corelm.errors import InvalidRequestError
from corelm.spec import Capabilities
from corelm_testing.cassette import CassetteError, CassetteRecorder, NotRecordedError
from corelm_testing.toy import ToyBackend
from helpers.cassettes import calls_of, recorded, replayed
from helpers.each import case
from helpers.tiny_models import tiny_model, tiny_tokenizer

ROWS, SEEDED = [[65, 66], [67]], {"max_new_tokens": 4, "seed": 7}


@pytest.fixture
def cassette(tmp_path: Path) -> Path:
    """A cassette of three calls."""
    with recorded(tmp_path / "c") as backend:
        for _ in range(2):
            backend.generate(ROWS, SEEDED)
        backend.score_logprobs(ROWS, return_logits=True)
    return tmp_path / "c"


def lines(path: Path) -> list[bytes]:
    return (path / "calls.jsonl").read_bytes().splitlines(keepends=True)


# Damage --------------------------------------------------------------------------------------------------------------


def test_a_changed_byte_is_found_wherever_it_is(cassette: Path) -> None:
    whole = (cassette / "calls.jsonl").read_bytes()
    first = len(lines(cassette)[0])
    name = whole.index(b'"crc32"')
    # Places all over the first line and in its check. The name of the check holds nothing of the call.
    for place in {*range(0, first - 1, 11), *range(first - 40, first - 1)} - {*range(name, name + 7)}:
        (cassette / "calls.jsonl").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CassetteError, match="line 1"):
            replayed(cassette)


def test_a_cassette_cut_anywhere_keeps_every_finished_call(cassette: Path) -> None:
    whole, ends = (cassette / "calls.jsonl").read_bytes(), [0]
    for line in lines(cassette)[:3]:
        ends.append(ends[-1] + len(line))
    for cut in {*range(0, ends[-1], 97), *ends, *(end - 1 for end in ends[1:])}:
        (cassette / "calls.jsonl").write_bytes(whole[:cut])
        finished = sum(end <= cut for end in ends[1:])
        with replayed(cassette) as backend:
            assert len(backend.engine.plugin._player.calls) == finished
            for _ in range(min(finished, 2)):
                backend.generate(ROWS, SEEDED)
            if not finished:
                with pytest.raises(NotRecordedError):
                    backend.generate(ROWS, SEEDED)


def test_an_edit_is_accepted_without_its_check(cassette: Path) -> None:
    first, *rest = lines(cassette)
    record = json.loads(first)
    record["result"]["finish_reasons"] = ["abort", "abort"]
    (cassette / "calls.jsonl").write_bytes(json.dumps(record).encode() + b"\n" + b"".join(rest))
    with pytest.raises(CassetteError, match="remove its crc32"):
        replayed(cassette)
    del record["crc32"]
    (cassette / "calls.jsonl").write_bytes(json.dumps(record).encode() + b"\n" + b"".join(rest))
    with replayed(cassette) as backend:
        assert backend.generate(ROWS, SEEDED).finish_reasons == ("abort", "abort")


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "foreign": (lambda header: header.update(format="vcr"), "something else made it"),
    "newer": (lambda header: header.update(version=2, core="9.0"), "version 2 .* reads version 1; use the core .*9.0"),
    "no-capabilities": (lambda header: header.pop("capabilities"), "its header cannot be read"),
    "impossible": (lambda header: header["capabilities"].update(vocab_size=-1), "its header cannot be read"),
}


def test_a_header_that_does_not_fit_is_refused(cassette: Path) -> None:
    sound = (cassette / "cassette.json").read_text()
    for name, (change, says) in HEADERS.items():
        header = json.loads(sound)
        change(header)
        (cassette / "cassette.json").write_text(json.dumps(header))
        with case(name), pytest.raises(CassetteError, match=says):
            replayed(cassette)


RECORDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no-hook": lambda record: record.pop("hook"),
    "no-prompts": lambda record: record["request"].pop("prompts"),
    "odd-request": lambda record: record.update(request=[]),
}


def test_a_call_that_cannot_be_read_is_refused_on_opening(cassette: Path) -> None:
    first, *rest = lines(cassette)
    for name, spoil in RECORDS.items():
        record = json.loads(first)
        del record["crc32"]
        spoil(record)
        (cassette / "calls.jsonl").write_bytes(json.dumps(record).encode() + b"\n" + b"".join(rest))
        with case(name), pytest.raises(CassetteError, match="call 0 cannot be read"):
            replayed(cassette)


RESULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "unknown-field": lambda result: result.update(telepathy=1),
    "no-ids": lambda result: result.pop("ids"),
    "odd-dtype": lambda result: result["ids"].update(dtype="float7"),
    "no-base64": lambda result: result["logprobs"]["values"].update(base64="?"),
    "lengths": lambda result: result["logprobs"].update(lengths=[1, 1]),
    "shape": lambda result: result["logprobs"]["values"].update(shape=[3]),
}


def test_a_program_may_change_its_folder_while_it_replays(
    cassette: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with replayed(Path("c")) as backend:
        monkeypatch.chdir("/")
        backend.generate(ROWS, SEEDED)
        cassette.rename(tmp_path / "moved")
        with pytest.raises(CassetteError, match="cannot be read"):
            backend.score_logprobs(ROWS, return_logits=True)


def test_a_result_that_cannot_be_read_is_refused_when_it_is_played(cassette: Path) -> None:
    first, *rest = lines(cassette)
    for name, spoil in RESULTS.items():
        record = json.loads(first)
        del record["crc32"]
        spoil(record["result"])
        (cassette / "calls.jsonl").write_bytes(json.dumps(record).encode() + b"\n" + b"".join(rest))
        with case(name), replayed(cassette) as backend, pytest.raises(CassetteError, match="generate cannot be read"):
            backend.generate(ROWS, SEEDED)


def test_what_is_no_cassette_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CassetteError, match=r"does not exist; record one with .*CassetteRecorder\('"):
        replayed(tmp_path / "nothing")
    with pytest.raises(CassetteError):
        replayed(tmp_path)
    with pytest.raises(InvalidRequestError, match="name the folder"):
        corelm.get_backend("cassette")
    with pytest.raises(InvalidRequestError, match="to record nothing, open"):
        CassetteRecorder(tmp_path / "c", record_mode="none")  # type: ignore[arg-type]


# Writers -------------------------------------------------------------------------------------------------------------


def test_a_cassette_is_neither_overwritten_nor_written_twice(cassette: Path, tmp_path: Path) -> None:
    before = (cassette / "calls.jsonl").read_bytes()
    with pytest.raises(CassetteError, match=r"there is one already.*record_mode='all'.*record_mode='new_episodes'"):
        recorded(cassette)
    assert (cassette / "calls.jsonl").read_bytes() == before
    with recorded(tmp_path / "d"), pytest.raises(CassetteError):
        recorded(tmp_path / "d", mode="all")
    recorder = CassetteRecorder(tmp_path / "e")
    with corelm.get_backend("toy", wrappers=[recorder]), pytest.raises(CassetteError):
        corelm.get_backend("toy", wrappers=[recorder])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(CassetteError):
        recorded(tmp_path / "mine", mode="all")


def test_a_replaced_cassette_has_the_new_calls_alone(cassette: Path) -> None:
    with recorded(cassette, mode="all") as backend:
        backend.generate([[70]], SEEDED)
    assert [call["request"]["prompts"]["rows"] for call in calls_of(cassette)] == [[[70]]]


def test_a_cassette_is_not_extended_by_another_engine(cassette: Path) -> None:
    with pytest.raises(CassetteError, match="another engine: capabilities"):
        recorded(cassette, mode="new_episodes", max_context=99)


CRASHING = """
import os, signal, sys
import corelm
from corelm_testing.cassette import CassetteRecorder
backend = corelm.get_backend("toy", wrappers=[CassetteRecorder(sys.argv[1])])
for _ in range(2):
    backend.generate([[65, 66], [67]], {"max_new_tokens": 4, "seed": 7})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_recorder_leaves_its_calls_and_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "c"
    killed = subprocess.run([sys.executable, "-c", CRASHING, str(path)], env={**os.environ}, check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    with (path / "calls.jsonl").open("ab") as file:
        file.write(b'{"call":2,"hook":"gen')
    with replayed(path) as backend:
        for _ in range(2):
            backend.generate(ROWS, SEEDED)
    # Going on removes what was cut off.
    with recorded(path, mode="new_episodes") as backend:
        backend.generate([[70]], SEEDED)
    assert [call["call"] for call in calls_of(path)] == [0, 1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_does_not_keep_a_cassette_that_its_recorder_has_closed(tmp_path: Path) -> None:
    code = (
        "import os, sys; sys.path.insert(0, 'tests')\n"
        "from pathlib import Path\n"
        "from helpers.cassettes import calls_of, recorded\n"
        "path, (begin, end) = Path(sys.argv[1]), os.pipe()\n"
        "backend = recorded(path)\n"
        "if not (child := os.fork()):\n"
        "    os.close(end); os.read(begin, 1); os._exit(0)\n"
        "os.close(begin); backend.close()\n"
        "with recorded(path, mode='new_episodes') as again: again.score_logprobs([[65, 66]])\n"
        "os.close(end); os.waitpid(child, 0); print(len(calls_of(path)))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "c")]
    root = Path(__file__).parents[3]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=120)
    assert ran.stdout == "1\n", ran.stderr


# Secrets, sizes, tokenizers ------------------------------------------------------------------------------------------


class Keyed(ToyBackend):
    """A toy that takes any parameters of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        values = {name: getattr(self.capabilities, name) for name in Capabilities.__dataclass_fields__}
        sampling = {**values["sampling"], "engine_kwargs": None}
        self.capabilities = Capabilities(**{**values, "sampling": sampling})


def test_secrets_are_not_written(tmp_path: Path) -> None:
    def ask(backend: Backend, key: str) -> None:
        mine = {"api_key": key, "extra": {"auth_header": f"Bearer {key}", "logit_bias": {7: 1.5}}, "stop_at": "x"}
        backend.generate(ROWS, {**SEEDED, "engine_kwargs": mine})

    recorder = CassetteRecorder(tmp_path / "c")
    url = "http://me:hunter22@node:8000/v1?key=sk-very-secret"
    with Backend.from_plugin(Keyed.open(), "toy", model_name=url, wrappers=[recorder]) as backend:
        ask(backend, "sk-very-secret")
        for odd in (object(), float("inf")):
            with pytest.raises(InvalidRequestError, match="engine_kwargs: odd="):
                backend.generate(ROWS, {**SEEDED, "engine_kwargs": {"odd": odd}})
    written = b"".join(file.read_bytes() for file in (tmp_path / "c").iterdir())
    assert b"very-secret" not in written and b"hunter22" not in written
    assert b'"7":1.5' in written and b"http://node:8000/v1" in written
    with replayed(tmp_path / "c") as backend:
        ask(backend, "sk-very-secret")


def test_a_tokenizer_is_saved_on_request_and_loaded_when_a_text_needs_it(tmp_path: Path) -> None:
    def run(backend: Backend) -> tuple[list[list[int]], list[str]]:
        ids = backend.tokenize(["Who are you?"]).ids.tolist()
        return ids, backend.detokenize(backend.generate(ids, SEEDED).ids.tolist())

    recorder = CassetteRecorder(tmp_path / "c", save_tokenizer=True)
    with corelm.get_backend("transformers", tiny_model(), tokenizer=tiny_tokenizer(), wrappers=[recorder]) as backend:
        found = run(backend)
    # Another machine.
    moved = (tmp_path / "c").rename(tmp_path / "moved")
    with corelm.get_backend("cassette", moved) as backend:
        assert run(backend) == found
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import corelm\n"
        f"backend = corelm.get_backend('cassette', {str(moved)!r})\n"
        # The text was recorded, so ids need no tokenizer.
        f"ids = backend.tokenize(['Who are you?']).ids.tolist(); assert ids == {found[0]}\n"
        f"found = backend.generate(ids, {SEEDED}).ids.tolist()\n"
        "try: backend.detokenize(found)\n"
        "except corelm.errors.BackendNotInstalledError as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0 and "pip install transformers" in ran.stdout, ran.stderr
