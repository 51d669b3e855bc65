"""What `corelm doctor` looks at. No module here imports typer, so that other interpreters need core alone."""
