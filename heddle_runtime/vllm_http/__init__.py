"""Engines that run elsewhere, reached by URL: any `vllm serve` with its token endpoints on."""
