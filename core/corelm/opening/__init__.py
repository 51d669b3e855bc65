"""The code that decides which engine `get_backend` opens, and where that engine runs."""
