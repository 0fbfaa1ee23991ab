"""What a step cost: spans taken at the seams of the pipeline, and the totals made of them."""
