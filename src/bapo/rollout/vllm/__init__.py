"""The engine that samples with vLLM: `engine` in our process, `plugin` in vLLM's processes, `buckets` between them."""
