"""Faults in simulated rollouts, loops and gateways, judged by ledgers of their own."""
