"""`heddle profile`: measuring engines, and checking a profile by a run."""
