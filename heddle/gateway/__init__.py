"""`heddle serve`: its configuration and its run."""
