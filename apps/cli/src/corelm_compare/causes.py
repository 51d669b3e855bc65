"""`CAUSES`: the name of every cause that a comparison can find, and what it means."""

from __future__ import annotations

#: id → what it means. The ids are stable: programs may test for them.
CAUSES: dict[str, str] = {
    # Texts and conversations.
    "tokenization": "the same text has other ids",
    "bos-added": "an id, such as BOS, is put before a text or before ids",
    "bos-doubled": "BOS is put before ids that begin with it already",
    "bos-missing": "BOS at the beginning is left out",
    "first-token-dropped": "the first id of a row is left out",
    "special-tokens-as-text": "the text of a special token is read as ordinary characters",
    "chat-template": "a conversation is rendered otherwise",
    "generation-prompt": "the end of a conversation, which prompts for an answer, is left out or added",
    # Which number is returned.
    "shift": "the numbers are those of the token before or after",
    "units": "the logarithm has another base",
    "temperature": "log-probs of sampled tokens are taken after the temperature",
    "truncation-in-logprobs": "log-probs of sampled tokens are taken over what top-k or top-p left",
    "penalties": "log-probs of sampled tokens are taken after penalties",
    "top-only": "scores are normalised over the most probable ids",
    "vocab-padding": "padded ids of the output layer count in the softmax",
    "eos-suppressed": "EOS is impossible where log-probs are taken",
    "sampled-differs": "what is said of a token when it is sampled is not what is said when it is scored",
    # What is computed.
    "missing-softcap": "a softcap of logits or of attention is left out",
    "missing-scale": "a scale of the configuration is left out, or logits are multiplied by a constant",
    "missing-bias": "biases are left out",
    "sliding-window": "the sliding window is ignored",
    "rope": "the scaling or the base of rotary positions is another one",
    "truncation": "only the last ids of a long row are read",
    "chunked-prefill": "long rows are read in chunks that do not see one another, or change at one length",
    # With which weights, and how exactly.
    "dtype": "the numbers are rounded as a lower precision rounds them",
    "quantized": "the weights are rounded as a scheme of quantization rounds them",
    "stale-weights": "the weights are those of another checkpoint, which was named",
    "other-weights": "the weights are others, or the model is computed otherwise",
    "adapter-not-applied": "the adapter changes nothing",
    "wrong-adapter": "the adapter is another one",
    # From call to call.
    "company": "the other rows of a call change a row",
    "prefix-cache": "a cache of prefixes has other entries than what would be computed",
    "not-deterministic": "equal calls give different numbers",
    # Where answers end.
    "ends": "answers end at other ids",
    "stop-string": "answers go on after a stop string",
}
