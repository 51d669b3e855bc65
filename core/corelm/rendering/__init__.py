"""From conversations to token ids: chat templates, the segments of a conversation, and who said which token."""
