"""The rules of `PruneRedundantAttention`, one file each."""
