"""The paper's figures and tables, and questions beyond it: `python -m experiments`."""
