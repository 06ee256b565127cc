"""Makers of the JSON that is shipped with profiles: fits to published tables of others.

Heddle imports none of this; a checkout runs it as ``python -m tools.profiles NAME``.
"""
