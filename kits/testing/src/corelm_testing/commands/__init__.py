"""The subcommands of `corelm` for authors of backends."""
