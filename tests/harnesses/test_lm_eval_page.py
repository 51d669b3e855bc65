"""docs/lm-eval.md names what lm-eval has. test_lm_eval_command.py runs the page."""

from pathlib import Path

from helpers.foreign_names import names_in_tables, unknown_names
from helpers.pages import Page

PAGE = Page(Path(__file__).parents[2] / "docs" / "lm-eval.md")


def test_every_name_of_lm_eval_exists():
    assert len([*names_in_tables(PAGE, "lm_eval")]) > 25
    assert unknown_names(PAGE, "lm_eval") == []
