"""HTTP in front of the driver: agents that speak OpenAI's protocol, or token ids, as its agents."""
