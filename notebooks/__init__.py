"""Notebooks that explain Heddle, and what executes and checks them: `make notebooks`."""
