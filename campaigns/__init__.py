"""Campaigns that attack Heddle for as long as they are given; see docs/reliability.md."""
