"""The parts of a policy: one folder for each field of `Policy`, one file for each part."""
