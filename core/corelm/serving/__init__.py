"""Recorded sessions: what clients of a server said and were told, as a tree, token for token. No HTTP in here."""
