"""Redundancy that the weights of attention have, and the edits that remove it."""
