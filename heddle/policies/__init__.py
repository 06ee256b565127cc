"""Policies by name, and those of one's own: loading, checking, errors, and a template."""
