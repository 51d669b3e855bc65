"""Subcommands that other distributions add."""

import sys

import pytest

from helpers.command_line import corelm_command

#: A stranger's command. Importing it is noticed.
COMMAND = """
import typer

app = typer.Typer()

@app.command()
def weigh(name: str) -> None:
    "Weigh something."
    print(f"{name} is light")
"""


@pytest.fixture
def weigh(fabricate):
    fabricate(
        *("strange-command", "1.0", {}, {"strange_command": COMMAND}),
        groups={"corelm.commands": {"weigh": "strange_command:app"}},
    )
    yield
    sys.modules.pop("strange_command", None)


def test_a_strangers_command_is_listed_without_being_imported_and_runs(weigh):
    assert "weigh" in corelm_command("--help").stdout
    assert "strange_command" not in sys.modules
    result = corelm_command("weigh", "tea")
    assert result.exit_code == 0 and "tea is light" in result.stdout
    assert "Weigh something." in corelm_command("weigh", "--help").stdout


@pytest.mark.parametrize(
    ("command", "distribution", "folder"),
    [("fleet", "core-fleet", "apps/fleet"), ("conformance", "core-testing", "kits/testing")],
)
def test_a_command_whose_distribution_is_missing_says_what_to_install(uninstalled, command, distribution, folder):
    assert command in corelm_command("--help").stdout
    uninstalled(distribution)
    result = corelm_command(command, "--help")
    assert result.exit_code == 2
    said = " ".join(result.stderr.replace("│", " ").split())
    assert distribution in said and folder in said
