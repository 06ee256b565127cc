"""What a policy estimates of cost and lengths, never the ground truth."""
