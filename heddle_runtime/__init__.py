"""A world made of processes and GPUs: the policy core's commands carried out in real time."""
