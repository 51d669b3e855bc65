"""Options of `get_backend` that belong to openers: entry points of other distributions."""

import pytest

import corelm
from corelm.errors import BackendNotInstalledError

#: An opener of a stranger. It opens the engine twice, and names the backend that it is shown.
OPENER = """
SEEN = []

class Twice:
    def __init__(self, *, twice, loudly=None):
        SEEN.append(("made", twice, loudly))

    def open(self, open_one, name, model, options):
        open_one(options)
        SEEN.append(("open", name, dict(options)))
        return open_one(options)

    def opened(self, backend):
        SEEN.append(("opened", backend.name))
        if backend.name == "toy" and SEEN[0][2] == "fail":
            raise ValueError("not this one")
"""
GROUPS = {"corelm.openers": {"twice": "strange_opener:Twice", "loudly": "strange_opener:Twice"}}


@pytest.fixture
def seen(fabricate, monkeypatch):
    import sys

    fabricate("strange-opener", "1.0", {}, {"strange_opener": OPENER}, groups=GROUPS)
    yield lambda: sys.modules["strange_opener"].SEEN
    sys.modules.pop("strange_opener", None)


def test_a_strangers_opener_takes_its_options_and_opens(seen):
    with corelm.get_backend("toy", twice=True, loudly="very", max_context=50) as backend:
        assert backend.capabilities.max_context == 50
    assert seen() == [("made", True, "very"), ("open", "toy", {"max_context": 50}), ("opened", "toy")]


def test_what_an_opener_raises_closes_the_engine(seen):
    with pytest.raises(ValueError, match="not this one"):
        corelm.get_backend("toy", twice=True, loudly="fail")


@pytest.mark.parametrize("option", [{"twice": None}, {"twice": False}, {}])
def test_an_opener_is_not_imported_for_an_option_that_is_not_given(seen, option):
    corelm.get_backend("toy", **option).close()
    with pytest.raises(KeyError):
        seen()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replicas": 2}, "replicas= needs core-fleet"),
        ({"python": "python3"}, "python= needs core-fleet"),
        ({"canary": True}, "canary= needs core-fleet"),
        ({"base_url": ["http://a", "http://b"]}, "a list as base_url= needs core-fleet"),
    ],
)
def test_an_option_without_its_opener_names_the_distribution_before_anything_is_opened(
    uninstalled, monkeypatch, options, said
):
    uninstalled("core-fleet")
    monkeypatch.setattr("corelm_testing.toy.ToyBackend.open", lambda *_, **__: pytest.fail("it was opened"))
    with pytest.raises(BackendNotInstalledError, match=said) as error:
        corelm.get_backend("toy", **options)
    assert "apps/fleet" in str(error.value)
