"""What is shown of runs and traces: figures, the page, the Perfetto export."""
