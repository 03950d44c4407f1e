"""The API paths of vLLM that the proxy serves.

Administration of an instance (`/sleep`, `/pause`, `/reset_prefix_cache`, `/collective_rpc`, adapters, weights) is not
among them, because any client could do it. Nor is `/v1/responses/ID`: only the D that has answered knows the id.
"""

from kvpipe.proxy.bodies import CHAT_PATH, COMPLETIONS_PATH

# A handoff can answer these.
HANDED_OFF = (COMPLETIONS_PATH, CHAT_PATH)
# D alone answers these, and gets JSON.
ALONE = (
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v2/embed",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/pooling",
    "/classify",
    "/tokenize",
    "/detokenize",
)
# D alone answers these, and gets forms. vLLM takes no transfer parameters from their fields.
AUDIO = ("/v1/audio/transcriptions", "/v1/audio/translations")
# One instance answers these.
ABOUT_INSTANCE = ("/v1/models", "/version", "/ping")
# These need no API key: probes and monitoring have none. Reports have neither prompts nor answers.
UNAUTHENTICATED_PATHS = ("/health", "/metrics", "/status/{handoff}", "/queue", "/version", "/ping")
