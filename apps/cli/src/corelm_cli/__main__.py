"""``python -m corelm_cli`` is the `corelm` command."""

from corelm_cli import main

if __name__ == "__main__":
    main()
