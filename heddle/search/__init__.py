"""`heddle plan`: the best setting, found by simulation on one half of the prompts."""
