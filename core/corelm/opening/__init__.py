"""What decides which engine `get_backend` opens, and where it lives."""
