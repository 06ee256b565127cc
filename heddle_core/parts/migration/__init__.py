"""Migrations: when a home moves while a tool runs."""
