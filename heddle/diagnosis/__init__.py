"""Where the time of a measured step went."""
