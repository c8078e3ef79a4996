"""What attention computes twice or for little: measured, never rewritten."""
