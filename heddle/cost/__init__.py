"""What runs cost, and what comparisons rank by."""
