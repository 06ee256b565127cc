"""Consolidations: engines that change while a rollout runs."""
