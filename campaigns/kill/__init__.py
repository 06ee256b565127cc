"""Commands that are killed, out of disk, or not permitted to write."""
