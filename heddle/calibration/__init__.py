"""`heddle calibrate`: measuring engines, and checking a profile by a run."""
