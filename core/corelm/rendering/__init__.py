"""Conversations to token ids: chat templates, the segments of a conversation, and which tokens are the assistant's."""
