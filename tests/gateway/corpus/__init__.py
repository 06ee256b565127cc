"""Requests of clients, and the comparison of two servers' answers to them.

python -m tests.gateway.corpus --help
"""
