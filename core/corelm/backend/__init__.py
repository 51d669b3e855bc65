"""An opened engine: found by name, its hooks called, every request and every result checked."""
