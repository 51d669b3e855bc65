"""`LLMPolicy`: TensorDict in, TensorDict out, with any backend."""
