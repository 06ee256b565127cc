"""Programs of a checkout that make what is shipped; nothing of them is in the wheel."""
