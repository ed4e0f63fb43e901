"""Compares what stands between a client and an engine: nothing, nginx, kvgate, a bare aiohttp proxy, LiteLLM."""
